"""Whose turn it is to order on a node, where several Providers of one process attach Devices to it: one at a time. I/O.

Owns that order, and who has ordered where. How many Devices a node can have bounds all together, of whatever model, and
no write of one is refused by an API server for what another wrote; so each looks only when the one before has written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Of all nodes, for all such Providers of a process."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[asyncio.Lock, set[str]]] = {}

    @asynccontextmanager
    async def at(self, node: str, provider: str) -> AsyncIterator[bool]:
        """It is that provider's, until it is left. Yields whether no other has ever had one there: then nothing that it
        cannot see yet was written.
        """
        lock, had = self._nodes.setdefault(node, (asyncio.Lock(), set()))
        async with lock:
            had.add(provider)
            yield had == {provider}
