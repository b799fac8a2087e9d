"""Reliability section 5 A in virtual time: starts and waiting (cases 1 to 5, 8 and 9; 6 and 7 are in test_demand).

Times are exact here: limits that a case states in seconds are asserted in virtual ones.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from autoscaler.contract import ModelName
from autoscaler.drivers.local.learned_files import EVERY_S
from autoscaler.spec.model import StartLimits
from autoscaler.state.events import StartSeen
from autoscaler.state.lifecycle import ReplicaState as S
from gateway.dispatch.call import Outcome
from tests.simulation.case_harness import Stage, model, play, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.installation import Journey
from tests.support.fakes.driver import FakeEngine

SLOW = Manners(start_s=(3.0, 3.0), serve_s=(0.2, 0.6))
SWAPS = Manners(start_s=(0.5, 0.5), serve_s=(0.2, 1.0))
"""Engine behaviour in case 9."""
NEVER = Manners(start_s=(0.1, 0.2), dies_at_start=1.0)
EXACT_S = 0.05
"""Tolerance in virtual seconds: reports and Routes take some milliseconds, and conditions are polled."""


def first_bytes_s(calls: list[Journey], tenant: str) -> float:
    """Seconds between the first and the last first byte of a Tenant's requests."""
    times = [j.first_byte_s for j in calls if j.call.tenant == tenant and j.first_byte_s is not None]
    return max(times) - min(times)


@simulated(model(), manners=NEVER, strict=False)
async def test_only_start_backoff_over_a_minute_old_survives_an_autoscaler_kill(stage: Stage) -> None:
    """The back-off of a Model that cannot start: lost with a leader that has just learned it, kept a minute later."""
    town = stage.town

    async def next_leader() -> None:
        town.crash_autoscaler()
        town.start_autoscaler()
        await asyncio.sleep(1.0)

    failed = {"model_start_failed": 1}
    assert await stage.answered([town.call("a")], within_s=10) == failed
    assert stage.starts() == 4
    town.histories = {}
    await next_leader()
    assert await stage.answered([town.call("a")], within_s=10) == failed
    assert stage.starts() == 8, "tried again at once"
    await asyncio.sleep(EVERY_S + 1.0)
    assert await stage.answered([town.call("a")], within_s=10) == failed
    assert stage.starts() == 12, "the back-off of a minute is over; the next is two"
    await asyncio.sleep(EVERY_S + 1.0)
    await next_leader()
    assert await stage.answered([town.call("a")], within_s=10) == failed
    assert stage.starts() == 12, "refused at once"


@pytest.mark.case("1")
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_burst_from_zero_starts_exactly_the_planned_replicas(replicas: int) -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        calls = []
        for number in range(1000):
            tenant = "lab" if number % 10 == 0 else "acme"
            calls.append(town.call("a", tenant, gateway=number % 3))
            await asyncio.sleep(0.05 / 1000)
        assert await stage.answered(calls) == {"completed": 1000}
        assert stage.starts() == replicas, "as many as planned: one Replica alone would need 50 s, a start takes 3 s"
        for gateway in town.gateways:
            assert all(b - a >= 0.0099 for a, b in pairwise(gateway.reports_s)), "at most one report per 10 ms"
        took_s = {tenant: first_bytes_s(calls, tenant) for tenant in ("lab", "acme")}
        assert took_s["lab"] < took_s["acme"] / 3, "the Tenant with a tenth of the Calls is through long before"

    play(act, model(slots=8, replicas=replicas, memory_gib=4), gateways=3, devices=2, manners=SLOW)


@pytest.mark.case("2")
@simulated(model(start=StartLimits(seconds_max=60.0, retries=3)), manners=NEVER)
async def test_repeatedly_failing_start_rejects_requests_and_backs_off(stage: Stage) -> None:
    town = stage.town
    calls = [town.call("a", wait_s=300) for _ in range(20)]
    assert await stage.answered(calls, within_s=61) == {"model_start_failed": 20}
    assert stage.starts() == 4, "one start, and tries after 0, 0.5 and 1 s"
    assert max(j.ended[0].at_s - j.call.arrived_s for j in calls) <= 0.5 + 1.0 + 1.0 + 4 * 0.2 + EXACT_S
    late = town.call("a")
    assert await stage.answered([late], within_s=0.1) == {"model_start_failed": 1}
    gaps = []
    for _ in range(3):
        last_s = town.now()
        seen = stage.starts()
        while stage.starts() == seen:
            town.call("a")
            await asyncio.sleep(1.0)
        gaps.append(town.now() - last_s)
        await asyncio.sleep(5.0)
    assert [round(gap / 60) for gap in gaps] == [1, 2, 4], f"backs off, half-open after: {gaps}"


@pytest.mark.case("2")
@simulated(model(start=StartLimits(seconds_max=60.0)), manners=Manners(start_s=(9e9, 9e9)))
async def test_start_that_never_becomes_ready_fails_at_its_time_limit(stage: Stage) -> None:
    """Every waiting request fails within min(its deadline, the start limit)."""
    town = stage.town
    calls = [town.call("a", wait_s=300) for _ in range(20)]
    hasty = town.call("a", wait_s=20)
    assert await stage.answered([*calls, hasty]) == {"model_start_failed": 20, "model_starting": 1}
    assert all(j.ended[0].at_s - j.call.arrived_s == pytest.approx(60.0, abs=EXACT_S) for j in calls)
    assert hasty.ended[0].at_s - hasty.call.arrived_s == pytest.approx(20.0, abs=EXACT_S)


@pytest.mark.case("2")
@simulated(model("a"), model("b", idle_s=300.0, residency_s=0.0))
async def test_model_that_cannot_start_gets_no_start_and_evicts_no_replica(stage: Stage) -> None:
    """There is one device; `b` has it and is idle. Once the obstacle is removed, `a` gets it within a minute."""
    town = stage.town
    assert await stage.answered([town.call("b")]) == {"completed": 1}
    town.machine.obstacles = {ModelName("a"): "there is no file"}
    calls = [town.call("a", wait_s=300) for _ in range(20)]
    assert await stage.answered(calls, within_s=0.1) == {"model_start_failed": 20}
    assert (stage.starts("a"), stage.starts("b"), stage.replicas("b")) == (0, 1, 1)
    town.machine.obstacles = {}
    stage.loop.observe([StartSeen(model=ModelName("a"))])
    assert await stage.answered([town.call("a")], within_s=0.1) == {"model_start_failed": 1}, "not before its pause"
    await asyncio.sleep(61.0)
    assert await stage.answered([town.call("a")], within_s=20) == {"completed": 1}


@pytest.mark.case("2")
@simulated(model("a"), model("b"), manners=NEVER)
async def test_other_model_serves_while_the_start_of_one_model_fails(stage: Stage) -> None:
    town = stage.town
    broken = [town.call("a", wait_s=300) for _ in range(5)]
    await stage.answered(broken)
    town.machine.manners = town.machine.manners._replace(dies_at_start=0.0)
    assert await stage.answered([town.call("b") for _ in range(5)], within_s=20) == {"completed": 5}
    assert await stage.answered([town.call("a")], within_s=1) == {"model_start_failed": 1}


@pytest.mark.case("3")
@simulated(model(slots=1, calls_max=200), manners=SLOW)
async def test_full_queue_rejects_only_the_requests_beyond_its_limit(stage: Stage) -> None:
    town = stage.town
    calls = [town.call("a") for _ in range(700)]
    surplus = [j for j in calls if j.ended]
    assert len(surplus) == 500
    assert all(j.ended[0].at_s == j.call.arrived_s for j in surplus), "refused in the instant of their arrival"
    assert {j.ended[0].error.code for j in surplus if j.ended[0].error} == {"queue_full"}
    assert await stage.answered(calls) == {"completed": 200, "queue_full": 500}
    granted = [j.first_byte_s for j in calls if j.first_byte_s is not None]
    assert len(granted) == 200


@pytest.mark.case("4")
@simulated(model(), manners=SLOW)
async def test_all_clients_leaving_during_start_empties_the_queue(stage: Stage) -> None:
    town = stage.town
    calls = [town.call("a") for _ in range(50)]
    await asyncio.sleep(1.0)
    for journey in calls:
        town.leave(journey)
    await asyncio.sleep(0.1)
    assert not any(w for g in town.gateways for _, w, _ in g.dispatch.counts()), "queue empty within 100 ms"
    assert stage.loop.world.loads.get(model().name) is None or not (stage.loop.world.loads[model().name].waiting)
    assert {j.ended[0].outcome for j in calls} == {Outcome.ABANDONED}
    assert not any(j.granted_to for j in calls), "nothing is granted to who left"
    ready = await stage.until(lambda: any(p.ready for p in town.machine.engines.values()))
    assert ready > 0, "a start whose process has begun runs to ready"
    await stage.until(lambda: stage.replicas() == 0, within_s=60)


@pytest.mark.case("5")
@simulated(model(start=StartLimits(seconds_max=300.0)), manners=Manners(start_s=(90.0, 90.0)))
async def test_request_is_rejected_if_its_deadline_precedes_the_estimated_start(stage: Stage) -> None:
    town = stage.town
    await stage.answered([town.call("a")])
    await stage.until(lambda: stage.replicas() == 0)
    patient = town.call("a", wait_s=600)
    await asyncio.sleep(1.0)
    hasty, medium = town.call("a", wait_s=1.0), town.call("a", wait_s=30.0)
    for journey in (hasty, medium):
        assert journey.ended, "rejected at once: by the estimate its deadline cannot be met"
        assert journey.ended[0].error is not None
        assert journey.ended[0].error.code == "model_starting"
    assert await stage.answered([patient]) == {"completed": 1}


@pytest.mark.case("5")
@simulated(model(start=StartLimits(seconds_max=300.0)), manners=Manners(start_s=(90.0, 90.0)))
async def test_requests_wait_until_their_deadline_without_a_start_estimate(stage: Stage) -> None:
    town = stage.town
    hasty = town.call("a", wait_s=1.0)
    assert not hasty.ended, "an unknown estimate never refuses"
    assert await stage.answered([hasty], within_s=1.1) == {"model_starting": 1}
    assert hasty.ended[0].at_s <= hasty.call.deadline_s + 0.1
    assert not hasty.granted_to


@pytest.mark.case("4")
@simulated(model("a"), model("b"), manners=Manners(start_s=(0.5, 0.5), serve_s=(10.0, 10.0)))
async def test_planned_start_is_dropped_if_clients_leave_while_victim_drains(stage: Stage) -> None:
    """All clients leave while the other Model still has the Slice: nothing starts, and the victim is not stopped."""
    town = stage.town
    stream = town.call("b")
    await stage.until(lambda: stream.first_byte_s is not None)
    await asyncio.sleep(1.5)
    calls = [town.call("a") for _ in range(5)]
    loop = stage.loop
    await stage.until(lambda: any(r.state == S.DRAINING for r in loop.world.replicas.values()), within_s=1)
    for journey in calls:
        town.leave(journey)
    assert await stage.answered([stream, town.call("b")]) == {"completed": 2}
    await stage.until(lambda: stage.replicas("b") == 0, within_s=60)
    await asyncio.sleep(10.0)
    assert (stage.starts("a"), stage.starts("b")) == (0, 1)


@pytest.mark.case("4")
@simulated(model("a", memory_gib=4), model("b", memory_gib=4), manners=SLOW)
async def test_start_that_waits_for_another_is_dropped_if_its_clients_leave(stage: Stage) -> None:
    """One replica at a time starts on a device; the second is not there yet when its clients leave."""
    town = stage.town
    first = town.call("b")
    await stage.until(lambda: stage.starts("b") == 1)
    calls = [town.call("a") for _ in range(5)]
    await asyncio.sleep(1.0)
    for journey in calls:
        town.leave(journey)
    assert await stage.answered([first]) == {"completed": 1}
    await asyncio.sleep(10.0)
    assert stage.starts("a") == 0


@pytest.mark.case("8")
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("gateways", [1, 2])
def test_request_of_another_tenant_overtakes_five_hundred_queued_requests(gateways: int, slots: int, seed: int) -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        long = [town.call("a", "acme", gateway=0) for _ in range(500)]
        await stage.until(lambda: sum(bool(j.granted_to) for j in long) >= 4)
        await asyncio.sleep(3.0)
        short = town.call("a", "lab", gateway=gateways - 1)
        arrived_s = town.now()
        await stage.until(lambda: bool(short.granted_to))
        (granted_s,) = short.granted_s
        released = [j.ended[0].at_s for j in long if j.ended and arrived_s + 0.05 < j.ended[0].at_s <= granted_s]
        late_s = granted_s - min(released, default=granted_s)
        assert late_s <= within_s, "granted at the first release later than 50 ms after its arrival"
        order = [j.first_byte_s for j in long if j.first_byte_s is not None]
        assert len(order) >= 4
        first = [int(j.call.id.split("-")[1]) for j in long if j.granted_to]
        assert first == sorted(first)[: len(first)] == list(range(len(first))), "the others keep their order"

    within_s = 0.0 if gateways == 1 else 0.02  # a slot that goes to the other gateway takes a report and Routes
    play(act, model(slots=slots), seed=seed, gateways=gateways, manners=Manners(serve_s=(0.5, 1.5)))


@pytest.mark.case("9")
@simulated(model("a", residency_s=2.0), model("b", residency_s=2.0), manners=SWAPS)
async def test_two_models_on_one_slice_alternate_with_bounded_wait(stage: Stage) -> None:
    town = stage.town
    waits: list[float] = []
    switches: list[float] = []

    def note(_: FakeEngine, what: str) -> None:
        if what == "ready":
            switches.append(town.now())

    stage.watcher.listen(note)

    async def client(name: str) -> list[Journey]:
        out = []
        for _ in range(40):
            began_s = town.now()
            journey = town.call(name)
            await stage.answered([journey])
            waits.append(town.now() - began_s)
            out.append(journey)
        return out

    began_s = town.now()
    both = await asyncio.gather(client("a"), client("b"))
    took_s = town.now() - began_s
    calls = [j for side in both for j in side]
    served_s = sum((j.ended[0].at_s - (j.first_byte_s or 0.0)) / (1.0 - SWAPS.first_byte_share) for j in calls)
    serial_s = served_s + 2 * SWAPS.start_s[0] + SWAPS.stop_s[0]
    assert serial_s / took_s >= 0.7, "goodput of one Model after the other, each started once"
    assert all(j.ended[0].outcome == Outcome.COMPLETED for side in both for j in side), "no running Call is killed"
    gaps = [b - a for a, b in pairwise(switches)]
    assert min(gaps) >= 2.0, "at most one switch per residency"
    assert max(waits) <= 2.0 + 1.0 + 3 * 0.5 + 0.5, "no request waits longer than residency, stream, stop and start"
