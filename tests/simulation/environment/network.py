"""Messages between processes with every fault of a network: delayed, lost, duplicated, reordered.

`post` carries single messages (reports), each with its own fate. `Stream` carries ordered ones (Routes, catalogue):
they arrive in order or, after a cut, not at all.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import NamedTuple


class Rates(NamedTuple):
    """Frequency of faults: probabilities per message, and the usual and the worst delay in seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    delay_s: tuple[float, float] = (0.0002, 0.002)
    late_s: tuple[float, float] = (0.05, 30.0)


CALM = Rates()


class Network:
    """One network; `rates` may be changed at any time (`CALM` ends all faults)."""

    def __init__(self, rng: random.Random, rates: Rates) -> None:
        self._rng = rng
        self.rates = rates

    def post(self, deliver: Callable[[], None], lost: Callable[[], None]) -> None:
        """Deliver once, twice or never; exactly one of the two callbacks is called at least once."""
        rates, rng = self.rates, self._rng
        loop = asyncio.get_running_loop()
        if rng.random() < rates.lost:
            loop.call_later(rng.uniform(0.05, 2.0), lost)
            return
        for _ in range(1 + (rng.random() < rates.doubled)):
            delay_s = rng.uniform(*(rates.late_s if rng.random() < rates.late else rates.delay_s))
            loop.call_later(delay_s, deliver)

    def delay_s(self) -> float:
        """One ordinary delay."""
        return self._rng.uniform(*self.rates.delay_s)


class Stream:
    """An ordered stream to one gateway; `cut` drops all messages in transit."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._last_s = 0.0
        self._generation = 0

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver after a delay and never before an earlier message."""
        loop = asyncio.get_running_loop()
        later_s = math.nextafter(self._last_s, math.inf)  # two timers of the same time have no order
        at_s = max(loop.time() + self._network.delay_s(), later_s)
        self._last_s = at_s
        generation = self._generation

        def arrive() -> None:
            if generation == self._generation:
                deliver()

        loop.call_at(at_s, arrive)

    def cut(self) -> None:
        """Drop all messages in transit."""
        self._generation += 1
