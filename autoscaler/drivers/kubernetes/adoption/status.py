"""What an adopted workload shows of its adoption: one condition in its own status, and when that is written. Pure.

Owns the words of the condition and the pace of one workload's. Promises: nothing in it changes with the Calls on the
Model, so a wake or a stop costs no write; what is there already is not written again; what somebody took away is put
back, but not in a fight; what was refused is not asked for again in the same leadership. A StatefulSet's controller
drops every condition that is not its own whenever it writes the status, so there only what is out of the ordinary is
shown. Times are `now_s`.
"""

from __future__ import annotations

import math

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.annotations import USUAL, WRONG
from autoscaler.drivers.kubernetes.adoption.objects import SHOWN, ShownCondition
from autoscaler.kubernetes.resources.conditions import MESSAGE_MAX, NAME_TAKEN, ConditionValue
from autoscaler.spec.model import Model

SCALED = "Scaled"
NEWS_S, AGAIN_S = 1.0, 5.0
"""Of one workload: so long after the last write at the earliest; and where the same is to be written again."""


def build_condition(problem: str, model: Model | None, called: ModelName | None, taken: str) -> ConditionValue | None:
    """What is to be shown; None: nothing. `problem`: of its annotations; `model`: what is in force of them; `called`:
    its name in the whole installation; `taken`: what others have of its names.
    """
    if problem:
        left = "it is not served" if model is None else "the last good annotations are in force"
        return _said("False", WRONG, f"{problem}; {left}")
    if model is None or model.adopted is None:
        return None
    if called is None:
        return _said("False", NAME_TAKEN, taken)
    of = model.adopted
    if of.reason == USUAL and not taken:
        return None if of.kind == "StatefulSet" else _said("True", SCALED, _usual(called))
    sentences = [_usual(called) if of.reason == USUAL else of.message, taken]
    return _said("True", NAME_TAKEN if of.reason == USUAL else of.reason, "; ".join(filter(None, sentences)))


def _usual(called: ModelName) -> str:
    return f"its scale follows the Calls on Model {called}"


def _said(status: str, reason: str, message: str) -> ConditionValue:
    return ConditionValue(SHOWN, status, reason, message[:MESSAGE_MAX])


class Sign:
    """The condition of one workload, as it is there and as it shall be."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.there: ShownCondition | None = None
        self.wanted: ConditionValue | None = None
        self._version = 0
        """Of the workload as we last wrote it: what is older says nothing about what came of it."""
        self._wrote: ConditionValue | None = None
        self._wrote_s = -math.inf
        self._refused = False
        """To write what is wanted now."""

    def see(self, there: ShownCondition | None, version: int, wanted: ConditionValue | None) -> None:
        """It is so as of `version` of the workload, and shall be so."""
        if version >= self._version:
            self.there = there
        if wanted != self.wanted:
            self.wanted, self._refused = wanted, False

    @property
    def empty(self) -> bool:
        """Nothing is there, and nothing is wanted."""
        return self.there is None and self.wanted is None

    def due_s(self) -> float | None:
        """When it may be written; None: it is as it shall be, or may not be written."""
        if self._refused or self.wanted == (None if self.there is None else self.there.said):
            return None
        return self._wrote_s + (AGAIN_S if self.wanted == self._wrote else NEWS_S)

    def next(self, now: str) -> ShownCondition | None:
        """What is to be written; None: none. `now` is as an API server has times."""
        if self.wanted is None:
            return None
        if self.there is not None and self.there.said.status == self.wanted.status:
            return ShownCondition(self.wanted, self.there.since)
        return ShownCondition(self.wanted, now)

    def wrote(self, shown: ShownCondition | None, version: int, now_s: float) -> None:
        """It is so as of `version`."""
        self.there, self._version = shown, version
        self._wrote, self._wrote_s = None if shown is None else shown.said, now_s

    def refused(self) -> None:
        """What is wanted may not be written."""
        self._refused = True

    def lead(self) -> None:
        """Another leadership: what was refused may be allowed by now."""
        self._refused = False
