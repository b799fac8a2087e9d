"""The decision log: state changes of replicas with their reasons, and rejections without a start. Newest rows only.

A bounded, append-only record for `explain` that drops its oldest rows. It records the same rejection of a Model at most
once a minute, so that a client that retries cannot fill it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from autoscaler.contract import ModelName
from autoscaler.state import StateRecord
from autoscaler.state.actions import FailStart, Unmet
from autoscaler.state.events import Transition
from autoscaler.text import format_duration

LAST_ROWS = 20
"""Maximum number of rows that `list_recent_decisions` returns."""


ROWS_MAX = 10_000
"""Maximum number of rows, about 3 MiB."""
REFUSED_EVERY_S = 60.0
"""The minimum time between two rows about the same rejection of a Model, in seconds."""


class RefusedCalls(StateRecord, frozen=True):
    """Requests for a Model were rejected without a start, because it fits on no device or cannot start."""

    at_s: float
    model: ModelName
    reason: str


Row = Transition | RefusedCalls


class Log:
    """The latest rows, at most `bound`, oldest first."""

    def __init__(self, bound: int = ROWS_MAX) -> None:
        self._rows: deque[Row] = deque(maxlen=bound)
        self._refused: dict[ModelName, RefusedCalls] = {}
        """The last rejection of each Model within REFUSED_EVERY_S: at most one per Model."""

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, transitions: Iterable[Transition]) -> None:
        """Append rows, in order."""
        self._rows.extend(transitions)

    def refuse(self, refused: Iterable[Unmet | FailStart], now_s: float) -> tuple[RefusedCalls, ...]:
        """Record Models whose requests the Plan rejects without a start; return the new rows."""
        new_rows: list[RefusedCalls] = []
        for one in refused:
            known = self._refused.get(one.model)
            reason = _refusal(one)
            if reason and (known is None or known.reason != reason or self._is_expired(known, now_s)):
                new_rows.append(RefusedCalls(at_s=now_s, model=one.model, reason=reason))
        if new_rows:
            kept = {model: row for model, row in self._refused.items() if not self._is_expired(row, now_s)}
            self._refused = kept | {row.model: row for row in new_rows}
            self._rows.extend(new_rows)
        return tuple(new_rows)

    @staticmethod
    def _is_expired(row: RefusedCalls, now_s: float) -> bool:
        return now_s - row.at_s >= REFUSED_EVERY_S

    def of_model(self, model: ModelName) -> tuple[Row, ...]:
        """Return the rows of one Model, oldest first."""
        return tuple(row for row in self._rows if row.model == model)

    def latest(self, count: int) -> tuple[Row, ...]:
        """Return at most `count` rows, newest first."""
        return tuple(islice(reversed(self._rows), count))


def _refusal(one: Unmet | FailStart) -> str:
    """Return why requests are rejected. Empty: they wait for capacity."""
    if isinstance(one, FailStart):
        return f"cannot start: {one.reason}"
    return f"fits on no device: {one.reason}" if one.never else ""


def list_recent_decisions(log: Log, now_s: float) -> tuple[str, ...]:
    """Return the latest state changes of replicas, and rejections of Models that fit no device or cannot start."""
    return tuple(f"{row.model}: {describe_decision(row, now_s)}" for row in log.latest(LAST_ROWS))


def describe_decision(row: Row, now_s: float) -> str:
    """Describe a row in words, with its age."""
    if isinstance(row, RefusedCalls):
        return f"its requests were rejected, {format_duration(now_s - row.at_s)} ago: it {row.reason}"
    before = "" if row.before is None else f"{row.before} -> "
    return f"{row.replica} {before}{row.after}, {format_duration(now_s - row.at_s)} ago: {row.reason}"
