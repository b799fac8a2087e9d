"""Models of a cluster with the memory that agents read of their artifacts: each made once for what was read.

Owns since when it is waited for what an artifact says: until then nobody knows whether its Model needs a part of a
Device or all of it, and the plan gives it none (`autoscaler.planner.reconcile`). Promises: of a Model nothing is worked
out anew while neither it nor what was read of it has changed, however often all are told; and what is read of many at
once is told together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from autoscaler.agent_contract import WeightsRequest
from autoscaler.contract import ModelName, WeightsReport
from autoscaler.faults import Failure, attempt, describe_error
from autoscaler.spec.model import Model
from autoscaler.state.events import FaultSeen
from pilotlight.models import remote_header
from pilotlight.models.documents import fill_memory_estimate

if TYPE_CHECKING:
    from autoscaler.controller.loop import LoopStep

AGAIN_S = 0.25
"""All Models are told again at most so often: after a change of leaders many artifacts are looked at."""
Looks = tuple[WeightsReport | None, ...]


class _Made(NamedTuple):
    asked: Model
    looks: Looks
    model: Model


class Sized(NamedTuple):
    """All Models that there are, as far as they are known."""

    models: tuple[Model, ...]
    faults: tuple[FaultSeen, ...]
    """Models whose size could not be computed; `models` has them as they were given."""


class Sizes:
    """Of one process. `clock` is the loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: dict[ModelName, _Made] = {}
        self._read = asyncio.Event()

    def of(self, models: Iterable[Model], looked: Mapping[WeightsRequest, WeightsReport]) -> Sized:
        """See `Sized`; Devices are not the host's memory."""
        before, self._made = self._made, {}
        sized, faults = list[Model](), list[FaultSeen]()
        for model in models:
            made = attempt(partial(self._make, model, looked, before.get(model.name)))
            if isinstance(made, Failure):
                faults.append(FaultSeen(model=model.name, reason=describe_error(made.error)))
                sized.append(model)
            else:
                self._made[model.name] = made
                sized.append(made.model)
        return Sized(tuple(sized), tuple(faults))

    def _make(self, model: Model, looked: Mapping[WeightsRequest, WeightsReport], was: _Made | None) -> _Made:
        looks = remote_header.list_reports(model, looked)
        same = was is not None and was.asked == model
        if was is not None and same and all(one is other for one, other in zip(was.looks, looks, strict=True)):
            return was
        since_s = was.model.unread_s if was is not None and same else None
        return _Made(model, looks, self._sized(model, looked, since_s))

    def _sized(self, model: Model, looked: Mapping[WeightsRequest, WeightsReport], since_s: float | None) -> Model:
        if remote_header.is_header_pending(model, looked):
            return replace(model, unread_s=self._clock() if since_s is None else since_s)
        found = remote_header.find_artifact_facts(model, looked)
        return model if found is None else fill_memory_estimate(model, found, gpus=True)

    def on_step(self, step: LoopStep) -> None:
        """Hears when agents have read more."""
        if step.after.looked is not step.before.looked:
            self._read.set()

    async def run(self, again: Callable[[], None]) -> None:
        """Until cancelled: has all told `again` when more was read, the first at once."""
        while True:
            await self._read.wait()
            self._read.clear()
            again()
            await asyncio.sleep(AGAIN_S)
