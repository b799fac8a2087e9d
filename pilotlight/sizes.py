"""Models of a cluster with the memory that agents read of their artifacts: each made once for what was read.

Owns since when it is waited for what an artifact says: until then nobody knows whether its Model needs a part of a
Device or all of it, and the plan gives it none (`autoscaler.compare`). Promises: of a Model nothing is worked out anew
while neither it nor what was read of it has changed, however often all are told; and what is read of many at once is
told together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName, WeightsReport
from autoscaler.model import Model
from autoscaler.nodewants import Wish
from pilotlight import shapes
from pilotlight.gathering import completed

if TYPE_CHECKING:
    from autoscaler.loop import Step

AGAIN_S = 0.25
"""All Models are told again at most so often: after a change of leaders many artifacts are looked at."""
Looks = tuple[WeightsReport | None, ...]


class _Sized(NamedTuple):
    asked: Model
    looks: Looks
    model: Model


class Sizes:
    """Of one process. `clock` is the loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: dict[ModelName, _Sized] = {}
        self._read = asyncio.Event()

    def of(self, models: Iterable[Model], looked: Mapping[Wish, WeightsReport]) -> tuple[Model, ...]:
        """All Models that there are, as far as they are known; Devices are not the host's memory."""
        before, self._made = self._made, {}
        for model in models:
            looks, was = shapes.looks(model, looked), before.get(model.name)
            same = was is not None and was.asked == model
            if was is None or not same or any(one is not other for one, other in zip(was.looks, looks, strict=True)):
                since_s = was.model.unread_s if was is not None and same else None
                was = _Sized(model, looks, self._sized(model, looked, since_s))
            self._made[model.name] = was
        return tuple(one.model for one in self._made.values())

    def _sized(self, model: Model, looked: Mapping[Wish, WeightsReport], since_s: float | None) -> Model:
        if shapes.unread(model, looked):
            return replace(model, unread_s=self._clock() if since_s is None else since_s)
        found = shapes.known(model, looked)
        return model if found is None else completed(model, found, gpus=True)

    def on_step(self, step: Step) -> None:
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
