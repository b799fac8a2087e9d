"""The server for node agents: receives reports, sends wants and peers (interfaces, section 6). I/O.

POST /v1/node validates a report of limited size, which the fold interprets. A report without changes waits for the
loop's next step and does not wake it: thousands of agents report every few seconds that nothing has changed.

GET /v1/wants streams what `autoscaler.weights.desired` requires, GET /v1/peers answers which agents have it
(`autoscaler.weights.peers`). The leader sends the complete wants at once when they change. A follower sends only blank
lines, so that an agent gets the first message of the next leader. A slow agent gets only the newest message. A Model
whose wants raise an exception is quarantined. The wants of all nodes omit it until its quarantine ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Collection
from copy import copy

import msgspec
from aiohttp import web

from autoscaler.agent_contract import NodeAnswer, NodeReport, NodeWants
from autoscaler.capacity import agent_device_requests
from autoscaler.contract import ModelName, make_decoder
from autoscaler.controller.fault_attribution import find_culprits, rank_suspects
from autoscaler.controller.loop import Loop, LoopStep
from autoscaler.exception_handling import Failure, attempt, can_complete
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.queries.agent_reports import is_redundant_node_report
from autoscaler.server.auth import NODE_CHARS_MAX, check_token_node
from autoscaler.state.events import NodeReported
from autoscaler.state.world import NodeId, World
from autoscaler.weights.desired import build_node_wants, list_promised_placements
from autoscaler.weights.image_prepull import ImageWants
from autoscaler.weights.inspection import InspectionAssigner
from autoscaler.weights.peers import PeerCache

NODE_BYTES_MAX = 1 << 20
FOLDER = re.compile(r"copies(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,255}){1,4}")
"""The folder of a copy below a store. It is mounted into pods, so it must not refer to anything else on the node."""
DIGEST = re.compile(r"sha[0-9]{3}:[0-9a-f]{1,128}")
"""A digest. It becomes a part of an image name and is sent to other agents."""
PEER_CHARS_MAX = 300
"""The maximum length of an agent's URL for its peers, which get many at once: a name of NODE_CHARS_MAX and a port."""

_decode = make_decoder(NodeReport)
_encode = msgspec.json.Encoder().encode


def add_node_route(app: web.Application, loop: Loop) -> None:
    """Add the route to the contract's application."""

    async def node(request: web.Request) -> web.Response:
        length = request.content_length
        if length is None or length > NODE_BYTES_MAX:
            error = f"invalid node report: it requires a Content-Length of at most {NODE_BYTES_MAX} bytes"
            return web.json_response({"error": error}, status=413)
        try:
            report = _decode(await request.read())
        except msgspec.DecodeError as wrong:
            return web.json_response({"error": f"invalid node report: {wrong}"}, status=400)
        if not report.node or len(report.node) > NODE_CHARS_MAX:
            return web.json_response({"error": "invalid node report: `node` must be the name of the node"}, status=400)
        if (refused := check_token_node(request, report.node)) is not None:
            return refused
        for is_wrong, error in (
            (any(one.folder and not FOLDER.fullmatch(one.folder) for one in report.weights),
             "`folder` must be a folder of the store, such as copies/..."),
            (any(one.digest and not DIGEST.fullmatch(one.digest) for one in report.weights),
             "`digest` must have the form sha256:..."),
            (len(report.peer) > PEER_CHARS_MAX,
             f"`peer` must be https://HOST:PORT with at most {PEER_CHARS_MAX} characters"),
        ):  # fmt: skip
            if is_wrong:
                return web.json_response({"error": f"invalid node report: {error}"}, status=400)
        known, seen = loop.world.nodes.agents.get(report.node), (NodeReported(report=report),)
        if known is not None and known.report.boot == report.boot and is_redundant_node_report(known.report, report):
            loop.note(seen)
        else:
            loop.observe(seen)
        return web.Response(body=_encode(NodeAnswer(epoch=loop.world.epoch)), content_type="application/json")

    app.router.add_post("/v1/node", node)


HEARTBEAT_S = 3.0
"""The interval of messages if nothing changes."""
BLANK = b"\n"


class NodeWantsServer:
    """The streams of wants over one Loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._wants: dict[NodeId, NodeWants] = {}
        self._early: tuple[tuple[ModelName, NodeId], ...] = ()
        self._readers: dict[NodeId, dict[asyncio.Event, None]] = {}
        """The readers, by connection: the order of wake-ups must not depend on addresses of objects."""
        self._others = False
        """Whether the next step must compute the wants again: the set of connected agents has changed since inspections
        were last assigned, or the last computation raised an exception.
        """
        self._now_s: float | None = None
        """The time of the last step."""
        self._images, self._lookers = ImageWants(), InspectionAssigner()
        self._faulty: frozenset[ModelName] = frozenset()
        """The Models that the wants omit, because they raised an exception."""
        self._asked = PeerCache()
        loop.listeners.append(self._on_step)

    def add_to(self, app: web.Application) -> None:
        """Add the routes to the contract's application."""
        app.router.add_get("/v1/wants", self._follow)
        app.router.add_get("/v1/peers", self._peers)

    def _on_step(self, step: LoopStep) -> None:
        self._now_s = step.acted_s
        early = list_promised_placements(step.after, step.plan.unmet) if self._readers else ()
        same = early == self._early and not self._others and not _differs(step.before, step.after)
        same = same and self._now_s < self._lookers.next_s and self._faulty <= list_quarantined_models(step.after)
        if not self._readers or same:
            return
        self._others = True
        before, self._wants, self._early = self._wants, self._wanted(step.after, early), early
        self._others = False
        general = _general(step.before) != _general(step.after)
        for node, events in self._readers.items():
            if general or before.get(node) != self._wants.get(node):
                for event in events:
                    event.set()

    def _wanted(self, world: World, early: tuple[tuple[ModelName, NodeId], ...]) -> dict[NodeId, NodeWants]:
        """Return the wants without those of faulty Models. Raises an exception that no Model explains."""
        held = self._faulty & list_quarantined_models(world)

        def wants(out: Collection[ModelName]) -> tuple[dict[NodeId, NodeWants], InspectionAssigner]:
            return self._computed(mask_quarantined(world, held.union(out)), early)

        done, found = attempt(lambda: wants(())), tuple[ModelName, ...]()
        if isinstance(done, Failure):
            suspects = rank_suspects(world.models.keys() - held, done.error)
            found = find_culprits(suspects, lambda out: can_complete(lambda: wants(out)))
            for name in found:
                self._loop.fault(name, "wants", done.error)
            if not found:
                raise done.error
            done = attempt(lambda: wants(found))
        self._faulty = held.union(found)
        if isinstance(done, Failure):  # there are more culprits than one search returns
            raise done.error
        wanted, self._lookers = done
        return wanted

    def _computed(
        self, world: World, early: tuple[tuple[ModelName, NodeId], ...]
    ) -> tuple[dict[NodeId, NodeWants], InspectionAssigner]:
        """Return the wants, and the assignments of inspections on which they are based. Changes no assignment."""
        lookers = copy(self._lookers)
        looks = lookers.looks(world, self._readers.keys(), self._now_s)
        fabric = agent_device_requests.build_fabric_wants(world)
        return build_node_wants(world, early, self._images.of(world, early), looks, fabric), lookers

    async def messages(self, node: NodeId) -> AsyncGenerator[bytes]:
        """Yield lines for one agent: its wants, once and after every change."""
        changed, said = asyncio.Event(), None
        kept, self._others = bool(self._readers), self._others or node not in self._readers
        self._readers.setdefault(node, {})[changed] = None
        if not kept:
            self._early = list_promised_placements(self._loop.world, self._loop.plan.unmet)
            self._wants = self._wanted(self._loop.world, self._early)  # not updated while there was no reader
        try:
            while True:
                changed.clear()
                now = self._now(node)
                yield BLANK if now is None or now == said else _encode(now) + b"\n"
                said = now or said
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
        finally:
            del self._readers[node][changed]
            if not self._readers[node]:
                del self._readers[node]
                self._others = True

    def _now(self, node: NodeId) -> NodeWants | None:
        """Return the wants of a node. None: this autoscaler does not lead, or does not know them yet."""
        world = self._loop.world
        if not (world.leadership.leads and world.leadership.synced and world.leadership.documented):
            return None
        return self._wants.get(node) or NodeWants(epoch=world.epoch, weights=world.settings.weights)

    async def _peers(self, request: web.Request) -> web.Response:
        """Answer on any autoscaler with connected agents. Only the leader knows which agents are about to pull."""
        node, artifact = NodeId(request.query.get("node", "")), request.query.get("artifact", "")
        if not node or not artifact:
            return web.json_response(
                {"error": "`node` or `artifact` is missing: expected ?node=NAME&artifact=..."}, status=400
            )
        if (refused := check_token_node(request, node)) is not None:
            return refused
        now_s = asyncio.get_running_loop().time()
        peers = self._asked.peers(self._loop.world, self._wants, node, artifact, now_s)
        return web.Response(body=_encode(peers), content_type="application/json")

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        node = NodeId(request.query.get("node", ""))
        if not node:
            return web.json_response({"error": "`node` is missing: expected ?node=NAME"}, status=400)
        if (refused := check_token_node(request, node)) is not None:
            return refused
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        async with contextlib.aclosing(self.messages(node)) as lines:
            try:
                await response.prepare(request)
                async for line in lines:
                    await response.write(line)
            except ConnectionResetError:
                pass  # the agent disconnected; it reconnects by itself
        return response


def _differs(before: World, after: World) -> bool:
    """Return whether an input of the wants has changed."""
    return _general(before) != _general(after) or any(
        one is not other
        for one, other in (
            (before.replicas, after.replicas), (before.models, after.models), (before.nodes.slices, after.nodes.slices),
            (before.nodes.images, after.nodes.images), (before.settings, after.settings),
            (before.learned.looked, after.learned.looked), (before.nodes.mounting, after.nodes.mounting),
            (before.capacity.leases, after.capacity.leases),
        )
    ) or before.nodes.agents.keys() != after.nodes.agents.keys()  # fmt: skip


def _general(world: World) -> tuple[object, ...]:
    """Return the inputs that are the same for all nodes."""
    leadership = world.leadership
    return world.epoch, leadership.leads, leadership.synced, leadership.documented, world.settings.weights
