"""Released capacity that does not detach: reported once, and forced only by `drain --force`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.controller.loop import LoopStep
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.fold.indices import rebuild_indices
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.resources import events
from autoscaler.kubernetes.resources.event_writer import Events
from autoscaler.kubernetes.resources.events import Regarding
from autoscaler.planner.plan import plan
from autoscaler.provisioning.release import FORCED, RETRY_S, STUCK_S, Leaving
from autoscaler.server.metrics import Metrics
from autoscaler.server.order_effects import Wish, place_order
from autoscaler.state.actions import Acted, Plan, ReleaseLease
from autoscaler.state.capacity import ReleaseOrder
from autoscaler.state.events import CordonsSeen, SlicesSeen
from autoscaler.state.world import Cordon, CordonTarget, World
from tests.support.builders.capacity import A, acted, arrived, cloud, observe, offer, releases, shown, surge
from tests.support.builders.worlds import T0, gateway, replace_fields, replica
from tests.support.chart import CHART

BEGUN_S = T0 + 40
THERE: dict[str, Any] = {"committed": True, "node": "w1", "device_ids": ("new0",)}


def here() -> World:
    return arrived(acted(surge(offer()))[0], T0 + 30)


def leaving() -> World:
    """An order that was delivered and released; its operator reports what blocks the detach."""
    begin = here()
    (id,) = begin.capacity.leases
    release = ReleaseLease(order=ReleaseOrder(id=id, epoch=1), reason="idle for 60 s")
    return shown(observe(begin, Acted(action=release), now_s=BEGUN_S), BEGUN_S, phase="leaving", says="busy", **THERE)


class Silent(Api):
    """An API that answers no requests, and must not get any."""

    def __init__(self) -> None:
        pass


class Teller:
    """The events of one autoscaler that observes the given Worlds."""

    def __init__(self) -> None:
        self.now_s = BEGUN_S
        about = Regarding("pilotlight.dev/v1alpha1", "Model", "default", "a", "u1")
        self.events = Events(Silent(), regarding=lambda model: about, clock=lambda: self.now_s, wall=lambda: self.now_s)

    def sees(self, world: World, after_s: float) -> list[tuple[str, str, str]]:
        """The (reason, type, note) of each event due after `after_s` seconds."""
        self.now_s = BEGUN_S + after_s
        self.events.on_step(LoopStep(world, world, Plan(), (), (), self.now_s, self.now_s, self.now_s))
        dues = iter(lambda: self.events._book.take(self.now_s), None)
        return [(due.happening.reason, due.happening.type, due.happening.note) for due in dues if due is not None]


def test_stuck_release_emits_one_event_after_the_timeout() -> None:
    teller, world = Teller(), leaving()
    assert not teller.sees(world, 0)
    assert not teller.sees(world, STUCK_S)
    note = "1 x A100 on w1 of rack is not released after 5 min: busy"
    assert teller.sees(world, STUCK_S + 1) == [("CapacityStuck", "Warning", note)]
    assert not teller.sees(world, STUCK_S + 2)
    assert not teller.sees(world, 10 * STUCK_S)


def test_follower_emits_no_stuck_release_event_but_the_next_leader_does() -> None:
    teller, world = Teller(), leaving()
    follows = replace_fields(world, leads=False)
    assert not teller.sees(follows, 0)
    assert not teller.sees(follows, STUCK_S + 1)
    assert [reason for reason, *_ in teller.sees(world, STUCK_S + 2)] == ["CapacityStuck"]


def test_release_completed_or_reverted_before_the_timeout_is_not_stuck() -> None:
    world = leaving()
    for other in (replace(world, capacity=replace(world.capacity, leases={})), here()):
        teller = Teller()
        assert not teller.sees(world, 0)
        assert not teller.sees(other, STUCK_S - 1)
        assert not teller.sees(other, STUCK_S + 1)
        assert not teller.sees(world, STUCK_S + 2), "the timeout starts again"


def test_release_of_a_device_still_in_use_does_not_count_as_stuck() -> None:
    begin = here()
    on = replica(A, "r", ["new0"], ready_s=T0 + 30)
    used = shown(rebuild_indices(replace(begin, replicas={on.id: on}), BEGUN_S), BEGUN_S, phase="leaving", **THERE)
    assert [one.in_use for one in used.capacity.leases.values()] == [True]
    watch = Leaving()
    for after_s in (0.0, STUCK_S, 2 * STUCK_S):
        watch.look(used.capacity, BEGUN_S + after_s)
    assert (watch.stuck(), watch.longest_s()) == (frozenset(), {})


@pytest.mark.parametrize("leads", [True, False])
def test_time_since_the_release_is_exported_as_a_metric_per_provider(*, leads: bool) -> None:
    world = replace_fields(leaving(), leads=leads)
    metrics = Metrics(lambda: world)
    for now_s in (BEGUN_S, BEGUN_S + 30.0, BEGUN_S + 90.0):
        metrics.on_step(LoopStep(world, world, Plan(), (), (), now_s, now_s, now_s))
    assert 'pilotlight_lease_leaving_seconds{provider="rack"} 90.0\n' in metrics.text().decode()


def test_stuck_capacity_alert_and_event_have_the_same_threshold() -> None:
    rules = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"][0]["rules"]
    (rule,) = [one for one in rules if one["alert"] == "PilotlightCapacityStuck"]
    assert re.findall(r"pilotlight_lease_leaving_seconds\) > (\d+)$", rule["expr"]) == [f"{STUCK_S:.0f}"]


NODE, NEW = CordonTarget("node", "w1"), CordonTarget("device", "new0")
HERE_S = T0 + 30


def idle(devices: int = 1) -> World:
    """Delivered capacity, without any requests."""
    ordered, _ = acted(surge(offer(devices_min=devices)))
    here = arrived(ordered, HERE_S, devices=devices)
    return replace(observe(here, now_s=HERE_S), gateways={"g": gateway(seen_s=HERE_S)}, loads={})


def drained(of: World, *places: CordonTarget, drain: bool = True, force: bool = True, now_s: float = HERE_S) -> World:
    cordons = (Cordon(place=place, node="w1", since_s=now_s, drain=drain, force=force) for place in places)
    return observe(of, CordonsSeen(cordons=tuple(cordons)), now_s=now_s)


def heard(of: World, now_s: float) -> World:
    return replace(of, gateways={name: replace(one, seen_s=now_s) for name, one in of.gateways.items()})


def given_back(of: World, now_s: float) -> tuple[World, list[ReleaseLease]]:
    after, done = acted(heard(of, now_s), now_s)
    return after, releases(done)


def stuck(of: World, *, now_s: float) -> World:
    """The order was released, and its provider still lists it."""
    return shown(of, now_s, phase="leaving", committed=True, node="w1", device_ids=("new0",))


def test_forced_drain_forces_a_release_only_after_the_release_is_stuck() -> None:
    after, first = given_back(drained(idle(), NODE), HERE_S + 1)
    assert [(one.order.force, one.reason) for one in first] == [(False, "an operator drains it by force")]
    after = stuck(after, now_s=HERE_S + 5)
    assert not given_back(after, HERE_S + 6)[1], "it has some time to go by itself"
    after, second = given_back(after, HERE_S + 1 + RETRY_S[0])
    assert [one.order.force for one in second] == [True]
    assert second[0].reason == f"an operator drains it by force{FORCED}"
    (lease,) = after.capacity.leases.values()
    assert lease.forced
    sentences = explain_model(after, plan(after, HERE_S + 12), Log(), A.name, HERE_S + 12).sentences
    assert any("being released by force: an operator drains it by force" in one for one in sentences)


def test_forced_release_emits_one_warning_event() -> None:
    before, _ = given_back(drained(idle(), NODE), HERE_S + 1)
    before = stuck(before, now_s=HERE_S + 5)
    after, _ = given_back(before, HERE_S + 12)
    (one,) = events.derive_step_events((), (), before, after)
    assert (one.model, one.reason, one.type) == (A.name, "CapacityForced", "Warning")
    assert one.note == (
        "1 x A100 on w1 of rack is detached by force: an operator ordered a forced drain, "
        "and the normal release did not end"
    )
    again, forced = given_back(after, HERE_S + 60)
    assert [one.order.force for one in forced] == [True]
    assert not list(events.derive_step_events((), (), after, again))


def test_release_is_not_forced_if_the_forced_drain_is_withdrawn_first() -> None:
    for places, kinds in (((NODE,), {"force": False}), ((NODE,), {"drain": False}), ((), {})):
        after, _ = given_back(drained(idle(), NODE), HERE_S + 1)
        after = stuck(drained(after, *places, **kinds), now_s=HERE_S + 5)
        for late_s in (12, 40, 100, 1000):
            after, again = given_back(after, HERE_S + late_s)
            assert [one.order.force for one in again] == [False]


def test_release_is_forced_only_if_all_devices_of_the_order_are_drained() -> None:
    two = idle(devices=2)
    ids = ("new0", "new1")
    half, both = drained(two, NEW), drained(two, *(CordonTarget("device", one) for one in ids))
    assert not given_back(half, HERE_S + 1)[1], "the other stays where it is"
    after, first = given_back(both, HERE_S + 1)
    assert len(first) == 1
    after = shown(after, HERE_S + 5, phase="leaving", committed=True, node="w1", device_ids=ids)
    assert [one.order.force for one in given_back(after, HERE_S + 12)[1]] == [True]
    assert [one.order.force for one in given_back(drained(after, NEW), HERE_S + 12)[1]] == [False]


def test_forced_drain_releases_a_device_used_by_foreign_pods() -> None:
    (foreign,) = [one for one in idle().nodes.slices.values() if one.id == "new0"]
    begin = shown(
        replace_fields(idle(), others={foreign.counted: 1}),
        HERE_S + 0.5,
        phase="here",
        committed=True,
        node="w1",
        device_ids=("new0",),
    )
    assert [one.in_use for one in begin.capacity.leases.values()] == [True]
    assert not given_back(begin, HERE_S + 3600)[1]
    assert not given_back(drained(begin, NODE, force=False), HERE_S + 3600)[1]
    after, first = given_back(drained(begin, NODE), HERE_S + 1)
    assert [one.order.force for one in first] == [False]
    assert [one.order.force for one in given_back(after, HERE_S + 1 + RETRY_S[0])[1]] == [True]


def test_device_with_a_replica_is_not_force_released() -> None:
    ordered, _ = acted(surge(offer()))
    here = arrived(ordered, HERE_S)
    on = replica(A, "r", ["new0"], ready_s=HERE_S)
    begin = rebuild_indices(replace(here, replicas={on.id: on}), HERE_S)
    used = shown(begin, HERE_S + 0.5, phase="here", committed=True, node="w1", device_ids=("new0",))
    assert [one.in_use for one in used.capacity.leases.values()] == [True]
    used = drained(used, NODE)
    for late_s in (1, 12, 40):
        used, back = given_back(used, HERE_S + late_s)
        assert not back, "its Replica ends first"
    after, _ = given_back(drained(idle(), NODE), HERE_S + 1)
    alone = shown(after, HERE_S + 5, phase="leaving", committed=True, node="w1", device_ids=("new0",), alone=True)
    beside = replica(A, "r", ["cpu"], ready_s=HERE_S)
    shared = observe(
        replace(alone, replicas={beside.id: beside}),
        SlicesSeen(slices=tuple(alone.nodes.slices.values())),
        now_s=HERE_S,
    )
    assert [one.order.force for one in given_back(alone, HERE_S + 12)[1]] == [True]
    assert [one.order.force for one in given_back(shared, HERE_S + 12)[1]] == [False], "whose is which is not known"


def test_release_of_a_whole_ordered_node_is_never_forced() -> None:
    ordered, _ = acted(surge(cloud()))
    here = arrived(ordered, HERE_S, "cloud", node="n9")
    here = replace(here, gateways={"g": gateway(seen_s=HERE_S)}, loads={})
    after = drained(here, CordonTarget("node", "n9"))
    for late_s in (1000, 2000, 3000):
        after, back = given_back(after, HERE_S + late_s)
        assert not any(one.order.force for one in back)


@given(
    orders=st.lists(
        st.tuples(st.sampled_from((NODE, NEW, CordonTarget("node", "other"))), st.booleans(), st.booleans()), max_size=4
    ),
    phase=st.sampled_from(("coming", "here", "leaving", "failed")),
    alone=st.booleans(),
    waits_s=st.lists(st.floats(0.5, 400.0), min_size=1, max_size=6),
)
def test_release_is_forced_only_under_a_forced_drain(
    orders: list[tuple[CordonTarget, bool, bool]], phase: str, *, alone: bool, waits_s: list[float]
) -> None:
    after, now_s = idle(), HERE_S
    cordons = {place: Cordon(place=place, node="w1", since_s=now_s, drain=drain, force=force)
               for place, drain, force in orders}  # fmt: skip
    after = observe(after, CordonsSeen(cordons=tuple(cordons.values())), now_s=now_s)
    may = any(one.drain and one.force and one.place in {NODE, NEW} for one in cordons.values())
    seen = list[ReleaseLease]()
    for wait_s in waits_s:
        now_s += wait_s
        after, back = given_back(after, now_s)
        seen += back
        after = shown(after, now_s, phase=phase, committed=True, node="w1", device_ids=("new0",), alone=alone)
    assert may or not any(one.order.force for one in seen)
    assert not seen or not seen[0].order.force, "the first order never is"


# --- reports to the operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "named"), [(NODE, True), (NEW, True), (CordonTarget("device", "cpu"), False)])
def test_forced_drain_response_warns_only_if_ordered_capacity_is_released(place: CordonTarget, *, named: bool) -> None:
    begin = idle()
    forced, plain = (place_order(begin, place, "drain", Wish(force=one), HERE_S).response.says for one in (True, False))
    warning = "; 1 x A100 of rack is released, by force if necessary: programs that have it open lose it"
    assert (warning in forced, warning in plain) == (named, False)
