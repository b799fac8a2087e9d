"""Time for a client of registries: a clock, waiting, and counting the tries of one request. I/O.

Owns the pauses between tries; when there is another is decided in `retrying`. Tests give it a clock of their own, so
that none of them waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from artifacts.errors import BrokenError, UnreachableError
from artifacts.http import retrying

log = logging.getLogger("pilotlight.registry")


class Pace:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        """For how long things take."""
        return time.monotonic()

    def unix_s(self) -> float:
        """For dates that others wrote."""
        return time.time()

    def draw(self) -> float:
        """Within 0 and 1."""
        return random.random()  # noqa: S311 -- spreads tries out, keeps no secret

    def again_s(self, tries: int, waited_s: float, asked_s: float | None) -> float | None:
        """As `retrying.wait_s`."""
        return retrying.wait_s(tries, waited_s, asked_s, self.draw())

    async def wait(self, wait_s: float) -> None:
        """Until then."""
        await asyncio.sleep(wait_s)


class Once(Pace):
    """Another's clock, for whoever has others to ask: there is no second try."""

    def __init__(self, of: Pace) -> None:
        self._of = of

    def monotonic_s(self) -> float:
        """As Pace."""
        return self._of.monotonic_s()

    def unix_s(self) -> float:
        """As Pace."""
        return self._of.unix_s()

    def again_s(self, tries: int, waited_s: float, asked_s: float | None) -> float | None:
        """Never."""
        del tries, waited_s, asked_s
        return None


class Tries:
    """Of one request to one registry."""

    def __init__(self, pace: Pace, told: Callable[[BrokenError], None] | None = None) -> None:
        """`told` hears of each try that failed."""
        self._pace = pace
        self._told = told
        self._tries = 0
        self._waited_s = 0.0

    def progressed(self) -> None:
        """Much came: what failed before does not count any more."""
        self._tries, self._waited_s = 0, 0.0

    async def again(self, error: BrokenError) -> None:
        """Returns when it is time for the next try. Raises UnreachableError when it was enough."""
        self._tries += 1
        if self._told is not None:
            self._told(error)
        asked_s = retrying.retry_after_s(error.retry_after, self._pace.unix_s())
        wait_s = self._pace.again_s(self._tries, self._waited_s, asked_s)
        if wait_s is None:
            asks = f", and asks to wait {asked_s:.0f} s" if asked_s is not None else ""
            raise UnreachableError(f"{error}{asks}; given up after {self._tries} tries", error) from None
        log.info("event=registry_again reason=%r wait_s=%.2f", str(error), wait_s)
        self._waited_s += wait_s
        await self._pace.wait(wait_s)
