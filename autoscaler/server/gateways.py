"""The server of the gateway protocol (interfaces, section 6): receives reports, sends streams of routes and catalogue.

Owns the connections of the gateways, and decides nothing: reports go to the loop's inbox, and each stream sends the
difference between the `World` that its gateway has and the current `World`. A slow gateway gets one larger delta later,
never a queue of deltas. While another autoscaler leads, the stream of routes stays open and sends only blank lines, so
that the gateway gets the first message as soon as this autoscaler leads. On a Unix socket the peer's process is
watched, so that a gateway that has ended is distinguished from a silent one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from autoscaler.contract import (
    ID_PATTERN,
    NAME_PATTERN,
    CatalogueDelta,
    GatewayId,
    Level,
    ModelName,
    Report,
    ReportAnswer,
    RoutesDelta,
    Total,
    make_decoder,
)
from autoscaler.controller.loop import Loop, LoopStep
from autoscaler.drivers.local.replica_processes import ProcessWatch
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.fold.gateway_reports import is_redundant_report
from autoscaler.routing import catalogue
from autoscaler.routing import routes as publish
from autoscaler.server import agents
from autoscaler.server.agents import NodeWantsServer
from autoscaler.server.auth import ContractAuth, Role, require_roles
from autoscaler.state.actions import Unmet
from autoscaler.state.events import GatewayGone, GatewaySeen, Reported
from autoscaler.state.world import World

HEARTBEAT_S = 1.0
"""The interval of heartbeats of an idle stream. After five missing ones the leader counts as silent."""
REPORT_BYTES_MAX = 16 << 20
GATEWAYS_MAX = 1000
"""The maximum number of known gateways. Requests of further gateways are rejected."""
ENDPOINTS: Final[Mapping[str, Role]] = {
    "/v1/report": "gateway", "/v1/routes": "gateway", "/v1/catalogue": "gateway",
    "/v1/node": "agent", "/v1/wants": "agent", "/v1/peers": "agent",
}  # fmt: skip
"""The role that each endpoint requires."""

_encode = msgspec.json.Encoder().encode
_decode_report = make_decoder(Report)
_ID, _NAME = re.compile(ID_PATTERN), re.compile(NAME_PATTERN)

D = TypeVar("D", CatalogueDelta, RoutesDelta)
BLANK = b""
"""An empty message, sent as a blank line to keep the connection alive."""


class Feed:
    """The messages for gateways, independent of transport, as JSON: the full state first, then changes.

    A slow reader only lags behind: its next message is the difference from the last one that it received.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._changed: dict[asyncio.Event, None] = {}
        """The readers, by connection: the order of wake-ups must not depend on addresses of objects."""
        loop.listeners.append(self._on_step)

    def _on_step(self, step: LoopStep) -> None:
        if step.before is not step.after:
            for event in self._changed:
                event.set()

    def routes(self, gateway: GatewayId, boot: str = "") -> AsyncGenerator[bytes]:
        """Yield the routes for this boot of this gateway, with an empty delta as heartbeat if nothing changes."""
        clock = asyncio.get_running_loop().time
        said_s = -math.inf
        unmet: dict[ModelName, Unmet] = {}

        def delta(before: World | None) -> bytes | None:
            nonlocal said_s, unmet
            now_s, leads = clock(), self._loop.world.leadership.leads
            if not leads:
                if now_s - said_s < HEARTBEAT_S:
                    return None
                said_s = now_s
                return BLANK
            was, unmet = unmet, {one.model: one for one in self._loop.plan.unmet}
            full = partial(publish.routes_full, gateway=gateway, now_s=now_s, unmet=unmet, boot=boot)
            change = partial(
                publish.routes_delta, gateway=gateway, now_s=now_s, unmet=unmet, unmet_before=was, boot=boot
            )
            message = self._changed_since(before, change, full)
            if message is None and now_s - said_s >= HEARTBEAT_S:  # also if the `World` changes at every step
                message = publish.build_heartbeat(self._loop.world)
            said_s = said_s if message is None else now_s
            return None if message is None else _encode(message)

        return self._messages("routes", delta)

    def catalogue(self) -> AsyncGenerator[bytes]:
        """Yield Models and Tenants, with the same heartbeat. It sends none before the documents are loaded."""

        def delta(before: World | None) -> bytes | None:
            after = self._loop.world
            if not after.leadership.documented:
                return BLANK if before is None or before is after else None
            known = before if before is not None and before.leadership.documented else None
            message = self._changed_since(known, catalogue.catalogue_delta, catalogue.catalogue_full)
            if message is None and before is after:
                message = CatalogueDelta(epoch=after.epoch, version=after.version)
            return None if message is None else _encode(message)

        return self._messages("catalogue", delta)

    def _changed_since(
        self, before: World | None, change: Callable[[World, World], D | None], full: Callable[[World], D]
    ) -> D | None:
        """Return the change since `before` (None: nothing was sent), or the full state if a Model makes this raise."""

        def compute(world: World) -> D | None:
            done = full(world) if before is None else attempt(lambda: change(before, world))
            return full(world) if isinstance(done, Failure) else done

        return self._loop.contained("publish", compute)

    async def _messages(self, what: str, delta: Callable[[World | None], bytes | None]) -> AsyncGenerator[bytes]:
        changed = asyncio.Event()
        self._changed[changed] = None
        sent: World | None = None
        try:
            while True:
                changed.clear()
                done = attempt(partial(delta, sent))
                self._loop.trouble(what, describe_error(done.error) if isinstance(done, Failure) else "")
                sent = None if isinstance(done, Failure) else self._loop.world
                if isinstance(done, bytes):
                    yield done
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            del self._changed[changed]


class ContractServer:
    """The gateway protocol as an aiohttp application over one Loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._feed = Feed(loop)
        self._node_wants = NodeWantsServer(loop)
        self._watch = ProcessWatch()

    def application(self, door: ContractAuth | None = None) -> web.Application:
        """Return the application.

        Paths: POST /v1/report, GET /v1/routes?gateway=&boot=, GET /v1/catalogue; POST /v1/node, GET /v1/wants?node=,
        GET /v1/peers?node=&artifact=. `door` authenticates the clients, if given.
        """
        doors = () if door is None else (door.check,)
        app = web.Application(client_max_size=REPORT_BYTES_MAX, middlewares=(*doors, require_roles(ENDPOINTS)))
        app.router.add_post("/v1/report", self._report)
        agents.add_node_route(app, self._loop)
        self._node_wants.add_to(app)
        app.router.add_get("/v1/routes", self._routes)
        app.router.add_get("/v1/catalogue", self._catalogue)
        return app

    async def _report(self, request: web.Request) -> web.Response:
        try:
            report = _decode_report(await request.read())
        except msgspec.DecodeError as error:
            return web.json_response({"error": f"invalid report: {error}"}, status=400)
        if odd := find_invalid_name(report):
            return web.json_response({"error": f"invalid report: illegal name - at `{odd}`"}, status=400)
        if report.epoch == self._loop.world.epoch and report.version > self._loop.world.version:
            why = "invalid report: its version of the routes is newer than that of this autoscaler - at `$.version`"
            return web.json_response({"error": why}, status=400)
        if (refused := self._too_many(report.gateway)) is not None:
            return refused
        answer = accept_report(self._loop, report)
        await asyncio.sleep(0)  # the loop decides first, because its decision is urgent and the response is not
        return web.Response(body=_encode(answer), content_type="application/json")

    async def _routes(self, request: web.Request) -> web.StreamResponse:
        gateway, boot = GatewayId(request.query.get("gateway", "")), request.query.get("boot", "")
        if not _ID.search(gateway):
            return web.json_response(
                {"error": "invalid `gateway`: expected ?gateway=ID with at most 253 letters, digits or ._-"}, status=400
            )
        if boot and not _ID.search(boot):
            return web.json_response(
                {"error": "`boot` is invalid: expected at most 253 letters, digits or ._-"}, status=400
            )
        if (refused := self._too_many(gateway)) is not None:
            return refused
        pid = _peer(request)
        self._loop.observe((GatewaySeen(gateway=gateway, boot=boot, watched=pid is not None),))
        if pid is not None:
            self._watch.watch(gateway, pid, lambda: self._loop.observe((GatewayGone(gateway=gateway, boot=boot),)))
        return await self._stream(request, self._feed.routes(gateway, boot))

    async def _catalogue(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, self._feed.catalogue())

    async def _stream(self, request: web.Request, messages: AsyncGenerator[bytes]) -> web.StreamResponse:
        """Send one message per line until the gateway disconnects."""
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        async with contextlib.aclosing(messages):
            try:
                await response.prepare(request)
                async for message in messages:
                    await response.write(message + b"\n")
            except ConnectionResetError:
                pass  # the gateway disconnected; it reconnects by itself
        return response

    def _too_many(self, gateway: GatewayId) -> web.Response | None:
        """Return an error response to a gateway beyond the limit."""
        known = self._loop.world.gateways
        if gateway in known or len(known) < GATEWAYS_MAX:
            return None
        error = f"the limit of {GATEWAYS_MAX} gateways is reached; gateways that ended are removed after two minutes"
        return web.json_response({"error": error}, status=503)


def _peer(request: web.Request) -> int | None:
    """Return the process of the gateway, if the socket reports it (Unix, SO_PEERCRED)."""
    peer = request.get_extra_info("socket")
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


@functools.lru_cache(maxsize=8192)
def _is_name(text: str) -> bool:
    """Cached: a gateway sends the same names twenty times per second."""
    return _NAME.search(text) is not None


def find_invalid_name(report: Report) -> str:
    """Return the path of the first name with an illegal character; empty: there is none."""
    fields: tuple[tuple[str, Sequence[Level | Total]], ...] = (("levels", report.levels), ("totals", report.totals))
    for field, rows in fields:
        for number, row in enumerate(rows):
            if not _is_name(row.model):
                return f"$.{field}[{number}].model"
            if not _is_name(row.tenant):
                return f"$.{field}[{number}].tenant"
    for number, use in enumerate(report.replicas):
        if not _is_name(use.replica):
            return f"$.replicas[{number}].replica"
    return ""


def accept_report(loop: Loop, report: Report) -> ReportAnswer:
    """Put a report into the loop's inbox; return whether the gateway must send every total again."""
    known = loop.world.gateways.get(report.gateway)
    resend = known is None or known.boot != report.boot or known.report is None
    put = loop.note if is_redundant_report(loop.world, report) else loop.observe
    put((Reported(report=report, came_s=loop.now_s()),))
    return ReportAnswer(epoch=loop.world.epoch, leads=loop.world.leadership.leads, resend=resend)
