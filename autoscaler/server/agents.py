"""POST /v1/node: what agents of nodes say comes in (interfaces, section 6). I/O; the fold decides what it means.

Owns the bound of one report and its one error. It stands on the contract's port, behind the same door as gateways.
A report that only repeats the one before waits for the loop's next step and wakes nobody: thousands of agents say every
few seconds that nothing has changed.
"""

from __future__ import annotations

import re

import msgspec
from aiohttp import web

from autoscaler.contract import NodeAnswer, NodeReport, make_decoder
from autoscaler.controller.loop import Loop
from autoscaler.queries.device_health import is_redundant_node_report
from autoscaler.server.auth import NODE_CHARS_MAX, check_token_node
from autoscaler.state.operator_orders import NodeReported

NODE_BYTES_MAX = 1 << 20
FOLDER = re.compile(r"copies(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,255}){1,4}")
"""Of a Copy's files, below a store: it is mounted into pods, and must lead to nothing else of the node."""
DIGEST = re.compile(r"sha[0-9]{3}:[0-9a-f]{1,128}")
"""It becomes a part of an image's name, and other agents are told of it."""
PEER_CHARS_MAX = 300
"""Of an agent's URL for others, who are told of many at once: a name of NODE_CHARS_MAX and a port."""

_decode = make_decoder(NodeReport)
_encode = msgspec.json.Encoder().encode


def add_node_route(app: web.Application, loop: Loop) -> None:
    """Puts the route on the contract's application."""

    async def node(request: web.Request) -> web.Response:
        length = request.content_length
        if length is None or length > NODE_BYTES_MAX:
            error = f"a node's report says its length and has at most {NODE_BYTES_MAX} bytes"
            return web.json_response({"error": error}, status=413)
        try:
            report = _decode(await request.read())
        except msgspec.DecodeError as wrong:
            return web.json_response({"error": f"not a node's report: {wrong}"}, status=400)
        if not report.node or len(report.node) > NODE_CHARS_MAX:
            return web.json_response({"error": "which node? `node` is its name"}, status=400)
        if (refused := check_token_node(request, report.node)) is not None:
            return refused
        if any(one.folder and not FOLDER.fullmatch(one.folder) for one in report.weights):
            return web.json_response({"error": "`folder` is that of a Copy, below the store: copies/..."}, status=400)
        if any(one.digest and not DIGEST.fullmatch(one.digest) for one in report.weights):
            return web.json_response({"error": "`digest` is one such as sha256:..."}, status=400)
        if len(report.peer) > PEER_CHARS_MAX:
            error = f"`peer` is longer than {PEER_CHARS_MAX} characters: https://HOST:PORT"
            return web.json_response({"error": error}, status=400)
        known, seen = loop.world.nodes.agents.get(report.node), (NodeReported(report=report),)
        if known is not None and known.report.boot == report.boot and is_redundant_node_report(known.report, report):
            loop.note(seen)
        else:
            loop.observe(seen)
        return web.Response(body=_encode(NodeAnswer(epoch=loop.world.epoch)), content_type="application/json")

    app.router.add_post("/v1/node", node)
