"""A fake API server: lists return the true objects, watches return the events that a test specifies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from autoscaler.kubernetes import watch as watching
from autoscaler.kubernetes.api import ApiError, Object
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.unreadable_objects import UnreadableObjects

Event = tuple[str, Object]


def bookmark(version: int, *, end: bool = False) -> Event:
    """A bookmark event of a watch, or of a streamed list if `end` is set."""
    notes = {watching.INITIAL_END: "true"} if end else {}
    return "BOOKMARK", {"metadata": {"resourceVersion": str(version), "annotations": notes}}


class Server:
    """Lists return `truth`; the next watch sends `stream`, then hangs (or raises `ends`). Writes change nothing."""

    def __init__(self) -> None:
        self.truth: dict[str, Object] = {}
        self.version = 1
        self.stream: list[Event] = []
        self.ends: Callable[[], None] | None = None
        self.lists = 0
        self.streams = True
        self.idle = asyncio.Event()
        """Set once the whole stream has been sent."""
        self.unreadable = UnreadableObjects()

    async def check(self, path: str) -> None:
        """As `Api.check`: the list is permitted."""

    async def get(self, path: str, **query: str) -> Object:
        """As `Api.get`, for objects that are not watched: there is none."""
        del path, query
        return {"items": []}

    async def watch(
        self, path: str, version: str | None, query: Mapping[str, str], *, initial: bool = False, silent_s: float = 0
    ) -> AsyncIterator[Event]:
        """As `Api.watch`."""
        del path, version, query, silent_s
        if initial:
            if not self.streams:
                raise ApiError(422, "Invalid", "sendInitialEvents is forbidden")
            self.lists += 1
            for found in list(self.truth.values()):
                yield "ADDED", found
            yield bookmark(self.version, end=True)
            return
        while self.stream:
            yield self.stream.pop(0)
        self.idle.set()
        if self.ends is not None:
            self.ends()
            return
        await asyncio.Event().wait()

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        """As `Api.pages`, with one object on each."""
        del path, query
        self.lists += 1
        for found in list(self.truth.values()):
            yield ListPage(str(self.version), "", [found], [])
        yield ListPage(str(self.version), "", [], [])

    @staticmethod
    def unix_s() -> float:
        """As `Api.unix_s`."""
        return 0.0

    async def delete(self, path: str, **of: object) -> Object:
        """As `Api.delete`: reports success."""
        del path, of
        return {}
