"""Helpers for single cases: Models and towns with the usual values, and waiting in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.controller.loop import Loop
from autoscaler.spec.model import Model, ModelSpec, Queue, ReplicaRange, StartLimits
from tests.simulation.checks import continuous_invariants, final_invariants
from tests.simulation.environment.machine import QUICK, Manners, one_device
from tests.simulation.environment.network import CALM, Rates
from tests.simulation.environment.virtual_loop import run
from tests.simulation.installations.installation import Journey, Town
from tests.support.harness.scenarios import hide_parameters

GIB = 1 << 30
A_MINUTE = StartLimits(seconds_max=60.0)
P = ParamSpec("P")
T = TypeVar("T")


def model(
    name: str = "a", *, slots: int = 4, replicas: int = 1, memory_gib: int = 10, idle_s: float = 5.0,
    residency_s: float = 1.0, calls_max: int = 10_000, start: StartLimits = A_MINUTE, drain_s: float = 60.0,
) -> Model:  # fmt: skip
    """A Model of which one replica fits on a device of the stage."""
    spec = ModelSpec(
        engine="command", command=("engine", "{port}"), idle_seconds=idle_s, residency_seconds=residency_s,
        replicas=ReplicaRange(max=replicas), queue=Queue(calls_max=calls_max), start=start, drain_seconds_max=drain_s,
    )  # fmt: skip
    return Model(name=ModelName(name), spec=spec, memory_bytes=memory_gib * GIB, slots=slots)


class Stage:
    """A town with its watcher, settled and ready for requests."""

    def __init__(self, town: Town, watcher: continuous_invariants.Watcher) -> None:
        self.town = town
        self.watcher = watcher

    @property
    def loop(self) -> Loop:
        """The control loop of the autoscaler that runs now."""
        assert self.town.autoscaler is not None
        return self.town.autoscaler.loop

    def starts(self, name: str = "a") -> int:
        """Number of processes of a Model that were ever started."""
        return sum(id.startswith(f"{name}-") for id in self.town.machine.started)

    def replicas(self, name: str = "a") -> int:
        """Number of processes of a Model now."""
        return sum(e.replica.model == name for e in self.town.machine.engines.values())

    async def until(self, what: Callable[[], bool], within_s: float = 600.0, step_s: float = 0.005) -> float:
        """Wait for a condition; return the seconds that it took."""
        began_s = self.town.now()
        while not what():
            assert self.town.now() - began_s < within_s, f"not within {within_s} virtual seconds"
            await asyncio.sleep(step_s)
        return self.town.now() - began_s

    async def answered(self, journeys: list[Journey], within_s: float = 600.0) -> Counter[str]:
        """Wait for the outcomes of these requests; count them by outcome or error code."""
        await self.until(lambda: all(j.ended for j in journeys), within_s)
        return Counter(j.ended[0].error.code if j.ended[0].error else j.ended[0].outcome.value for j in journeys)


async def both_are_called_one_after_the_other(stage: Stage, within_s: float = 120.0) -> None:
    """Model `a` starts from zero, is evicted for `b`, and both scale to zero."""
    for name in ("a", "b"):
        calls = [stage.town.call(name) for _ in range(6)]
        assert await stage.answered(calls) == {"completed": 6}
    await stage.until(lambda: not stage.town.machine.engines, within_s)


def play(
    act: Callable[[Stage], Coroutine[object, object, T]], *models: Model, seed: int = 1, gateways: int = 1,
    devices: int = 1, manners: Manners = QUICK, rates: Rates = CALM, strict: bool = True, kind: type[Town] = Town,
    shared: str = "",
) -> T:  # fmt: skip
    """Run one scenario in virtual time, then check every invariant that holds always."""

    async def whole() -> T:
        slices = tuple(replace(one_device(16 * GIB, f"gpu{number}"), kind=shared) for number in range(devices))
        town = kind(seed, models=models, slices=slices, gateways=gateways, manners=manners, rates=rates)
        watcher = continuous_invariants.Watcher(town, strict=strict)
        stage = Stage(town, watcher)
        await asyncio.sleep(0.5)
        result = await act(stage)
        watcher.stop()
        await town.close()
        answered = [line for line in final_invariants.everybody_was_answered(town) if "0 outcomes" not in line]
        broken = watcher.broken + answered + [repr(error) for error in town.crashes]
        assert not broken, broken
        return result

    return run(whole())


def simulated(
    *models: Model, **options: Any
) -> Callable[[Callable[Concatenate[Stage, P], Coroutine[object, object, None]]], Callable[P, None]]:
    """Make a test that runs the scenario with `play`. pytest passes all parameters except the stage."""

    def decorate(scenario: Callable[Concatenate[Stage, P], Coroutine[object, object, None]]) -> Callable[P, None]:
        @wraps(scenario)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            play(lambda stage: scenario(stage, *args, **kwargs), *models, **options)

        return hide_parameters(test, scenario, 1)

    return decorate


def cut_off(stage: Stage, number: int) -> None:
    """Cut a gateway off from all autoscalers in both directions; nothing proves that it is dead."""
    link = stage.town.gateways[number].link
    link.reachable = False
    link.cut()
