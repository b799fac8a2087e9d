"""Announced node removals: replicas move before the deadline, replacement first, and no request is cut off."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.capacity.interruptions import DRAIN_S, SUCCESSOR_S, TAKEN
from autoscaler.contract import Report
from autoscaler.planner.plan import plan
from autoscaler.provisioning.release import STRAY_S
from autoscaler.queries.operator_orders import explain_closed_slice
from autoscaler.spec.capacity import Cro, ProviderSettings
from autoscaler.state.actions import AcquireLease, Action, DrainReplica, ReleaseLease, StartReplica
from autoscaler.state.capacity import LeaseId, LeasesSeen, Listed
from autoscaler.state.events import CordonsSeen, Reported, Seen, SlicesSeen, Tick
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.world import Cordon, CordonTarget, NodeId, World
from autoscaler.text import format_duration
from tests.support.builders.capacity import A, acted, cloud, observe, offer, offered, shown
from tests.support.builders.worlds import T0, device, gateway, kinds, level, model, replace_fields, replica, use, world
from tests.support.harness.driver_events import seen_of

SPOT, KARPENTER = "aws-node-termination-handler/spot-itn", "karpenter.sh/disrupted"
HOUR_S = 3600.0


def served(*more: str, running: int = 1) -> World:
    """A replica of `a` runs on n1 if `running`; `more` names other nodes with a device."""
    slices = [device(f"g-{name}", 16, NodeId(name)) for name in ("n1", *more)]
    one = replica(A, "r1", ["g-n1"])
    if not running:
        return world([A], slices, gateways=[gateway()])
    return world([A], slices, [one], [gateway(levels=[level("a", 0, running)], uses=[use("r1", running)])])


def tainted(at: World, key: str, now_s: float = T0) -> World:
    slices = [replace(one, taints=(Taint(key, "", "NoSchedule"),) if one.node == "n1" else one.taints)
              for one in at.nodes.slices.values()]  # fmt: skip
    return observe(at, SlicesSeen(slices=tuple(slices)), now_s=now_s)


def drains(at: World, now_s: float) -> list[str]:
    return [one.reason for one in plan(at, now_s).actions if isinstance(one, DrainReplica)]


def test_replica_on_a_node_removed_by_karpenter_is_replaced_then_drained() -> None:
    at = tainted(served("n2"), KARPENTER)
    assert kinds(plan(at, T0)) == ["start a"]
    start = next(one for one in plan(at, T0).actions if isinstance(one, StartReplica))
    assert start.replica.resources.slices == ("g-n2",)
    assert "node n1: Karpenter removes it" in start.reason
    assert explain_closed_slice(at, at.nodes.slices[next(iter(at.nodes.slices))]) == "node n1: Karpenter removes it"
    after, _ = acted(at)
    assert not drains(after, T0 + 1)
    ready = observe(after, seen_of(start.replica, Seen.READY), now_s=T0 + 1)
    assert drains(ready, T0 + 1) == ["node n1: Karpenter removes it"]


def test_interrupted_replica_drains_at_the_deadline_without_a_replacement() -> None:
    at = tainted(served(), KARPENTER)
    assert not drains(at, T0)
    early = observe(at, Tick(), now_s=T0 + SUCCESSOR_S - 1)
    assert not drains(early, T0 + SUCCESSOR_S - 1)
    early = observe(
        early, CordonsSeen(cordons=()), now_s=T0 + SUCCESSOR_S - 1
    )  # the operator orders are reported again
    late = observe(early, Tick(), now_s=T0 + SUCCESSOR_S)
    assert drains(late, T0 + SUCCESSOR_S) == ["node n1: Karpenter removes it"]


@pytest.mark.parametrize("key", [key for key, (_, at_once) in TAKEN.items() if at_once])
def test_spot_or_shutdown_notice_drains_a_busy_replica_at_once(key: str) -> None:
    at = tainted(served("n2"), key)
    assert len(drains(at, T0)) == 1
    after, _ = acted(at)
    (one,) = [one for one in after.replicas.values() if one.id == "r1"]
    assert one.state == "draining", "it is not stopped: a Call runs on it"


def test_removed_taint_cancels_the_interruption() -> None:
    at = tainted(served("n2"), KARPENTER)
    back = observe(at, SlicesSeen(slices=tuple(replace(one, taints=()) for one in at.nodes.slices.values())))
    assert not back.nodes.cordons
    assert not kinds(plan(back, T0))


def test_operator_cordon_takes_precedence_over_an_interruption() -> None:
    mine = Cordon(place=CordonTarget("node", "n1"), node="n1", since_s=T0)
    at = tainted(observe(served("n2"), CordonsSeen(cordons=(mine,))), KARPENTER)
    assert at.nodes.cordons == {mine.place: mine}
    lifted = observe(at, CordonsSeen(cordons=()))
    assert [one.why for one in lifted.nodes.cordons.values()] == ["node n1: Karpenter removes it"]


# --- capacity orders ------------------------------------------------------------------------------------------------


def leased(ends_s: float | None, *more: str, running: int = 1, **fields: object) -> World:
    """Node n1 belongs to an order that was delivered ten hours ago; `fields` change how it is listed now."""
    begin = offered(served(*more, running=running), cloud(), now_s=T0)
    listed = Listed(
        name="lease", offer=cloud(), devices=1, phase="here", committed=True, node="n1", owner=A.name, ends_s=ends_s
    )
    at = observe(begin, LeasesSeen(provider="cloud", leases=(listed,), began_s=T0))
    lease = at.capacity.leases[LeaseId("cloud", "lease")]
    aged = replace(lease, asked_s=T0 - 10 * HOUR_S, here_s=T0 - 10 * HOUR_S, stray=False)
    at = replace(at, capacity=replace(at.capacity, leases={lease.id: aged}))
    return observe(at, LeasesSeen(provider="cloud", leases=(replace(listed, **fields),), began_s=T0))


def test_new_leader_cordons_expiring_capacity_as_early_as_the_old_leader() -> None:
    """A new leader does not know when the order of another leader was delivered, and must not assume now."""
    ends_s = T0 + 1000.0
    old = leased(ends_s)
    (lease,) = old.capacity.leases.values()
    assert old.nodes.cordons
    unsure = replace(lease, asked_s=T0, here_s=T0, found=True)
    new = replace_fields(old, capacity=replace(old.capacity, leases={lease.id: unsure}), cordons={})
    assert observe(new, Tick(), now_s=T0).nodes.cordons.keys() == old.nodes.cordons.keys()
    short = replace(unsure, offer=replace(unsure.offer, lasts_s=1200.0))
    new = replace(new, capacity=replace(new.capacity, leases={lease.id: short}))
    assert not observe(new, Tick(), now_s=T0).nodes.cordons, "a quarter of the duration in its offer"


def acquired(actions: tuple[Action, ...]) -> list[str]:
    return [one.order.id.provider for one in actions if isinstance(one, AcquireLease)]


def test_expiring_capacity_is_replaced_early_and_drained_before_expiry() -> None:
    at = leased(T0 + 2 * HOUR_S)
    assert not at.nodes.cordons
    begins_s = T0 + 2 * HOUR_S - 2 * 360.0 - DRAIN_S
    assert not observe(at, Tick(), now_s=begins_s - 1).nodes.cordons
    later = observe(at, Tick(), now_s=begins_s)
    assert [one.why for one in later.nodes.cordons.values()] == ["node n1: its capacity order from cloud ends"]
    assert not drains(later, begins_s)
    fields = {"phase": "here", "committed": True, "node": "n1", "ends_s": T0 + 2 * HOUR_S}
    fresh = shown(offered(later, cloud(), now_s=begins_s), begins_s, "cloud", **fields)
    assert acquired(plan(fresh, begins_s).actions) == ["cloud"], "another node is ordered while the old one serves"
    last_s = T0 + 2 * HOUR_S - DRAIN_S
    assert not drains(observe(later, Tick(), now_s=last_s - 1), last_s - 1)
    assert drains(observe(later, Tick(), now_s=last_s), last_s) == ["node n1: its capacity order from cloud ends"]


def test_capacity_without_an_expiry_time_is_not_cordoned() -> None:
    assert not observe(leased(None), Tick(), now_s=T0 + 1000 * HOUR_S).nodes.cordons


def test_capacity_reclaimed_by_its_provider_is_cordoned_with_the_reason() -> None:
    at = leased(T0, "n2", phase="leaving", says="Karpenter is removing it: Underutilized")
    at = observe(at, Tick(), now_s=T0 + 1)
    (cordon,) = at.nodes.cordons.values()
    assert cordon.why == "node n1: its capacity order from cloud ends (Karpenter is removing it: Underutilized)"
    assert kinds(plan(at, T0 + 1))[:1] == ["start a"]


def test_only_the_devices_of_expiring_capacity_are_cordoned() -> None:
    at = observe(leased(T0, device_ids=("g-n1",)), Tick(), now_s=T0 + 1)
    assert set(at.nodes.cordons) == {CordonTarget("device", "g-n1")}


@pytest.mark.parametrize("phase", ["here", "leaving"])
def test_ended_reservation_on_a_permanent_node_drains_no_replica(phase: str) -> None:
    room = replace(cloud(), room=True, lasts_s=HOUR_S)
    listed = Listed(name="lease", offer=room, devices=1, phase="here", committed=True, node="n1", owner=A.name)
    at = offered(served("n2"), room, now_s=T0)
    at = observe(at, LeasesSeen(provider="cloud", leases=(listed,), began_s=T0))
    over = replace(listed, phase=phase, ends_s=T0 + 1)
    for now_s in (T0 + 1, T0 + 2 * HOUR_S):
        at = observe(at, LeasesSeen(provider="cloud", leases=(over,), began_s=now_s), now_s=now_s)
        assert not at.nodes.cordons
        assert not drains(at, now_s)


def test_idle_capacity_is_released_at_its_expiry_time() -> None:
    idle = leased(T0, running=0)
    removed = [one.reason for one in plan(idle, T0).actions if isinstance(one, ReleaseLease)]
    assert removed == ["it is being withdrawn and is not in use"]


# --- Fabric devices on unneeded or unremovable nodes (cases 3 and 4 of Dynamic Device Scaling) ------------------------

UNNEEDED = "DeletionCandidateOfClusterAutoscaler"


def attached(at: World, *, alone: bool = False) -> World:
    """Device g-n1 was attached to node n1 an hour ago. It takes long to attach, so it is kept for long."""
    of = offer(name="n1", node="n1", expected_s=600.0)
    running = any("g-n1" in one.resources.slices for one in at.replicas.values())
    begin = offered(at, of, now_s=T0)
    listed = Listed(
        name="lease", offer=of, devices=1, phase="here", committed=True, node="n1", owner=A.name,
        device_ids=("g-n1",), alone=alone,
    )  # fmt: skip
    at = observe(begin, LeasesSeen(provider="rack", leases=(listed,), began_s=T0))
    lease = at.capacity.leases[LeaseId("rack", "lease")]
    aged = replace(lease, stray=False, used=True, here_s=T0 - HOUR_S, idle_since_s=None if running else T0)
    return replace(at, capacity=replace(at.capacity, leases={lease.id: aged}))


def released(at: World, now_s: float) -> list[str]:
    at = observe(at, Reported(report=heard(at, now_s)), now_s=now_s)
    return [one.reason for one in plan(at, now_s).actions if isinstance(one, ReleaseLease)]


def heard(at: World, now_s: float) -> Report:
    """The last gateway report again, with a new sequence number."""
    (one,) = at.gateways.values()
    assert one.report is not None
    return replace(one.report, sequence=int(now_s * 10), epoch=at.epoch)


def test_idle_device_on_a_node_marked_as_unneeded_is_released_early() -> None:
    """Case 3: the devices would be removed with the node."""
    assert not released(attached(served(running=0)), T0 + STRAY_S), "where it stays, to have it again would cost more"
    at = tainted(attached(served(running=0)), UNNEEDED)
    assert not released(at, T0 + STRAY_S - 1), "it may be between two Replicas"
    assert plan(at, T0 + STRAY_S - 1).next_s == T0 + STRAY_S
    assert released(at, T0 + STRAY_S) == ["it is not in use, and node n1 will be removed as unneeded"]


@pytest.mark.parametrize("kept_s", [0.0, 700.0, 100_000.0])
def test_idle_capacity_is_released_after_the_keep_seconds_of_its_provider(kept_s: float) -> None:
    at = attached(served(running=0))
    entry = ProviderSettings(name="rack", cro=Cro(model="A100"), keep_seconds=kept_s)
    at = replace(at, settings=replace(at.settings, capacity=(entry,)))
    reasons = [f"idle for {format_duration(kept_s)}, and its provider's keepSeconds is {format_duration(kept_s)}"]
    assert kept_s == 0.0 or not released(at, T0 + kept_s - 1)
    assert released(at, T0 + kept_s) == reasons


def test_replica_on_a_node_marked_as_unneeded_keeps_running() -> None:
    at = tainted(attached(served("n2")), UNNEEDED)
    assert not at.nodes.cordons
    assert not kinds(plan(at, T0 + HOUR_S))


def test_device_of_a_removed_node_is_released_after_its_replica_moved() -> None:
    """Case 3: the removal of the node has begun."""
    at = tainted(attached(served("n2")), "ToBeDeletedByClusterAutoscaler")
    assert not released(at, T0)
    assert kinds(plan(at, T0)) == ["start a"], "elsewhere, first"
    empty = tainted(attached(served(running=0)), "ToBeDeletedByClusterAutoscaler")
    assert released(empty, T0) == ["it is being withdrawn and is not in use"]


def test_idle_device_of_a_node_in_use_is_released_if_its_owner_is_known() -> None:
    """Case 4: a replica runs on another device of the node."""
    b, late_s = model("b", 16), T0 + 2 * HOUR_S
    slices = [device(name, 16, NodeId("n1")) for name in ("g-n1", "g2-n1")]
    busy = gateway(levels=[level("b", 0, 1)], uses=[use("r2", 1)])
    at = world([A, b], slices, [replica(b, "r2", ["g2-n1"])], [busy])
    assert released(attached(at), late_s) == ["idle for 2 h, and it is worth keeping for 30 min"]
    assert not released(attached(at, alone=True), late_s), "the owner of each device is unknown"
    assert not released(tainted(attached(at, alone=True), UNNEEDED), late_s)
