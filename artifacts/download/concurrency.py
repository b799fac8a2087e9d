"""Controls how many requests of a download run concurrently, and detects stalled requests.

The window grows while the rate grows with it (by half at first, then by one), returns to the previous size if it does
not, and is halved when requests fail. Times are in seconds and amounts in bytes; both are arguments.

A request has stalled if its rate is far below the median of the others for some seconds. The last requests, which have
no others, are compared with the median seen earlier. A request is repeated only a few times for this reason; after that
the limits of the client apply.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

START, LEAST, MOST = 3, 1, 16
EVERY_S = 1.0
"""Duration of one rate measurement."""
BETTER = 1.1
"""Minimum rate gain that justifies another concurrent request."""
REST = 8
"""Measurements to wait after an increase that did not help."""


class Window:
    """The number of concurrent requests of one download."""

    def __init__(self, now_s: float) -> None:
        self.size = START
        self._since_s = now_s
        self._bytes = 0
        self._rate = 0.0
        """Rate at the previous size."""
        self._grew = 0
        """Size of the last increase; 0 if there was none."""
        self._rest = 0
        self._begins = True
        """Initial phase: no increase has failed yet."""
        self._broke = False

    def broke(self, now_s: float) -> None:
        """Record a failed attempt. Counts once per measurement, since one outage breaks all running requests."""
        if not self._broke:
            self.size = max(LEAST, self.size // 2)
            self._rest, self._begins, self._grew = REST, False, 0
            self._since_s, self._bytes = now_s, -1
        self._broke = True

    def measured(self, now_s: float, came: int, *, busy: bool) -> None:
        """Record progress. `came`: total bytes so far; `busy`: the window was fully used throughout."""
        if self._bytes < 0:
            self._bytes = came  # restarted after an interruption
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


WINDOW_S = 5.0
"""Time over which a request's rate is measured."""
SHARE = 0.1
"""A request has stalled below this share of the median rate."""
OTHERS_MIN = 2
"""Minimum number of rates for a median."""
SEEN_MAX = 64
"""Number of past rates kept for comparison with the last requests."""
REPEATS_MAX = 3
"""Maximum repeats of one span."""

Key = TypeVar("Key", bound=Hashable)


class Mark(NamedTuple):
    """A request's progress at a point in time."""

    at_s: float
    came: int


class Judge:
    """Detects stalled requests of one download."""

    def __init__(self) -> None:
        self._marks: dict[object, Mark] = {}
        self._seen: deque[float] = deque(maxlen=SEEN_MAX)

    def stalled(self, now_s: float, came: Mapping[Key, int], repeats: Mapping[Key, int]) -> list[Key]:
        """Return the requests to repeat. `came`: bytes received per running request; `repeats`: its repeats so far."""
        self._marks = {key: self._marks.get(key, Mark(now_s, came[key])) for key in came}
        ripe = {key: mark for key, mark in self._marks.items() if now_s - mark.at_s >= WINDOW_S}
        rates = {key: (came[key] - ripe[key].came) / (now_s - ripe[key].at_s) for key in came if key in ripe}
        for key in rates:
            self._marks[key] = Mark(now_s, came[key])
        found = []
        for key, rate in rates.items():
            others = [each for other, each in rates.items() if other != key]
            like = others if len(others) >= OTHERS_MIN else list(self._seen)
            if len(like) >= OTHERS_MIN and repeats.get(key, 0) < REPEATS_MAX and rate < SHARE * statistics.median(like):
                found.append(key)
        self._seen.extend(rate for key, rate in rates.items() if key not in found)
        return found
