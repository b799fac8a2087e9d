"""Injects a fault for one Model at a point drawn by the seed, and checks that no other Model is affected (I14).

Every third seed has documents as custom resources. If it has a storm, it injects a fault: from a random second of the
storm until its end, a function of the documents, the planner, the fold, the driver, the publisher, `explain` or the
status writer raises for one Model. Meanwhile documents change and an operator reads explanations. After the storm,
documents and statuses of all other Models must be current. Then an operator wakes the Model with the fault, and it must
serve again, with its current document. A contained exception that was not injected is a violation, and so is an
unreadable object.
"""

from __future__ import annotations

import asyncio
import random
import re
from functools import partial

import pytest

from autoscaler.contract import ModelName
from autoscaler.controller import loop
from autoscaler.controller.loop import Loop
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.explain import model as explain
from autoscaler.explain import status_rows
from autoscaler.explain.decision_log import Log
from autoscaler.kubernetes import unreadable_objects
from autoscaler.server import read_responses
from autoscaler.spec.model import Model
from autoscaler.state.events import ModelWoken
from autoscaler.state.world import World
from gateway.control import fault_containment as gateway_faults
from tests.simulation.installations.documented_town import DocumentedTown
from tests.simulation.installations.installation import Town
from tests.support.harness.faults.fault_injection import DOCUMENT_POINTS, POINTS, Faults, concerns, inject

EVERY = 3
EDIT_S, READ_S = (0.5, 3.0), 0.5
"""Pauses between two changes of a document, and between two reads of all explanations."""
CURRENT_S = 30.0
"""Maximum time after the storm until the documents and statuses of all other Models are current."""
SAFETY = ("I1:", "I2:", "I3:", "I5:", "I12:", "hold rule:")
"""Invariants that hold even for a Model with an injected fault."""


def has_documents(seed: int) -> bool:
    """Whether the documents of this seed are custom resources."""
    return seed % EVERY == 0


class Contained:
    """The fault of one run. `seed` None: nothing is injected."""

    def __init__(self, town: Town, patch: pytest.MonkeyPatch, seed: int | None) -> None:
        self._town, self._patch = town, patch
        self._rng, self._edits = random.Random(f"{seed}/faults"), random.Random(f"{seed}/edits")
        self._model: ModelName | None = None
        if seed is not None and has_documents(seed):
            self._model = self._rng.choice(town.models).name
        self._faults: Faults | None = None
        self.contained = 0
        """How often the injected fault quarantined its Model."""
        self.broken: list[str] = []
        patch.setattr(loop, "report_fault", self._report)
        patch.setattr(unreadable_objects, "report_fault", self._report)
        patch.setattr(gateway_faults, "report_fault", self._report)

    def _report(self, model: ModelName | None, what: str, reason: str) -> None:
        if model is None or model != self._model or "InjectedError" not in reason:
            self.broken.append(f"I14: {model or 'no Model'} is at fault in {what}: {reason}")
        else:
            self.contained += 1

    async def inject(self) -> None:
        """Inject the fault at a random time of the storm."""
        if self._model is None:
            return
        await asyncio.sleep(self._rng.uniform(0.0, 15.0))
        point = self._rng.choice([*POINTS, *DOCUMENT_POINTS])
        self._town.note(f"fault in {point} for {self._model}")
        self._faults = inject(self._patch, point, concerns(self._model), expected=False)

    async def edit(self) -> None:
        """Change the documents of random Models until cancelled."""
        while isinstance(self._town, DocumentedTown):
            await asyncio.sleep(self._edits.uniform(*EDIT_S))
            self._town.edit(self._edits.choice(self._town.models))

    async def read(self) -> None:
        """Explain all Models, as an operator requests it, until cancelled."""
        while self._model is not None:
            await asyncio.sleep(READ_S)
            if self._town.autoscaler is not None:
                done = attempt(partial(_explain_all, self._town.autoscaler.loop))
                if isinstance(done, Failure):
                    self.broken.append(f"I14: explain raised {describe_error(done.error)}")

    async def others_are_current(self) -> list[str]:
        """Wait until documents and statuses of all other Models are current; return what is not."""
        if self._model is None or not isinstance(self._town, DocumentedTown):
            return []
        until_s = self._town.now() + CURRENT_S
        others = [one for one in self._town.models if one.name != self._model]
        while (late := _outdated(self._town, others)) and self._town.now() < until_s:
            await asyncio.sleep(0.5)
        return late

    def all_are_current(self) -> list[str]:
        """Return Models whose documents or statuses are outdated long after the storm, and unreadable objects."""
        if not isinstance(self._town, DocumentedTown):
            return []
        return _outdated(self._town, self._town.models) + [f"I14: {one}" for one in self._town.unreadable()]

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


def _outdated(town: DocumentedTown, models: list[Model] | tuple[Model, ...]) -> list[str]:
    return [f"I14: {one.name}: {why}" for one in models if (why := town.outdated(one))]


def _explain_all(of: Loop) -> None:
    plan, log, now_s = of.plan, Log(), of.now_s()

    def rows(world: World) -> object:
        return status_rows.list_status_rows(world, plan, now_s), read_responses.list_models(world)

    def explanation(name: ModelName, world: World) -> object:
        return explain.explain_model(world, plan, log, name, now_s)

    of.contained("status", rows)
    for name in of.world.models:
        of.contained("explain", partial(explanation, name))
