"""Work that goes on in a thread is waited for, whatever happens meanwhile: it uses what its owner would close. I/O."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def wait_until_done(work: asyncio.Future[T]) -> None:
    """Returns when it has ended; its error, if it has one, counts as looked at.

    Raises CancelledError only then, where it was cancelled meanwhile, however often.
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
