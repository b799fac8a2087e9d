"""An API server in virtual time: versioned objects, resumable watches, preconditions, outages and overload.

Holds the objects and, in order, every write that arrived. Clients use the product's own `Api` with simulated sending:
its budget, fencing, timeouts and error handling are the real ones. A request that was sent is carried out even if its
process does not live to see the response.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from kubernetes.aio import client

from autoscaler.kubernetes.api import Api, ApiError, Object, RequestRateLimiter
from autoscaler.kubernetes.kubeconfig import ApiAccess
from autoscaler.kubernetes.unreadable_objects import Unreadable
from autoscaler.kubernetes.watch import EXPIRED, INITIAL_END

WAY_S = 0.001
"""One-way latency of a request or a response."""
NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/town/pods"
PATH = re.compile(
    r"(?P<group>/api/v1|/apis/[^/]+/[^/]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)"
    r"(/(?P<name>[^/]+)(/(?P<sub>status))?)?"
)
SELECTED = re.compile(r"(?P<key>[^=!]+)(?P<sign>!?=)(?P<value>.*)")
BEGAN_UNIX_S = 1_767_225_600.0
"""True time when a virtual loop's time is 0."""
WRITES = ("POST", "PUT", "PATCH", "DELETE")
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Asked(NamedTuple):
    """One request that arrived."""

    at_s: float
    who: str
    method: str
    path: str
    body: Mapping[str, Any] = NOTHING


class Server:
    """All objects, by collection and name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.asked: list[Asked] = []
        self.refuses: Callable[[], ApiError | None] = lambda: None
        """Called for each request; a returned error is the response."""
        self.on_pod: Callable[[Object, str], None] = lambda pod, event: None
        """The kubelet's callback for a pod that is created (`ADDED`), or marked for deletion (`LEAVES`)."""
        self.loses: Callable[[str, str], bool] = lambda collection, event: False
        """Whether no watch ever reports this change."""
        self._away = False
        self._versions = itertools.count(1)
        self.version = next(self._versions)
        self._events: list[tuple[int, str, str, Object]] = []
        self._changed = asyncio.Event()
        self._cuts = 0
        self._managed: dict[str, dict[str, Object]] = {}
        """By uid: the status that each field manager applied."""

    @staticmethod
    def unix_s() -> float:
        """True time."""
        return BEGAN_UNIX_S + asyncio.get_running_loop().time()

    # --- faults -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The process ends: connections break, and new ones are refused."""
        self._away = True
        self.cut()

    def come_back(self) -> None:
        """The process restarts with all of its objects and an empty watch history."""
        self._away = False
        self._events.clear()

    def cut(self) -> None:
        """End all watches."""
        self._cuts += 1
        self._wake()

    def writes(self, of: str = PODS) -> list[Asked]:
        """Writes to one collection, in order."""
        return [one for one in self.asked if one.method in WRITES and one.path.startswith(of)]

    # --- kubelet ------------------------------------------------------------------------------------------------------

    def put(self, collection: str, found: Object, event: str) -> Object:
        """Store an object with a new version."""
        self.version = next(self._versions)
        found["metadata"]["resourceVersion"] = str(self.version)
        there = self.objects.setdefault(collection, {})
        if event == "DELETED":
            there.pop(found["metadata"]["name"], None)
        else:
            there[found["metadata"]["name"]] = found
        if not self.loses(collection, event):
            self._events.append((self.version, collection, event, copy.deepcopy(found)))
        self._wake()
        return copy.deepcopy(found)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- requests -----------------------------------------------------------------------------------------------------

    def carry_out(self, who: str, method: str, path: str, body: Any, query: Mapping[str, str] = NOTHING) -> Object:
        """Carry out one request. Raises ApiError, OSError."""
        found_path = PATH.fullmatch(path)
        name = found_path["name"] if found_path else ""
        self._arrives(who, "LIST" if method == "GET" and not name else method, path, body)
        if path == "/version":
            return {"major": "1", "minor": "36"}
        if found_path is None:
            raise ApiError(404, "NotFound", path)
        collection = path[: found_path.end("kind")]
        if method == "POST":
            return self._create(collection, found_path["namespace"], body)
        if not name:
            items = [copy.deepcopy(one) for one in self._in(collection) if _selects(query, one)]
            return {"items": items, "metadata": {"resourceVersion": str(self.version)}}
        there = self.objects.get(collection, {})
        if name not in there:
            raise ApiError(404, "NotFound", name)
        found = there[name]
        if method == "GET":
            return copy.deepcopy(found)
        if method == "DELETE":
            return self._delete(collection, found, body)
        _same(found, body.get("metadata") or {})
        if "fieldManager" in query:
            return self._apply(collection, found, body, query)
        wanted = _merged(found, body) if method == "PATCH" else copy.deepcopy(body)
        return self.put(collection, wanted, "MODIFIED")

    def _in(self, collection: str) -> list[Object]:
        """The objects of a collection, also of a collection in all namespaces."""
        return [found for one in self.objects if _within(one, collection) for found in self.objects[one].values()]

    def _apply(self, collection: str, found: Object, body: Object, query: Mapping[str, str]) -> Object:
        """Server-side apply of a status, whose list `conditions` is a map by `type` (KEP-555)."""
        manager, status = query["fieldManager"], body.get("status", {})
        managed = self._managed.setdefault(found["metadata"]["uid"], {})
        others = {
            one["type"]: one for owner, reported in managed.items() if owner != manager
            for one in reported.get("conditions", ())
        }  # fmt: skip
        mine = {one["type"]: one for one in status.get("conditions", ())}
        if query["force"] == "false" and any(others.get(kind, one) != one for kind, one in mine.items()):
            raise ApiError(409, "Conflict", "another manager owns a condition")
        managed[manager] = copy.deepcopy(status)
        whole: Object = {}
        for reported in managed.values():
            whole |= reported
        whole["conditions"] = list((others | mine).values())
        changed = {**copy.deepcopy(found), "status": whole}
        return copy.deepcopy(found) if changed == found else self.put(collection, changed, "MODIFIED")

    def _arrives(self, who: str, method: str, path: str, body: Mapping[str, Any] = NOTHING) -> None:
        if self._away:
            raise ConnectionRefusedError
        self.asked.append(Asked(asyncio.get_running_loop().time(), who, method, path, body))
        if refusal := self.refuses():
            raise refusal

    def _create(self, collection: str, namespace: str | None, body: Object) -> Object:
        if body.get("kind") == "SelfSubjectAccessReview":
            return {**body, "status": {"allowed": False}}
        name = body["metadata"]["name"]
        if name in self.objects.setdefault(collection, {}):
            raise ApiError(409, "AlreadyExists", name)
        made = copy.deepcopy(body)
        made["metadata"] |= {"uid": f"uid-{self.version}"} | ({"namespace": namespace} if namespace else {})
        made = self.put(collection, made, "ADDED")
        if collection.endswith("/pods"):
            self.on_pod(self.objects[collection][name], "ADDED")
        return made

    def _delete(self, collection: str, found: Object, body: Object) -> Object:
        _same(found, body.get("preconditions") or {})
        found["metadata"]["deletionTimestamp"] = "soon"
        found["metadata"]["deletionGracePeriodSeconds"] = body.get("gracePeriodSeconds", 30)
        reported = self.put(collection, found, "MODIFIED")
        self.on_pod(found, "LEAVES")
        return reported

    async def follow(self, who: str, collection: str, query: Mapping[str, str]) -> AsyncGenerator[Object, None]:
        """A watch. Raises ApiError, OSError."""
        initial, version = "sendInitialEvents" in query, query.get("resourceVersion")
        self._arrives(who, "LIST" if initial else "WATCH", collection)
        shown = set[str]()
        if initial:
            for found in self._in(collection):
                if _selects(query, found):
                    shown.add(_id(found))
                    yield _event("ADDED", found)
            notes = {INITIAL_END: "true"}
            yield _event("BOOKMARK", {"metadata": {"resourceVersion": str(self.version), "annotations": notes}})
        else:
            shown |= {_id(one) for one in self._in(collection) if _selects(query, one)}
        cuts, seen = self._cuts, int(version) if version is not None else self.version
        if seen < self.version and (not self._events or seen + 1 < self._events[0][0]):
            raise ApiError(EXPIRED, "Expired", "too old resource version")
        while True:
            for number, of, event, found in tuple(self._events):
                if number > seen:
                    seen = number
                    if _within(of, collection) and (reported := _as_selected(query, event, found, shown)):
                        yield _event(reported, found)
            await self._changed.wait()
            if cuts != self._cuts:
                raise ConnectionResetError


def _within(collection: str, asked: str) -> bool:
    """Whether the path is that collection or its part in a namespace."""
    return collection == asked or re.sub(r"/namespaces/[^/]+(?=/)", "", collection) == asked


def _id(found: Object) -> str:
    return f"{found['metadata'].get('namespace', '')}/{found['metadata']['name']}"


def _selects(query: Mapping[str, str], found: Object) -> bool:
    """Whether the label and field selectors match."""
    labels = found["metadata"].get("labels") or {}
    asked = [one for one in query.get("labelSelector", "").split(",") if one]
    values = [(one, labels) for one in asked] + [
        (one, {key: _field(found, key) for key in ("metadata.name", "spec.nodeName", "status.phase")})
        for one in query.get("fieldSelector", "").split(",") if one
    ]  # fmt: skip
    return all(_holds(one, of) for one, of in values)


def _field(found: Object, path: str) -> str:
    value: Any = found
    for key in path.split("."):
        value = value.get(key, {})
    return value or ""


def _holds(requirement: str, of: Mapping[str, str]) -> bool:
    if reported := SELECTED.fullmatch(requirement):
        return (of.get(reported["key"], "") == reported["value"]) == (reported["sign"] == "=")
    return (requirement.lstrip("!") in of) != requirement.startswith("!")


def _as_selected(query: Mapping[str, str], event: str, found: Object, shown: set[str]) -> str:
    """The event as a client with a selector sees it; empty: none."""
    was, there = _id(found) in shown, event != "DELETED" and _selects(query, found)
    (shown.add if there else shown.discard)(_id(found))
    if there:
        return "MODIFIED" if was and event != "ADDED" else "ADDED" if not was else event
    return "DELETED" if was or (event == "DELETED" and _selects(query, found)) else ""


def _event(kind: str, found: Object) -> Object:
    return {"type": kind, "object": copy.deepcopy(found)}


def _same(found: Object, wanted: Mapping[str, Any]) -> None:
    """Preconditions: 409 if the object is another one or has changed."""
    for key in ("uid", "resourceVersion"):
        if wanted.get(key) is not None and str(wanted[key]) != found["metadata"].get(key):
            raise ApiError(409, "Conflict", f"{key} is another")


def _merged(found: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


class SimApi(Api):
    """A client of the server, identified by its name: only the sending is simulated."""

    def __init__(self, server: Server, who: str, writes_s: Callable[[], float] = lambda: math.inf) -> None:
        super().__init__(ApiAccess(client.Configuration(host="http://sim")), writes_s)
        self._server = server
        self._who = who
        self._budget = RequestRateLimiter(asyncio.get_running_loop().time)

    def unix_s(self) -> float:
        return self._server.unix_s()

    async def _send(  # noqa: PLR0917  as in its base class
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str], headers: Mapping[str, str],
        within_s: float, bytes_max: int | None,
    ) -> bytes:  # fmt: skip
        del headers, bytes_max
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Object] = loop.create_future()
        body: Object = msgspec.json.decode(data) if data is not None else {}

        def arrives() -> None:
            try:
                reported = self._server.carry_out(self._who, method, path, body, query)
            except (ApiError, OSError) as error:
                loop.call_later(WAY_S, _fail, answered, error)
            else:
                loop.call_later(WAY_S, _succeed, answered, reported)

        loop.call_later(WAY_S, arrives)
        try:
            async with asyncio.timeout(within_s):
                reported = await answered
        except ApiError:
            self.answers = True
            raise
        self.answers = True
        return msgspec.json.encode(reported)

    async def _stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silent_s: float
    ) -> AsyncGenerator[tuple[str, Object | Unreadable], None]:
        del headers, silent_s
        await asyncio.sleep(WAY_S)
        async for event in self._server.follow(self._who, path, query):
            self.answers = True
            await asyncio.sleep(WAY_S)
            yield event["type"], event["object"]


def _succeed(answered: asyncio.Future[Object], reported: Object) -> None:
    if not answered.done():
        answered.set_result(reported)


def _fail(answered: asyncio.Future[Object], error: Exception) -> None:
    if not answered.done():
        answered.set_exception(error)
