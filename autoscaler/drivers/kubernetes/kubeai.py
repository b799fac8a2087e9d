"""Watches KubeAI's Models (`kubeai.org/v1`) and tells the installation what they are as ours. I/O; it decides nothing.

Owns the following of that kind, which a cluster may not have, or get at any time. Promises: KubeAI's objects are only
read; one that cannot be taken over stops no other, what it said when it could stays in force, and `wrong` says why;
many changes at once are told as one. What an object means is `convert`'s business (`autoscaler.foreign.kubeai`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.drivers.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.drivers.kubernetes.hearing import ABSENT
from autoscaler.drivers.kubernetes.watching import Change, Key, Watched
from autoscaler.installation import Installation
from autoscaler.model import Model
from autoscaler.names import Origin

API_VERSION = "kubeai.org/v1"
KUBEAI = "kubeai"
"""The name of this source of documents."""
TOGETHER_S = 0.02
"""What changes within it is told as one."""
ABSENT_S = 30.0
"""A kind that the cluster does not have is looked for this often."""
RETRY_S = 1.0

Convert = Callable[[object], tuple[Model | None, str, tuple[str, ...]]]
"""An object -> its Model, or why it has none; and a line for each key that was not taken over."""

_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What is kept of an object."""

    uid: str
    model: Model | None
    """What is in force; None: it could never be taken over."""
    wrong: str
    """Why what it says now is not in force; empty: it is."""
    notes: tuple[str, ...]
    """What of it was not taken over, a line for each key."""


class KubeaiModels:
    """KubeAI's Models of a cluster, or of some namespaces. `api` is open while it runs; nothing is written."""

    def __init__(
        self, api: Api, convert: Convert, installation: Installation, namespaces: Sequence[str] | None = None,
        absent_s: float = ABSENT_S,
    ) -> None:  # fmt: skip
        self._api = api
        self._convert = convert
        self._installation = installation
        self._absent_s = absent_s
        self._news = asyncio.Event()
        self._generations: dict[Key, int] = {}
        """Which one of each was read: KubeAI writes status and counts all the time."""
        self._absent: set[str] = set()
        self._trouble: dict[str, str] = {}
        root = f"/apis/{API_VERSION}"
        paths = [f"{root}/models"] if namespaces is None else [f"{root}/namespaces/{one}/models" for one in namespaces]
        self._watches = {path: Watched(api, path, self._read, self._changed, optional=True) for path in paths}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for path, watched in self._watches.items():
                tasks.create_task(self._follow(path, watched))
                tasks.create_task(self._say_synced(watched.synced))
            tasks.create_task(self._put_often())

    @property
    def found(self) -> dict[Key, Found]:
        """All there are."""
        return {key: found for watched in self._watches.values() for key, found in watched.items.items()}

    @property
    def wrong(self) -> dict[Key, str]:
        """Objects that are not in force, and why."""
        return {key: found.wrong for key, found in self.found.items() if found.wrong}

    @property
    def trouble(self) -> str:
        """Why nothing is heard now; empty while all is well, also without the kind."""
        watches = (watched.trouble for path, watched in self._watches.items() if path not in self._absent)
        return "; ".join(dict.fromkeys(one for one in (*self._trouble.values(), *watches) if one))

    # --- following ----------------------------------------------------------------------------------------------------

    async def _follow(self, path: str, watched: Watched[Found]) -> None:
        """Waits for the kind to be there."""
        pause_s = await self._look(path)
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self._look(path)
        await watched.run()

    async def _look(self, path: str) -> float | None:
        """None where the collection can be read, else when to look again."""
        self._trouble.pop(path, None)
        try:
            await self._api.get(path, limit="1")
        except ApiError as error:
            if error.status != ABSENT:
                self._trouble[path] = str(error)
            if self._watches[path].hearing.broke(error):
                self._absent.add(path)
                self._news.set()
                return self._absent_s
            return RETRY_S
        except UnreachableError as error:
            self._trouble[path] = str(error)
            self._watches[path].hearing.broke(error)
            return RETRY_S
        self._absent.discard(path)
        return None

    async def _say_synced(self, synced: asyncio.Event) -> None:
        await synced.wait()
        self._news.set()

    def _changed(self, changes: list[Change[Found]]) -> None:
        for key, old, new in changes:
            if new is None:
                self._generations.pop(key, None)
            elif new.wrong and (old is None or old.wrong != new.wrong):
                _log.error("kubeai model is not taken over model=%s/%s reason=%s", *key, new.wrong)
            for note in new.notes if new is not None and (old is None or old.notes != new.notes) else ():
                _log.warning("kubeai model=%s/%s not taken over: %s", *key, note)
        self._news.set()

    async def _put_often(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER_S)
            self._news.clear()
            if all(path in self._absent or watched.synced.is_set() for path, watched in self._watches.items()):
                models = {Origin(KUBEAI, *key): found.model for key, found in self.found.items() if found.model}
                self._installation.put(KUBEAI, models)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, found: Object) -> Found | None:
        """Once for each generation; one that is being deleted is gone."""
        metadata = found["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        if "deletionTimestamp" in metadata:
            return None
        old = next((old for watched in self._watches.values() if (old := watched.items.get(key)) is not None), None)
        if old is not None and old.uid == uid and self._generations.get(key) == generation:
            return old
        self._generations[key] = generation
        model, wrong, notes = self._convert({"apiVersion": API_VERSION, "kind": "Model"} | found)
        if model is not None:
            created_unix_s = int(datetime.fromisoformat(metadata["creationTimestamp"]).timestamp())
            return Found(uid, replace(model, created_unix_s=created_unix_s), "", notes)
        return Found(uid, old.model if old is not None and old.uid == uid else None, wrong, notes)
