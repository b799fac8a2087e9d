"""Waits for a thread's work, even if cancelled, so that no resource is closed while the work uses it. I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
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


async def run_in_thread(
    work: Callable[[], T], dispose: Callable[[T], None] | None = None, interrupt: Callable[[], None] | None = None
) -> T:
    """Run work in a thread; on cancellation interrupt it, wait for its end and dispose of the result."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if interrupt is not None:
            interrupt()
        with suppress(asyncio.CancelledError):
            await wait_until_done(task)
        if task.exception() is None and dispose is not None:
            dispose(task.result())
        raise
