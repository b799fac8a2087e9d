"""Waits for observable conditions, with a timeout for what hangs: no test sleeps to synchronize."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LOOK_EVERY_S = 0.01
WITHIN_S = 90.0
"""Detects hangs and verifies no performance figure: a busy machine may be slow."""

T = TypeVar("T")


async def until(what: str, look: Callable[[], T], within_s: float = WITHIN_S, every_s: float = LOOK_EVERY_S) -> T:
    """Polls until `look` returns a true value and returns it; fails after `within_s` with `what`."""
    end_s = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {found!r}")
        await asyncio.sleep(every_s)
