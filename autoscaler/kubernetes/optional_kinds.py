"""Watches collections of kinds that a cluster may not have yet, each from when its kind is there. I/O; decides nothing.

Owns that waiting, and when what there is may be told: once all of it has been listed, a kind that is not there counting
as one of which there is nothing; many changes at once are told as one. Where a kind is not optional, one that may not
be read holds up the telling; the log says so (`hearing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.kubernetes.watch_health import ABSENT

TOGETHER_S = 0.02
"""What changes within it is told as one."""
ABSENT_S = 10.0
"""A kind that the cluster does not have is looked for this often."""
RETRY_S = 1.0

T = TypeVar("T")


def list_collection_paths(api_version: str, plural: str, namespaces: Sequence[str] | None) -> list[str]:
    """Paths of all objects of a kind: one for each namespace, or one for the whole cluster (None)."""
    root = f"/apis/{api_version}"
    within = [root] if namespaces is None else [f"{root}/namespaces/{one}" for one in namespaces]
    return [f"{one}/{plural}" for one in within]


def created_unix_s(metadata: Mapping[str, str]) -> int:
    """When an object was created."""
    return int(datetime.fromisoformat(metadata["creationTimestamp"]).timestamp())


class Kinds:
    """Add collections, then run. `put` is to tell what there is now; it is called in the loop and does not block."""

    def __init__(self, api: Api, put: Callable[[], None]) -> None:
        self._api = api
        self._put = put
        self._news = asyncio.Event()
        self._watches: dict[str, Watched[Any]] = {}  # each of a type of its own, which does not matter here
        self._absent: set[str] = set()
        """Collections whose kind the cluster does not have."""
        self._whole: set[str] = set()
        """Collections of which all has been told."""

    def add(
        self, path: str, read: Callable[[Object], T | None],
        changed: Callable[[list[Change[T]]], None] = lambda _: None, *, optional: bool = False,
    ) -> Watched[T]:  # fmt: skip
        """One more collection. `changed` hears of each change at once, before `put`; `optional` as in Watched."""

        def hear(changes: list[Change[T]]) -> None:
            changed(changes)
            self._news.set()

        watched = Watched(self._api, path, read, hear, optional=optional)
        self._watches[path] = watched
        return watched

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for path, watched in self._watches.items():
                tasks.create_task(self._follow(path, watched))
                tasks.create_task(self._say_synced(path, watched.synced))
            tasks.create_task(self._put_often())

    async def _follow(self, path: str, watched: Watched[Any]) -> None:
        """Waits for the kind to be there."""
        pause_s = await self._look(path, watched)
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self._look(path, watched)
        await watched.run()

    async def _look(self, path: str, watched: Watched[Any]) -> float | None:
        """None where the collection can be read, else when to look again."""
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

    async def _say_synced(self, path: str, synced: asyncio.Event) -> None:
        await synced.wait()
        if path not in self._whole:  # else it was told in the moment before: the same would be told twice
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
                    self._news.set()  # it is tried again
                    raise
