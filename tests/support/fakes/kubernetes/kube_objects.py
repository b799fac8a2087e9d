"""A fake API server with objects in memory: what Providers require of one
(`autoscaler.providers.kubernetes_access.ApiServer`).

Owns names, versions, conflicts, finalizers and timestamps as the real one does; it validates no schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

from autoscaler.contract import ModelName
from autoscaler.providers.kubernetes_access import CONFLICT, NOT_FOUND, AnswerError, Object
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership

FIELDS = {"spec.nodeName", "status.phase", "metadata.name", "involvedObject.uid"}
"""The supported field selectors; any other is an error."""
HEARD_S = 0.05
"""Maximum delay until a watch reports a change."""


class PlayedServer:
    """`clock` returns seconds since 1970. Created objects are labelled as `owner` does it."""

    def __init__(self, clock: Callable[[], float], owner: Ownership = ANYBODYS) -> None:
        self.owner = owner
        self.foreign: set[ModelName] = set()
        """Models whose unlabelled orders are left to another installation."""
        self._clock = clock
        self.objects: dict[str, Object] = {}
        """Objects by path."""
        self.away = False
        self.requests = 0
        """Requests, including failed ones and the polls of watches."""
        self.refused: dict[str, AnswerError] = {}
        """By method (or WATCH): the error returned to each such request."""
        self.before_write: Callable[[str, str], None] = lambda method, path: None
        """Called between a read and the write that follows."""
        self.writes: list[tuple[str, str, Object]] = []
        self._version = 0

    # --- ApiServer ----------------------------------------------------------------------------------------------------

    def is_foreign(self, model: ModelName) -> bool:
        """See ApiServer."""
        return model in self.foreign

    def unix_s(self) -> float:
        """See ApiServer."""
        return self._clock()

    async def find(self, path: str) -> Object | None:
        """See ApiServer."""
        self._asked("GET")
        return copy.deepcopy(self.objects.get(path))

    async def items(self, path: str, **query: str) -> list[Object]:
        """See ApiServer."""
        self._asked("GET")
        under = [self.objects[one] for one in sorted(self.objects) if self._within(one, path)]
        return copy.deepcopy([one for one in under if _selected(one, query)])

    async def follow(
        self, path: str, read: Callable[[Object], object], changed: Callable[[], None], **query: str
    ) -> None:
        """See ApiServer. It polls instead of being notified."""
        known: dict[str, object] = {}
        while True:
            with contextlib.suppress(ConnectionError, AnswerError):
                self._asked("WATCH")
                there = {one: body for one, body in self.objects.items() if self._within(one, path)}
                read_now = {one: read(body) for one, body in there.items() if _selected(body, query)}
                now = {one: what for one, what in read_now.items() if what is not None}
                if now != known:
                    changed()
                known = now
            await asyncio.sleep(HEARD_S)

    async def create(self, path: str, body: Object) -> Object:
        """See ApiServer."""
        self._write("POST", path, body)
        at = f"{path}/{body['metadata']['name']}"
        if at in self.objects:
            raise AnswerError(CONFLICT, "AlreadyExists", f"{at} already exists")
        made = copy.deepcopy(self.owner.label(body))
        made["metadata"] |= {"creationTimestamp": stamp(self._clock()), "uid": f"uid-{len(self.writes)}"}
        return self._put(at, made)

    async def patch(self, path: str, body: Object) -> Object:
        """See ApiServer."""
        self._write("PATCH", path, body)
        path = path.removesuffix("/status")
        found = self._there(path)
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != found["metadata"]["resourceVersion"]:
            raise AnswerError(CONFLICT, "Conflict", f"{path} is another by now")
        merged = _merged(found, body)
        return found if merged == found else self._put(path, merged)

    async def delete(self, path: str, *, version: str | None = None) -> None:
        """See ApiServer."""
        self._write("DELETE", path, {})
        found = self.objects.get(path)
        if found is None:
            return
        if version is not None and version != found["metadata"]["resourceVersion"]:
            raise AnswerError(CONFLICT, "Conflict", f"{path} is another by now")
        if found["metadata"].get("finalizers"):
            if "deletionTimestamp" not in found["metadata"]:
                self._put(path, _merged(found, {"metadata": {"deletionTimestamp": stamp(self._clock())}}))
            return
        del self.objects[path]

    # --- controls for tests -------------------------------------------------------------------------------------------

    def put(self, path: str, body: Object) -> None:
        """Stores an object."""
        made = copy.deepcopy(body)
        made.setdefault("metadata", {}).setdefault("name", path.rpartition("/")[2])
        made["metadata"].setdefault("creationTimestamp", stamp(self._clock()))
        self._put(path, made)

    def change(self, path: str, body: Object) -> None:
        """Changes the object as another client; deletes it if it is being deleted and has no finalizer left."""
        self._put(path, _merged(self._there(path), body))

    def _put(self, path: str, body: Object) -> Object:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        if "deletionTimestamp" in body["metadata"] and not body["metadata"].get("finalizers"):
            self.objects.pop(path, None)
        else:
            self.objects[path] = body
        return copy.deepcopy(body)

    def _there(self, path: str) -> Object:
        if path not in self.objects:
            raise AnswerError(NOT_FOUND, "NotFound", f"{path} not found")
        return self.objects[path]

    def _asked(self, method: str) -> None:
        self.requests += 1
        if self.away:
            raise ConnectionError("no answer")
        if method in self.refused:
            raise self.refused[method]

    def _write(self, method: str, path: str, body: Object) -> None:
        self._asked(method)
        happens, self.before_write = self.before_write, lambda method, path: None
        happens(method, path)
        self.writes.append((method, path, copy.deepcopy(body)))

    @staticmethod
    def _within(path: str, collection: str) -> bool:
        """Whether the path is in the collection; `/api/v1/pods` includes all namespaces."""
        if path.rpartition("/")[0] == collection:
            return True
        before, _, kind = collection.rpartition("/")
        parts = path.split("/")
        return path.startswith(f"{before}/namespaces/") and len(parts) > 2 and parts[-2] == kind


def stamp(unix_s: float) -> str:
    """A timestamp in the format of Kubernetes objects."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _merged(before: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(before, dict):
        return copy.deepcopy(patch)
    after = {**before}
    for key, one in patch.items():
        if one is None:
            after.pop(key, None)
        else:
            inner = before.get(key)
            after[key] = _merged(inner if isinstance(inner, dict) else {}, one) if isinstance(one, dict) else one
    return copy.deepcopy(after)


def _selected(one: Object, query: dict[str, str]) -> bool:
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, unlike, value = term.partition("!=") if "!=" in term else term.partition("=")
        assert path in FIELDS, path
        found: Any = one
        for part in path.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        if (found == value) == (unlike == "!="):
            return False
    labels = one["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True
