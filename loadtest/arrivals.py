"""When Calls arrive: planned moments in seconds from the start of a run, ascending.

Owns the arrival processes. All are open loop: they do not know what became of earlier Calls. Pure; randomness is an
argument, so the same seed is the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def constant_arrivals(rate_per_s: float, seconds: float) -> tuple[float, ...]:
    """One every 1/rate seconds, the first at 0."""
    return tuple(index / rate_per_s for index in range(math.ceil(rate_per_s * seconds)))


def poisson_arrivals(rate_per_s: float, seconds: float, draw: Callable[[], float]) -> tuple[float, ...]:
    """A Poisson process. `draw` gives uniform numbers of [0, 1), such as `random.Random(seed).random`."""
    moments: list[float] = []
    at_s = -math.log(1.0 - draw()) / rate_per_s
    while at_s < seconds:
        moments.append(at_s)
        at_s += -math.log(1.0 - draw()) / rate_per_s
    return tuple(moments)


def burst_arrivals(count: int, within_s: float) -> tuple[float, ...]:
    """So many, evenly within so many seconds; all at once when that is 0."""
    return tuple(index * within_s / count for index in range(count))
