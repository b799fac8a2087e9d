"""Capacity orders: what is ordered, for which model, how much, with how many simulations, and when released."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.capacity.remaining_offers import SILENT_S
from autoscaler.controller.loop import Loop
from autoscaler.placement.capacity_simulation import SimulationContext, devices_for
from autoscaler.placement.model.types import PlacementRequest
from autoscaler.planner.plan import plan
from autoscaler.provisioning import provisioner
from autoscaler.provisioning.provisioner import ORDERS_MAX, UNLISTED_S, WANTS_MAX
from autoscaler.provisioning.release import WITHDRAW_S
from autoscaler.spec.model import Gpu, ReplicaRange, ReplicaWindow
from autoscaler.spec.pod import Pod, Resources
from autoscaler.state.actions import AcquireLease, Acted, Plan, ReleaseLease, StartReplica
from autoscaler.state.capacity import (
    AcquireOrder,
    LeaseRefused,
    LeasesSeen,
    Listed,
    Offer,
    OffersSeen,
    ProvidersSeen,
    ProviderTroubled,
    ReleaseOrder,
)
from autoscaler.state.events import ClockSeen, LeadingSeen, Reported, Seen, Synced
from autoscaler.state.resources import HostResources
from autoscaler.state.world import NodeId
from tests.support.builders.capacity import (
    A,
    acted,
    arrived,
    cloud,
    observe,
    offer,
    offered,
    orders,
    quiet,
    releases,
    shown,
    surge,
    waits,
)
from tests.support.builders.worlds import GI, T0, device, gateway, kinds, level, model, replace_fields, world
from tests.support.harness.driver_events import seen_of
from tests.support.harness.manual_loop import IdleDriver

# --- orders -----------------------------------------------------------------------------------------------------------


def test_demand_without_providers_is_rejected_without_an_order() -> None:
    begin = world([A], [device("cpu", 1)], gateways=[gateway(levels=[level("a", 1, wait_s=60.0)])])
    assert plan(begin, T0).unmet[0].never
    assert not orders(plan(begin, T0).actions)


def test_demand_that_fits_no_free_device_orders_a_device_and_waits() -> None:
    made = plan(surge(offer()), T0)
    assert orders(made.actions) == [("rack", 1)]
    assert made.unmet[0].reason == "waiting for 1 x A100 on w1 from rack, expected in about 30 s"
    assert not made.unmet[0].never
    assert made.unmet[0].ready_s is not None
    assert made.unmet[0].ready_s > 30.0, "an engine starts after that"
    assert made.tries == ("a",), "whether it could start at all is looked at before anything is paid for"


def test_same_demand_is_ordered_only_once() -> None:
    after, done = acted(surge(offer(), cloud()))
    assert len(orders(done)) == 1
    for later_s in (1.0, 20.0, 50.0):
        assert not orders(plan(waits(after, T0 + later_s), T0 + later_s).actions)


def test_free_device_is_used_before_new_capacity_is_ordered() -> None:
    begin = surge(offer())
    free = observe(begin, now_s=T0)
    free = replace_fields(free, slices={**free.nodes.slices, **world([], [device("gpu0", 16)]).nodes.slices})
    assert kinds(plan(free, T0)) == ["start a"]


def test_two_replicas_share_one_ordered_node_that_fits_both() -> None:
    both = cloud(devices_min=2, devices_max=2)
    assert orders(plan(surge(both, waiting=2), T0).actions) == [("cloud", 2)]
    assert orders(plan(surge(cloud(many=2), waiting=2), T0).actions) == [("cloud", 1), ("cloud", 1)]
    assert orders(plan(surge(cloud(), waiting=2), T0).actions) == [("cloud", 1)], "there is one such node, no more"


def test_free_devices_reduce_the_number_of_devices_ordered() -> None:
    two = model("a", 16, gpu=Gpu(count=2))
    reporting = gateway(levels=[level("a", 1, wait_s=60.0)])
    slices = [device(f"w{n}", 16, f"n{n}", product="A100") for n in (1, 2)]
    begin = world([two], slices, gateways=[reporting], leading_since_s=T0 - 500)
    there = offered(begin, offer(node="n2", name="n2", devices_max=4), offer(node="n9", name="n9", price_per_hour=0.8))
    assert orders(plan(there, T0).actions) == [("rack", 1)], "the node that has one needs one more"


def test_pool_offer_is_ordered_only_up_to_its_free_devices() -> None:
    begin = surge(offer(devices_max=2), waiting=3)
    assert orders(plan(begin, T0).actions) == [("rack", 1), ("rack", 1)]


def test_orders_do_not_exceed_a_pool_shared_by_nodes() -> None:
    nodes = [offer(name=one, node=one, devices_max=2, pool=3) for one in ("w1", "w2")]
    begin = replace_fields(
        surge(*nodes, waiting=4), slices=world([], [device(f"c-{n}", 1, n) for n in ("w1", "w2")]).nodes.slices
    )
    assert [many for _, many in orders(plan(begin, T0).actions)] == [1, 1, 1]


def test_cheapest_offer_that_meets_the_deadline_is_ordered() -> None:
    slow = cloud(expected_s=400.0, price_per_hour=0.1)
    assert orders(plan(surge(offer(), slow), T0).actions) == [("cloud", 1)], "no request is urgent"
    assert orders(plan(surge(offer(), slow, waits_s=240.0), T0).actions) == [("rack", 1)]
    hopeless = surge(offer(expected_s=5000.0), slow, waits_s=10.0)
    assert orders(plan(hopeless, T0).actions) == [("cloud", 1)]


def test_node_is_ordered_instead_of_a_gpu_if_host_memory_is_short() -> None:
    """Two nodes are full: a model that needs a GPU gets one attached, a model that needs memory gets a node."""
    hungry = model("a", 16, high=4, slots=1, resources=Resources(requests={"memory": "64Gi"}))
    reporting = gateway(levels=[level("a", 1, wait_s=60.0)])
    hosts = {device(node="w1").node: HostResources(8000, 32 * GI, 8000, 32 * GI)}
    begin = world([hungry], [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500, hosts=hosts)
    assert orders(plan(offered(begin, offer(), cloud(price_per_hour=9.0)), T0).actions) == [("cloud", 1)]
    modest = world([A], [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500, hosts=hosts)
    assert orders(plan(offered(modest, offer(), cloud(price_per_hour=9.0)), T0).actions) == [("rack", 1)]


def test_demand_is_not_rejected_before_providers_list_their_orders() -> None:
    begin = observe(surge(), ProvidersSeen(providers=("rack",)))
    begin = replace_fields(begin, leading_since_s=T0)
    (unmet,) = plan(begin, T0).unmet
    assert not unmet.never
    assert unmet.reason.endswith("; some providers have not listed their orders yet")
    assert plan(waits(begin, T0 + UNLISTED_S), T0 + UNLISTED_S).unmet[0].never


def test_uncertain_order_gets_a_second_order_and_the_slower_is_withdrawn() -> None:
    begin = surge(offer(), cloud(), waits_s=100.0)
    begin = observe(begin, ProvidersSeen(providers=("cloud", "rack"), hedges=frozenset({"cloud"})))
    after, done = acted(begin)
    assert orders(done) == [("rack", 1), ("cloud", 1)]
    here = arrived(shown(after, T0 + 1, "cloud"), T0 + 31)
    _, done = acted(waits(here, T0 + 31), T0 + 31)
    assert "start a" in kinds(Plan(actions=tuple(done)))
    (back,) = releases(done)
    assert (back.order.id.provider, back.order.uncommitted) == ("cloud", True)


def test_offer_without_delivery_time_is_ordered_once_and_blocks_no_other() -> None:
    queue = cloud("queue", expected_s=None, price_per_hour=0.1)
    after, done = acted(surge(queue))
    assert orders(done) == [("cloud", 1)]
    again = plan(waits(after, T0 + 50), T0 + 50)
    assert not again.actions
    assert not again.unmet[0].slices
    assert again.unmet[0].ready_s == inf, "no Call is parked for it"
    other = observe(after, ProvidersSeen(providers=("cloud", "rack")), OffersSeen(provider="rack", offers=(offer(),)))
    other = observe(other, LeasesSeen(provider="rack", leases=(), began_s=T0))
    assert orders(plan(other, T0).actions) == [("rack", 1)]


def test_order_queued_for_days_is_not_repeated_and_other_offers_are_used() -> None:
    queue = cloud("queue", expected_s=None, price_per_hour=0.1)
    after, _ = acted(surge(queue))
    for hour in range(1, 73):
        now_s = T0 + 3600.0 * hour
        fresh = observe(waits(after, now_s), OffersSeen(provider="cloud", offers=(queue,)), now_s=now_s)
        after = shown(fresh, now_s, "cloud", says="it is queued")
        found = plan(after, now_s)
        assert not [one for one in found.actions if isinstance(one, (AcquireLease, ReleaseLease))]
        assert found.unmet[0].ready_s == inf, "no Call is parked for it"
    assert len(after.capacity.leases) == 1
    free = observe(after, ProvidersSeen(providers=("cloud", "rack")), OffersSeen(provider="rack", offers=(offer(),)),
                LeasesSeen(provider="rack", leases=(), began_s=now_s), now_s=now_s)  # fmt: skip
    assert orders(plan(free, now_s).actions) == [("rack", 1)]


# --- no orders --------------------------------------------------------------------------------------------------------


def test_unmet_demand_states_the_age_and_message_of_its_queued_order() -> None:
    after, _ = acted(surge(cloud("queue", expected_s=None)))
    reported = shown(waits(after, T0 + 7200.0), T0 + 7200.0, "cloud", says="the quota of the cloud is used up")
    (lacking,) = plan(reported, T0 + 7200.0).unmet
    assert lacking.reason.endswith(
        "; ordered from cloud 2 h ago, delivery time unknown: the quota of the cloud is used up"
    )
    assert lacking.ready_s == inf, "no Call waits for it"


def test_new_leader_orders_nothing_before_existing_orders_are_known() -> None:
    begin = surge(offer())
    begin = observe(begin, ProvidersSeen(providers=("cloud", "rack")), LeadingSeen(epoch=2), Synced())
    begin = waits(begin, T0)
    assert not orders(plan(begin, T0).actions)
    heard = observe(begin, LeasesSeen(provider="rack", leases=(), began_s=T0))
    assert not orders(plan(heard, T0).actions), "what the cloud has is not known"
    late_s = T0 + UNLISTED_S
    late = observe(waits(heard, late_s), OffersSeen(provider="rack", offers=(offer(),)), now_s=late_s)
    assert orders(plan(late, late_s).actions) == [("rack", 1)], "a minute, and no longer"


def test_provider_that_stopped_responding_gets_no_orders() -> None:
    begin = surge(offer(), cloud())
    late_s = T0 + SILENT_S
    late = waits(begin, late_s)
    assert not orders(plan(late, late_s).actions)
    heard = observe(late, OffersSeen(provider="cloud", offers=(cloud(),)), now_s=late_s)
    heard = observe(heard, LeasesSeen(provider="cloud", leases=(), began_s=late_s), now_s=late_s)
    assert orders(plan(heard, late_s).actions) == [("cloud", 1)]


def test_refused_offer_is_replaced_by_the_next_and_retried_later() -> None:
    after, done = acted(surge(offer(), cloud()))
    (first,) = [one for one in done if isinstance(one, AcquireLease)]
    refused = observe(after, LeaseRefused(id=first.order.id, reason="no quota"), now_s=T0 + 1)
    after, done = acted(waits(refused, T0 + 1), T0 + 1)
    assert orders(done) == [("cloud", 1)]
    (second,) = [one for one in done if isinstance(one, AcquireLease)]
    both = observe(after, LeaseRefused(id=second.order.id, reason="no quota"), now_s=T0 + 2)
    made = plan(waits(both, T0 + 2), T0 + 2)
    assert not made.actions
    assert made.unmet[0].reason.endswith("no provider offers what it needs now; no quota")
    assert made.next_s is not None
    assert orders(plan(waits(both, T0 + 61), T0 + 61).actions) == [("rack", 1)]


def test_order_of_a_deleted_model_is_released_not_repeated() -> None:
    after, _ = acted(surge(offer()))
    unseen = observe(after, LeasesSeen(provider="rack", leases=(), began_s=T0 + 20), now_s=T0 + 20)
    removed = quiet(replace(unseen, models={}), T0 + 20)
    made = plan(removed, T0 + 20)
    assert [type(one).__name__ for one in made.actions] == ["ReleaseLease"]
    assert not made.tries


# --- releases ---------------------------------------------------------------------------------------------------------


def test_unneeded_order_is_withdrawn_unless_committed() -> None:
    after, _ = acted(surge(offer()))
    left_s = T0 + WITHDRAW_S
    assert not plan(quiet(after, left_s - 1), left_s - 1).actions, "whose Calls left for a moment comes back"
    (back,) = releases(plan(quiet(shown(after, T0 + 1), left_s), left_s).actions)
    assert back.order.uncommitted
    assert not plan(quiet(shown(after, T0 + 1, committed=True), left_s), left_s).actions


def test_capacity_is_not_released_while_a_gateway_does_not_report() -> None:
    after, _ = acted(surge(offer()))
    seen = shown(after, T0 + 1)
    assert not releases(plan(quiet(seen, T0 + 12), T0 + 40).actions), "the gateway is silent for 28 s"


def test_overdue_order_is_released_and_the_next_offer_is_ordered() -> None:
    after, _ = acted(surge(offer(), cloud()))
    (lease,) = after.capacity.leases.values()
    seen = waits(shown(after, lease.due_s - 1), lease.due_s)
    seen = observe(seen, OffersSeen(provider="cloud", offers=(cloud(),)), now_s=lease.due_s)
    seen = observe(seen, LeasesSeen(provider="cloud", leases=(), began_s=lease.due_s), now_s=lease.due_s)
    after, done = acted(seen, lease.due_s)
    assert [one.order.id.provider for one in releases(done)] == ["rack"]
    assert orders(done) == [("cloud", 1)]
    assert after.capacity.barred, "and it is left alone for a while"


def test_unlisted_order_is_repeated_with_the_same_id_and_then_released() -> None:
    after, done = acted(surge(offer(), cloud()))
    (first,) = [one for one in done if isinstance(one, AcquireLease)]
    unseen = observe(waits(after, T0 + 20), LeasesSeen(provider="rack", leases=(), began_s=T0 + 20), now_s=T0 + 20)
    unseen, done = acted(unseen, T0 + 20)
    (again,) = [one for one in done if isinstance(one, AcquireLease)]
    assert again.order.id == first.order.id
    after, done = acted(waits(unseen, T0 + 61), T0 + 61)
    assert orders(done) == [("cloud", 1)]
    assert len(releases(done)) == 1, "should it stand after all it goes"


def test_delivered_capacity_is_kept_while_used_and_for_a_while_after() -> None:
    after, _ = acted(surge(offer()))
    after, done = acted(waits(arrived(after, T0 + 30), T0 + 30), T0 + 30)
    (start,) = [one for one in done if isinstance(one, StartReplica)]
    assert start.replica.resources.slices == ("new0",)
    ready = observe(after, seen_of(start.replica, Seen.READY, started_s=T0 + 31), now_s=T0 + 40)
    (lease,) = ready.capacity.leases.values()
    assert lease.in_use
    assert not releases(plan(quiet(ready, T0 + 41), T0 + 41).actions)
    removed = observe(ready, seen_of(start.replica, Seen.CLEAN, proof="exited"), now_s=T0 + 50)
    assert not releases(plan(quiet(removed, T0 + 60), T0 + 60).actions), "having it again would cost more"
    after, done = acted(quiet(removed, T0 + 250), T0 + 250)
    (back,) = releases(done)
    assert not back.order.uncommitted
    assert not orders(done)
    wanted = plan(waits(after, T0 + 251), T0 + 251)
    assert not [one for one in wanted.actions if isinstance(one, StartReplica)], "nothing new is put on what goes"


def test_unneeded_capacity_arriving_late_is_released_after_a_delay() -> None:
    begin = quiet(surge(offer()), T0 + 1)
    late = Listed(name="pilotlight-a-x", offer=offer(), devices=1, phase="here", node="w1", device_ids=("new0",))
    seen = observe(begin, LeasesSeen(provider="rack", leases=(late,), began_s=T0 + 5), now_s=T0 + 5)
    here = replace_fields(seen, slices={**seen.nodes.slices, **world([], [device("new0", 16, "w1")]).nodes.slices})
    here = observe(here, LeasesSeen(provider="rack", leases=(late,), began_s=T0 + 6), now_s=T0 + 6)
    assert not releases(plan(quiet(here, T0 + 7), T0 + 7).actions)
    assert len(releases(plan(quiet(here, T0 + 17), T0 + 17).actions)) == 1


def test_failed_order_is_released_at_once_with_its_reason() -> None:
    after, _ = acted(surge(offer(), cloud()))
    failed = shown(after, T0 + 5, phase="failed", says="no cable")
    after, done = acted(waits(failed, T0 + 5), T0 + 5)
    assert releases(done)[0].reason == "it failed: no cable"
    assert orders(done) == [("cloud", 1)]


def test_failed_delivered_capacity_is_released_once_unused() -> None:
    after, _ = acted(surge(offer()))
    here, _ = acted(arrived(waits(after, T0 + 30.0), T0 + 30.0), T0 + 30.0)
    assert next(iter(here.replicas.values())).resources.slices == ("new0",)
    removed = shown(here, T0 + 40.0, phase="failed", node="w1", device_ids=("new0",), says="its node was deleted")
    assert not releases(plan(removed, T0 + 40.0).actions)
    one = next(iter(here.replicas.values()))
    empty = observe(removed, seen_of(one, Seen.EXITED), seen_of(one, Seen.CLEAN), now_s=T0 + 41.0)
    (given,) = releases(plan(empty, T0 + 41.0).actions)
    assert given.reason == "it failed: its node was deleted"


def test_missing_devices_are_ordered_after_a_partial_delivery() -> None:
    two = model("a", 16, gpu=Gpu(count=2))
    reporting = gateway(levels=[level("a", 1, wait_s=60.0)])
    begin = world([two], [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500)
    after, done = acted(offered(begin, offer(), cloud(devices_min=2, devices_max=2)))
    assert orders(done) == [("rack", 2)]
    half = waits(arrived(after, T0 + 30), T0 + 30)
    assert half.capacity.leases[next(iter(half.capacity.leases))].devices == 1
    assert orders(acted(half, T0 + 30)[1]) == [("rack", 1)], "one more makes two"


def test_two_leaders_ordering_at_once_use_the_same_order_id() -> None:
    begin = surge(offer())
    other = replace(begin, epoch=2)
    names = {one.order.id for at in (begin, other) for one in plan(at, T0).actions if isinstance(one, AcquireLease)}
    assert len(names) == 1


def test_replanning_after_applying_orders_adds_no_order() -> None:
    begin = surge(offer(), cloud(many=3), waiting=3)
    made = plan(begin, T0)
    after = observe(begin, *(Acted(action=one) for one in made.actions))
    assert not plan(after, T0).actions


@pytest.mark.parametrize("many", [1, 3])
def test_demand_that_waits_for_an_order_states_its_capacity_and_time(many: int) -> None:
    made = plan(surge(offer(devices_max=4), waiting=many), T0)
    assert [one.reason for one in made.unmet] == ["waiting for 1 x A100 on w1 from rack, expected in about 30 s"]
    assert all(isinstance(one, AcquireLease) and "expected 30 s" in one.reason for one in made.actions)


def test_unmet_demand_names_a_provider_that_does_not_respond() -> None:
    begin = observe(
        surge(offer(memory_bytes=GI)),
        ProviderTroubled(provider="rack", says="does not respond (TimeoutError)", listing=True),
    )
    (unmet,) = plan(begin, T0).unmet
    assert unmet.reason.endswith("; no provider offers what it needs now; rack does not respond (TimeoutError)")


@pytest.mark.parametrize("priority", [0, 5])
def test_infeasible_models_do_not_block_a_feasible_order(priority: int) -> None:
    crowd = [
        model(f"m{number:03}", 16, priority=priority, gpu=Gpu(models=("*h200*",))) for number in range(2 * WANTS_MAX)
    ]
    reporting = gateway(levels=[level(one.name, 1, wait_s=90.0) for one in (*crowd, A)])
    begin = world([A, *crowd], [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500)
    after, done = acted(offered(begin, offer()))
    assert [one.order.owner for one in done if isinstance(one, AcquireLease)] == [A.name]
    assert reporting.report is not None
    still = Reported(report=replace(reporting.report, sequence=9, epoch=after.epoch))
    none_left = observe(shown(after, T0 + 20), still, OffersSeen(provider="rack", offers=()), now_s=T0 + 20)
    assert not releases(plan(none_left, T0 + 20).actions), "it is still waited for"


def test_order_of_a_model_not_examined_in_this_plan_is_kept() -> None:
    crowd = [model(f"m{number:03}", 16, priority=5) for number in range(WANTS_MAX)]
    reporting = gateway(levels=[level("a", 1, wait_s=90.0)])
    begin = world([A, *crowd], [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500)
    after, _ = acted(offered(begin, offer()))
    report = gateway(levels=[level(one.name, 1, wait_s=90.0) for one in (*crowd, A)]).report
    assert report is not None
    crowded = observe(after, Reported(report=replace(report, sequence=9, epoch=after.epoch)), now_s=T0 + 20)
    crowded = observe(shown(crowded, T0 + 20), OffersSeen(provider="rack", offers=()), now_s=T0 + 20)
    assert not releases(plan(crowded, T0 + 20).actions)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the simulated offers, in order."""
    found: list[str] = []

    def counted(ground: SimulationContext, want: PlacementRequest, of: Offer) -> int | None:
        found.append(of.name)
        return devices_for(ground, want, of)

    monkeypatch.setattr("autoscaler.provisioning.offer_selection.devices_for", counted)
    return found


def test_offer_is_simulated_once_per_plan_for_identical_demand(asked: list[str]) -> None:
    tiny = [offer(name=f"n{number}", node=f"n{number}", devices_max=1) for number in range(3)]
    greedy = model("a", 16, high=4, slots=1, pod=Pod(resources=Resources(requests={"cpu": "8"})))
    begin = surge(*tiny, waiting=4, hosts={NodeId(f"n{at}"): HostResources(cpu_left_milli=1000) for at in range(3)})
    assert not orders(plan(replace(begin, models={greedy.name: greedy}), T0).actions)
    assert sorted(asked) == ["n0", "n1", "n2"]


def test_plan_for_a_scheduled_replica_evaluates_at_most_two_offers(asked: list[str]) -> None:
    """Otherwise models with queued requests would be reported as having no offer."""
    many = [offer(name=f"n{number}", node=f"n{number}") for number in range(9)]
    ahead = ReplicaWindow(cron="0 9 * * *", seconds=28_800.0)
    later = model("a", 16, high=4, slots=1)
    later = replace(later, spec=replace(later.spec, replicas=ReplicaRange(max=4, schedule=(ahead,))))
    begin = world([later], [device("cpu", 1, "w1")], leading_since_s=T0 - 500)
    nine_s = datetime(2027, 1, 11, 9, tzinfo=UTC).timestamp()
    begin = offered(observe(begin, ClockSeen(unix_offset_s=nine_s - 3000.0 - T0)), *many, cloud("dws", expected_s=None))
    plan(begin, T0)
    assert len(asked) <= 2


class Orders:
    """A capacity supplier that records the owners of orders."""

    def __init__(self) -> None:
        self.acquired: list[str] = []

    def acquire(self, order: AcquireOrder) -> None:
        self.acquired.append(order.owner)

    def release(self, order: ReleaseOrder) -> None:
        raise AssertionError(order)


@pytest.mark.parametrize(("many", "plans"), [(1, 1), (ORDERS_MAX - 1, 1), (ORDERS_MAX + 1, 2)])
def test_second_plan_runs_only_for_orders_above_the_limit_of_one_plan(
    monkeypatch: pytest.MonkeyPatch, many: int, plans: int
) -> None:
    names = [f"m{number:02}" for number in range(many)]
    reporting = gateway(levels=[level(name, 1, wait_s=60.0) for name in names])
    models = [model(name, 16, high=1) for name in names]
    begin = world(models, [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500)
    settled: list[int] = []

    def counted(*given: Any) -> provisioner.ProvisioningResult:
        settled.append(1)
        return settle(*given)

    settle = provisioner.provision_capacity
    monkeypatch.setattr(provisioner, "provision_capacity", counted)
    sent = Orders()
    Loop(offered(begin, offer(devices_max=many, shared=False)), IdleDriver(), lambda: T0, supplier=sent).step()
    assert (sorted(sent.acquired), len(settled)) == (names, plans)


@pytest.mark.parametrize("calls", [False, True])
def test_hedging_second_order_is_placed_only_if_requests_are_waiting(calls: bool) -> None:
    """Capacity for `replicas.min` can arrive later if the first order fails, so two orders are not paid for."""
    unsure = offer(expected_s=60.0, confidence=0.8), cloud(expected_s=60.0, confidence=0.8)
    kept = model("a", 16, low=1, high=4, slots=1)
    reporting = [gateway(levels=[level("a", 1, wait_s=1.0)] if calls else [])]
    begin = world([kept], [device("cpu", 1, "w1")], gateways=reporting, leading_since_s=T0 - 500)
    done = orders(plan(offered(begin, *unsure, hedges=("cloud", "rack")), T0).actions)
    assert sorted(done) == ([("cloud", 1), ("rack", 1)] if calls else [("rack", 1)])
