"""A proxy whose connections a test can cut and refuse. It passes bytes in both directions. Owns its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Cuttable:
    """A proxy to the address that `reach` connects to. Use `connected` as the callback of an asyncio server."""

    def __init__(self, reach: Callable[[], Awaitable[Connection]]) -> None:
        self._reach = reach
        self._open: set[asyncio.StreamWriter] = set()
        self.closed = False
        """Whether new connections are refused."""
        self.cuts = 0
        """Number of cuts that closed an open connection."""

    def cut(self) -> None:
        """Closes all open connections."""
        self.cuts += bool(self._open)
        for one in list(self._open):
            one.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection until it ends."""
        if self.closed:
            writer.transport.abort()
            return
        there, thither = await self._reach()
        both = {writer, thither}
        self._open |= both
        await asyncio.gather(_pass(reader, thither), _pass(there, writer))
        self._open -= both


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()
