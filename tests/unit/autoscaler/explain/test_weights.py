"""How explain describes the location of a Model's weights."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from autoscaler.agent_contract import WeightsReport, read_weights_request
from autoscaler.contract import ModelName
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.explain.status_rows import list_status_rows
from autoscaler.explain.weights import describe_weights, weights_state
from autoscaler.spec.model import Adapter
from autoscaler.spec.settings import Settings, Weights
from autoscaler.state.actions import Plan
from autoscaler.state.world import ClusterFacts, Copy, NodeId, World
from tests.support.builders.worlds import T0, device, model, replace_fields, world

OWN, LORA = "oci://r.io/m:1", "s3://b/lora.gguf"
BASE = model("m", 20)
M = replace(BASE, spec=replace(BASE.spec, artifact=OWN, adapters=(Adapter(name="x", artifact=LORA),)))


def at(*copies: tuple[str, str], why: str = "") -> World:
    there = frozenset(Copy(artifact=artifact, node=NodeId(node)) for artifact, node in copies)
    return replace_fields(world([M], [device()]), copies=there, unbrought={LORA: why} if why else {})


def test_explain_describes_weights_as_present_absent_or_failed() -> None:
    assert describe_weights(at(), M) == [
        f"Its weights ({OWN}) are on no node yet; the next start pulls them.",
        f"The weights of its adapter x ({LORA}) are on no node yet; the next start pulls them.",
    ]
    assert weights_state(at(), M) == "absent"
    failed = at((OWN, "n2"), (OWN, "n1"), why="b: there is no lora.gguf")
    assert describe_weights(failed, M) == [
        f"Its weights ({OWN}) are on n1, n2.",
        f"The weights of its adapter x ({LORA}) could not be pulled (retrying): b: there is no lora.gguf.",
    ]
    assert weights_state(failed, M) == "failed"
    here = at((OWN, "n1"), (LORA, "n1"), why="it is here all the same")
    assert weights_state(here, M) == "here"
    assert set(describe_weights(here, M)) <= set(explain_model(here, Plan(), Log(), M.name, T0).sentences)
    assert [row.weights for row in list_status_rows(here, Plan(), T0)] == ["here"]


def test_explain_shows_the_inspection_result_of_image_mounted_weights() -> None:
    one = replace(BASE, spec=replace(BASE.spec, artifact=OWN))
    facts, settings = ClusterFacts(server=(1, 36)), Settings(weights=Weights(mount="image"))
    before = replace_fields(world([one], [device()]), mounting=facts, settings=settings)
    as_image = "are mounted by the node's container runtime as an image, as Settings require (weights.mount: image)"
    mounted = f"Its weights {as_image}"
    assert describe_weights(before, one) == [
        f"Its weights ({OWN}) are not pulled to nodes.", f"{mounted} (the artifact has not been inspected yet).",
    ]  # fmt: skip
    seen = WeightsReport(artifact=OWN, look=True, digest="sha256:aa", image="")
    assert describe_weights(replace_fields(before, looked={read_weights_request(seen): seen}), one)[1] == f"{mounted}."
    assert weights_state(before, one) == "here", "nothing keeps them from pods"
    none = replace(seen, image=None, no_image="it is not an image (ModelPack)")
    assert (
        "it is not an image (ModelPack)"
        in describe_weights(replace_fields(before, looked={read_weights_request(seen): none}), one)[1]
    )
    assert weights_state(replace_fields(before, unbrought={OWN: "away"}), one) == "failed"


class Counted(frozenset[Copy]):
    """A set of copies that counts its iterations."""

    looks = 0

    def __iter__(self) -> Iterator[Copy]:
        Counted.looks += 1
        return super().__iter__()


def test_status_rows_of_many_models_scan_the_copies_once() -> None:
    models = [replace(M, name=ModelName(f"m{number}")) for number in range(20)]
    there = Counted(Copy(artifact=OWN, node=NodeId(f"n{number}")) for number in range(50))
    Counted.looks = 0
    rows = list_status_rows(replace_fields(world(models, [device()]), copies=there), Plan(), T0)
    assert {row.weights for row in rows} == {"absent"}
    assert Counted.looks == 1


def test_more_than_four_nodes_are_listed_as_four_names_and_a_count() -> None:
    (message, _) = describe_weights(at(*((OWN, f"n{number}") for number in range(6))), M)
    assert message.endswith("are on n0, n1, n2, n3 and 2 more.")


def test_explain_omits_weights_that_are_files_or_fetched_by_the_engine() -> None:
    file = replace(M, spec=replace(M.spec, artifact="file:///m", adapters=()))
    hub = replace(M, spec=replace(M.spec, engine="vllm", artifact="hf://o/n", adapters=()))
    for one in (file, hub):
        assert (describe_weights(at(), one), weights_state(at(), one)) == ([], "")
    some = replace(hub, spec=replace(hub.spec, artifact="hf://o/n?include=*"))
    assert weights_state(at(), some) == "absent", "no engine fetches that"
    assert weights_state(at(("hf://o/n", "n1")), hub) == "here"
