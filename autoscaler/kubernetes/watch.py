"""Follows one collection of an API server: what is there, then every change, for as long as it runs.

Owns the resuming: a watch that ends (they all do) goes on from the last version; one that is too old (410), that has
been silent for SILENT_S_MAX, or that does not show what we know to have happened (`expect`, `suspect`), begins anew
with everything. Promises: what is told is a level, so that nothing is missed over any break: who vanished meanwhile is
told as gone, and what comes late or twice is not told. `watch_health` logs why nothing is heard. Objects are read at
this boundary into what their user needs; nothing else of them is kept.
An object that cannot be read is logged once and stays as it was; it does not affect the others (`unreadable` of the
Api).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from autoscaler.faults import describe_error, reraise_memory_error
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.unreadable import Unreadable
from autoscaler.kubernetes.watch_health import WatchHealth

T = TypeVar("T")

WATCH_S = (290.0, 350.0)
"""The server ends a watch after so long, at random, so that not all come back at once."""
RETRY_S, RETRY_S_MAX = 0.2, 10.0
LASTED_S = 1.0
"""A watch that ends sooner, and told nothing, is trouble: the next is not opened at once."""
SUSPECT_S = 5.0
"""What we know to have happened must be heard of within that time; else the watch is not believed any more."""
LIST_SILENT_S_MAX = 10.0
"""Of a list that is streamed. With SUSPECT_S: everything is read anew within 20 s of a suspicion."""
NEVER = 1 << 63
"""A version that no watch gets to."""
VERSION_DIGITS_MAX = 20
"""Of 64 bits."""
GONE = 410
GONE_MAX = 10_000
"""Deleted objects whose versions are remembered, so that what comes late brings none back."""
INITIAL_END = "k8s.io/initial-events-end"
STREAMING_LISTS_REFUSED = frozenset((400, 422))
"""From a server that does not know them (before 1.32, or switched off)."""


class ObjectKey(NamedTuple):
    """Which object of a collection."""

    namespace: str
    name: str


class Change(NamedTuple, Generic[T]):
    """What a key's object was and is; None where there is none."""

    key: ObjectKey
    old: T | None
    new: T | None


class SuspicionError(Exception):
    """The watch runs and does not show what has happened."""


class Watched(Generic[T]):
    """One collection. `read` makes of an object what is kept of it, None for what does not matter. An `optional` one
    that we may not read, or that the server does not have, counts as listed, and is asked for again.
    """

    def __init__(
        self, api: Api, path: str, read: Callable[[Object], T | None], changed: Callable[[list[Change[T]]], None],
        *, optional: bool = False, **query: str,
    ) -> None:  # fmt: skip
        self._api = api
        self._path = path
        self._read = read
        self._changed = changed
        self._query = query
        self.hearing = WatchHealth(path, optional=optional)
        self._version: str | None = None
        self._versions: dict[ObjectKey, int] = {}
        """Of each object, also of those that are gone: what is older comes late."""
        self._of = ("", "")
        """API version and kind of the objects, as the last list named them."""
        self._streams = True
        """The server streams lists."""
        self._heard = False
        """The watch that runs told something."""
        self._expected = 0
        self._due_s: float | None = None
        """When it is no longer believed, unless it gets as far as `_expected`."""
        self._patience: asyncio.Timeout | None = None
        self.items: dict[ObjectKey, T] = {}
        self.synced = asyncio.Event()
        """All that is there has been told once."""
        self.trouble = ""
        """Why nothing is heard now; empty while all is well."""
        self.fault = ""
        """The contained exception of the callback; empty: none since everything was last read."""
        self.gap = False
        """What is told now came to be unseen: everything was read anew. How a thing that is gone ended is not known."""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._run()
        finally:
            self._api.unreadable.forget(self)

    async def _run(self) -> None:
        loop, wait_s = asyncio.get_running_loop(), RETRY_S
        while True:
            began_s, asked_s, self._heard = loop.time(), 0.0, False
            try:
                if self._version is None:
                    await self._begin()
                self.trouble = ""
                await self._follow()
            except ApiError as error:
                self.trouble, asked_s = str(error), error.retry_after_s or 0.0
                if self.hearing.broke(error):
                    self.synced.set()
                if error.status == GONE:
                    self._version = None
            except (UnreachableError, SuspicionError) as error:
                self.trouble = str(error)
                if isinstance(error, SuspicionError):
                    self._version = None
                else:
                    self.hearing.broke(error)
            except Exception as error:  # noqa: BLE001  callbacks may raise anything; it is reported, and the list is read again
                reraise_memory_error(error)
                self.trouble = describe_error(error)
                self._set_fault(self.trouble)
                self._version = None
            if self._heard or loop.time() - began_s >= LASTED_S:
                wait_s = RETRY_S
                if not self.trouble:
                    continue  # the end of a stream is nothing special
            await asyncio.sleep(max(asked_s, wait_s) * random.uniform(0.5, 1) + asked_s / 2)  # noqa: S311  no secret
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    def _set_fault(self, reason: str) -> None:
        if reason != self.fault:
            self.fault = reason
            self._api.unreadable.fault(f"watch {self._path}", reason)

    def expect(self, version: str) -> None:
        """The collection has got to this version (of a write of ours): it must be heard of soon."""
        number = _number(version)
        if number > max(self._expected, _number(self._version or "")):
            self._expected = number
            self._doubt()

    def suspect(self) -> None:
        """Something contradicts what the watch says: everything is read anew soon, whatever is heard until then."""
        self._expected = NEVER
        self._doubt()

    async def refresh(self) -> None:
        """Returns when all that happened before this call has been told, however far behind the watch is.

        Raises ApiError, UnreachableError.
        """
        missing = set(self.items)
        await self._list(missing)
        self._tell_gone(missing)

    def _doubt(self) -> None:
        if self._due_s is None:
            self._due_s = asyncio.get_running_loop().time() + SUSPECT_S
            if self._patience is not None:
                self._patience.reschedule(self._due_s)

    async def _begin(self) -> None:
        """Everything that is there. What was known and is not there any more is told as gone."""
        missing = set(self.items)
        self._versions = {}  # a list is the truth, also after the server's own past was restored
        if self._streams:
            try:
                self._version = await self._stream(missing)
            except ApiError as error:
                if error.status not in STREAMING_LISTS_REFUSED:
                    raise
                self._streams = False
        if not self._streams:
            self._version = await self._list(missing)
        self._tell_gone(missing)
        self._api.unreadable.keep(self, self._versions)
        self._expected, self._due_s = 0, None
        self._set_fault("")
        self.hearing.is_heard()
        self.synced.set()

    async def _stream(self, missing: set[ObjectKey]) -> str:
        asked = {**self._query, "timeoutSeconds": "60"}
        watch = self._api.watch(self._path, None, asked, initial=True, silent_s=LIST_SILENT_S_MAX)
        async with contextlib.aclosing(watch) as events:
            async for event, found in events:
                if isinstance(found, Unreadable) or event != "BOOKMARK":
                    self._see(event, found, missing)
                elif (found["metadata"].get("annotations") or {}).get(INITIAL_END) == "true":
                    return _version_of(found)
        raise UnreachableError(f"watch {self._path}: it ended before it had told everything")

    async def _list(self, missing: set[ObjectKey]) -> str:
        version = ""
        async for page in self._api.pages(self._path, self._query):
            version, self._of = page.version, page.of
            listed: list[Object | Unreadable] = [*page.items, *page.unreadable]
            for found in listed:
                self._see("MODIFIED", found, missing)
        return version

    async def _follow(self) -> None:
        """Until the stream ends. Raises SuspicionError."""
        limit_s = str(int(random.uniform(*WATCH_S)))  # noqa: S311  no secret
        try:
            query = {**self._query, "timeoutSeconds": limit_s}
            watch = contextlib.aclosing(self._api.watch(self._path, self._version, query))
            async with asyncio.timeout_at(self._due_s) as self._patience, watch as events:
                async for event, found in events:
                    self._heard = True
                    self.hearing.is_heard()
                    if event != "BOOKMARK":
                        self._see(event, found, None)
                    self._reach(_version_of(found))
        except TimeoutError:
            raise SuspicionError(f"watch {self._path}: it does not show what has happened") from None
        finally:
            self._patience = None

    def _reach(self, version: str) -> None:
        """The watch has told everything up to this version."""
        if self._version is None or _number(version) >= _number(self._version):
            self._version = version
        if self._due_s is not None and _number(version) >= self._expected:
            self._due_s = None
            if self._patience is not None and not self._patience.expired():
                self._patience.reschedule(None)

    def _see(self, event: str, found: Object | Unreadable, missing: set[ObjectKey] | None) -> None:
        key, version = _key_of(found), _number(_version_of(found))
        if missing is not None:
            missing.discard(key)
        if version and version < self._versions.get(key, 0):
            return
        if key not in self._versions and len(self._versions) >= len(self.items) + GONE_MAX:
            self._versions = {known: at for known, at in self._versions.items() if known in self.items}
            self._api.unreadable.keep(self, self._versions)
        self._versions[key] = version
        if event == "DELETED":
            seen = None
        elif isinstance(found, Unreadable):
            self._api.unreadable.add(self, found, self._path)
            return
        else:
            try:
                seen = self._read(found)
            except Exception as error:  # noqa: BLE001  each kind has its own reader; its fault must affect this object only
                reraise_memory_error(error)
                one = self._not_read(found, f"{type(error).__name__}: {error}")
                self._api.unreadable.add(self, one, self._path)
                return
        self._api.unreadable.remove(self, *key)
        self._tell([(key, seen)])

    def _not_read(self, found: Object, reason: str) -> Unreadable:
        """An object that JSON can be decoded to and its reader cannot read."""
        key, (api_version, kind) = _key_of(found), self._of
        return Unreadable(
            str(found.get("kind", kind)), *key, _version_of(found), reason, str(found.get("apiVersion", api_version)),
            str(found["metadata"].get("uid", "")),
        )  # fmt: skip

    def _tell_gone(self, missing: set[ObjectKey]) -> None:
        self.gap = True
        try:
            self._tell([(key, None) for key in missing])
        finally:
            self.gap = False

    def _tell(self, seen: list[tuple[ObjectKey, T | None]]) -> None:
        changes = list[Change[T]]()
        for key, new in seen:
            old = self.items.get(key)
            if new is None:
                self.items.pop(key, None)
            else:
                self.items[key] = new
            if old != new:
                changes.append(Change(key, old, new))
        if not changes:
            return
        try:
            self._changed(changes)
        except BaseException:  # not reported: the next list reports it again
            for key, old, _ in changes:
                if old is None:
                    self.items.pop(key, None)
                else:
                    self.items[key] = old
            raise


def _key_of(found: Object | Unreadable) -> ObjectKey:
    if isinstance(found, Unreadable):
        return ObjectKey(found.namespace, found.name)
    return ObjectKey(found["metadata"].get("namespace", ""), found["metadata"].get("name", ""))


def _version_of(found: Object | Unreadable) -> str:
    """Its resourceVersion; empty if not even that can be read."""
    return found.version if isinstance(found, Unreadable) else str(found["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """Versions of one collection rise (KEP-5504); 0: this server's are no numbers, so nothing is told by them."""
    return int(version) if version.isdecimal() and len(version) <= VERSION_DIGITS_MAX else 0
