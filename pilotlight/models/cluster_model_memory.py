"""Fills in the memory needs of a cluster's Models from what agents read of their artifacts.

Until an artifact is inspected it is unknown whether its Model needs a part of a device or all of it, and the plan does
not place it (`autoscaler.planner.reconcile`); this module records since when. A Model is computed again only if it or
the agents' reports about it have changed. Reports about many Models are processed together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from autoscaler.agent_contract import WeightsReport, WeightsRequest
from autoscaler.contract import ModelName
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.spec.model import Model
from autoscaler.state.events import FaultSeen
from pilotlight.models import header_report
from pilotlight.models.document_loading import fill_memory_estimate

if TYPE_CHECKING:
    from autoscaler.controller.loop import LoopStep

AGAIN_S = 0.25
"""Minimum interval between updates of all Models: after a change of leadership, many artifacts are inspected."""
Looks = tuple[WeightsReport | None, ...]


class _Made(NamedTuple):
    asked: Model
    looks: Looks
    model: Model


class Sized(NamedTuple):
    """All Models with the memory needs known so far."""

    models: tuple[Model, ...]
    faults: tuple[FaultSeen, ...]
    """Models whose size could not be computed; `models` contains them unchanged."""


class Sizes:
    """Caches the sized Models of one process. `clock` is the loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: dict[ModelName, _Made] = {}
        self._read = asyncio.Event()

    def of(self, models: Iterable[Model], looked: Mapping[WeightsRequest, WeightsReport]) -> Sized:
        """Return the sized Models, for devices with memory separate from the host's."""
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
        looks = header_report.list_reports(model, looked)
        same = was is not None and was.asked == model
        if was is not None and same and all(one is other for one, other in zip(was.looks, looks, strict=True)):
            return was
        since_s = was.model.unread_s if was is not None and same else None
        return _Made(model, looks, self._sized(model, looked, since_s))

    def _sized(self, model: Model, looked: Mapping[WeightsRequest, WeightsReport], since_s: float | None) -> Model:
        if header_report.is_header_pending(model, looked):
            return replace(model, unread_s=self._clock() if since_s is None else since_s)
        found = header_report.find_artifact_facts(model, looked)
        return model if found is None else fill_memory_estimate(model, found, gpus=True)

    def on_step(self, step: LoopStep) -> None:
        """Schedule an update when agents have read more."""
        if step.after.learned.looked is not step.before.learned.looked:
            self._read.set()

    async def run(self, again: Callable[[], None]) -> None:
        """Call `again` when agents have read more, at most every AGAIN_S, until cancelled. After an exception of
        `again`, the next `run` calls it again.
        """
        while True:
            await self._read.wait()
            self._read.clear()
            try:
                again()
            except BaseException:
                self._read.set()
                raise
            await asyncio.sleep(AGAIN_S)
