"""The log: every move of every Replica with its reason, the newest so many of them.

Owns a bounded, append-only record that `explain` and later the ledger read. Old rows fall out of the far end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from autoscaler.contract import ModelName
from autoscaler.world import Transition

ROWS_MAX = 10_000
"""About 3 MiB."""


class Log:
    """At most `bound` Transitions, oldest first."""

    def __init__(self, bound: int = ROWS_MAX) -> None:
        self._rows: deque[Transition] = deque(maxlen=bound)

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, transitions: Iterable[Transition]) -> None:
        """Appends rows, in order."""
        self._rows.extend(transitions)

    def of_model(self, model: ModelName) -> tuple[Transition, ...]:
        """The rows of one Model, oldest first."""
        return tuple(row for row in self._rows if row.model == model)

    def latest(self, count: int) -> tuple[Transition, ...]:
        """At most `count` rows, newest first."""
        return tuple(islice(reversed(self._rows), count))
