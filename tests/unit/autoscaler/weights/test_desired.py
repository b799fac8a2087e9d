"""The weights that a node should have, and the progress of those of a replica."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from autoscaler.agent_contract import (
    OWN,
    Laid,
    LaidAdapter,
    NodeReport,
    NodeWant,
    NodeWants,
    WeightsReport,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
    should_store_on_node,
)
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.engines import EngineError
from autoscaler.explain.weights import describe_weights, weights_state
from autoscaler.fold.fold import fold
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Adapter, Gpu, Model, ModelSpec
from autoscaler.spec.quantity import BytesOrAuto
from autoscaler.spec.settings import Settings, Weights
from autoscaler.state.actions import Unmet
from autoscaler.state.events import DocumentsSeen, NodeReported, Tick
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import ClusterFacts, Copy, ModelLoad, NodeId, Replica, SliceId, World
from autoscaler.weights.desired import (
    build_node_wants,
    find_artifact_facts,
    find_unfetched_artifact,
    list_promised_placements,
)
from autoscaler.weights.inspection import InspectionAssigner
from autoscaler.weights.mount_choice import ArtifactFacts
from autoscaler.weights.replica_weights import AGENT_S_MAX, WeightsFailed, WeightsPending, assess_weights, choose_gguf
from tests.support.builders.worlds import T0, device, replace_fields, replica, world

ADA = "oci://r.example/ada:1"
N1, N2 = NodeId("n1"), NodeId("n2")


def model(name: str = "ada", artifact: str = ADA, **spec: object) -> Model:
    given = {"engine": "vllm", "artifact": artifact, "gpu": Gpu(), **spec}
    return Model(name=ModelName(name), spec=ModelSpec(**given))  # type: ignore[arg-type]  # fields of each test


def one(of: Model, id: str, slice_: str = "g1", state: S = S.STARTING, **more: object) -> Replica:
    made = replica(of, id, (slice_,), state)
    return replace_fields(made, **more)


def nodes(models: list[Model], replicas: list[Replica]) -> World:
    return world(models, [device("g1", 80, "n1"), device("g2", 80, "n2")], replicas)


def want(artifact: str = ADA, secret: str = "", *replicas: str) -> NodeWant:
    return NodeWant(artifact=artifact, pull_secret=secret, replicas=tuple(map(ReplicaId, replicas)))


def test_weights_request_of_a_node_lists_each_artifact_once_per_secret() -> None:
    ada, twin, secret = model(), model("twin"), model("eve", pull_secret="mine")
    at = nodes(
        [ada, twin, secret], [one(ada, "a2"), one(ada, "a1"), one(twin, "t1"), one(secret, "e1"), one(ada, "a3", "g2")]
    )
    at = replace(at, settings=Settings(weights=Weights(ca_file="/ca")), epoch=7)
    assert build_node_wants(at) == {
        N1: NodeWants(epoch=7, wants=(want(ADA, "", "a1", "a2", "t1"), want(ADA, "mine", "e1")),
                      weights=Weights(ca_file="/ca")),
        N2: NodeWants(epoch=7, wants=(want(ADA, "", "a3"),), weights=Weights(ca_file="/ca")),
    }  # fmt: skip


def test_node_holds_weights_copies_of_ready_and_stopping_replicas() -> None:
    ada = model()
    for state in (S.READY, S.DRAINING, S.STOPPING, S.SCRUBBING):
        wanted = build_node_wants(nodes([ada], [one(ada, "a1", state=state, weights=("copies/x",))]))
        assert wanted == {N1: NodeWants(epoch=1, held=("copies/x",))}, state
    removed = nodes([], [one(ada, "a1", state=S.READY, weights=("copies/x", "copies/y"))])
    assert build_node_wants(removed)[N1].held == ("copies/x", "copies/y"), "also after its Model was deleted"


def test_file_artifacts_and_outdated_specs_request_no_weights() -> None:
    of_file, ada = model("f", "file:///a.gguf"), model()
    assert build_node_wants(nodes([of_file], [one(of_file, "f1")])) == {}
    assert build_node_wants(nodes([ada], [replace(one(ada, "a1"), spec_hash="before")])) == {}


def test_weights_are_requested_on_the_node_of_a_planned_placement() -> None:
    of_file = model("f", "file:///a.gguf")
    at = nodes([model(), of_file], [])
    unmet = [
        Unmet(model=ModelName("ada"), reason="waits", slices=(SliceId("g2"), SliceId("gone"))),
        Unmet(model=ModelName("ada"), reason="nowhere"),
        Unmet(model=of_file.name, reason="waits", slices=(SliceId("g1"),)),
    ]
    assert list_promised_placements(at, unmet) == (("ada", N2), ("f", N1))
    assert list(build_node_wants(at, list_promised_placements(at, unmet))) == [N2], "no agent fetches a local file"


def test_plan_lists_the_slices_being_freed_for_a_waiting_model() -> None:
    ada, bob = (replace(model(name), memory_bytes=60 << 30) for name in ("ada", "bob"))
    running = [one(bob, "b1", "g1", S.READY), one(bob, "b2", "g2", S.READY)]
    at = replace(nodes([ada, bob], running), loads={ada.name: ModelLoad(waiting=1, oldest_s=T0 - 1)})
    (unmet,) = plan(at, T0).unmet
    assert set(unmet.slices) <= {"g1", "g2"}
    assert unmet.slices


def test_weights_requested_ahead_of_a_start_name_no_replica() -> None:
    assert build_node_wants(nodes([model()], []), [(ModelName("ada"), N2), (ModelName("gone"), N2)])[N2].wants == (
        want(),
    )


LORA = "oci://r.example/lora:1"
LORAS = (Adapter(name="lora", artifact=LORA), Adapter(name="here", artifact="file:///l"))


def test_adapters_from_registries_are_requested_with_the_model_weights() -> None:
    ada = model(adapters=LORAS)
    assert build_node_wants(nodes([ada], [one(ada, "a1")]))[N1].wants == (want(ADA, "", "a1"), want(LORA, "", "a1"))
    files = model(artifact="file:///m", adapters=LORAS)
    assert build_node_wants(nodes([files], [one(files, "a1")]))[N1].wants == (want(LORA, "", "a1"),)
    assert build_node_wants(nodes([ada], []), [(ada.name, N1)])[N1].wants == (want(ADA), want(LORA)), (
        "also ahead of a start"
    )


def test_model_that_allows_unsafe_weights_gets_a_separate_request() -> None:
    plain, bold = model(), model("bold", allow_unsafe=True)
    wanted = build_node_wants(nodes([plain, bold], [one(plain, "a1"), one(bold, "b1")]))[N1].wants
    assert wanted == (want(ADA, "", "a1"), replace(want(ADA, "", "b1"), allow_unsafe=True))


# --- progress ---------------------------------------------------------------------------------------------------------


def with_reports(*weights: WeightsReport, brings: bool = True) -> World:
    report = NodeReport(node="n1", boot="b", sequence=1, brings=brings, weights=weights)
    return fold(nodes([model()], [one(model(), "a1")]), [NodeReported(report=report)], T0)[0]


def stands(at: World, now_s: float = T0, **spec: object) -> Laid | WeightsPending | WeightsFailed:
    return assess_weights(at, one(model(), "a1"), model(**spec), T0, now_s)  # type: ignore[arg-type]


A1 = (ReplicaId("a1"),)


def test_weights_are_ready_when_the_agent_reports_them_for_the_replica() -> None:
    there = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files", ggufs=("a.gguf",))
    assert stands(with_reports(there)) == Laid("copies/x/files", "a.gguf")
    assert stands(with_reports(replace(there, replicas=(ReplicaId("a0"),)))) == WeightsPending("requested"), "another's"
    assert stands(with_reports(replace(there, pull_secret="mine"))) == WeightsPending("requested"), (
        "by a login that is not its own"
    )
    assert stands(with_reports(there), pull_secret="mine") == WeightsPending("requested")
    many = replace(there, ggufs=("a.gguf", "b.gguf"))
    assert stands(with_reports(many)) == WeightsFailed(f"{ADA} contains 2 GGUF files: a.gguf, b.gguf; package only one")


def test_pending_start_reports_progress_or_failure_of_its_weights() -> None:
    far = WeightsReport(artifact=ADA, bytes=1 << 30, total_bytes=4 << 30, bytes_per_s=float(1 << 20))
    assert stands(with_reports(far)) == WeightsPending("1Gi of 4Gi, 1Mi a second")
    failed = WeightsReport(artifact=ADA, replicas=A1, failed="no room")
    assert stands(with_reports(failed)) == WeightsFailed("no room")
    before = replace(failed, replicas=(ReplicaId("a0"),))
    assert stands(with_reports(before)) == WeightsPending("requested"), "a try before fails no other"


def with_lora(*weights: WeightsReport, artifact: str = ADA) -> Laid | WeightsPending | WeightsFailed:
    return stands(with_reports(*weights), adapters=LORAS, artifact=artifact)


def test_start_waits_for_the_weights_of_the_model_and_its_adapters() -> None:
    own = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files", ggufs=("a.gguf",))
    lora = WeightsReport(artifact=LORA, replicas=A1, folder="copies/y/files", adapters=("sub",))
    found = with_lora(own, lora)
    assert found == Laid("copies/x/files", "a.gguf", (LaidAdapter("lora", "copies/y/files", "sub"),))
    assert isinstance(found, Laid)
    assert found.folders == ("copies/x/files", "copies/y/files")
    assert with_lora(own) == WeightsPending("requested")
    assert with_lora(lora, artifact="file:///m") == Laid("", "", found.adapters)
    halves = [WeightsReport(artifact=one, bytes=1 << 20, total_bytes=2 << 20, bytes_per_s=1.0) for one in (ADA, LORA)]
    assert with_lora(*halves) == WeightsPending("2Mi of 4Mi, 2 bytes a second")


def test_start_fails_if_an_adapter_is_not_fetched_or_is_invalid() -> None:
    own = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files", ggufs=("a.gguf",))
    lora = WeightsReport(artifact=LORA, replicas=A1)
    assert with_lora(own, replace(lora, failed="no room")) == WeightsFailed("adapter lora: no room")
    message = "adapter lora: its artifact contains no adapter (GGUF, or PEFT's files); package only one"
    assert with_lora(own, replace(lora, folder="y")) == WeightsFailed(message)
    odd = with_lora(own, replace(lora, folder="y", adapters=("x,y.gguf",)))
    assert isinstance(odd, WeightsFailed)
    assert "contains a character that engines interpret (, : =" in odd.reason


def test_unsafe_weights_are_not_used_by_a_model_that_forbids_them() -> None:
    there = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files", allow_unsafe=True)
    assert stands(with_reports(there)) == WeightsPending("requested")
    assert stands(with_reports(there), allow_unsafe=True) == Laid("copies/x/files", "")


# --- weights that pods mount as an image ------------------------------------------------------------------------------


IMAGES = Settings(weights=Weights(mount="image"))
NEW = ClusterFacts(volumes=True, server=(1, 36))
LOOK = WeightsReport(artifact=ADA, look=True, digest="sha256:aa", image="models", ggufs=("a.gguf",))
NONE = WeightsReport(artifact=ADA, look=True, digest="sha256:aa", no_image="it is not an image (ModelPack)")


def looking(*weights: WeightsReport, models: Sequence[Model] = (), by: str = "n1") -> World:
    at = nodes([*models] or [model()], [one(model(), "a1")])
    at = replace_fields(at, settings=IMAGES, mounting=NEW)
    report = NodeReport(node=by, boot="b", sequence=1, brings=True, weights=weights)
    return fold(at, [NodeReported(report=report)], T0)[0]


def looks(at: World, *agents: str) -> dict[str, tuple[NodeWant, ...]]:
    at = replace(at, replicas={}, by_slice={}, by_model={})
    found = InspectionAssigner().looks(at, [NodeId(node) for node in agents], None)
    return {node: one.wants for node, one in build_node_wants(at, inspections=found).items()}


def test_image_mounted_artifact_is_inspected_but_not_downloaded() -> None:
    assert build_node_wants(looking())[N1].wants == (replace(want(ADA, "", "a1"), look=True),)
    assert stands(looking()) == WeightsPending("requested")
    found = stands(looking(replace(LOOK, replicas=A1)))
    assert found == Laid("", "a.gguf", (), "sha256:aa", "models")
    assert isinstance(found, Laid)
    assert found.folders == (), "no node has anything of it"
    brought = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files")
    assert stands(looking(brought)) == WeightsPending("requested"), "what was brought before is no answer"


def test_start_with_image_mount_fails_if_the_artifact_is_no_image() -> None:
    found = stands(looking(replace(NONE, replicas=A1)))
    why = "cannot be mounted in its pods: it is not an image (ModelPack); set weights.mount: auto in Settings"
    assert found == WeightsFailed(why)
    assert stands(looking(replace(LOOK, digest="", failed="gone", image=None, replicas=A1))) == WeightsFailed("gone")


def test_one_agent_inspects_each_unknown_artifact_ahead_of_a_start() -> None:
    assert list(looks(looking(), "n1", "n2").values()) == [(replace(want(), look=True),)]
    assert looks(looking()) == {}, "no agent receives the request"
    many = [model(f"m{number}", f"oci://r.io/m:{number}") for number in range(20)]
    spread = looks(looking(models=many), "n1", "n2")
    assert sum(map(len, spread.values())) == 20
    assert min(map(len, spread.values())) > 3
    assert looks(looking(replace(LOOK, header="{}")), "n1") == {}
    assert looks(looking(replace(NONE, header="{}")), "n1") != {}, "one may be pushed in its place, and nothing starts"
    assert looks(looking(replace(LOOK, pull_secret="mine")), "n1") != {}, "another login's"
    assert looks(looking(replace(LOOK, digest="", failed="away")), "n1") != {}, "it is tried again"


def test_inspection_result_is_kept_while_a_model_names_the_artifact() -> None:
    at = looking(LOOK, by="n2")
    assert find_artifact_facts(at, model()) == ArtifactFacts("sha256:aa", image="models")
    later = NodeReport(node="n2", boot="b", sequence=2, brings=True)
    assert find_artifact_facts(fold(at, [NodeReported(report=later)], T0)[0], model()) is not None
    assert find_artifact_facts(at, model(pull_secret="mine")) is None
    other = replace(later, sequence=3, weights=(replace(LOOK, artifact="oci://r.io/b:1"),))
    assert len(fold(at, [NodeReported(report=other)], T0)[0].learned.looked) == 1, "that was not requested"
    removed = fold(replace_fields(at, unbrought={ADA: "away"}), [DocumentsSeen()], T0)[0]
    assert (removed.learned.looked, removed.learned.unbrought) == ({}, {}), "no Model refers to it any more"


def test_inspection_reported_before_its_model_is_applied_with_the_model() -> None:
    message = replace(LOOK, header="{}")
    before = replace_fields(looking(message, models=[model("b", "oci://r.io/b:1")]), looked={})
    after = fold(before, [DocumentsSeen(models=(model(),))], T0)[0]
    assert after.learned.looked == {read_weights_request(message): message}
    newer = replace_fields(after, looked={read_weights_request(message): replace(message, digest="sha256:bb")})
    kept = fold(newer, [DocumentsSeen(models=(model(), model("b")))], T0)[0]
    assert kept.learned.looked == newer.learned.looked, "another agent has looked since"


def test_unrequested_inspection_report_is_discarded() -> None:
    at = looking(LOOK, replace(LOOK, pull_secret="made-up"), replace(LOOK, pull_secret="so too", digest="", failed="x"))
    assert [wish.pull_secret for wish in at.learned.looked] == [""]
    assert at.learned.unbrought == {}


def test_weights_header_is_read_if_the_memory_of_a_model_is_unknown() -> None:
    plain = replace(looking(), settings=Settings())
    assert list(looks(plain, "n1").values()) == [(replace(want(), look=True),)]
    seen = replace(NONE, header="{}")
    assert looks(replace(looking(seen), settings=Settings()), "n1") == {}
    assert looks(replace(looking(replace(NONE, no_header="truncated")), settings=Settings()), "n1") == {}
    assert looks(replace(looking(NONE), settings=Settings()), "n1") != {}, "it was looked at without its header"
    told_ = model(engine="llama.cpp", gpu=Gpu(memory_bytes=BytesOrAuto(1 << 30)))
    cpu = model(gpu=Gpu(count=0))
    for known in (told_, cpu):
        assert looks(replace(looking(models=[known]), settings=Settings()), "n1") == {}
    elastic = replace(told_, spec=replace(told_.spec, gpu=replace(told_.spec.gpu, elastic_percent=10)))
    assert looks(replace(looking(models=[elastic]), settings=Settings()), "n1") != {}


def test_inspection_for_a_start_keeps_the_known_header() -> None:
    at = looking(replace(LOOK, header="{}", bytes=7))
    later = NodeReport(node="n1", boot="b", sequence=2, brings=True, weights=(replace(LOOK, replicas=A1),))
    (kept,) = fold(at, [NodeReported(report=later)], T0)[0].learned.looked.values()
    assert (kept.header, kept.bytes, kept.replicas) == ("{}", 7, ())
    other = replace(later, weights=(replace(LOOK, replicas=A1, digest="sha256:bb"),))
    (kept,) = fold(at, [NodeReported(report=other)], T0)[0].learned.looked.values()
    assert kept.header == "", "it is another artifact"


def test_inspection_failure_is_reported_until_an_inspection_succeeds() -> None:
    at = looking(replace(LOOK, digest="", image=None, failed="away"))
    assert at.learned.unbrought == {ADA: "away"}
    trying = NodeReport(node="n1", boot="b", sequence=2, brings=True, weights=(WeightsReport(artifact=ADA, look=True),))
    again = fold(at, [NodeReported(report=trying)], T0)[0]
    assert again.learned.unbrought == {ADA: "away"}, "it is tried again just now"
    let_be = fold(at, [NodeReported(report=replace(trying, weights=()))], T0)[0]
    assert let_be.learned.unbrought == {}, "no agent retries any more"
    report = NodeReport(node="n1", boot="b", sequence=2, brings=True, weights=(LOOK,))
    assert fold(at, [NodeReported(report=report)], T0)[0].learned.unbrought == {}


def test_start_fails_after_waiting_a_limited_time_for_a_node_agent() -> None:
    there = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files")
    for at, now_s in (
        (with_reports(there, brings=False), T0),
        (nodes([model()], []), T0),
        (with_reports(there), T0 + 11),
    ):
        found = stands(at, now_s)
        assert isinstance(found, WeightsPending)
        assert "no agent reports that it pulls weights to node n1" in found.words
    for at in (with_reports(there, brings=False), nodes([model()], [])):
        assert isinstance(assess_weights(at, one(model(), "a1"), model(), T0 - AGENT_S_MAX, T0), WeightsFailed)
    long_s = T0 - 600.0
    assert isinstance(
        assess_weights(with_reports(there), one(model(), "a1"), model(), long_s, T0 + 29), WeightsPending
    ), "it is replaced"
    assert isinstance(
        assess_weights(with_reports(there), one(model(), "a1"), model(), long_s, T0 + AGENT_S_MAX), WeightsFailed
    )


def test_start_fails_if_its_model_changes_while_weights_are_pending() -> None:
    before, after = model(), model(artifact="oci://r.example/ada:2")
    waits, far = one(before, "a1"), WeightsReport(artifact=after.spec.artifact or "", bytes=1, total_bytes=4)
    report = NodeReport(node="n1", boot="b", sequence=1, brings=True, weights=(far,))
    at = fold(nodes([after], [waits]), [NodeReported(report=report)], T0)[0]
    assert build_node_wants(at) == {}, "no agent fetches them any more"
    assert assess_weights(at, waits, before, T0, T0) == WeightsFailed("its Model was changed during the pull")
    there = WeightsReport(artifact=ADA, replicas=A1, folder="copies/x/files")
    at = fold(at, [NodeReported(report=replace(report, sequence=2, weights=(there,)))], T0)[0]
    assert assess_weights(at, waits, before, T0, T0) == Laid("copies/x/files", ""), "they were there before that"
    removed = fold(nodes([], [waits]), [NodeReported(report=report)], T0)[0]
    assert isinstance(assess_weights(removed, waits, before, T0, T0), WeightsPending), "the plan stops it"


def test_start_without_a_device_fails_if_it_needs_weights() -> None:
    found = assess_weights(
        nodes([model()], []),
        replace(one(model(), "a1"), resources=replace(one(model(), "a1").resources, slices=())),
        model(),
        T0,
        T0,
    )
    assert isinstance(found, WeightsFailed)
    assert "request a device" in found.reason


def test_reported_copies_are_known_until_a_newer_report_or_expiry() -> None:
    at = nodes([model()], [])
    for number, copies in enumerate(((ADA, "oci://r.io/b:1"), (ADA,), ()), 1):
        report = NodeReport(node="n1", boot="b", sequence=number, copies=copies)
        at = fold(at, [NodeReported(report=report)], T0)[0]
        assert at.nodes.copies == {Copy(artifact=artifact, node=N1) for artifact in copies}
    report = NodeReport(node="n2", boot="b", sequence=1, copies=(ADA,))
    at = fold(at, [NodeReported(report=report)], T0)[0]
    assert fold(at, [Tick()], T0 + 700)[0].nodes.copies == frozenset(), "its node is forgotten"


@pytest.mark.parametrize(("ggufs", "engine", "path"), [(["s/a.gguf"], "vllm", "s/a.gguf"), ([], "vllm", "")])
def test_engine_loads_the_single_gguf_file_or_the_folder(ggufs: list[str], engine: str, path: str) -> None:
    assert choose_gguf(ggufs, model(engine=engine)) == path


def test_llama_cpp_rejects_a_folder_without_gguf_files() -> None:
    with pytest.raises(EngineError, match="contains no GGUF file"):
        choose_gguf([], model(engine="llama.cpp"))


def test_two_spellings_of_an_artifact_are_treated_as_one_artifact() -> None:
    short, full = model(artifact="oci://docker.io/x:1"), model("b", "oci://docker.io/library/x:1")
    name = full.spec.artifact or ""
    assert collect_weights_requests(short) == collect_weights_requests(full) == {OWN: WeightsRequest(name)}
    at = looking(replace(LOOK, artifact=name, header="{}"), models=[short, full])
    assert list(InspectionAssigner().looks(at, [N1], None)) == [], "one look is enough for both"
    report = NodeReport(node="n1", boot="b", sequence=2, copies=(name,))
    after = fold(at, [NodeReported(report=report)], T0)[0]
    requests = [build_placement_request(one, 0, T0, EvictionLevel.NONE, "") for one in (short, full)]
    assert [want.supplies.artifact for want in requests] == [name, name]
    assert [weights_state(after, one) for one in (short, full)] == ["here", "here"]
    assert short.spec_hash() != full.spec_hash(), "nothing that runs is restarted for it"


@pytest.mark.parametrize(
    ("engine", "artifact", "brought"),
    [
        ("vllm", "oci://r.io/a:1", True),
        ("vllm", "s3://bucket/llama/", True),
        ("vllm", "hf://org/name@main", False),
        ("vllm", "hf://org/name@main?include=*.safetensors", True),
        ("llama.cpp", "hf://org/name?include=*Q4_K_M.gguf", True),
        ("llama.cpp", "hf://org/name", True),
        ("command", "hf://org/name", True),
        ("vllm", "pvc://claim/llama", False),
        ("vllm", "file:///models/llama", False),
        ("command", None, False),
    ],
)
def test_agent_stores_only_artifacts_the_engine_does_not_fetch(
    engine: str, artifact: str | None, brought: bool
) -> None:
    assert should_store_on_node(artifact, engine) is brought
    model = Model(name=ModelName("a"), spec=ModelSpec(engine=engine, artifact=artifact))  # type: ignore[arg-type]
    there = world([model], [device("g1", 80, "n1")])
    wanted = build_node_wants(there, [(model.name, NodeId("n1"))])
    assert [one.artifact for node in wanted.values() for one in node.wants] == ([artifact] if brought else [])


def test_engine_fetched_artifact_is_described_without_a_volume() -> None:
    found = {}
    for artifact in ("hf://org/name", "hf://org/name?include=*"):
        model = Model(name=ModelName("a"), spec=ModelSpec(engine="vllm", artifact=artifact))
        there = world([model], mounting=ClusterFacts(volumes=True))
        described = [one for one in describe_weights(there, model) if "volume" in one]
        found[artifact] = (find_unfetched_artifact(model), described)
    (engines, no_words), (agents, words) = found.values()
    assert (engines, no_words, agents) == (None, [], "hf://org/name?include=*")
    assert words
