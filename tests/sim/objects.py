"""An API server in virtual time: objects with versions, watches that resume, preconditions; and it may be away or busy.

Owns what is there and every write that came, in order. Clients use the product's own `Api`, of which only the sending
is played: budget, fence, patience and refusals are the real ones. A request that was sent is carried out, whether or
not its process lives to hear of it.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from kubernetes.aio import client

from autoscaler.drivers.kubernetes.access import Access
from autoscaler.drivers.kubernetes.api import Api, ApiError, Object
from autoscaler.drivers.kubernetes.budget import Budget
from autoscaler.drivers.kubernetes.unreadable import Unreadable
from autoscaler.drivers.kubernetes.watching import GONE, INITIAL_END

WAY_S = 0.001
"""Of a request there, and of its answer back."""
NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/town/pods"
COLLECTIONS = ("/pods", "/nodes", "/leases", "/resourceclaims", "/resourceslices")
BEGAN_UNIX_S = 1_767_225_600.0
"""True time, when a virtual loop's is 0."""
WRITES = ("POST", "PUT", "PATCH", "DELETE")


class Asked(NamedTuple):
    """One request that arrived."""

    at_s: float
    who: str
    method: str
    path: str


class Server:
    """All objects, by collection and name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.asked: list[Asked] = []
        self.refuses: Callable[[], ApiError | None] = lambda: None
        """Asked for each request; what it gives is the answer."""
        self.on_pod: Callable[[Object, str], None] = lambda pod, event: None
        """The kubelet's: hears of a pod that is made (`ADDED`), or to be deleted (`LEAVES`)."""
        self.loses: Callable[[str, str], bool] = lambda collection, event: False
        """Of which changes no watch ever tells."""
        self._away = False
        self._versions = itertools.count(1)
        self.version = next(self._versions)
        self._events: list[tuple[int, str, str, Object]] = []
        self._changed = asyncio.Event()
        self._cuts = 0

    @staticmethod
    def unix_s() -> float:
        """True time."""
        return BEGAN_UNIX_S + asyncio.get_running_loop().time()

    # --- moods --------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Its process is gone: connections break, and new ones are refused."""
        self._away = True
        self.cut()

    def come_back(self) -> None:
        """With all that it had, and nothing of what happened before."""
        self._away = False
        self._events.clear()

    def cut(self) -> None:
        """All watches end."""
        self._cuts += 1
        self._wake()

    def writes(self, of: str = PODS) -> list[Asked]:
        """Those to a collection, in order."""
        return [one for one in self.asked if one.method in WRITES and one.path.startswith(of)]

    # --- what a kubelet does ------------------------------------------------------------------------------------------

    def put(self, collection: str, found: Object, event: str) -> Object:
        """An object is so from now on, with a new version."""
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

    def carry_out(self, who: str, method: str, path: str, body: Any) -> Object:
        """One request. Raises ApiError, OSError."""
        collection, name = self._split(path, method)
        self._arrives(who, "LIST" if method == "GET" and not name else method, path)
        there = self.objects.setdefault(collection, {})
        if method == "POST":
            return self._create(collection, body)
        if not name:
            items = [copy.deepcopy(one) for one in there.values()]
            return {"items": items, "metadata": {"resourceVersion": str(self.version)}}
        if name not in there:
            raise ApiError(404, "NotFound", name)
        found = there[name]
        if method == "GET":
            return copy.deepcopy(found)
        if method == "DELETE":
            return self._delete(collection, found, body)
        wanted = _merged(found, body) if method == "PATCH" else copy.deepcopy(body)
        _same(found, body["metadata"])
        return self.put(collection, wanted, "MODIFIED")

    def _arrives(self, who: str, method: str, path: str) -> None:
        if self._away:
            raise ConnectionRefusedError
        self.asked.append(Asked(asyncio.get_running_loop().time(), who, method, path))
        if refusal := self.refuses():
            raise refusal

    def _split(self, path: str, method: str) -> tuple[str, str]:
        if method == "POST" or path.endswith(COLLECTIONS):
            return path, ""
        collection, _, name = path.rpartition("/")
        return collection, name

    def _create(self, collection: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        if name in self.objects[collection]:
            raise ApiError(409, "AlreadyExists", name)
        made = copy.deepcopy(body)
        made["metadata"] |= {"uid": f"uid-{self.version}", "namespace": "town"}
        made = self.put(collection, made, "ADDED")
        if collection == PODS:
            self.on_pod(self.objects[collection][name], "ADDED")
        return made

    def _delete(self, collection: str, found: Object, body: Object) -> Object:
        _same(found, body.get("preconditions") or {})
        found["metadata"]["deletionTimestamp"] = "soon"
        found["metadata"]["deletionGracePeriodSeconds"] = body.get("gracePeriodSeconds", 30)
        said = self.put(collection, found, "MODIFIED")
        self.on_pod(found, "LEAVES")
        return said

    async def follow(self, who: str, collection: str, query: Mapping[str, str]) -> AsyncGenerator[Object, None]:
        """A watch. Raises ApiError, OSError."""
        initial, version = "sendInitialEvents" in query, query.get("resourceVersion")
        self._arrives(who, "LIST" if initial else "WATCH", collection)
        if initial:
            for found in list(self.objects.get(collection, {}).values()):
                yield _event("ADDED", found)
            notes = {INITIAL_END: "true"}
            yield _event("BOOKMARK", {"metadata": {"resourceVersion": str(self.version), "annotations": notes}})
        cuts, seen = self._cuts, int(version) if version is not None else self.version
        if seen < self.version and (not self._events or seen + 1 < self._events[0][0]):
            raise ApiError(GONE, "Expired", "too old resource version")
        while True:
            for number, of, event, found in tuple(self._events):
                if number > seen:
                    seen = number
                    if of == collection:
                        yield _event(event, found)
            await self._changed.wait()
            if cuts != self._cuts:
                raise ConnectionResetError


def _event(kind: str, found: Object) -> Object:
    return {"type": kind, "object": copy.deepcopy(found)}


def _same(found: Object, wanted: Mapping[str, Any]) -> None:
    """Preconditions: 409 where it is another, or has changed."""
    for key in ("uid", "resourceVersion"):
        if wanted.get(key) is not None and str(wanted[key]) != found["metadata"].get(key):
            raise ApiError(409, "Conflict", f"{key} is another")


def _merged(found: Any, patch: Any) -> Any:
    """RFC 7386."""
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
    """A client of the server, by its name: all but the sending is the real one."""

    def __init__(self, server: Server, who: str, writes_s: Callable[[], float] = lambda: math.inf) -> None:
        super().__init__(Access(client.Configuration(host="http://sim")), writes_s)
        self._server = server
        self._who = who
        self._budget = Budget(asyncio.get_running_loop().time)

    def unix_s(self) -> float:
        return self._server.unix_s()

    async def _send(  # noqa: PLR0917  as its base
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str], headers: Mapping[str, str],
        within_s: float,
    ) -> bytes:  # fmt: skip
        del query, headers
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Object] = loop.create_future()
        body: Object = msgspec.json.decode(data) if data is not None else {}

        def arrives() -> None:
            try:
                said = self._server.carry_out(self._who, method, path, body)
            except (ApiError, OSError) as error:
                loop.call_later(WAY_S, _fail, answered, error)
            else:
                loop.call_later(WAY_S, _succeed, answered, said)

        loop.call_later(WAY_S, arrives)
        try:
            async with asyncio.timeout(within_s):
                said = await answered
        except ApiError:
            self.answers = True
            raise
        self.answers = True
        return msgspec.json.encode(said)

    async def _stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silent_s: float
    ) -> AsyncGenerator[tuple[str, Object | Unreadable], None]:
        del headers, silent_s
        await asyncio.sleep(WAY_S)
        async for event in self._server.follow(self._who, path, query):
            self.answers = True
            await asyncio.sleep(WAY_S)
            yield event["type"], event["object"]


def _succeed(answered: asyncio.Future[Object], said: Object) -> None:
    if not answered.done():
        answered.set_result(said)


def _fail(answered: asyncio.Future[Object], error: Exception) -> None:
    if not answered.done():
        answered.set_exception(error)
