"""The log: every move of every Replica with its reason, and who was refused without a start; the newest rows.

Owns a bounded, append-only record that `explain` and later the ledger read. Old rows fall out of the far end. A Model
whose Calls are refused again and again is one row a minute: the log must not be filled by a client that tries again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from autoscaler.contract import ModelName
from autoscaler.state.actions import FailStart, Unmet
from autoscaler.state.events import Transition
from autoscaler.state.world import Fact

ROWS_MAX = 10_000
"""About 3 MiB."""
REFUSED_EVERY_S = 60.0
"""The same refusal of a Model is a row once in so long."""


class RefusedCalls(Fact, frozen=True):
    """Calls of a Model were refused without a start: `reason` says that it fits on no device, or cannot start."""

    at_s: float
    model: ModelName
    reason: str


Row = Transition | RefusedCalls


class Log:
    """At most `bound` rows, oldest first."""

    def __init__(self, bound: int = ROWS_MAX) -> None:
        self._rows: deque[Row] = deque(maxlen=bound)
        self._refused: dict[ModelName, RefusedCalls] = {}
        """The last such row of each Model, for REFUSED_EVERY_S: at most one for each Model of the documents."""

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, transitions: Iterable[Transition]) -> None:
        """Appends rows, in order."""
        self._rows.extend(transitions)

    def refuse(self, refused: Iterable[Unmet | FailStart], now_s: float) -> tuple[RefusedCalls, ...]:
        """Notes whose Calls the Plan has refused without a start; gives the rows that are news."""
        news: list[RefusedCalls] = []
        for one in refused:
            known = self._refused.get(one.model)
            reason = _refusal(one)
            if reason and (known is None or known.reason != reason or self._old(known, now_s)):
                news.append(RefusedCalls(at_s=now_s, model=one.model, reason=reason))
        if news:
            kept = {model: row for model, row in self._refused.items() if not self._old(row, now_s)}
            self._refused = kept | {row.model: row for row in news}
            self._rows.extend(news)
        return tuple(news)

    @staticmethod
    def _old(row: RefusedCalls, now_s: float) -> bool:
        return now_s - row.at_s >= REFUSED_EVERY_S

    def of_model(self, model: ModelName) -> tuple[Row, ...]:
        """The rows of one Model, oldest first."""
        return tuple(row for row in self._rows if row.model == model)

    def latest(self, count: int) -> tuple[Row, ...]:
        """At most `count` rows, newest first."""
        return tuple(islice(reversed(self._rows), count))


def _refusal(one: Unmet | FailStart) -> str:
    """Why Calls are refused, in words; empty: they merely wait for room."""
    if isinstance(one, FailStart):
        return f"cannot start: {one.reason}"
    return f"fits on no device: {one.reason}" if one.never else ""
