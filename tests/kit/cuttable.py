"""A way for connections that a test can cut and close: bytes pass both ways as they come. Owns its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Cuttable:
    """To wherever `reach` connects. A server of asyncio begins with `connected`."""

    def __init__(self, reach: Callable[[], Awaitable[Connection]]) -> None:
        self._reach = reach
        self._open: set[asyncio.StreamWriter] = set()
        self.closed = False
        """New connections are refused."""
        self.cuts = 0
        """How often something that was open was cut."""

    def cut(self) -> None:
        """All that is open."""
        self.cuts += bool(self._open)
        for one in list(self._open):
            one.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one connection on until it ends."""
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
