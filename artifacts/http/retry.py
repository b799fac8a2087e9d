"""Whether and when a failed request to a registry is repeated, and the clock that the pauses use.

`retry_after_s` and `wait_s` decide: they take times and the random draw as arguments. `Retry-After` (RFC 9110, 10.2.3)
is respected up to a limit. Tests pass a clock of their own, so that none of them waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

from artifacts.errors import BrokenError, UnreachableError

STATUSES = frozenset({408, 429, 500, 502, 503, 504})
TRIES_MAX = 6
"""In a row without a byte of progress."""
FIRST_S, LONGEST_S = 0.25, 8.0
RETRY_AFTER_S_MAX = 60.0
"""A registry that says one day is asked again after this, until the time is used up."""
WAIT_S_MAX = 180.0
"""All waits of one request together."""


def retry_after_s(header: str | None, unix_s: float) -> float | None:
    """How long the header asks to wait, in seconds or until a date; None: it says nothing that can be read."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 10 else RETRY_AFTER_S_MAX
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - unix_s)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def wait_s(tries: int, waited_s: float, asked_s: float | None, draw: float) -> float | None:
    """Before the next try, after `tries` in a row; None: it is enough. `draw` is within 0 and 1."""
    if tries >= TRIES_MAX:
        return None
    backoff_s = min(LONGEST_S, FIRST_S * 2 ** (tries - 1))
    if asked_s is None:
        wait = backoff_s * (0.5 + draw / 2)
    else:
        wait = max(min(asked_s, RETRY_AFTER_S_MAX), FIRST_S) + backoff_s * draw / 2  # not before, and not all together
    return wait if waited_s + wait <= WAIT_S_MAX else None


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
        """Seconds before the next try; None: give up (`wait_s`)."""
        return wait_s(tries, waited_s, asked_s, self.draw())

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
        asked_s = retry_after_s(error.retry_after, self._pace.unix_s())
        wait_s = self._pace.again_s(self._tries, self._waited_s, asked_s)
        if wait_s is None:
            asks = f", and asks to wait {asked_s:.0f} s" if asked_s is not None else ""
            raise UnreachableError(f"{error}{asks}; given up after {self._tries} tries", error) from None
        log.info("event=registry_again reason=%r wait_s=%.2f", str(error), wait_s)
        self._waited_s += wait_s
        await self._pace.wait(wait_s)
