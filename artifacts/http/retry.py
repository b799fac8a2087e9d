"""Retry policy of registry requests, and the clock that the pauses use.

`retry_after_s` and `wait_s` decide: they take times and the random draw as arguments. `Retry-After` (RFC 9110, 10.2.3)
is respected up to a limit. Tests pass their own clock, so that none of them waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

from artifacts.registry_errors import BrokenError, UnreachableError

STATUSES = frozenset({408, 429, 500, 502, 503, 504})
TRIES_MAX = 6
"""Maximum consecutive attempts without a byte of progress."""
FIRST_S, LONGEST_S = 0.25, 8.0
RETRY_AFTER_S_MAX = 60.0
"""Cap on Retry-After: a registry that demands a day is retried after this, until the total wait is used up."""
WAIT_S_MAX = 180.0
"""Maximum total wait of one request."""


def retry_after_s(header: str | None, unix_s: float) -> float | None:
    """Parse Retry-After (seconds or a date) into seconds; None if it is missing or invalid."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 10 else RETRY_AFTER_S_MAX
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - unix_s)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def wait_s(tries: int, waited_s: float, asked_s: float | None, draw: float) -> float | None:
    """Return the wait after `tries` consecutive attempts; None to give up. `draw` is between 0 and 1."""
    if tries >= TRIES_MAX:
        return None
    backoff_s = min(LONGEST_S, FIRST_S * 2 ** (tries - 1))
    if asked_s is None:
        wait = backoff_s * (0.5 + draw / 2)
    else:
        wait = (
            max(min(asked_s, RETRY_AFTER_S_MAX), FIRST_S) + backoff_s * draw / 2
        )  # not before Retry-After, and with jitter
    return wait if waited_s + wait <= WAIT_S_MAX else None


log = logging.getLogger("pilotlight.artifacts.http")


class Pace:
    """The system clock and random source."""

    def monotonic_s(self) -> float:
        """Return the clock for durations."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return the clock for absolute dates."""
        return time.time()

    def draw(self) -> float:
        """Return a random number between 0 and 1."""
        return random.random()  # noqa: S311 -- spreads retries, not used for secrets

    def again_s(self, tries: int, waited_s: float, asked_s: float | None) -> float | None:
        """Return the seconds before the next attempt; None to give up (see `wait_s`)."""
        return wait_s(tries, waited_s, asked_s, self.draw())

    async def wait(self, wait_s: float) -> None:
        """Sleep for `wait_s` seconds."""
        await asyncio.sleep(wait_s)


class Once(Pace):
    """Wraps a clock and permits no retries, for callers that have other sources to try."""

    def __init__(self, of: Pace) -> None:
        self._of = of

    def monotonic_s(self) -> float:
        """See `Pace`."""
        return self._of.monotonic_s()

    def unix_s(self) -> float:
        """See `Pace`."""
        return self._of.unix_s()

    def again_s(self, tries: int, waited_s: float, asked_s: float | None) -> float | None:
        """Return None: there is no second attempt."""
        del tries, waited_s, asked_s
        return None


class Tries:
    """The attempts of one request to one registry."""

    def __init__(self, pace: Pace, on_failure: Callable[[BrokenError], None] | None = None) -> None:
        """`on_failure` is called with each failed attempt."""
        self._pace = pace
        self._on_failure = on_failure
        self._tries = 0
        self._waited_s = 0.0

    def progressed(self) -> None:
        """Reset the counters after substantial progress."""
        self._tries, self._waited_s = 0, 0.0

    async def again(self, error: BrokenError) -> None:
        """Return when the next attempt may start. Raises UnreachableError when the limit is reached."""
        self._tries += 1
        if self._on_failure is not None:
            self._on_failure(error)
        asked_s = retry_after_s(error.retry_after, self._pace.unix_s())
        wait_s = self._pace.again_s(self._tries, self._waited_s, asked_s)
        if wait_s is None:
            asks = f", and asks to wait {asked_s:.0f} s" if asked_s is not None else ""
            raise UnreachableError(f"{error}{asks}; given up after {self._tries} tries", error) from None
        log.info("event=registry_retry wait_s=%.2f reason=%r", wait_s, str(error))
        self._waited_s += wait_s
        await self._pace.wait(wait_s)
