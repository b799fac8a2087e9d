"""Arrival times of requests in seconds from the start of a run, ascending. Pure.

All arrival processes are open loop: they are independent of earlier requests' outcomes. Randomness is an argument, so
the same seed gives the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def constant_arrivals(rate_per_s: float, seconds: float) -> tuple[float, ...]:
    """Return one arrival every 1/rate seconds, the first at 0."""
    return tuple(index / rate_per_s for index in range(math.ceil(rate_per_s * seconds)))


def poisson_arrivals(rate_per_s: float, seconds: float, draw: Callable[[], float]) -> tuple[float, ...]:
    """Return a Poisson process. `draw` returns uniform numbers in [0, 1), such as `random.Random(seed).random`."""
    moments: list[float] = []
    at_s = -math.log(1.0 - draw()) / rate_per_s
    while at_s < seconds:
        moments.append(at_s)
        at_s += -math.log(1.0 - draw()) / rate_per_s
    return tuple(moments)


def burst_arrivals(count: int, within_s: float) -> tuple[float, ...]:
    """Return `count` arrivals spread evenly over `within_s` seconds, all at once if that is 0."""
    return tuple(index * within_s / count for index in range(count))
