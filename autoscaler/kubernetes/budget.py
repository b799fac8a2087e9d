"""How fast this process may ask an API server: a token bucket, so that no bug and no flood of ours is a storm there.

Owns the rate. A burst is let through at once (a whole node's Replicas start together), then requests take turns in the
order in which they came. Pure but for the sleep of `turn`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WRITES_PER_S = 50.0
BURST = 100.0
READ_COST = 0.2
"""Of a write: reads come out of the server's cache."""


class Budget:
    """`clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = BURST
        self._at_s = clock()

    def take(self, cost: float) -> float:
        """Takes `cost` and says how many seconds to wait before the request may be sent."""
        now_s = self._clock()
        self._tokens = min(BURST, self._tokens + (now_s - self._at_s) * WRITES_PER_S)
        self._at_s = now_s
        self._tokens -= cost
        return max(0.0, -self._tokens / WRITES_PER_S)

    async def turn(self, method: str) -> None:
        """Returns when a request of this method may be sent."""
        cost = READ_COST if method == "GET" else 1.0
        wait_s = self.take(cost)
        if wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:  # it is not sent: others need not wait for it
                self._tokens += cost
                raise
