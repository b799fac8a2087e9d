"""A list-and-watch cache of one API collection. I/O.

A watch that ends or is silent for too long resumes from the last version. If that version is too old (410), or the
watch does not deliver an event that we know of (`expect`, `suspect`), the whole collection is read again. Changes are
derived by comparing states, so none is missed during an interruption: an object that disappeared is reported as
deleted, and late or repeated events are ignored. `read` returns the facts to keep of each object. An unreadable object
is logged once, keeps its last value, and does not affect the others (`unreadable` of the Api). The same holds for an
object for which the callback raises an exception; it is reported again after 5 s, 10 s, ... 5 minutes.

`WatchHealth` logs a failure once for each change of its reason, and the recovery, in lines without address, token or
message of the server. It does not log a single failure, nor that the kind of an optional collection is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from autoscaler.exception_handling import describe_error, reraise_memory_error
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.unreadable_objects import Unreadable

FORBIDDEN, ABSENT = 403, 404
BREAKS = 2
"""Consecutive failures without a response before they are logged: single failures are normal."""

_log = logging.getLogger("pilotlight.autoscaler.watch")


class WatchHealth:
    """The health of one watched collection. An `optional` one counts as empty while it cannot be read."""

    def __init__(self, path: str, *, optional: bool) -> None:
        self._path = path
        self._optional = optional
        self._logged = ""
        self._breaks = 0

    def broke(self, error: ApiError | UnreachableError) -> bool:
        """Record a failure. Returns whether the collection counts as empty if it was never read."""
        if isinstance(error, UnreachableError):
            self._breaks += 1
            if self._breaks >= BREAKS:
                self._log_change("the API server does not answer")
            return False
        if error.status == FORBIDDEN:
            left = "it counts as empty" if self._optional else "nothing starts before it can be read"
            self._log_change(f"403 Forbidden: {left}; `pilotlight doctor` reports the missing permission")
        elif error.status != EXPIRED and not (self._optional and error.status == ABSENT):
            self._log_change(f"{error.status} {error.reason}")
        return self._optional and error.status in (FORBIDDEN, ABSENT)

    def is_heard(self) -> None:
        """Record that the watch delivered something."""
        self._breaks = 0
        if self._logged:
            _log.warning("event=watch_recovered path=%s", self._path)
            self._logged = ""

    def _log_change(self, what: str) -> None:
        if what != self._logged:
            _log.warning("event=watch_failed path=%s error=%s", self._path, what)
            self._logged = what


T = TypeVar("T")

WATCH_S = (290.0, 350.0)
"""The server ends a watch after a random time in this range, so that watches do not reconnect simultaneously."""
RETRY_S, RETRY_S_MAX = 0.2, 10.0
LASTED_S = 1.0
"""A watch that ends sooner without any event counts as a failure: the next one is opened after a pause."""
FAULT_RETRY_S, FAULT_RETRY_S_MAX = 5.0, 300.0
"""Until an object is reported again for which the callback raised an exception; doubled each time."""
SUSPECT_S = 5.0
"""A known change must be received within this time; otherwise the watch is no longer trusted."""
LIST_SILENT_S_MAX = 10.0
"""Maximum silence of a streamed list. Together with SUSPECT_S, it ensures that all objects are read again within 20 s
of a suspicion."""
NEVER = 1 << 63
"""A version that no watch reaches."""
VERSION_DIGITS_MAX = 20
"""Digits of a 64-bit number."""
EXPIRED = 410
GONE_MAX = 10_000
"""Number of deleted objects whose versions are remembered, so that a late event does not restore one."""
INITIAL_END = "k8s.io/initial-events-end"
STREAMING_LISTS_REFUSED = frozenset((400, 422))
"""Status of a server without streaming lists (before 1.32, or disabled)."""


class ObjectKey(NamedTuple):
    """Identifies an object of a collection."""

    namespace: str
    name: str


class Change(NamedTuple, Generic[T]):
    """The old and new object of a key; None: it does not exist."""

    key: ObjectKey
    old: T | None
    new: T | None


class Failed(NamedTuple, Generic[T]):
    """An object for which the callback raised an exception."""

    seen: T | None
    """The object that is to be reported; None: it was deleted."""
    wait_s: float
    due_s: float


class SuspicionError(Exception):
    """The watch is connected but does not show a known change."""


class Watched(Generic[T]):
    """One watched collection. `read` returns the facts to keep of an object, or None to ignore it. An `optional`
    collection that we may not read, or that the server does not have, counts as listed and empty, and is retried.
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
        """Last version of each object, also of deleted ones: older events are late."""
        self._of = ("", "")
        """API version and kind of the objects, from the last list."""
        self._streams = True
        """Whether the server supports streaming lists."""
        self._heard = False
        """Whether the current watch has delivered an event."""
        self._expected = 0
        self._due_s: float | None = None
        """When the collection is read again, unless the watch has reached `_expected`."""
        self._patience: asyncio.Timeout | None = None
        self.items: dict[ObjectKey, T] = {}
        self.synced = asyncio.Event()
        """Set once all existing objects have been reported."""
        self.trouble = ""
        """Why the watch fails now; empty: no problem."""
        self.fault = ""
        """The last exception that was caught; empty: all objects have been reported since."""
        self._failed: dict[ObjectKey, Failed[T]] = {}
        self._failed_changed = asyncio.Event()
        self.gap = False
        """The changes being reported were found by a full read, so the last states of deleted objects are unknown."""

    async def run(self) -> None:
        """Watch until cancelled."""
        tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._retry_failed())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task  # raises its exception; neither returns
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._api.unreadable.forget(self)

    async def _retry_failed(self) -> None:
        """Report each failed object again when it is due."""
        while True:
            self._failed_changed.clear()
            try:
                async with asyncio.timeout_at(min((one.due_s for one in self._failed.values()), default=None)):
                    await self._failed_changed.wait()
            except TimeoutError:
                self._report_failed(asyncio.get_running_loop().time())

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
                if error.status == EXPIRED:
                    self._version = None
            except (UnreachableError, SuspicionError) as error:
                self.trouble = str(error)
                if isinstance(error, SuspicionError):
                    self._version = None
                else:
                    self.hearing.broke(error)
            except Exception as error:  # noqa: BLE001  any other exception is reported, and the list is read again
                reraise_memory_error(error)
                self.trouble = describe_error(error)
                self._set_fault(self.trouble)
                self._version = None
            if self._heard or loop.time() - began_s >= LASTED_S:
                wait_s = RETRY_S
                if not self.trouble:
                    continue  # the end of a stream is no error
            await asyncio.sleep(max(asked_s, wait_s) * random.uniform(0.5, 1) + asked_s / 2)  # noqa: S311  jitter needs no cryptographic randomness
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    def _set_fault(self, reason: str) -> None:
        if reason != self.fault:
            self.fault = reason
            self._api.unreadable.fault(f"watch {self._path}", reason)

    def expect(self, version: str) -> None:
        """Require the watch to reach this version (of one of our writes) within SUSPECT_S."""
        number = _number(version)
        if number > max(self._expected, _number(self._version or "")):
            self._expected = number
            self._start_suspicion()

    def suspect(self) -> None:
        """Read the collection again after SUSPECT_S, because another observation contradicts the watch."""
        self._expected = NEVER
        self._start_suspicion()

    async def refresh(self) -> None:
        """Return when all changes from before this call have been reported, even if the watch lags behind.
        Raises ApiError, UnreachableError.
        """
        missing = set(self.items)
        await self._list(missing)
        self._report_gone(missing)

    def replace(self, key: ObjectKey, new: T) -> None:
        """Replace the facts of an object, which were read again from the same version of it."""
        self._report([(key, new)])
        self._drop_failed(key)

    def _start_suspicion(self) -> None:
        if self._due_s is None:
            self._due_s = asyncio.get_running_loop().time() + SUSPECT_S
            if self._patience is not None:
                self._patience.reschedule(self._due_s)

    async def _begin(self) -> None:
        """Read all objects. Report known objects that no longer exist as deleted."""
        missing = set(self.items)
        self._versions = {}  # a list is authoritative, also after the server was restored from a backup
        if self._streams:
            try:
                self._version = await self._stream(missing)
            except ApiError as error:
                if error.status not in STREAMING_LISTS_REFUSED:
                    raise
                self._streams = False
        if not self._streams:
            self._version = await self._list(missing)
        self._report_gone(missing)
        for key in [key for key, one in self._failed.items() if one.seen is not None and key not in self._versions]:
            self._drop_failed(key)  # deleted before it could be reported
        self._api.unreadable.keep(self, self._versions)
        self._expected, self._due_s = 0, None
        if not self._failed:
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
        raise UnreachableError(f"watch {self._path}: it ended before all objects were listed")

    async def _list(self, missing: set[ObjectKey]) -> str:
        version = ""
        async for page in self._api.pages(self._path, self._query):
            version, self._of = page.version, page.of
            listed: list[Object | Unreadable] = [*page.items, *page.unreadable]
            for found in listed:
                self._see("MODIFIED", found, missing)
        return version

    async def _follow(self) -> None:
        """Process watch events until the stream ends. Raises SuspicionError."""
        limit_s = str(int(random.uniform(*WATCH_S)))  # noqa: S311  jitter needs no cryptographic randomness
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
            raise SuspicionError(
                f"watch {self._path}: it did not deliver in time a change that is known to exist"
            ) from None
        finally:
            self._patience = None

    def _reach(self, version: str) -> None:
        """Record that the watch has delivered everything up to this version."""
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
        if key not in self._versions:
            self._forget_gone()
        self._versions[key] = version
        if event == "DELETED":
            seen = None
        elif isinstance(found, Unreadable):
            self._api.unreadable.add(self, found, self._path)
            self._drop_failed(key)
            return
        else:
            try:
                seen = self._read(found)
            except Exception as error:  # noqa: BLE001  an exception of the reader must affect this object only
                reraise_memory_error(error)
                one = self._not_read(found, f"{type(error).__name__}: {error}")
                self._api.unreadable.add(self, one, self._path)
                self._drop_failed(key)
                return
        if self._report_contained(key, seen):
            self._api.unreadable.remove(self, *key)
        elif not isinstance(found, Unreadable):
            self._api.unreadable.add(self, self._not_read(found, self.fault), self._path)

    def _forget_gone(self) -> None:
        """Forget the versions of deleted objects once there are GONE_MAX of them."""
        unreadable = self._api.unreadable.names(self)
        if len(self._versions) >= len(self.items) + len(unreadable) + GONE_MAX:
            self._versions = {
                known: at for known, at in self._versions.items() if known in self.items or known in unreadable
            }

    def _not_read(self, found: Object, reason: str) -> Unreadable:
        """Describe an object whose JSON is valid but which its reader cannot read."""
        key, (api_version, kind) = _key_of(found), self._of
        return Unreadable(
            str(found.get("kind", kind)), *key, _version_of(found), reason, str(found.get("apiVersion", api_version)),
            str(found["metadata"].get("uid", "")),
        )  # fmt: skip

    def _report_gone(self, missing: set[ObjectKey]) -> None:
        self.gap = True
        try:
            self._report([(key, None) for key in missing])
        except Exception as error:  # noqa: BLE001  an exception of the callback must affect one object only
            reraise_memory_error(error)
            for key in missing:
                self._report_contained(key, None)
        finally:
            self.gap = False

    def _report_contained(self, key: ObjectKey, seen: T | None) -> bool:
        """Report one object. If the callback raises an exception, return False and report it again later."""
        try:
            self._report([(key, seen)])
        except Exception as error:  # noqa: BLE001  an exception of the callback must affect this object only
            reraise_memory_error(error)
            before = self._failed.get(key)
            wait_s = FAULT_RETRY_S if before is None else min(2 * before.wait_s, FAULT_RETRY_S_MAX)
            self._failed[key] = Failed(seen, wait_s, asyncio.get_running_loop().time() + wait_s)
            self._failed_changed.set()
            self._set_fault(describe_error(error))
            return False
        self._drop_failed(key)
        return True

    def _drop_failed(self, key: ObjectKey) -> None:
        """Do not report this object again: it was reported, or cannot be read any more."""
        if self._failed.pop(key, None) is not None and not self._failed:
            self._set_fault("")

    def _report_failed(self, now_s: float) -> None:
        """Report the failed objects again that are due."""
        for key, one in [*self._failed.items()]:
            if one.due_s <= now_s:
                self.gap = one.seen is None
                try:
                    if self._report_contained(key, one.seen):
                        self._api.unreadable.remove(self, *key)
                finally:
                    self.gap = False

    def _report(self, seen: list[tuple[ObjectKey, T | None]]) -> None:
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
    """The resourceVersion; empty if it cannot be read either."""
    return found.version if isinstance(found, Unreadable) else str(found["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """The version as a number; those of one collection rise (KEP-5504). 0: not a number, so it cannot be compared."""
    return int(version) if version.isdecimal() and len(version) <= VERSION_DIGITS_MAX else 0
