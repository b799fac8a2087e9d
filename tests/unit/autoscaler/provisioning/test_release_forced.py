"""A detach is forced only by `drain --force`, only for the drained capacity, and only if it is stuck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.fold.indices import rebuild_indices
from autoscaler.kubernetes.resources import event_log
from autoscaler.planner.plan import plan
from autoscaler.provisioning.release import FORCED, RETRY_S
from autoscaler.server.operator_orders import Wish, place_order
from autoscaler.state.actions import ReleaseLease
from autoscaler.state.events import SlicesSeen
from autoscaler.state.operator_orders import Cordon, CordonsSeen, CordonTarget
from autoscaler.state.world import World
from tests.support.builders.capacity import A, acted, arrived, cloud, offer, releases, shown, surge, told
from tests.support.builders.worlds import T0, gateway, replace_fields, replica

NODE, NEW = CordonTarget("node", "w1"), CordonTarget("device", "new0")
HERE_S = T0 + 30


def idle(devices: int = 1) -> World:
    """Delivered capacity, without any requests."""
    ordered, _ = acted(surge(offer(devices_min=devices)))
    here = arrived(ordered, HERE_S, devices=devices)
    return replace(told(here, now_s=HERE_S), gateways={"g": gateway(seen_s=HERE_S)}, loads={})


def drained(of: World, *places: CordonTarget, drain: bool = True, force: bool = True, now_s: float = HERE_S) -> World:
    cordons = (Cordon(place=place, node="w1", since_s=now_s, drain=drain, force=force) for place in places)
    return told(of, CordonsSeen(cordons=tuple(cordons)), now_s=now_s)


def heard(of: World, now_s: float) -> World:
    return replace(of, gateways={name: replace(one, seen_s=now_s) for name, one in of.gateways.items()})


def given_back(of: World, now_s: float) -> tuple[World, list[ReleaseLease]]:
    after, done = acted(heard(of, now_s), now_s)
    return after, releases(done)


def stuck(of: World, *, now_s: float) -> World:
    """The order was released, and its provider still lists it."""
    return shown(of, now_s, phase="leaving", committed=True, node="w1", device_ids=("new0",))


def test_forced_drain_forces_a_release_only_once_it_is_stuck() -> None:
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
    (one,) = event_log.derive_step_events((), (), before, after)
    assert (one.model, one.reason, one.type) == (A.name, "CapacityForced", "Warning")
    assert one.note == (
        "1 x A100 on w1 of rack is detached by force: an operator ordered a forced drain, "
        "and the normal release did not end"
    )
    again, forced = given_back(after, HERE_S + 60)
    assert [one.order.force for one in forced] == [True]
    assert not list(event_log.derive_step_events((), (), after, again))


def test_plain_drain_cordon_or_uncordon_forces_no_release() -> None:
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


def test_forced_drain_releases_a_device_used_by_pods_of_others() -> None:
    (theirs,) = [one for one in idle().nodes.slices.values() if one.id == "new0"]
    begin = shown(
        replace_fields(idle(), others={theirs.counted: 1}),
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
    shared = told(
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
    after = told(after, CordonsSeen(cordons=tuple(cordons.values())), now_s=now_s)
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
def test_drain_response_warns_of_a_forced_release(place: CordonTarget, *, named: bool) -> None:
    begin = idle()
    forced, plain = (place_order(begin, place, "drain", Wish(force=one), HERE_S).response.says for one in (True, False))
    warning = "; 1 x A100 of rack is released, by force if necessary: programs that have it open lose it"
    assert (warning in forced, warning in plain) == (named, False)
