"""The plan of an autoscaler that shuts down: all replicas are drained and stopped, and none is started."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.controller.loop import Loop
from autoscaler.planner.plan import REASON, wind_down
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Drain, World
from tests.support.builders.worlds import T0, device, folded, gateway, kinds, level, model, replica, use, world
from tests.support.fakes.driver import FakeDriver, FakeMachine, Fate

A = model("a", 1)


@pytest.mark.parametrize(
    ("state", "first"),
    [
        (S.STARTING, "drain r"),
        (S.READY, "drain r"),
        (S.UNREADY, "drain r"),
        (S.DRAINING, "stop r"),
        (S.PENDING, "stop r"),
        (S.FAILED, "stop r"),
        (S.STOPPING, None),
        (S.SCRUBBING, None),
    ],
)
def test_shutdown_drains_running_replicas_and_stops_pending_ones(state: S, first: str | None) -> None:
    drain = Drain(since_s=T0, reason="idle", came_from=S.READY, epoch=1, version=1) if state is S.DRAINING else None
    made = world([A], [device()], [replica(A, "r", state=state, drain=drain)])
    planned = wind_down(made, 5.0)
    assert kinds(planned) == ([] if first is None else [first])
    assert all(action.reason == REASON for action in planned.actions)


def test_shutdown_stops_all_replicas_in_two_steps_despite_open_requests() -> None:
    calls = [gateway(levels=[level("a", 4, 2)], uses=[use("r1", 2)])]
    made = world([A], [device()], [replica(A, "r1"), replica(A, "r2", state=S.STARTING)], calls)
    made = folded(made, wind_down(made, 5.0).actions)
    last = wind_down(made, 5.0)
    assert kinds(last) == ["stop r1", "stop r2"]
    made = folded(made, last.actions)
    assert not wind_down(made, 5.0).actions


async def test_loop_starts_no_replica_after_all_were_stopped_for_shutdown() -> None:
    clock = asyncio.get_running_loop()
    machine = FakeMachine(clock, (device(),), lambda _replica, _model: Fate(ready_after_s=0.0, stops_in_s=0.01))
    loop = Loop(World(epoch=1, models={A.name: model("a", 1, low=1)}), FakeDriver(machine), clock.time)
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(60):
        while not any(r.state is S.READY for r in loop.world.replicas.values()):
            await asyncio.sleep(0.005)
        await loop.wind_down(1.0)
    assert not machine.engines
    loop.step()
    assert len(machine.started) == 1, "a Model with one permanent replica is not started again"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
