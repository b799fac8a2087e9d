"""Questions that go side by side: all their answers, or the first error; none is left running.

No TaskGroup: of one that is cancelled as a task of it fails only the failure is told, and whoever tries again would not
end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Read = TypeVar("Read")


async def together(asked: Sequence[Coroutine[Any, Any, Read]]) -> list[Read]:
    """See the module."""
    running = [asyncio.ensure_future(each) for each in asked]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
