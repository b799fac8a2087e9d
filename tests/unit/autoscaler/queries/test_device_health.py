"""Reports of node agents: ownership of devices, their health, freed memory, and no repeated decisions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pytest_aiohttp import AiohttpClient

from autoscaler.agent_contract import DeviceReport, NodeReport, PodDevices, PodUse
from autoscaler.fold.agent_reports import FORGET_S, PODS_BEFORE_MAX
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import plan
from autoscaler.queries.agent_reports import (
    IDLE_BYTES_MAX,
    NOTICED_BYTES,
    devices_of,
    is_device_memory_free,
    is_redundant_node_report,
)
from autoscaler.queries.device_health import ILL, list_lost_replicas, list_unhealthy_slices
from autoscaler.server.gateways import ContractServer
from autoscaler.server.read_responses import list_devices
from autoscaler.state.actions import DrainReplica, ReviveReplica, StartReplica
from autoscaler.state.events import NodeReported
from autoscaler.state.resources import Isolation
from autoscaler.state.world import PodRef, Replica, Slice, World
from tests.support.builders.worlds import GI, T0, device, folded, gateway, level, model, replica, world
from tests.support.harness.manual_loop import SteppedLoop

A = model("a", memory_gi=0)
POD = PodRef(namespace="engines", name="r", uid="u1")
OURS = PodDevices(namespace="engines", name="r", devices=("GPU-b",))


def gpus(count: int, node: str = "n0") -> list[Slice]:
    """Whole GPUs as the Kubernetes driver reports them: counted only, not identified."""
    return [device(f"{node}/gpu{n}", 24, node, shared=False, isolation=Isolation.HARDWARE) for n in range(count)]


def own_replica(*on: str, pod: PodRef | None = POD) -> Replica:
    return replica(A, "r", on or ("n0/gpu0",), pod=pod)


def gpu(name: str, used_bytes: int = 0, *, healthy: bool = True) -> DeviceReport:
    return DeviceReport(id=name, memory_bytes=24 * GI, used_bytes=used_bytes, healthy=healthy)


def with_report(
    at: World, now_s: float, *found: DeviceReport, pods: tuple[PodDevices, ...] = (), age_s: float = 0.0
) -> World:
    """The state after this report of the agent of n0."""
    known = at.nodes.agents.get("n0")
    sequence = 1 if known is None else known.report.sequence + 1
    report = NodeReport(node="n0", boot="b", sequence=sequence, devices=found, pods=pods, age_s=age_s)
    return fold(at, (NodeReported(report=report),), now_s)[0]


# --- ownership of devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [OURS, PodDevices(pod_uid="u1", devices=("GPU-b",))])
def test_devices_of_a_replica_are_matched_by_pod_name_or_uid(named: PodDevices) -> None:
    at = with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a", 1), gpu("GPU-b", 7), pods=(named,))
    assert [one.id for one in devices_of(at, at.replicas[own_replica().id], T0)] == ["GPU-b"]
    (first, second) = list_devices(at, T0)
    assert (first.used_bytes, first.replicas[0].devices) == (7, ("GPU-b",))
    assert (second.used_bytes, second.replicas) == (None, ()), "the device of a free slice is unknown"
    (later, _) = list_devices(at, T0 + 10)
    assert (later.used_bytes, later.replicas[0].devices) == (None, ()), "too long ago"


def test_pod_with_another_namespace_or_uid_is_not_matched() -> None:
    for other in (
        PodDevices(namespace="n", name="r", devices=("GPU-a",)),
        PodDevices(pod_uid="u2", devices=("GPU-a",)),
    ):
        at = with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a"), pods=(other,))
        assert devices_of(at, at.replicas[own_replica().id], T0) == ()


def test_agent_report_of_a_silent_node_is_removed_until_a_new_report() -> None:
    """Nodes appear under new names for as long as an autoscaler runs."""
    at = with_report(world([A], gpus(2), []), T0, gpu("GPU-a"))
    assert fold(at, (), T0 + FORGET_S - 1)[0].nodes.agents.keys() == {"n0"}
    later = fold(at, (), T0 + FORGET_S)[0]
    assert not later.nodes.agents
    assert with_report(later, T0 + FORGET_S + 1, gpu("GPU-a")).nodes.agents["n0"].report.sequence == 1


# --- freed memory -----------------------------------------------------------------------------------------------------


def gone(*found: DeviceReport, now_s: float = T0 + 2, age_s: float = 0.0, pods: tuple[PodDevices, ...] = ()) -> World:
    """Its pod was deleted at T0 + 1, and then the agent sent this report."""
    at = with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a"), gpu("GPU-b", 20 * GI), pods=(OURS, *pods))
    return with_report(at, now_s, *found, pods=pods, age_s=age_s)


def back(at: World, now_s: float = T0 + 2) -> bool:
    return is_device_memory_free(at, own_replica().id, T0 + 1, now_s)


def test_pod_memory_is_free_when_a_later_report_shows_its_devices_idle() -> None:
    assert back(gone(gpu("GPU-a", 20 * GI), gpu("GPU-b", IDLE_BYTES_MAX)))
    assert not back(gone(gpu("GPU-a"), gpu("GPU-b", IDLE_BYTES_MAX + 1))), "a killed engine can keep it"
    assert not back(gone(gpu("GPU-a"), gpu("GPU-b", healthy=False))), "what cannot be read is not measured"
    assert not back(gone(gpu("GPU-a"))), "it is not there any more"


def test_only_a_report_after_the_pod_ended_proves_free_memory() -> None:
    idle = (gpu("GPU-a"), gpu("GPU-b"))
    assert not back(gone(*idle, age_s=1.0)), "it looked when the pod was still there"
    assert back(gone(*idle, age_s=0.9))
    assert not back(gone(*idle), T0 + 12), "a report that is too old is no evidence"
    at = with_report(world([A], gpus(2), [own_replica()]), T0, *idle, pods=(OURS,))
    assert not is_device_memory_free(at, own_replica().id, T0 - 1, T0), "the kubelet still has the pod"


def test_memory_counts_as_used_if_the_pod_devices_are_unknown_or_shared() -> None:
    idle = (gpu("GPU-a"), gpu("GPU-b"))
    unnamed = with_report(with_report(world([A], gpus(2), [own_replica()]), T0, *idle), T0 + 2, *idle)
    assert not back(unnamed)
    silent = world([A], gpus(2), [own_replica()])
    assert not back(silent)
    shared = with_report(world([A], [device("n0/gpu0", 24, "n0")], [own_replica()]), T0, *idle, pods=(OURS,))
    assert not back(with_report(shared, T0 + 2, *idle)), "another replica may use the rest of its memory"


def test_removed_pods_of_a_node_are_remembered_up_to_a_limit() -> None:
    at = with_report(world([A], gpus(2)), T0, pods=(OURS,))
    at = with_report(at, T0 + 1)
    assert at.nodes.agents["n0"].pods_before == (OURS,)
    at = with_report(at, T0 + 2, pods=(replace(OURS, devices=("GPU-a",)),))
    assert at.nodes.agents["n0"].pods_before == (), "it came again"
    many = tuple(PodDevices(namespace="n", name=f"p{n}", devices=("GPU-a",)) for n in range(PODS_BEFORE_MAX + 3))
    at = with_report(with_report(at, T0 + 3, pods=many), T0 + 4)
    assert at.nodes.agents["n0"].pods_before == many[3:]


# --- health -----------------------------------------------------------------------------------------------------------


def test_slice_is_excluded_if_its_pod_has_an_unhealthy_device() -> None:
    at = with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a"), gpu("GPU-b", healthy=False), pods=(OURS,))
    assert list_unhealthy_slices(at, T0) == {"n0/gpu0": ILL}
    assert [one.closed for one in list_devices(at, T0)] == [ILL, ""]
    assert list_unhealthy_slices(at, T0 + 10) == {}, "too long ago"


def test_one_free_slice_is_excluded_per_unassigned_unhealthy_device() -> None:
    at = with_report(
        world([A], gpus(3), [own_replica()]), T0, gpu("GPU-a", healthy=False), gpu("GPU-b"), gpu("GPU-c"), pods=(OURS,)
    )
    assert list_unhealthy_slices(at, T0) == {"n0/gpu2": ILL}
    noticed = with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a", healthy=False), gpu("GPU-b"),
                   gpu("GPU-c"), pods=(OURS,))  # fmt: skip
    assert list_unhealthy_slices(noticed, T0) == {}, "the device plug-in offers it no more"
    foreign = PodDevices(namespace="n", name="p", devices=("GPU-a",))
    taken = with_report(world([A], gpus(2)), T0, gpu("GPU-a", healthy=False), gpu("GPU-b"), pods=(foreign,))
    assert list_unhealthy_slices(taken, T0) == {}, "the kubelet will not give it"


def test_unhealthy_device_gets_no_replica_and_the_plan_gives_the_reason() -> None:
    at = with_report(
        world([A], gpus(1), gateways=[gateway(levels=[level("a", waiting=1)])]), T0, gpu("GPU-a", healthy=False)
    )
    made = plan(at, T0)
    assert made.actions == ()
    assert ILL in made.unmet[0].reason
    at = with_report(at, T0 + 1, gpu("GPU-a"))
    assert [type(one) for one in plan(at, T0 + 1).actions] == [StartReplica]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.booleans(), max_size=6), st.integers(0, 6), st.sets(st.integers(0, 5)))
def test_at_most_as_many_slices_are_excluded_as_devices_are_unhealthy(
    health: list[bool], slices: int, held: set[int]
) -> None:
    found = [gpu(f"GPU-{n}", healthy=one) for n, one in enumerate(health)]
    holders = [replica(A, f"r{n}", [f"n0/gpu{n}"]) for n in held if n < slices]
    at = with_report(world([A], gpus(slices), holders), T0, *found)
    closed = list_unhealthy_slices(at, T0)
    assert len(closed) <= health.count(False)
    assert len(closed) >= min(health.count(False), slices - len(holders)) - max(0, len(health) - slices)


# --- repeated reports -------------------------------------------------------------------------------------------------


def test_node_report_with_only_a_small_memory_change_is_redundant() -> None:
    one = NodeReport(node="n", boot="b", sequence=1, devices=(gpu("GPU-a", 5),), pods=(OURS,), images=("i",))
    assert is_redundant_node_report(
        one, replace(one, sequence=2, age_s=0.5, devices=(gpu("GPU-a", 5 + NOTICED_BYTES - 1),))
    )
    assert is_redundant_node_report(one, replace(one, uses=(PodUse(pod_uid="u1", device="GPU-a", used_bytes=5),)))
    for news in (
        replace(one, devices=(gpu("GPU-a", 5 + NOTICED_BYTES),)), replace(one, devices=(gpu("GPU-a", healthy=False),)),
        replace(one, devices=()), replace(one, pods=()), replace(one, images=()),
    ):  # fmt: skip
        assert not is_redundant_node_report(one, news)


@pytest.mark.standard
async def test_redundant_node_report_waits_for_the_next_control_loop_step(aiohttp_client: AiohttpClient) -> None:
    stepped = SteppedLoop(world([A], gpus(1)))
    client = await aiohttp_client(ContractServer(stepped.loop).application())

    async def post(sequence: int, **fields: object) -> None:
        body = msgspec.json.encode({"node": "n0", "boot": "b", "sequence": sequence, **fields})
        assert (await client.post("/v1/node", data=body)).status == 200

    await post(1)
    assert len(stepped.loop.observed) == 1
    stepped.step()
    await post(2)
    assert len(stepped.loop.observed) == 1, "it is in no hurry"
    stepped.step()
    assert stepped.loop.world.nodes.agents["n0"].report.sequence == 2
    await post(3, images=["new"])
    await post(1, boot="another")
    assert len(stepped.loop.observed) == 3


# --- a lost device ----------------------------------------------------------------------------------------------------


def test_replica_on_an_unhealthy_device_drains_and_is_not_revived() -> None:
    waiting = [gateway(levels=[level("a", waiting=1)])]
    begin = world([A], gpus(2), [own_replica()], waiting)
    at = with_report(begin, T0, gpu("GPU-a"), gpu("GPU-b", healthy=False), pods=(OURS,))
    assert list_lost_replicas(at, T0) == ("r",)
    made = plan(at, T0)
    assert [(one.replica, one.reason) for one in made.actions if isinstance(one, DrainReplica)] == [("r", ILL)]
    after = folded(at, made.actions)
    assert not [one for one in plan(after, T0).actions if isinstance(one, ReviveReplica)]


def test_replicas_are_kept_if_all_devices_of_their_node_are_unhealthy() -> None:
    at = with_report(
        world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a", healthy=False), gpu("GPU-b", healthy=False), pods=(OURS,)
    )
    assert list_lost_replicas(at, T0) == ()
    assert (
        list_lost_replicas(
            with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-b", healthy=False), pods=(OURS,)), T0
        )
        == ()
    )


def test_expired_node_report_marks_no_replica_as_lost() -> None:
    at = with_report(world([A], gpus(2), [own_replica()]), T0, gpu("GPU-a"), gpu("GPU-b", healthy=False), pods=(OURS,))
    assert list_lost_replicas(at, T0 + 10) == ()
