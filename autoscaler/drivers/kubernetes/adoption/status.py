"""The condition that reports adoption in a workload's status, and when it is written. Pure.

Builds the condition's text and paces the writes of one workload. Times are `now_s`. Invariants: the condition does not
depend on requests to the model, so a cold start or a stop causes no write. An up-to-date condition is not written. A
condition removed by others is restored at a limited rate. A rejected write is not retried within the same leadership.

A StatefulSet's controller drops foreign conditions whenever it writes the status, so there the condition is written
only to report a problem.
"""

from __future__ import annotations

import math

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.annotations import USUAL, WRONG
from autoscaler.drivers.kubernetes.adoption.objects import SHOWN, ShownCondition
from autoscaler.kubernetes.resources.model_conditions import MESSAGE_MAX, NAME_TAKEN, ConditionValue
from autoscaler.spec.model import Model

SCALED = "Scaled"
NEWS_S, AGAIN_S = 1.0, 5.0
"""Minimum seconds after a workload's last write: for a new condition, and to restore the same one."""


def build_condition(problem: str, model: Model | None, called: ModelName | None, taken: str) -> ConditionValue | None:
    """Return the condition to write; None: no condition. `problem`: error in its annotations. `model`: built from the
    valid annotations. `called`: its name in the installation. `taken`: sentence on names that others use.
    """
    if problem:
        left = "it is not served" if model is None else "the last valid annotations stay in force"
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
    return f"its scale follows the requests for Model {called}"


def _said(status: str, reason: str, message: str) -> ConditionValue:
    return ConditionValue(SHOWN, status, reason, message[:MESSAGE_MAX])


class Sign:
    """The condition of one workload, present and desired."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.there: ShownCondition | None = None
        self.wanted: ConditionValue | None = None
        self._version = 0
        """The workload's version after our last write: older observations do not reflect it."""
        self._wrote: ConditionValue | None = None
        self._wrote_s = -math.inf
        self._refused = False
        """Whether the API server refused the desired condition."""

    def see(self, there: ShownCondition | None, version: int, wanted: ConditionValue | None) -> None:
        """Record the condition present at `version` of the workload, and the desired one."""
        if version >= self._version:
            self.there = there
        if wanted != self.wanted:
            self.wanted, self._refused = wanted, False

    @property
    def empty(self) -> bool:
        """Whether no condition is present or desired."""
        return self.there is None and self.wanted is None

    def due_s(self) -> float | None:
        """Return when it may be written; None: it is up to date, or may not be written."""
        if self._refused or self.wanted == (None if self.there is None else self.there.said):
            return None
        return self._wrote_s + (AGAIN_S if self.wanted == self._wrote else NEWS_S)

    def next(self, now: str) -> ShownCondition | None:
        """Return the condition to write; None: remove it. `now` is in the API server's time format."""
        if self.wanted is None:
            return None
        if self.there is not None and self.there.said.status == self.wanted.status:
            return ShownCondition(self.wanted, self.there.since)
        return ShownCondition(self.wanted, now)

    def wrote(self, shown: ShownCondition | None, version: int, now_s: float) -> None:
        """Record the condition as written at `version`."""
        self.there, self._version = shown, version
        self._wrote, self._wrote_s = None if shown is None else shown.said, now_s

    def refused(self) -> None:
        """Record that the desired condition may not be written."""
        self._refused = True

    def lead(self) -> None:
        """Start a new leadership: refused writes may be allowed by now."""
        self._refused = False
