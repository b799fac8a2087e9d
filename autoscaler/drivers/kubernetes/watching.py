"""Follows one collection of an API server: what is there, then every change, for as long as it runs.

Owns the resuming: a watch that ends (they all do) goes on from the last version; one that is too old (410), or that has
been silent for SILENT_S_MAX, begins anew with everything. Promises: what is told is a level, so that nothing is missed
over any break: who vanished meanwhile is told as gone. Objects are read at this boundary into what their user needs;
nothing else of them is kept.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Generic, NamedTuple, TypeVar

from autoscaler.drivers.kubernetes.api import Api, ApiError, Object, UnreachableError

T = TypeVar("T")

WATCH_S = (290.0, 350.0)
"""The server ends a watch after so long, at random, so that not all come back at once."""
RETRY_S, RETRY_S_MAX = 0.2, 15.0
GONE = 410
INITIAL_END = "k8s.io/initial-events-end"
STREAMING_LISTS_REFUSED = frozenset((400, 422))
"""From a server that does not know them (before 1.32, or switched off)."""


class Key(NamedTuple):
    """Which object of a collection."""

    namespace: str
    name: str


class Change(NamedTuple, Generic[T]):
    """What a key's object was and is; None where there is none."""

    key: Key
    old: T | None
    new: T | None


class Watched(Generic[T]):
    """One collection. `read` makes of an object what is kept of it, None for what does not matter."""

    def __init__(
        self, api: Api, path: str, read: Callable[[Object], T | None], changed: Callable[[list[Change[T]]], None],
        **query: str,
    ) -> None:  # fmt: skip
        self._api = api
        self._path = path
        self._read = read
        self._changed = changed
        self._query = query
        self._version: str | None = None
        self._streams = True
        """The server streams lists."""
        self.items: dict[Key, T] = {}
        self.synced = asyncio.Event()
        """All that is there has been told once."""
        self.trouble = ""
        """Why nothing is heard now; empty while all is well."""

    async def run(self) -> None:
        """Until cancelled."""
        wait_s = RETRY_S
        while True:
            try:
                if self._version is None:
                    await self._begin()
                self.trouble = ""
                wait_s = RETRY_S
                await self._follow(self._version)
                continue  # the end of a stream is nothing special
            except ApiError as error:
                self.trouble = str(error)
                if error.status == GONE:
                    self._version = None
                    continue
            except UnreachableError as error:
                self.trouble = str(error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1))  # noqa: S311  not all at once, no secret
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    async def _begin(self) -> None:
        """Everything that is there. What was known and is not there any more is told as gone."""
        missing = set(self.items)
        if self._streams:
            try:
                self._version = await self._stream(missing)
            except ApiError as error:
                if error.status not in STREAMING_LISTS_REFUSED:
                    raise
                self._streams = False
        if not self._streams:
            self._version = await self._list(missing)
        self._tell([(key, None) for key in missing])
        self.synced.set()

    async def _stream(self, missing: set[Key]) -> str:
        watch = self._api.watch(self._path, None, {**self._query, "timeoutSeconds": "60"}, initial=True)
        async for event, found in watch:
            if event == "BOOKMARK":
                version = str(found["metadata"]["resourceVersion"])
                if found["metadata"].get("annotations", {}).get(INITIAL_END) == "true":
                    await _close(watch)
                    return version
                continue
            self._see(event, found, missing)
        raise UnreachableError(f"watch {self._path}: it ended before it had told everything")

    async def _list(self, missing: set[Key]) -> str:
        version = ""
        async for page in self._api.pages(self._path, self._query):
            version = str(page["metadata"]["resourceVersion"])
            for found in page["items"]:
                self._see("MODIFIED", found, missing)
        return version

    async def _follow(self, version: str | None) -> None:
        limit_s = str(int(random.uniform(*WATCH_S)))  # noqa: S311  as above
        async for event, found in self._api.watch(self._path, version, {**self._query, "timeoutSeconds": limit_s}):
            if event != "BOOKMARK":
                self._see(event, found, None)
            self._version = str(found["metadata"]["resourceVersion"])

    def _see(self, event: str, found: Object, missing: set[Key] | None) -> None:
        metadata = found["metadata"]
        key = Key(metadata.get("namespace", ""), metadata["name"])
        if missing is not None:
            missing.discard(key)
        self._tell([(key, None if event == "DELETED" else self._read(found))])

    def _tell(self, seen: list[tuple[Key, T | None]]) -> None:
        changes = list[Change[T]]()
        for key, new in seen:
            old = self.items.get(key)
            if new is None:
                self.items.pop(key, None)
            else:
                self.items[key] = new
            if old != new:
                changes.append(Change(key, old, new))
        if changes:
            self._changed(changes)


async def _close(watch: AsyncIterator[object]) -> None:
    """Ends a stream that is not wanted any more."""
    close = getattr(watch, "aclose", None)
    if close is not None:
        await close()
