"""POST /v1/node: receives the reports of node agents (interfaces, section 6). I/O; the fold interprets them.

Limits the size of a report, and validates it. The route is on the contract's port, with the authentication of gateways.
A report without changes waits for the loop's next step and does not wake it: thousands of agents report every few
seconds that nothing has changed.
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
        if any(one.folder and not FOLDER.fullmatch(one.folder) for one in report.weights):
            return web.json_response(
                {"error": "invalid node report: `folder` must be a folder of the store, such as copies/..."}, status=400
            )
        if any(one.digest and not DIGEST.fullmatch(one.digest) for one in report.weights):
            return web.json_response(
                {"error": "invalid node report: `digest` must have the form sha256:..."}, status=400
            )
        if len(report.peer) > PEER_CHARS_MAX:
            error = f"invalid node report: `peer` must be https://HOST:PORT with at most {PEER_CHARS_MAX} characters"
            return web.json_response({"error": error}, status=400)
        known, seen = loop.world.nodes.agents.get(report.node), (NodeReported(report=report),)
        if known is not None and known.report.boot == report.boot and is_redundant_node_report(known.report, report):
            loop.note(seen)
        else:
            loop.observe(seen)
        return web.Response(body=_encode(NodeAnswer(epoch=loop.world.epoch)), content_type="application/json")

    app.router.add_post("/v1/node", node)
