"""Windows of `replicas.schedule`: when they apply, and that capacity is ordered ahead of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.demand.desired_replicas import compute_desired_replicas, is_inactive
from autoscaler.demand.schedule import AHEAD_S, LOOK_S, Floor, compute_replica_floor
from autoscaler.documents.document_rules import check_model
from autoscaler.planner.plan import plan
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.model import Model, ModelSpec, ReplicaRange, ReplicaWindow
from autoscaler.state.actions import AcquireLease, StartReplica
from autoscaler.state.capacity import LeasesSeen, Offer, OffersSeen
from autoscaler.state.events import ClockSeen
from autoscaler.state.world import World
from tests.support.builders.capacity import acted, cloud, observe, offer, offered, orders, shown
from tests.support.builders.worlds import GI, T0, device, model, world

NINE_S = datetime(2027, 1, 11, 9, tzinfo=UTC).timestamp()
WINDOW = ReplicaWindow(cron="0 9 * * *", seconds=28_800.0, min=2)


def planned(*windows: ReplicaWindow, low: int = 0) -> Model:
    base = model("a", 16, high=4, slots=1)
    return replace(base, spec=replace(base.spec, replicas=ReplicaRange(min=low, max=4, schedule=windows or (WINDOW,))))


def at(of: Model, before_s: float, *offers: Offer, **fields: Any) -> World:
    """The state `before_s` seconds before 09:00."""
    begin = world([of], [device("cpu", 1, "w1")], leading_since_s=T0 - 500, **fields)
    begin = observe(begin, ClockSeen(unix_offset_s=NINE_S - before_s - T0))
    return offered(begin, *offers) if offers else begin


def test_schedule_window_starts_and_ends_early_by_start_and_drain_time() -> None:
    a = planned()
    drain_s = a.spec.drain_seconds_max
    counts = {left_s: compute_replica_floor(at(a, left_s), a, T0).least
              for left_s in (3600.0, 200.0, 100.0, 0.0, -28_800.0 + drain_s + 1, -28_800.0 + drain_s)}  # fmt: skip
    assert list(counts.values()) == [0, 0, 2, 2, 2, 0]
    assert compute_desired_replicas(at(a, 100.0), a, T0).count == 2
    assert not is_inactive(at(a, 3600.0), a), "otherwise no step would run when the floor begins"


def test_reason_for_the_minimum_names_the_window_and_time_until_its_start() -> None:
    a = planned()
    assert compute_replica_floor(at(a, 100.0), a, T0).reason == (
        "replicas.schedule keeps 2 in the window of `0 9 * * *` (UTC), which begins in 100 s"
    )
    assert compute_replica_floor(at(a, -60.0), a, T0).begins_s == float("inf")


def test_replica_minimum_is_the_largest_of_replicas_min_and_open_windows() -> None:
    a = planned(WINDOW, ReplicaWindow(cron="0 8 * * *", seconds=28_800.0, min=3))
    assert compute_replica_floor(at(a, -60.0), a, T0).least == 3
    b = planned(low=3)
    assert compute_replica_floor(at(b, -60.0), b, T0) == Floor(3, "replicas.min is 3", float("inf"), T0 + LOOK_S, 3)


def test_unknown_wall_clock_disables_windows_and_sets_a_recheck() -> None:
    a = planned()
    begin = world([a], [device()])
    assert compute_replica_floor(begin, a, T0) == Floor(0, "replicas.min is 0", float("inf"), T0 + LOOK_S, 0)
    assert compute_desired_replicas(begin, a, T0).next_s == T0 + LOOK_S


def test_scheduled_minimum_gives_the_time_of_its_next_change() -> None:
    a = planned()
    assert compute_replica_floor(at(a, 130.0), a, T0).next_s == pytest.approx(T0 + 10.0), "it counts 120 s before"
    assert compute_replica_floor(at(a, 1.0), a, T0).next_s == pytest.approx(T0 + 1.0)


def test_clock_offset_is_updated_for_a_one_hour_change_but_not_for_500_ms() -> None:
    begin = at(planned(), 100.0)
    offset_s = begin.unix_offset_s
    assert offset_s is not None
    assert observe(begin, ClockSeen(unix_offset_s=offset_s + 0.5)) is begin
    assert observe(begin, ClockSeen(unix_offset_s=offset_s + 3600.0)).unix_offset_s == offset_s + 3600.0


def test_cheapest_offer_that_arrives_before_the_window_is_ordered() -> None:
    a = planned(replace(WINDOW, min=1))
    slow = cloud(expected_s=900.0, price_per_hour=0.5, confidence=1.0)
    fast = offer(price_per_hour=4.0, confidence=1.0)
    early = plan(at(a, 2400.0, slow, fast), T0).actions
    assert orders(early) == [("cloud", 1)]
    assert orders(plan(at(a, 3599.0, slow, fast), T0).actions) == [], "not earlier than it takes"
    late = plan(at(a, 120.0, slow, fast), T0).actions
    assert orders(late) == [("rack", 1)], "the cheaper one would not come in time"
    assert all("replicas.schedule keeps 1" in one.reason for one in late if isinstance(one, AcquireLease))


def test_unusable_slow_offers_do_not_advance_the_start_of_a_window() -> None:
    a = planned(replace(WINDOW, min=1))
    a = replace(a, spec=replace(a.spec, gpu=replace(a.spec.gpu, models=("A100",))))
    others = cloud("h100", product="H100", expected_s=None), cloud("little", memory_bytes=8 * GI, expected_s=900.0)
    assert compute_replica_floor(at(a, 600.0, *others), a, T0) == compute_replica_floor(at(a, 600.0), a, T0)


def test_fast_offer_is_ordered_just_in_time_despite_a_queued_order() -> None:
    """Otherwise the capacity would be paid for while idle until the window begins."""
    a = planned(replace(WINDOW, min=1))
    both = cloud("dws", expected_s=None, queued=True, price_per_hour=8.0), offer(price_per_hour=4.0)
    begin = at(a, 3500.0, *both)
    after, done = acted(begin)
    assert orders(done) == [("cloud", 1)]
    ordered: list[list[tuple[str, int]]] = []
    for before_s in (3000.0, 600.0, 100.0):
        now_s = T0 + 3500.0 - before_s
        late = observe(after, *(OffersSeen(provider=one.provider, offers=(one,)) for one in both), now_s=now_s)
        late = shown(observe(late, LeasesSeen(provider="rack", leases=(), began_s=now_s), now_s=now_s), now_s, "cloud")
        ordered.append(orders(plan(late, now_s).actions))
    assert ordered == [[], [], [("rack", 1)]], "the queue did not give it by then"


def test_capacity_for_replicas_min_does_not_wait_for_a_schedule_window() -> None:
    a = planned(replace(WINDOW, min=3), low=1)
    both = cloud("dws", expected_s=None, queued=True, price_per_hour=8.0), offer(devices_max=4, price_per_hour=4.0)
    assert orders(plan(at(a, 3300.0, *both), T0).actions)[:1] == [("rack", 1)], "replicas.min is 1, and it is missing"
    assert [one for one in orders(plan(at(a, 3300.0, *both), T0).actions) if one[0] == "rack"] == [("rack", 1)]


def test_expensive_offer_is_not_ordered_while_a_cheaper_offer_is_in_time() -> None:
    a = planned(replace(WINDOW, min=1))
    slow, quick = cloud(expected_s=1000.0, price_per_hour=20.0), offer(expected_s=120.0, price_per_hour=1.0)
    assert orders(plan(at(a, 3100.0, slow, quick), T0).actions) == []
    assert orders(plan(at(a, 300.0, slow, quick), T0).actions) == [("rack", 1)]


def test_offer_with_unknown_lead_time_is_ordered_one_hour_ahead() -> None:
    a = planned(replace(WINDOW, min=1))
    queue = cloud(expected_s=None)
    assert orders(plan(at(a, AHEAD_S[1] - 1, queue), T0).actions) == [("cloud", 1)]
    assert orders(plan(at(a, AHEAD_S[1] + 1, queue), T0).actions) == []


def test_replicas_start_ahead_of_the_window_on_free_devices() -> None:
    a = planned()
    begin = world([a], [device()])
    begin = observe(begin, ClockSeen(unix_offset_s=NINE_S - 60.0 - T0))
    assert sum(isinstance(one, StartReplica) for one in plan(begin, T0).actions) == 1, "one at a time on a device"


@pytest.mark.parametrize(
    ("window", "path", "message"),
    [
        (ReplicaWindow(cron="0 9 * *", seconds=60.0), "cron", "five fields"),
        (ReplicaWindow(cron="0 9 * * *", seconds=60.0, time_zone="Mars"), "timeZone", "time zone"),
        (ReplicaWindow(cron="0 9 * * *", seconds=60.0, min=5), "min", "at most replicas.max, which is 4"),
    ],
)
def test_invalid_window_is_rejected_with_its_path(window: ReplicaWindow, path: str, message: str) -> None:
    with pytest.raises(WrongKeyError, match=message) as caught:
        check_model(ModelSpec(engine="command", replicas=ReplicaRange(max=4, schedule=(window,))))
    assert caught.value.path == ("spec", "replicas", "schedule", 0, path)
