"""Watches collections whose kind the cluster may not have yet; each watch starts once its kind exists. I/O.

Changes are reported once all collections have been listed; a missing kind counts as an empty collection. Changes within
TOGETHER_S are reported together. If a collection that is not optional cannot be read for lack of permission, nothing is
reported, and its `WatchHealth` logs the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.watch import ABSENT, Change, Watched

TOGETHER_S = 0.02
"""Changes within this time are reported together."""
ABSENT_S = 10.0
"""Interval at which a missing kind is checked for."""
RETRY_S = 1.0

T = TypeVar("T")


def list_collection_paths(api_version: str, plural: str, namespaces: Sequence[str] | None) -> list[str]:
    """The collection paths of a kind: one per namespace, or one for the whole cluster (None)."""
    root = f"/apis/{api_version}"
    within = [root] if namespaces is None else [f"{root}/namespaces/{one}" for one in namespaces]
    return [f"{one}/{plural}" for one in within]


def created_unix_s(metadata: Mapping[str, str]) -> int:
    """The object's creation time, in Unix seconds."""
    return int(datetime.fromisoformat(metadata["creationTimestamp"]).timestamp())


class Kinds:
    """Watches collections: call `add` for each, then `run`. `put` reports the current state and must not block."""

    def __init__(self, api: Api, put: Callable[[], None]) -> None:
        self._api = api
        self._put = put
        self._news = asyncio.Event()
        self._watches: dict[str, Watched[Any]] = {}  # each has its own item type, which is irrelevant here
        self._absent: set[str] = set()
        """Paths of collections whose kind the cluster does not have."""
        self._whole: set[str] = set()
        """Paths of collections that have been reported completely."""

    def add(
        self, path: str, read: Callable[[Object], T | None],
        changed: Callable[[list[Change[T]]], None] = lambda _: None, *, optional: bool = False,
    ) -> Watched[T]:  # fmt: skip
        """Add a collection. `changed` is called with each change at once, before `put`; `optional` as in Watched."""

        def on_change(changes: list[Change[T]]) -> None:
            changed(changes)
            self._news.set()

        watched = Watched(self._api, path, read, on_change, optional=optional)
        self._watches[path] = watched
        return watched

    async def run(self) -> None:
        """Watch all collections until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for path, watched in self._watches.items():
                tasks.create_task(self._follow(path, watched))
                tasks.create_task(self._report_synced(path, watched.synced))
            tasks.create_task(self._put_often())

    async def _follow(self, path: str, watched: Watched[Any]) -> None:
        """Wait until the kind exists, then watch it."""
        pause_s = await self._is_readable(path, watched)
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self._is_readable(path, watched)
        await watched.run()

    async def _is_readable(self, path: str, watched: Watched[Any]) -> float | None:
        """None if the collection can be read, else the seconds until the next check."""
        try:
            await self._api.check(path)
        except ApiError as error:
            if not watched.hearing.broke(error) and error.status != ABSENT:
                return RETRY_S
            self._absent.add(path)
            self._news.set()
            return ABSENT_S
        except UnreachableError as error:
            watched.hearing.broke(error)
            return RETRY_S
        self._absent.discard(path)
        return None

    async def _report_synced(self, path: str, synced: asyncio.Event) -> None:
        await synced.wait()
        if path not in self._whole:  # unless its complete list was reported already
            self._news.set()

    async def _put_often(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER_S)
            self._news.clear()
            if all(path in self._absent or watched.synced.is_set() for path, watched in self._watches.items()):
                self._whole.update(path for path, watched in self._watches.items() if watched.synced.is_set())
                try:
                    self._put()
                except BaseException:
                    self._news.set()  # retry after the restart
                    raise
