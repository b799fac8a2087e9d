"""Injects a fault for one Model at a point drawn by the seed, and checks that no other Model is affected (I14).

Every third seed with a storm injects one: from a random second of the storm until its end, a function of the planner,
the fold, the driver or the publisher raises for one Model. Then an operator wakes that Model, and it must serve again.
"""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from autoscaler.contract import ModelName
from autoscaler.controller import loop
from autoscaler.state.events import ModelWoken
from tests.simulation.installations.installation import Town
from tests.support.harness.faults.fault_injection import POINTS, Faults, concerns, inject

EVERY = 3
SAFETY = ("I1:", "I2:", "I3:", "I5:", "I12:", "hold rule:")
"""Invariants that hold even for a Model with an injected fault."""


class Contained:
    """The fault of one run. `seed` None: nothing is injected."""

    def __init__(self, town: Town, patch: pytest.MonkeyPatch, seed: int | None) -> None:
        self._town, self._patch = town, patch
        self._rng = random.Random(f"{seed}/faults")
        self._model: ModelName | None = None
        if seed is not None and seed % EVERY == 0:
            self._model = self._rng.choice(town.models).name
        self._faults: Faults | None = None
        self.broken: list[str] = []
        patch.setattr(loop, "report_fault", self._report)

    def _report(self, model: ModelName | None, what: str, reason: str) -> None:
        if model is None or model != self._model or "InjectedError" not in reason:
            self.broken.append(f"I14: {model or 'no Model'} is at fault in {what}: {reason}")

    async def inject(self) -> None:
        """Inject the fault at a random time of the storm."""
        if self._model is None:
            return
        await asyncio.sleep(self._rng.uniform(0.0, 15.0))
        point = self._rng.choice(POINTS)
        self._town.note(f"fault in {point} for {self._model}")
        self._faults = inject(self._patch, point, concerns(self._model), expected=False)

    def stop(self) -> None:
        """End the fault; an operator wakes the Model."""
        if self._faults is not None and self._model is not None:
            self._faults.stop()
            if self._town.autoscaler is not None:
                self._town.autoscaler.loop.observe((ModelWoken(model=self._model),))

    def hit(self, model: str) -> bool:
        """Whether a fault was injected into this Model, so that its requests fail."""
        return self._faults is not None and model == self._model

    def of_others(self, broken: list[str]) -> list[str]:
        """The violations of Models without an injected fault, and the safety violations of the faulty Model."""
        if self._faults is None:
            return broken
        return [line for line in broken if line.startswith(SAFETY) or not re.search(rf"\b{self._model}\b", line)]
