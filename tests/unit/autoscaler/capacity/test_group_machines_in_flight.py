"""Machine groups that another autoscaler scales: count the nodes that it is adding, and order nothing on top."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import read_group_limits
from autoscaler.capacity.group_machines_in_flight import GROW_S, adopt_group, update_growth
from autoscaler.planner.plan import plan
from autoscaler.server.metrics import Metrics
from autoscaler.state.actions import Acted, StartReplica
from autoscaler.state.capacity import Group, GroupGrowth, GroupsSeen, LeasesSeen, Offer, OffersSeen, ProvidersSeen
from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId, World
from tests.support.builders.capacity import acted, cloud, observe, offer, orders, shown, surge, waits
from tests.support.builders.worlds import GI, T0

LABELS = {"pool": "g"}
NAME = "MachineSet default/g"


def group(wanted: int = 1, ready: int = 0, **fields: Any) -> Group:
    """A group whose nodes have one device each."""
    brings = offer(NAME, "node", node="", devices_max=1, expected_s=240.0, labels=LABELS)
    return Group(wanted=wanted, ready=ready, **{"name": NAME, "labels": LABELS, "offer": brings, **fields})


def seen(at: World, *groups: Group, now_s: float = T0) -> World:
    """The state after the groups were polled."""
    return observe(at, GroupsSeen(groups=groups), now_s=now_s)


def grows(at: World, *groups: Group, now_s: float = T0) -> World:
    """The groups were polled before, when none of the machines that are not ready now was requested."""
    return seen(seen(at, *(replace(one, wanted=one.ready) for one in groups), now_s=now_s), *groups, now_s=now_s)


def came(at: World, *names: str, now_s: float = T0) -> World:
    """New nodes of the group report one device each."""
    new = [
        Slice(
            id=SliceId(f"{one}g"), device=DeviceId(f"{one}g"), node=NodeId(one), memory_bytes=16 * GI, product="A100",
            shared=True, labels=LABELS, labels_known=True,
        )
        for one in names
    ]  # fmt: skip
    return observe(at, SlicesSeen(slices=(*at.nodes.slices.values(), *new)), now_s=now_s)


def more(at: World, now_s: float, *offers: Offer) -> World:
    """The state after these offers are listed too; their providers list no orders."""
    names = {*at.capacity.providers, *(one.provider for one in offers)}
    for one in offers:
        given = OffersSeen(provider=one.provider, offers=(one,))
        at = observe(at, given, LeasesSeen(provider=one.provider, leases=(), began_s=now_s), now_s=now_s)
    return observe(at, ProvidersSeen(providers=tuple(sorted(names))), now_s=now_s)


# --- how much is on its way -------------------------------------------------------------------------------------------


def test_machine_group_growth_is_pending_until_its_devices_appear() -> None:
    one = adopt_group(group(2, 2), 0.0)
    assert one.coming == 0
    one = update_growth(one, group(4, 2), 2, 10.0)
    assert (one.coming, one.since_s) == (2, 10.0)
    one = update_growth(one, group(4, 3), 2, 20.0)
    assert one.coming == 2, "its node is ready, and shows no Device yet"
    one = update_growth(one, group(4, 3), 3, 30.0)
    assert (one.coming, one.since_s) == (1, 10.0)
    assert update_growth(one, group(3, 3), 3, 40.0).coming == 0, "another client has lowered it again"
    assert update_growth(one, group(5, 3), 3, 40.0) == GroupGrowth(group=group(5, 3), coming=2, shown=3, since_s=40.0)


def test_lost_node_is_not_counted_as_group_growth() -> None:
    one = update_growth(adopt_group(group(2, 2), 0.0), group(2, 1), 1, 10.0)
    assert one.coming == 0
    assert update_growth(one, group(2, 2), 2, 20.0).coming == 0
    assert update_growth(update_growth(one, group(2, 2), 1, 20.0), group(3, 2), 2, 30.0).coming == 1


def test_unready_nodes_of_a_new_group_are_counted_as_growth() -> None:
    assert update_growth(None, group(3, 1), 1, 5.0) == GroupGrowth(group=group(3, 1), coming=2, shown=1, since_s=5.0)
    assert update_growth(None, group(0), 0, 5.0).coming == 0
    assert update_growth(None, group(3, 3), 0, 5.0).coming == 0, "moved here from elsewhere, with its nodes"


# --- effects on planning ----------------------------------------------------------------------------------------------


def test_growing_machine_group_prevents_a_capacity_order() -> None:
    at = seen(surge(offer(), cloud()), group(0))
    assert orders(plan(at, T0).actions)
    at = seen(at, group(1))
    made = plan(at, T0)
    assert not made.actions
    assert made.unmet[0].reason == "waiting for 1 x A100 from MachineSet default/g, expected in about 4 min"
    assert not made.unmet[0].never
    at = came(waits(at, T0 + 60), "g1", now_s=T0 + 60)
    (started,) = plan(at, T0 + 60).actions
    assert isinstance(started, StartReplica)
    assert started.replica.resources.slices == ("g1g",)
    after = observe(seen(at, group(1, 1), now_s=T0 + 60), Acted(action=started), now_s=T0 + 60)
    assert after.capacity.groups[NAME].coming == 0


def test_machine_broken_before_the_first_poll_does_not_prevent_an_order() -> None:
    """The broken machine may stay requested for weeks; growth is counted from the first poll on."""
    at = seen(surge(offer()), group(3, 2))
    assert orders(plan(at, T0).actions) == [("rack", 1)]
    at = seen(at, group(4, 2), now_s=T0 + 5)
    assert at.capacity.groups[NAME].coming == 1
    assert not plan(at, T0 + 5).actions


def test_machine_group_that_appears_between_polls_prevents_an_order() -> None:
    at = seen(surge(offer()))
    assert at.capacity.grouped
    assert not plan(seen(at, group(1), now_s=T0 + 5), T0 + 5).actions


def test_machines_that_a_group_is_adding_are_exported_as_a_metric() -> None:
    at = grows(surge(offer()), group(2, 1), group(0, offer=None, name="MachineSet default/cpu"))
    coming = [line for line in Metrics(lambda: at).text().decode().splitlines() if "machines_coming{" in line]
    assert coming == ['pilotlight_machines_coming{group="MachineSet default/g"} 1.0']


def test_capacity_is_ordered_only_for_demand_beyond_machine_group_growth() -> None:
    at = grows(surge(cloud(many=4), waiting=3), group(1))
    assert orders(plan(at, T0).actions) == [("cloud", 1), ("cloud", 1)]


def test_stalled_machine_group_growth_prevents_no_order_after_a_time_limit() -> None:
    at = grows(surge(offer()), group(1))
    late_s = T0 + GROW_S
    at = waits(more(at, late_s, offer()), late_s)
    assert orders(plan(at, late_s).actions) == [("rack", 1)]


@pytest.mark.parametrize(
    "other",
    [group(1, claimed=1), group(1, offer=None), group(1, ready=1), group(0)],
    ids=["a pod of others waits for it", "it brings no Devices", "it is there", "no client raised it"],
)
def test_machine_group_that_adds_no_usable_node_prevents_no_order(other: Group) -> None:
    assert orders(plan(grows(surge(offer()), other), T0).actions) == [("rack", 1)]


def test_group_growth_caused_by_our_order_is_not_counted_twice() -> None:
    """Cluster Autoscaler adds a machine for our placeholder pod: two unplaced replicas need two nodes."""
    given = cloud(many=1, labels=LABELS)
    at, done = acted(surge(given, waiting=1))
    assert orders(done) == [("cloud", 1)]
    at = shown(seen(at, group(0)), T0 + 1, "cloud", committed=True)
    at = waits(seen(at, group(1), now_s=T0 + 5), T0 + 5, waiting=2)
    at = more(at, T0 + 5, offer())
    assert orders(plan(at, T0 + 5).actions) == [("rack", 1)]
    assert not orders(plan(seen(at, group(2), now_s=T0 + 6), T0 + 6).actions), "another client raised it again"


def test_delivered_node_ends_the_group_growth_before_the_next_poll() -> None:
    """Otherwise the growth would count for another order, which would then be cancelled."""
    at, done = acted(surge(cloud(labels=LABELS, expected_s=240.0), offer(expected_s=300.0, price_per_hour=9.0)))
    assert orders(done) == [("cloud", 1)]
    at = shown(seen(at, group(0)), T0 + 10, "cloud", committed=True)
    at = waits(seen(at, group(1), now_s=T0 + 10), T0 + 170, waiting=2)
    at = more(at, T0 + 170, offer(expected_s=300.0, price_per_hour=9.0))
    at, done = acted(
        shown(observe(at, OffersSeen(provider="cloud", offers=())), T0 + 170, "cloud", committed=True), T0 + 170
    )
    assert orders(done) == [("rack", 1)]
    at = came(shown(at, T0 + 171, "rack"), "g1", now_s=T0 + 240)
    at = waits(shown(at, T0 + 240, "cloud", phase="here", committed=True, node="g1"), T0 + 240, waiting=2)
    assert at.capacity.groups[NAME].coming == 0
    assert [type(one) for one in plan(at, T0 + 240).actions] == [StartReplica]
    assert seen(at, group(1), now_s=T0 + 243).capacity.groups[NAME].coming == 0, "it is counted once"


def test_device_plugin_restart_is_not_counted_as_a_new_node() -> None:
    at = came(surge(offer(), cloud()), "g1")
    at = observe(at, SlicesSeen(slices=tuple(replace(one, memory_bytes=GI) for one in at.nodes.slices.values())))
    at = seen(seen(at, group(1, 1)), group(2, 1), now_s=T0 + 1)
    slices = tuple(at.nodes.slices.values())
    at = observe(at, SlicesSeen(slices=tuple(one for one in slices if one.node != "g1")), now_s=T0 + 2)
    at = observe(at, SlicesSeen(slices=slices), now_s=T0 + 4)
    assert at.capacity.groups[NAME].coming == 1
    assert orders(plan(more(at, T0 + 6, offer(), cloud()), T0 + 6).actions) == []


def test_order_is_withdrawn_if_a_growing_group_delivers_sooner() -> None:
    at, done = acted(surge(cloud(expected_s=600.0)))
    assert orders(done) == [("cloud", 1)]
    at = shown(seen(at, group(0)), T0 + 1, "cloud")
    at = waits(seen(at, group(1), now_s=T0 + 20), T0 + 20)
    (removed,) = plan(at, T0 + 20).actions
    assert removed.reason == "no request waits for it any more"


def test_machine_group_without_a_device_limit_is_left_out_of_the_limits() -> None:
    at = seen(surge(offer()), group(1, most=4), Group(name="MachineSet default/other", labels=LABELS))
    assert read_group_limits(at) == {NAME: (4, LABELS)}
