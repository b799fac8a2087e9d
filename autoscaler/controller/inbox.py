"""What was observed and is not folded yet, in order; bounded by what gateways really mean.

Owns the bound. Reports are levels, so above it only the newest of each boot of a gateway is kept, with the cumulative
counts of those before it: they have been acknowledged and will not be said again. What a driver or anybody else says is
never dropped or changed: there is no more of it than there are Replicas that move.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from autoscaler.contract import GatewayId
from autoscaler.fold.fold import Observation
from autoscaler.state.events import Reported

INBOX_MAX = 10_000
"""Observations that wait; with more, reports are merged. 64 gateways at 100 reports a second fill it in 1.6 s."""


class Inbox:
    """Takes observations until somebody folds them."""

    def __init__(self) -> None:
        self._waiting: list[Observation] = []
        self._merge_above = INBOX_MAX
        self._merged = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, batch: Sequence[Observation]) -> None:
        """Adds what happened, in order."""
        self._waiting.extend(batch)
        if len(self._waiting) > self._merge_above:
            before = len(self._waiting)
            self._waiting = merge_reports(self._waiting)
            self._merged += before - len(self._waiting)
            self._merge_above = max(INBOX_MAX, 2 * len(self._waiting))  # else what cannot shrink is looked at each time

    def take(self) -> tuple[list[Observation], int]:
        """All that waits, and how many reports were merged into later ones."""
        taken = self._waiting, self._merged
        self._waiting, self._merged, self._merge_above = [], 0, INBOX_MAX
        return taken


def merge_reports(batch: Sequence[Observation]) -> list[Observation]:
    """The batch with one report per boot of a gateway, in the place of its first: nothing else may overtake it."""
    newest: dict[tuple[GatewayId, str], Reported] = {}
    for one in batch:
        if isinstance(one, Reported):
            key = (one.report.gateway, one.report.boot)
            newest[key] = _later(newest[key], one) if key in newest else one
    left: list[Observation] = []
    for one in batch:
        if isinstance(one, Reported):
            reported = newest.pop((one.report.gateway, one.report.boot), None)
            if reported is not None:
                left.append(reported)
        else:
            left.append(one)
    return left


def _later(one: Reported, other: Reported) -> Reported:
    """The one with the higher sequence, and the counts that only the earlier one says."""
    first, last = (one, other) if one.report.sequence < other.report.sequence else (other, one)
    totals = {(total.model, total.tenant): total for total in (*first.report.totals, *last.report.totals)}
    return replace(last, report=replace(last.report, totals=tuple(totals.values())))
