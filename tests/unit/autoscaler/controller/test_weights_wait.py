"""Replicas that wait for their weights before their pod is created."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import pytest
from msgspec.structs import replace

from autoscaler.agent_contract import OWN, Laid, NodeReport, WeightsReport
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.controller.loop import LoopStep
from autoscaler.controller.weights_wait import HOW, LOOK_S_MAX, AgentNodeSupply, NotBroughtError
from autoscaler.drivers.kubernetes.blocked_starts import FETCHING_WEIGHTS, WeightsWaits
from autoscaler.fold.fold import fold
from autoscaler.spec.model import Adapter, Gpu, Model, ModelSpec
from autoscaler.state.actions import Plan
from autoscaler.state.events import NodeReported
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import ClusterFacts, Replica, World
from tests.support.builders.worlds import T0, device, replace_fields, replica, world
from tests.support.harness.faults.contained_faults import raised
from tests.support.harness.faults.fault_injection import concerns, inject
from tests.support.harness.manual_loop import SteppedLoop

ADA = Model(name=ModelName("ada"), spec=ModelSpec(engine="vllm", artifact="oci://r.io/a:1"))
ONE = replica(ADA, "a1", ("g1",), S.STARTING)
LAID = Laid("copies/x/files", "sub/a.gguf")


class Driver:
    """Records its calls; its supply returns the values that the test sets."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.laid: asyncio.Future[Laid] | None = asyncio.get_running_loop().create_future()
        self.waits = WeightsWaits(self, self)

    def mounting(self) -> ClusterFacts:
        """Like `NodeSupply.mounting`."""
        return ClusterFacts()

    def __call__(self, replica: Replica, model: Model, report: Callable[[str], None]) -> Awaitable[Laid] | None:
        return self.laid

    def brings(self, model: Model) -> Collection[str]:
        return () if self.laid is None else (OWN,)

    def obstacle(self, model: Model) -> str:
        return ""

    def start_waits(self, replica: Replica, reason: str) -> None:
        self.heard.append(reason)

    def weights_came(self, replica: Replica, model: Model, laid: Laid | None) -> None:
        self.heard.append(laid)

    def weights_failed(self, replica: Replica, reason: str) -> None:
        self.heard.append(("failed", reason))

    def begin(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._run(one)) for one in self.waits.begin(ONE, ADA)]

    async def _run(self, one: Awaitable[None]) -> None:
        await one


async def test_start_waits_until_its_weights_are_delivered() -> None:
    driver = Driver()
    (task,) = driver.begin()
    assert driver.begin() == [], "it is on its way"
    assert driver.heard == [FETCHING_WEIGHTS, FETCHING_WEIGHTS]
    assert driver.laid is not None
    driver.laid.set_result(LAID)
    await task
    assert driver.heard[2:] == [LAID]
    driver.laid = None
    assert driver.begin() == []
    assert driver.heard[3:] == [None]


async def test_start_stopped_while_waiting_for_weights_creates_no_pod() -> None:
    driver = Driver()
    (task,) = driver.begin()
    driver.waits.stop(ONE.id)
    assert driver.laid is not None
    driver.laid.set_result(LAID)
    await task
    assert driver.heard == [FETCHING_WEIGHTS]


async def test_weight_delivery_failure_fails_the_start() -> None:
    driver = Driver()
    (task,) = driver.begin()
    assert driver.laid is not None
    driver.laid.set_exception(OSError("no room"))
    await task
    assert driver.heard == [FETCHING_WEIGHTS, ("failed", "its weights: no room")]


# --- reports of agents -----------------------------------------------------------------------------------------------


def with_report(**fields: object) -> World:
    report = NodeReport(node="n1", boot="b", sequence=1, brings=True, weights=(
        WeightsReport(artifact="oci://r.io/a:1", **fields),  # type: ignore[arg-type]  # fields of each test
    ))  # fmt: skip
    at = world([ADA], [device("g1", 80, "n1")], [ONE], mounting=ClusterFacts(volumes=True))
    return fold(at, [NodeReported(report=report)], T0)[0]


def step(after: World) -> LoopStep:
    return LoopStep(after, after, Plan(), (), (), T0, T0, T0)


def begin(
    supply: AgentNodeSupply, replica: Replica, model: Model, report: Callable[[str], None] = lambda _: None
) -> asyncio.Future[Laid]:
    """Begin the wait of a replica whose weights are in a registry."""
    waiting = supply(replica, model, report)
    assert waiting is not None
    return asyncio.ensure_future(waiting)


async def test_agent_report_of_delivered_weights_ends_the_wait() -> None:
    at, progress = with_report(), list[str]()
    supply = AgentNodeSupply(lambda: at, lambda: T0, raised)
    task = begin(supply, ONE, ADA, progress.append)
    await asyncio.sleep(0)
    supply.on_step(step(with_report(bytes=1 << 20, total_bytes=2 << 20)))
    supply.on_step(step(with_report(bytes=1 << 20, total_bytes=2 << 20)))
    assert progress == ["requested", "1Mi of 2Mi, 0 bytes a second"]
    supply.on_step(step(with_report(replicas=(ReplicaId("a1"),), folder="copies/x/files", ggufs=("a.gguf",))))
    assert await task == Laid("copies/x/files", "a.gguf")


async def test_start_fails_if_mount_support_of_the_cluster_stays_unknown() -> None:
    there = {"replicas": (ReplicaId("a1"),), "folder": "copies/x/files"}
    at, progress = replace_fields(with_report(**there), mounting=None), list[str]()
    supply = AgentNodeSupply(lambda: at, lambda: T0, raised)
    soon = begin(supply, ONE, ADA, progress.append)
    await asyncio.sleep(0)
    supply.on_step(step(at))
    assert progress == [HOW]
    supply.on_step(step(with_report(**there)))
    assert await soon == Laid("copies/x/files", "")
    late = begin(supply, ONE, ADA, progress.append)
    await asyncio.sleep(0)
    again = NodeReported(report=replace(at.nodes.agents["n1"].report, sequence=2))
    after = fold(at, [again], T0 + LOOK_S_MAX)[0]
    supply.on_step(step(after)._replace(acted_s=T0 + LOOK_S_MAX))
    with pytest.raises(NotBroughtError, match="it is unknown how pods can mount them"):
        await late


async def test_exception_in_the_weights_check_is_reported_for_its_model_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a replica that is checked after the faulty one starts, and the faulty one starts once the fault is over."""
    bob = replace(ADA, name=ModelName("bob"), spec=replace(ADA.spec, artifact="oci://r.io/b:1"))
    other = replica(bob, "b1", ("g2",), S.STARTING)
    devices = [device("g1", 80, "n1"), device("g2", 80, "n2")]
    loop = SteppedLoop(world([ADA, bob], devices, [ONE, other], mounting=ClusterFacts(volumes=True)))
    supply = AgentNodeSupply(lambda: loop.loop.world, lambda: T0, loop.loop.fault)
    loop.loop.listeners.append(supply.on_step)
    starts = [begin(supply, one, model) for one, model in ((ONE, ADA), (other, bob))]
    await asyncio.sleep(0)
    faults = inject(monkeypatch, "autoscaler.controller.weights_wait:assess_weights", concerns("ada"))
    for node, one, artifact in (("n1", ONE, "oci://r.io/a:1"), ("n2", other, "oci://r.io/b:1")):
        came = WeightsReport(artifact=artifact, replicas=(one.id,), folder=f"copies/{one.id}")
        report = NodeReport(node=node, boot="b", sequence=1, brings=True, weights=(came,))
        after = loop.step(NodeReported(report=report))
    async with asyncio.timeout(60):
        assert await starts[1] == Laid("copies/b1", "")
    assert (faults.reported, set(after.learned.faults), after.degraded) == ([("ada", "weights")], {"ada"}, "")
    assert not starts[0].done()
    faults.stop()
    loop.step()
    async with asyncio.timeout(60):
        assert await starts[0] == Laid("copies/a1", "")


def test_start_with_a_file_artifact_does_not_wait_for_weights() -> None:
    supply = AgentNodeSupply(with_report, lambda: T0, raised)
    of_file = replace(ADA, spec=replace(ADA.spec, artifact="file:///a"))
    assert supply(ONE, of_file, lambda _: None) is None


def test_model_that_requests_no_device_has_an_obstacle_to_weight_delivery() -> None:
    supply = AgentNodeSupply(with_report, lambda: T0, raised)
    on_cpu = replace(ADA, spec=replace(ADA.spec, gpu=Gpu(count=0)))
    assert "request a device" in supply.obstacle(on_cpu)
    assert supply.obstacle(ADA) == ""


LORA = (Adapter(name="lora", artifact="oci://r.io/lora:1"),)


def model(artifact: str, **spec: object) -> Model:
    return Model(name=ModelName("m"), spec=ModelSpec(engine="vllm", artifact=artifact, **spec))  # type: ignore[arg-type]


def supply(facts: ClusterFacts | None = None) -> AgentNodeSupply:
    at = world([], [device()], mounting=facts)
    return AgentNodeSupply(lambda: at, lambda: 0.0, raised)


def test_model_that_allows_unsafe_weights_is_not_blocked_from_starting() -> None:
    assert supply().obstacle(model("oci://r.io/a:1", allow_unsafe=True)) == ""
    assert supply().brings(model("oci://r.io/a:1", allow_unsafe=True))


def test_adapters_are_delivered_even_if_the_model_weights_are_local() -> None:
    one = model("file:///m", adapters=LORA)
    assert supply().brings(one)
    assert not supply().brings(model("file:///m"))
    assert supply()(replica(one, "r"), model("file:///m"), lambda _: None) is None


def test_undeliverable_adapter_is_reported_by_its_name_or_artifact() -> None:
    on_cpu = model("file:///m", adapters=LORA, gpu=Gpu(count=0))
    assert supply().obstacle(on_cpu).startswith("oci://r.io/lora:1 is pulled to one node")
    nowhere = supply(ClusterFacts()).obstacle(model("pvc://claim", adapters=LORA))
    assert nowhere.startswith(
        "the weights of its adapter lora cannot be mounted in its pods: Pilotlight may not create"
    )
