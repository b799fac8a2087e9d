"""A fake Redfish service with composition, on loopback: resource blocks, systems, PATCH of links. Tests inject faults.

Shapes: DMTF's ResourceBlock 1.4, ComputerSystem 1.21, Task 1.7, SessionService 1.1. Behavior follows CDIM's
hw-emulator: a block of another system: 409; a block that does not exist: 404; without the system's own: 406; the last
write wins. An operation is held until `finish`, takes `takes_s`, or completes at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

USER, PASSWORD, TOKEN = "composer", "s3cret-of-the-rack", "t0ken-of-a-session"
V1 = "/redfish/v1"
BLOCKS, SYSTEMS = f"{V1}/CompositionService/ResourceBlocks", f"{V1}/Systems"
A100, L40 = ("NVIDIA-A100-PCIE-40GB", 40960), ("NVIDIA-L40S", 46068)
Body = dict[str, Any]  # Any: documents


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    at_s: float


@dataclass(eq=False)
class Block:
    """The contents of a block, and its system. `client` None: the property is absent."""

    gpu: tuple[str, int] | None
    client: str | None = None
    system: str = ""
    state: str = "Unused"
    health: str = "OK"
    reserved: bool = False
    version: int = 1


@dataclass(eq=False)
class Going:
    """One operation in progress."""

    system: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    well: bool = True


@dataclass(eq=False)
class FakeFabric:
    """See the module."""

    systems: tuple[str, ...] = ("1", "2")
    gpus: tuple[tuple[str, int], ...] = (A100, A100, L40)
    keeps: bool = True
    """Whether blocks have a `Client`."""
    etags: bool = True
    members_tagged: bool = True
    """Whether blocks within the expanded collection have ETags; if not, only a single block has one, in its headers."""
    guarded: bool = False
    """Whether a change without If-Match is rejected (428)."""
    tasks: bool = True
    """Whether operations return 202 and a task monitor; if not, the response is sent when the operation is over."""
    expands: bool = True
    login: str = "session"
    """Or `basic`, or `none`."""
    named: str = ""
    """URL prefix of its tasks and sessions; empty: the URL of the request, and no prefix."""
    retry_after: str = ""
    """The Retry-After of running tasks."""
    hold: bool = False
    takes_s: float = 0.0
    early: bool = False
    """Whether it reports success before an operation is over."""
    # injected faults
    away: bool = False
    raw: bytes | None = None
    """The response to every request."""
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """By method: status codes of the next responses, whose requests are not performed."""
    lose: int = 0
    """Number of changes that are performed but whose responses are lost."""
    lose_before: int = 0
    """Number of changes that are lost themselves."""
    refuse: int = 0
    """The status code of every change of links."""
    refused: set[str] = field(default_factory=set)
    """Blocks with which any change of links is rejected (400)."""
    sealed: set[str] = field(default_factory=set)
    """Blocks whose `Client` cannot be changed (403)."""
    untold: dict[str, int] = field(default_factory=dict)
    """By block: the status code for its processor; 200: a document without its memory."""
    never: bool = False
    half: bool = False
    """Half of the next attachment is performed, and then nothing more."""
    elsewhere: str = ""
    """The system that receives the blocks that another one requested."""
    task_fails: bool = False
    """An asynchronous operation fails in the end."""
    task_status: int = 0
    """The status code that its monitor then returns, as the operation would; 0: a task that reports the failure."""

    def __post_init__(self) -> None:
        own = {f"Own-{one}": Block(None, system=one) for one in self.systems}
        pool = {f"Gpu-{at}": Block(gpu) for at, gpu in enumerate(self.gpus, 1)}
        self.blocks = {**own, **pool}
        for block in self.blocks.values():
            block.client = "" if self.keeps else None
        self.versions = dict.fromkeys(self.systems, 1)
        self.going: list[Going] = []
        self.running: list[asyncio.Task[None]] = []
        self.asked: list[Asked] = []
        self.overlaps = 0
        """Number of changes of links that were requested while another change of the same system was in progress."""
        self.sessions: set[str] = set()
        self.url = ""
        self.changed: Callable[[], None] = lambda: None
        self.meanwhile: Callable[[], None] | None = None
        """Called once, before the next change of links."""

    # --- controls for tests -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeFabric]:
        """Serves on a free port of this machine."""
        app = web.Application(client_max_size=1 << 20)
        app.router.add_route("*", "/{rest:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.finish()
            for one in self.running:
                one.cancel()
            await runner.cleanup()

    def finish(self) -> None:
        """Completes the operations that are held; later ones are not held."""
        self.hold = False
        for one in self.going:
            one.over.set()

    def attached(self, system: str) -> list[str]:
        """The blocks of a system, except its own."""
        return sorted(name for name, one in self.blocks.items() if one.system == system and one.gpu)

    def path(self, system: str) -> str:
        """Path of a system."""
        return f"{SYSTEMS}/{system}"

    def patches(self, below: str = V1) -> list[Asked]:
        """The changes that were requested."""
        return [one for one in self.asked if one.method == "PATCH" and one.path.startswith(below)]

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(Asked(request.method, request.path, asyncio.get_running_loop().time()))
        if self.away:
            return _cut(request)
        if self.raw is not None:
            return web.Response(body=self.raw, content_type="application/json")
        path = request.path.rstrip("/")
        if (request.method, path) == ("POST", f"{V1}/SessionService/Sessions"):
            return await self._enter(request)
        if self.login != "none" and path != V1 and not self._may(request):
            return _no(401, "InsufficientPrivilege")
        if planned := self.statuses.get(request.method):
            return _no(planned.pop(0), "GeneralError")
        if request.method == "PATCH":
            return await self._patch(request, path)
        if request.method == "DELETE":
            self.sessions.discard(path)
            return web.Response(status=204)
        return self._get(path, expanded="$expand" in request.query)

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        if self.login != "session":
            return _no(404, "ResourceMissingAtURI")
        login = await request.json()
        if (login["UserName"], login["Password"]) != (USER, PASSWORD):
            return _no(401, "ResourceAtUriUnauthorized")
        place = f"{V1}/SessionService/Sessions/{len(self.asked)}"
        self.sessions.add(place)
        login = {"X-Auth-Token": f"{TOKEN}{place}", "Location": f"{self.named}{place}"}
        return web.json_response({}, status=201, headers=login)

    def _may(self, request: web.Request) -> bool:
        if self.login == "session":
            return request.headers.get("X-Auth-Token", "").removeprefix(TOKEN) in self.sessions
        wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return request.headers.get("Authorization") == f"Basic {wanted}"

    def _get(self, path: str, *, expanded: bool) -> web.StreamResponse:
        name = path.rpartition("/")[2]
        if path == V1:
            features = {"ExpandQuery": {"NoLinks": self.expands}}
            return _doc({"CompositionService": _at(f"{V1}/CompositionService"), "ProtocolFeaturesSupported": features})
        if path == f"{V1}/CompositionService":
            return _doc({"ResourceBlocks": _at(BLOCKS)})
        if path == BLOCKS:
            members = [self._block(one) if expanded else _at(f"{BLOCKS}/{one}") for one in self.blocks]
            for member in () if self.members_tagged else members:
                member.pop("@odata.etag", None)
            return _doc({"Members": members})
        if path.startswith(f"{BLOCKS}/") and name in self.blocks:
            return self._tagged(self._block(name))
        if path.startswith(f"{V1}/Chassis/Rack/Processors/") and name in self.blocks:
            status = self.untold.get(name, 200)
            return _doc(self._processor(name)) if status == 200 else _no(status, "GeneralError")
        if path.startswith(f"{SYSTEMS}/") and name in self.versions:
            return self._tagged(self._system(name))
        if path.startswith(f"{V1}/Tasks/") and name.isdecimal() and int(name) < len(self.going):
            return self._task(self.going[int(name)])
        return _no(404, "ResourceMissingAtURI")

    def _tagged(self, body: Body) -> web.StreamResponse:
        etag = body.get("@odata.etag")
        return _doc(body, {"ETag": etag} if etag else {})

    def _block(self, name: str) -> Body:
        one = self.blocks[name]
        fields: Body = {
            **_at(f"{BLOCKS}/{name}"), "Id": name,
            "Status": {"State": "Enabled", "Health": one.health},
            "CompositionStatus": {"Reserved": one.reserved, "CompositionState": one.state},
            "Processors": [_at(f"{V1}/Chassis/Rack/Processors/{name}")] if one.gpu else [],
            "Links": {"ComputerSystems": [_at(self.path(one.system))] if one.system else [], "Zones": []},
        }  # fmt: skip
        if one.client is not None:
            fields["Client"] = one.client or None
        return fields | ({"@odata.etag": f'W/"{name}-{one.version}"'} if self.etags else {})

    def _processor(self, name: str) -> Body:
        gpu = self.blocks[name].gpu
        if gpu is None:
            return {"ProcessorType": "CPU", "Model": "Xeon"}
        memory = {"TotalMemorySizeMiB": 0 if name in self.untold else gpu[1]}
        return {"ProcessorType": "GPU", "Model": gpu[0], "UUID": f"GPU-{name}", "MemorySummary": memory}

    def _system(self, name: str) -> Body:
        links = [_at(f"{BLOCKS}/{one}") for one, block in self.blocks.items() if block.system == name]
        fields: Body = {**_at(self.path(name)), "Id": name, "Links": {"ResourceBlocks": links}}
        return fields | ({"@odata.etag": f'"{self.versions[name]}"'} if self.etags else {})

    def _task(self, going: Going) -> web.StreamResponse:
        if not going.over.is_set():
            retry_header = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.json_response({"TaskState": "Running"}, status=202, headers=retry_header)
        if not going.well and self.task_status:
            return _no(self.task_status, "InternalError")
        state = "Completed" if going.well else "Exception"
        return _doc({"TaskState": state, "TaskStatus": "OK" if going.well else "Critical"})

    # --- changes ------------------------------------------------------------------------------------------------------

    async def _patch(self, request: web.Request, path: str) -> web.StreamResponse:
        body, name = await request.json(), path.rpartition("/")[2]
        if self.lose_before:
            self.lose_before -= 1
            return _cut(request)
        if self.meanwhile is not None and path.startswith(SYSTEMS):
            self.meanwhile()
            self.meanwhile = None
        tag = self._get(path, expanded=False).headers.get("ETag")
        if tag is not None and request.headers.get("If-Match", tag) != tag:
            return _no(412, "PreconditionFailed")
        if self.guarded and "If-Match" not in request.headers:
            return _no(428, "PreconditionRequired")
        if path.startswith(f"{BLOCKS}/") and name in self.blocks:
            answer: web.StreamResponse = self._mark(name, body)
        elif path.startswith(f"{SYSTEMS}/") and name in self.versions:
            answer = await self._relink(name, body)
        else:
            answer = _no(404, "ResourceMissingAtURI")
        if self.lose:
            self.lose -= 1
            return _cut(request)
        return answer

    def _mark(self, name: str, body: Body) -> web.StreamResponse:
        block = self.blocks[name]
        if block.client is None:
            return _no(405, "OperationNotAllowed")
        if name in self.sealed:
            return _no(403, "InsufficientPrivilege")
        block.client, block.version = body["Client"] or "", block.version + 1
        return web.Response(status=204)

    async def _relink(self, system: str, body: Body) -> web.StreamResponse:
        names = [one["@odata.id"].rpartition("/")[2] for one in body["Links"]["ResourceBlocks"]]
        if self.refuse or not self.refused.isdisjoint(names):
            return _no(self.refuse or 400, "PropertyValueNotInList")
        if any(one not in self.blocks for one in names):
            return _no(404, "ResourceMissingAtURI")
        if f"Own-{system}" not in names:
            return _no(406, "ResourceCannotBeDeleted")
        if any(self.blocks[one].system not in {"", system} for one in names):
            return _no(409, "ResourceInUse")
        if any(not one.over.is_set() and one.system == system for one in self.going):
            self.overlaps += 1
            return _no(409, "OperationInProgress")
        going = Going(system, well=not self.task_fails)
        self.going.append(going)
        if not self.hold and not self.takes_s:
            going.over.set()
            self._perform(system, names, going)
        else:
            for one in names:
                self.blocks[one].state = self.blocks[one].state if self.blocks[one].system else "Composing"
            self.running.append(asyncio.create_task(self._later(system, names, going)))
        if self.early:
            return web.Response(status=204)
        if self.tasks and not going.over.is_set():
            place = f"{self.named or self.url}{V1}/Tasks/{len(self.going) - 1}"
            return web.json_response({}, status=202, headers={"Location": place})
        await going.over.wait()
        return _no(500, "InternalError") if not going.well else web.Response(status=204)

    async def _later(self, system: str, names: list[str], going: Going) -> None:
        if self.hold:
            await going.over.wait()
        else:
            await asyncio.sleep(self.takes_s)
        self._perform(system, names, going)
        going.over.set()

    def _perform(self, system: str, names: list[str], going: Going) -> None:
        new = [one for one in names if self.blocks[one].system == ""]
        old = [name for name, one in self.blocks.items() if one.system == system and name not in names]
        come = [] if self.never or not going.well else new[: (len(new) + 1) // 2] if self.half else new
        if self.half and new:
            self.half, self.never = False, True
        for one in new:
            self.blocks[one].state, self.blocks[one].system = "Unused", ""
        for one in come:
            self.blocks[one].system = self.elsewhere or system
            self.blocks[one].state = "Composed"
        for one in old if going.well else ():
            self.blocks[one].system, self.blocks[one].state = "", "Unused"
        for one in {*come, *old}:
            self.blocks[one].version += 1
        self.versions[system] += 1
        self.changed()


def _at(path: str) -> Body:
    return {"@odata.id": path}


def _doc(body: Body, headers: dict[str, str] | None = None) -> web.StreamResponse:
    return web.json_response(body, headers=headers or {})


def _no(status: int, word: str) -> web.StreamResponse:
    secret = {"MessageId": f"Base.1.18.{word}", "Message": f"10.0.0.7 says no to {PASSWORD}"}
    return web.json_response(
        {"error": {"code": "Base.1.18.GeneralError", "@Message.ExtendedInfo": [secret]}}, status=status
    )


def _cut(request: web.Request) -> web.StreamResponse:
    """Closes the connection without a response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response(body=json.dumps({}).encode())
