"""Reliability section 5 D in virtual time, with the real code of leader and writers: Lease, watches, Kubernetes driver.

Leaders are killed or paused at each possible point, clocks are wrong, the API server fails, all processes restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from autoscaler.kubernetes.api import ApiError
from autoscaler.routing import routes
from tests.simulation.case_harness import Stage, both_are_called_one_after_the_other, model
from tests.simulation.environment.api_server import NODES, PODS, Asked
from tests.simulation.installations.cluster import Cluster, Elected, simulated
from tests.simulation.installations.installation import Journey

FULL = 3
BUSY_S, RETRY_AFTER_S = 300.0, 2.0
ASKED_PER_S_MAX = 10.0
"""Of two processes, each with a few watches and a Lease; the budget of one would let 250 through."""
A, B = model("a", idle_s=3.0), model("b", idle_s=3.0)
"""Only one of them fits on the device."""
STEPS = 10
"""Await points of all orders of the scenario without a fault: two starts, two stops."""
PAUSED_S = 60.0
SKEWS_S = (3600.0, -3600.0)
AWAY_S = 900.0
SILENT_S = 8.0
"""Shorter than a report's expiry, and longer than the idle timeout."""


class Interrupts:
    """Calls a function on the leader at the n-th step of its orders, before that step is taken."""

    def __init__(self, town: Cluster, number: int, does: Callable[[str], None]) -> None:
        self.steps = 0
        self._number = number
        self._does = does
        for one in town.processes.values():
            one.process.on_step = lambda task, name=one.name: self._step(task, name)  # type: ignore[misc]  # bound now

    def _step(self, task: str, name: str) -> None:
        if task.startswith("Orders."):
            self.steps += 1
            if self.steps == self._number:
                self._does(name)


def left(town: Cluster) -> list[str]:
    """Pods that exist."""
    return list(town.server.objects["/api/v1/namespaces/town/pods"])


def deletes(town: Cluster) -> list[Asked]:
    """Requested pod deletions."""
    return [one for one in town.server.asked if one.method == "DELETE"]


@simulated(A, B)
async def test_run_without_a_fault_has_ten_await_points_and_one_leader(stage: Stage, town: Cluster) -> None:
    interrupts = Interrupts(town, 0, lambda _: None)
    await both_are_called_one_after_the_other(stage)
    assert (interrupts.steps, [epoch for _, epoch in town.epochs]) == (STEPS, [1])


@pytest.mark.case("26")
@pytest.mark.parametrize("number", range(1, STEPS + 1))
@simulated(A, B)
async def test_leader_kill_at_any_await_point_causes_no_duplicate_start(
    stage: Stage, town: Cluster, number: int
) -> None:
    """The next one adopts replicas and finishes pending stops: no second start, no lost request, nothing left."""
    interrupts = Interrupts(town, number, town.kill)
    await both_are_called_one_after_the_other(stage)
    await stage.until(lambda: len(town.epochs) == 2)
    assert interrupts.steps >= number
    assert {name for name, _ in town.epochs} == {"a", "b"}
    assert (stage.starts("a"), stage.starts("b"), left(town)) == (1, 1, [])


@pytest.mark.case("25")
@pytest.mark.parametrize("number", range(1, STEPS + 1))
@simulated(A, B, skews_s=SKEWS_S)
async def test_paused_leader_writes_nothing_after_resuming(stage: Stage, town: Cluster, number: int) -> None:
    """For 60 s, and the clocks of the two are two hours apart.
    Its next request is rejected, by itself or by the server; gateways that see its old epoch follow the new leader.
    """
    paused = list[Elected]()

    def pause(name: str) -> None:
        one = town.processes[name]
        one.process.stop()
        paused.append(one)
        asyncio.get_running_loop().call_later(PAUSED_S, one.process.go_on)

    interrupts = Interrupts(town, number, pause)
    await both_are_called_one_after_the_other(stage)
    await stage.until(lambda: len(town.epochs) == 2)
    assert interrupts.steps >= number
    (old,) = paused
    await stage.until(lambda: old.process.runs, PAUSED_S)
    writes, before_s = len(town.server.writes()), town.now()
    stale = [routes.routes_full(old.loop.world, gateway.id, before_s) for gateway in town.gateways]
    await asyncio.sleep(5.0)
    assert len(town.server.writes()) == writes, "it does nothing"
    assert not old.loop.world.leadership.leads
    assert {one.epoch for one in stale} == {1}
    for gateway, late in zip(town.gateways, stale, strict=True):
        acts_on = gateway.dispatch.report(town.now())
        gateway.routes(late)  # sent before it was paused
        after = gateway.dispatch.report(town.now())
        assert (after.epoch, after.version, after.replicas) == (2, acts_on.version, acts_on.replicas)
    assert {name for name, _ in town.epochs} == {"a", "b"}
    assert (stage.starts("a"), stage.starts("b"), left(town)) == (1, 1, [])
    assert await stage.answered([town.call("a")]) == {"completed": 1}


@pytest.mark.case("27")
@simulated(A, B)
async def test_ready_replicas_keep_serving_during_an_api_server_outage(stage: Stage, town: Cluster) -> None:
    """Requests to ready replicas are served, others fail once at their deadline with a Retry-After.
    The next leader reads everything first, and stops nothing before each gateway has reported to it.
    """
    assert await stage.answered([town.call("a")]) == {"completed": 1}
    town.server.leave()
    gone_s, warm, cold = town.now(), list[Journey](), list[Journey]()
    while town.now() < gone_s + AWAY_S:
        warm.append(town.call("a"))
        if len(warm) % 100 == 1:
            cold.append(town.call("b", wait_s=20.0))
        await asyncio.sleep(1.0)
    assert not any(one.loop.world.leadership.leads for one in town.processes.values())
    assert await stage.answered(warm) == {"completed": len(warm)}
    assert await stage.answered(cold) == {"model_starting": len(cold)}
    for journey in cold:
        (end,) = journey.ended
        assert end.error is not None
        assert (end.error.status, end.error.retry_after_s is not None) == (503, True)
        assert end.at_s == pytest.approx(journey.call.deadline_s, abs=0.1)
    other, asked = town.gateways[1], len(town.server.asked)
    for link in other.links:
        link.reachable = False
        link.cut()
    town.server.come_back()
    await stage.until(lambda: len(town.epochs) == 2)
    await asyncio.sleep(SILENT_S)
    assert not deletes(town), "the other gateway has not reported its requests"
    for link in other.links:
        link.reachable = True
    await stage.until(lambda: not town.machine.engines, 60.0)
    since = town.server.asked[asked:]
    first = next(n for n, one in enumerate(since) if one.method == "DELETE")
    listed = {one.path for one in since[:first] if one.who == town.leader.name and one.method == "LIST"}
    assert {PODS, NODES} <= listed


@pytest.mark.case("28")
@simulated(A, B)
async def test_overloaded_api_server_gets_at_most_ten_requests_per_second(stage: Stage, town: Cluster) -> None:
    """429 with a Retry-After, then 500: both processes comply, at different times, and then know the whole state."""
    assert await stage.answered([town.call("a")]) == {"completed": 1}
    town.server.cut()
    for refusal in (ApiError(429, "TooManyRequests", "", RETRY_AFTER_S), ApiError(500, "InternalError", "")):
        town.server.refuses = lambda refusal=refusal: refusal  # type: ignore[misc]  # bound now
        began = len(town.server.asked)
        await asyncio.sleep(BUSY_S)
        asked = town.server.asked[began:]
        assert 0 < len(asked) / BUSY_S <= ASKED_PER_S_MAX
        assert len({one.at_s for one in asked}) == len(asked), "they do not come together"
    town.server.refuses = lambda: None
    calls = [town.call("b")]
    assert await stage.answered(calls) == {"completed": 1}
    await stage.until(lambda: not town.machine.engines, 120.0)
    await stage.until(lambda: not any(one.loop.world.replicas for one in town.processes.values()), 1.0)
    assert stage.starts("b") == 1


@pytest.mark.case("29")
@simulated(model("a", slots=4, replicas=FULL, idle_s=3.0), gpus=FULL, gateways=3)
async def test_restart_of_all_autoscalers_at_full_load_stops_no_replica(stage: Stage, town: Cluster) -> None:
    """Within 30 s, while one gateway is silent at first: no scale-down before all have reported; no request is lost."""
    calls = list[Journey]()

    async def load() -> None:
        while True:
            calls.extend(town.call("a") for _ in range(2))
            await asyncio.sleep(0.1)

    loading = town.task(load())
    await stage.until(lambda: stage.replicas() == FULL, 60.0)
    for _ in range(2):
        for name in town.names:
            town.kill(name)
            town.start(name)
        await asyncio.sleep(10.0)
    assert stage.replicas() == FULL
    led = len(town.epochs)
    await stage.until(lambda: len(town.epochs) > led or town.leader.loop.world.leadership.leads, 30.0)
    for link in town.gateways[0].links:
        link.reachable = False
        link.cut()
    await asyncio.sleep(5.0)
    assert not deletes(town)
    for link in town.gateways[0].links:
        link.reachable = True
    await asyncio.sleep(20.0)
    assert (stage.starts(), deletes(town)) == (FULL, [])
    loading.cancel()
    assert await stage.answered(calls) == {"completed": len(calls)}
    await stage.until(lambda: not town.machine.engines, 60.0)
    assert len(deletes(town)) == FULL
