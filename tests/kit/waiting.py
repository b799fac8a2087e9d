"""Waits for what can be observed, with a deadline for what hangs: no test sleeps for logic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LOOK_EVERY_S = 0.01
WITHIN_S = 90.0
"""It finds what hangs, and proves no figure: a machine that is busy with other things may take its time."""

T = TypeVar("T")


async def until(what: str, look: Callable[[], T], within_s: float = WITHIN_S, every_s: float = LOOK_EVERY_S) -> T:
    """Looks until it finds something true and gives it; fails after `within_s`, saying what was waited for."""
    end_s = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {found!r}")
        await asyncio.sleep(every_s)
