"""How many requests run side by side: as many as make it faster, fewer at once when the registry has trouble. Pure.

Owns the number. It grows while that pays (by half at first, then by one), goes back where it did not and is left there
for a while, and is halved where tries fail. Time and bytes are arguments.
"""

from __future__ import annotations

START, LEAST, MOST = 3, 1, 16
EVERY_S = 1.0
"""So long one number is measured."""
BETTER = 1.1
"""So much faster makes one request more worth it."""
REST = 8
"""Measurements without a new attempt after one that did not pay."""


class Window:
    """Of one fetch."""

    def __init__(self, now_s: float) -> None:
        self.size = START
        self._since_s = now_s
        self._bytes = 0
        self._rate = 0.0
        """At the size before."""
        self._grew = 0
        """By how much, the last time; 0: it did not."""
        self._rest = 0
        self._begins = True
        """Nothing has shown yet that more is no better."""
        self._broke = False

    def broke(self, now_s: float) -> None:
        """A try failed. Counts once in each measurement: one outage breaks all that run."""
        if not self._broke:
            self.size = max(LEAST, self.size // 2)
            self._rest, self._begins, self._grew = REST, False, 0
            self._since_s, self._bytes = now_s, -1
        self._broke = True

    def measured(self, now_s: float, came: int, *, busy: bool) -> None:
        """`came`: bytes so far, of all; `busy`: there were always as many requests as there may be."""
        if self._bytes < 0:
            self._bytes = came  # begun anew after a break
        spent_s = now_s - self._since_s
        if spent_s < EVERY_S:
            return
        rate, self._since_s = (came - self._bytes) / spent_s, now_s
        self._bytes, self._broke = came, False
        if not busy:
            self._grew = 0
            return
        if self._grew and rate < self._rate * BETTER:
            self.size = max(LEAST, self.size - self._grew)
            self._rest, self._begins, self._grew = REST, False, 0
            return
        if self._rest:
            self._rest -= 1
            return
        self._rate = rate
        self._grew = min(max(1, self.size // 2) if self._begins else 1, MOST - self.size)
        self.size += self._grew
