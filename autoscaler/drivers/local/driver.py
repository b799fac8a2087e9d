"""Weights that an engine needs and that are not on this node yet: waited for, or not wanted any more. Async, no I/O.

Owns the race between the two. Promises: what nobody waits for any more is cancelled, and let go if it came all the
same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from autoscaler.drivers.driver import Weights
from autoscaler.spec.model import Model


def nothing_to_bring(_model: Model, _told: Callable[[str], None]) -> None:
    """A Supply of a node where all weights lie."""


async def bring(coming: Awaitable[Weights], over: asyncio.Event) -> Weights | None:
    """The weights; None: it was over before. Raises what `coming` does."""
    getting, ending = asyncio.ensure_future(coming), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return getting.result()
        await _let_go(getting)
    except asyncio.CancelledError:
        await _let_go(getting)
        raise
    finally:
        ending.cancel()
    return None


async def _let_go(getting: asyncio.Future[Weights]) -> None:
    getting.cancel()
    await asyncio.wait({getting})
    if not getting.cancelled() and getting.exception() is None:
        getting.result().close()
