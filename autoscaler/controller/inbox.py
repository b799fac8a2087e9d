"""A bounded FIFO queue of observations that are not folded yet.

A gateway report states current values, not changes. Above INBOX_MAX only the newest report of each gateway boot is
kept, with the cumulative counts of the earlier ones, because those are acknowledged and will not be repeated. Other
observations are never dropped or changed: their number is bounded by the number of replicas that change state.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from autoscaler.contract import GatewayId
from autoscaler.fold.fold import Observation
from autoscaler.state.events import Reported

INBOX_MAX = 10_000
"""Queue length above which reports are merged. 64 gateways at 100 reports a second reach it in 1.6 s."""


class Inbox:
    """Queues observations until they are folded."""

    def __init__(self) -> None:
        self._waiting: list[Observation] = []
        self._merge_above = INBOX_MAX
        self._merged = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, batch: Sequence[Observation]) -> None:
        """Append observations in order; merge reports if the queue is too long."""
        self._waiting.extend(batch)
        if len(self._waiting) > self._merge_above:
            before = len(self._waiting)
            self._waiting = merge_reports(self._waiting)
            self._merged += before - len(self._waiting)
            # Doubled: otherwise each `put` would merge again, although there is little left to merge.
            self._merge_above = max(INBOX_MAX, 2 * len(self._waiting))

    def take(self) -> tuple[list[Observation], int]:
        """Remove and return all queued observations, and the number of reports that were merged into later ones."""
        taken = self._waiting, self._merged
        self._waiting, self._merged, self._merge_above = [], 0, INBOX_MAX
        return taken


def merge_reports(batch: Sequence[Observation]) -> list[Observation]:
    """Return the batch with one merged report per gateway boot.
    It has the position of the first report of that boot, so that no later event precedes it.
    """
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
    """The report with the higher sequence number, plus the counts that only the earlier one has."""
    first, last = (one, other) if one.report.sequence < other.report.sequence else (other, one)
    totals = {(total.model, total.tenant): total for total in (*first.report.totals, *last.report.totals)}
    return replace(last, report=replace(last.report, totals=tuple(totals.values())))
