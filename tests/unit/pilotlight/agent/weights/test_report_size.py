"""Many Models with many long artifacts: the agent's report and its requests stay within their limits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from pytest_aiohttp import AiohttpClient

from artifacts.credentials.docker_config import Config
from autoscaler.agent_contract import (
    IMAGES_MAX,
    NodeReport,
    NodeWants,
    WeightsReport,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
)
from autoscaler.contract import ReplicaId
from autoscaler.documents.document_rules import ADAPTERS_MAX, ARTIFACT_CHARS_MAX
from autoscaler.documents.parse import read_document
from autoscaler.fold.fold import fold
from autoscaler.server.agents import NODE_BYTES_MAX
from autoscaler.server.gateways import ContractServer
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.model import Model
from autoscaler.state.events import NodeReported
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NodeId, World
from autoscaler.weights.desired import WANTS_BYTES_MAX, build_node_wants
from autoscaler.weights.inspection import LOOKS_MAX, SILENT_S, InspectionAssigner
from pilotlight.agent.weights.keeper import COPIES_MAX, WeightsKeeper, WeightsTask
from pilotlight.agent.weights.report_limits import (
    COPIES_BYTES_MAX,
    IMAGES_BYTES_MAX,
    REASON_CHARS_MAX,
    ROTATE_S,
    WEIGHTS_BYTES_MAX,
    RowLimit,
    limit_copies,
    limit_images,
)
from tests.support.builders.worlds import T0, device, replica, world
from tests.support.harness.manual_loop import SteppedLoop

pytestmark = pytest.mark.standard

N1 = NodeId("n1")
LARGE_MODELS = 15
HEALTHY = "oci://r.io/healthy:1"


def build_model(name: str, artifact: str, *adapters: str) -> Model:
    found = read_document({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": {"name": name},
        "spec": {
            "engine": "vllm", "image": "v", "artifact": artifact, "gpu": {"memory": "1Gi"},
            "adapters": [{"name": f"a{number}", "artifact": one} for number, one in enumerate(adapters)],
        },
    })  # fmt: skip
    assert isinstance(found, Model)
    return found


def build_large_model(name: str) -> Model:
    """Return a Model with as many adapters as are allowed; all artifacts have the maximum length."""
    parts = [f"s3://bucket/{name}/{number}/".ljust(ARTIFACT_CHARS_MAX, "x") for number in range(ADAPTERS_MAX + 1)]
    return build_model(name, *parts)


MODELS = [*(build_large_model(f"large-{number}") for number in range(LARGE_MODELS)), build_model("m", HEALTHY)]
REQUESTS = [request for model in MODELS for request in collect_weights_requests(model).values()]


def starting() -> World:
    """Return a world in which a replica of each Model waits for its weights."""
    devices = [device(f"g{number}", 80, "n1") for number in range(len(MODELS))]
    replicas = [replica(model, f"r-{model.name}", (f"g{at}",), S.STARTING) for at, model in enumerate(MODELS)]
    return world(MODELS, devices, replicas)


def test_weights_requests_of_a_node_fit_the_limit_and_include_small_models() -> None:
    wants = build_node_wants(starting())[N1].wants
    size = len(msgspec.json.encode(NodeWants(epoch=1, wants=wants)))
    assert size > WANTS_BYTES_MAX - 2 * ARTIFACT_CHARS_MAX, "the limit is used"
    assert size < WANTS_BYTES_MAX + 1000
    (healthy,) = [want for want in wants if want.artifact == HEALTHY]
    assert healthy.replicas == ("r-m",)
    sent = {read_weights_request(want) for want in wants}
    whole = [model.name for model in MODELS if sent.issuperset(collect_weights_requests(model).values())]
    assert len(whole) >= 11, "the requests of a Model are sent together"
    assert [*wants] == sorted(wants, key=read_weights_request)


def test_inspections_of_an_agent_are_limited_and_all_assigned_in_turn() -> None:
    models = [replace(model, spec=replace(model.spec, gpu=replace(model.spec.gpu, memory_bytes=0))) for model in MODELS]
    assigner, at, seen = InspectionAssigner(), world(models), set[WeightsRequest]()
    rounds = -(-len(REQUESTS) // LOOKS_MAX)
    for turn in range(2 * rounds):
        now_s = T0 + turn * SILENT_S
        report = NodeReport(node=N1, boot="b", sequence=turn, brings=True)
        at = fold(at, [NodeReported(report=report)], now_s)[0]
        looks = [*assigner.looks(at, [N1], now_s)]
        assert len(looks) == LOOKS_MAX
        assert len(msgspec.json.encode(build_node_wants(at, inspections=looks)[N1])) < WANTS_BYTES_MAX
        assert {*assigner.looks(at, [N1], now_s + SILENT_S / 2)} == {*looks}, "an assignment that has not ended is kept"
        if turn == 0:
            assert (N1, WeightsRequest(HEALTHY, look=True)) in looks, "the first artifact of each Model comes first"
        seen.update(request for _, request in looks)
        if turn == rounds - 1:
            assert len(seen) == len(REQUESTS)
            seen.clear()
    assert len(seen) == len(REQUESTS), "also when the assignments start over"


async def no_secret(name: str) -> Config:
    raise KeyError(name)


class LongReport:
    """An agent whose tasks have all failed with the longest reason."""

    def __init__(self, root: Path, waiting: tuple[str, ...]) -> None:
        self.now_s = 100.0
        self.keeper = WeightsKeeper(root, no_secret, lambda: self.now_s)
        for request in REQUESTS:
            task = WeightsTask(replicas=(ReplicaId("r"),) if request.artifact in waiting else ())
            task.refuse("é" * REASON_CHARS_MAX)
            self.keeper._lines[request] = task
        self.keeper._copies = tuple(f"s3://b/{number}/".ljust(ARTIFACT_CHARS_MAX, "y") for number in range(COPIES_MAX))

    def encode(self) -> tuple[bytes, tuple[WeightsReport, ...]]:
        copies, weights = self.keeper.report()
        report = NodeReport(node="n1", boot="b", sequence=1, brings=True, copies=copies, weights=weights)
        return msgspec.json.encode(report), weights


async def test_report_of_maximum_size_is_accepted_and_rotates_its_weights_rows(
    tmp_path: Path, aiohttp_client: AiohttpClient
) -> None:
    agent = LongReport(tmp_path, (HEALTHY,))
    client = await aiohttp_client(ContractServer(SteppedLoop(world()).loop).application())
    seen = set[WeightsRequest]()
    for _ in range(8):
        body, rows = agent.encode()
        assert NODE_BYTES_MAX // 2 < len(body) < NODE_BYTES_MAX - (200 << 10), (
            "room is left for devices, pods and images"
        )
        assert (await client.post("/v1/node", data=body)).status == 200
        assert rows[0].artifact == HEALTHY, "a replica waits for it"
        assert agent.encode()[1] == rows, "other autoscalers get the same rows"
        seen.update(map(read_weights_request, rows))
        agent.now_s += ROTATE_S
    assert seen == set(REQUESTS)


def test_small_weights_row_of_a_waiting_replica_precedes_large_rows(tmp_path: Path) -> None:
    body, rows = LongReport(tmp_path, tuple(request.artifact for request in REQUESTS)).encode()
    assert len(body) < NODE_BYTES_MAX
    assert rows[0].artifact == HEALTHY


def test_copies_in_use_and_recent_copies_are_reported_up_to_a_size_limit() -> None:
    others = [f"s3://b/{number}/".ljust(ARTIFACT_CHARS_MAX, "y") for number in range(COPIES_MAX)]
    copies = limit_copies({others[-1]}, others)
    assert others[-1] in copies
    assert {*others[: len(copies) - 1]} < {*copies}
    assert COPIES_BYTES_MAX - 2 * ARTIFACT_CHARS_MAX < len(msgspec.json.encode(copies)) <= COPIES_BYTES_MAX + 2


def test_copy_whose_name_is_too_long_does_not_omit_the_copies_after_it() -> None:
    assert limit_copies((), ["a", "x" * COPIES_BYTES_MAX, "b"]) == ("a", "b")


def row(name: str, size: int, *replicas: str) -> WeightsReport:
    return WeightsReport(artifact=name, failed="x" * size, replicas=tuple(map(ReplicaId, replicas)))


def test_every_row_is_reported_in_turn_when_rows_exceed_the_size_limit() -> None:
    waiting = [row(f"waits-{number}", WEIGHTS_BYTES_MAX // 40, "r") for number in range(50)]
    others = [row("a-large", WEIGHTS_BYTES_MAX * 3 // 4), *(row(f"other-{number}", 1000) for number in range(5))]
    limit, seen = RowLimit(), set[str]()
    for turn in range(60):
        rows = limit.choose(waiting, others, turn * ROTATE_S)
        assert len(msgspec.json.encode(rows)) <= WEIGHTS_BYTES_MAX
        assert rows == limit.choose(waiting, others, turn * ROTATE_S + ROTATE_S / 2), "all autoscalers get them"
        seen.update(one.artifact for one in rows)
    assert seen == {one.artifact for one in (*waiting, *others)}


def test_row_that_exceeds_the_remaining_space_does_not_delay_later_rows() -> None:
    waiting = [row("waits", WEIGHTS_BYTES_MAX // 2, "r")]
    others = [row(f"large-{number}", WEIGHTS_BYTES_MAX * 2 // 3) for number in range(2)] + [row("small", 1000)]
    limit, turns = RowLimit(), list[set[str]]()
    for turn in range(4):
        turns.append({one.artifact for one in limit.choose(waiting, others, turn * ROTATE_S)})
    assert turns == [{"large-0", "small"}, {"large-1", "small"}, {"waits", "small"}, {"large-0", "small"}]


def test_image_names_in_a_report_are_limited_and_the_longest_omitted() -> None:
    assert limit_images(["b:1", "a:1", "b:1"]) == ("a:1", "b:1")
    assert len(limit_images(f"i:{number}" for number in range(IMAGES_MAX + 5))) == IMAGES_MAX
    long = [f"r.io/{number}/".ljust(500, "x") for number in range(IMAGES_MAX)]
    names = limit_images([*long, "z:1"])
    assert "z:1" in names
    assert IMAGES_BYTES_MAX - 600 < len(msgspec.json.encode(names)) <= IMAGES_BYTES_MAX + 2


@pytest.mark.parametrize("part", ["artifact", "adapters"])
def test_document_with_an_artifact_over_the_length_limit_is_rejected(part: str) -> None:
    longer = "s3://bucket/".ljust(ARTIFACT_CHARS_MAX + 1, "x")
    given = (longer,) if part == "artifact" else (HEALTHY, longer)
    with pytest.raises(WrongKeyError, match="expected at most 1024 characters") as raised:
        build_model("m", *given)
    assert raised.value.path == (("spec", "artifact") if part == "artifact" else ("spec", "adapters", 0, "artifact"))
