"""Which of the requests that run has stalled: far slower than its like for some seconds. Pure.

Owns the judgement: the middle rate of the others is the measure, so a slow line makes nobody a suspect, and a way that
went bad is left early; for the last ones, which have no others, it is the middle rate of what was seen before. It is
asked for anew a few times only; after that the client's own limits count.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

WINDOW_S = 5.0
"""So long it must have been slow."""
SHARE = 0.1
"""Of the middle rate."""
OTHERS_MIN = 2
"""So many make a middle."""
SEEN_MAX = 64
"""Rates that are kept for the last ones."""
ANEW_MAX = 3
"""For one span."""

Key = TypeVar("Key", bound=Hashable)


class Mark(NamedTuple):
    """How far one was at some time."""

    at_s: float
    came: int


class Judge:
    """Of one fetch: keeps a mark of each that runs."""

    def __init__(self) -> None:
        self._marks: dict[object, Mark] = {}
        self._seen: deque[float] = deque(maxlen=SEEN_MAX)

    def stalled(self, now_s: float, came: Mapping[Key, int], anew: Mapping[Key, int]) -> list[Key]:
        """Those to ask for anew. `came`: bytes so far of each that runs; `anew`: how often that was done already."""
        self._marks = {key: self._marks.get(key, Mark(now_s, came[key])) for key in came}
        ripe = {key: mark for key, mark in self._marks.items() if now_s - mark.at_s >= WINDOW_S}
        rates = {key: (came[key] - ripe[key].came) / (now_s - ripe[key].at_s) for key in came if key in ripe}
        for key in rates:
            self._marks[key] = Mark(now_s, came[key])
        found = []
        for key, rate in rates.items():
            others = [each for other, each in rates.items() if other != key]
            like = others if len(others) >= OTHERS_MIN else list(self._seen)
            if len(like) >= OTHERS_MIN and anew.get(key, 0) < ANEW_MAX and rate < SHARE * statistics.median(like):
                found.append(key)
        self._seen.extend(rate for key, rate in rates.items() if key not in found)
        return found
