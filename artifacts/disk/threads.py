"""Waits for work in a thread to end, even under cancellation, since it uses resources its owner would close. I/O."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def wait_until_done(work: asyncio.Future[T]) -> None:
    """Return when the work has ended; its exception, if any, is marked as retrieved.

    If the caller is cancelled meanwhile, however often, CancelledError is raised only after the work has ended.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if not work.cancelled():
        work.exception()
    if cancelled:
        raise asyncio.CancelledError
