"""Peering between agents: this node's port for the others, and the peers asked for an artifact. I/O.

Autoscalers are trusted only to name peers. Access to weights is decided between agents as in
`pilotlight.agent.weights.peer_sharing`: both sides show a certificate of their own authority (or a token), so neither
an autoscaler nor a process that reports in a node's name gains access. If no peer answers, everything comes from the
registry.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.disk.thread_wait import run_in_thread
from artifacts.peers.client import Peering
from artifacts.peers.selection import PEERS_MAX, Peer
from artifacts.peers.server import STREAMS_MAX
from artifacts.store.layout import StoreError
from artifacts.store.store import Store
from autoscaler.contract import make_decoder
from autoscaler.server.auth import Answer
from autoscaler.weights.peers import NodePeer, NodePeers
from pilotlight.agent.autoscaler_client import HttpWay
from pilotlight.agent.weights import peer_sharing as peering
from pilotlight.agent.weights.metrics import StoreMetrics
from pilotlight.net import contract_access as access
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.http_server import Runner
from pilotlight.net.listen import Address

CERTIFIED = "pilotlight-agent"
"""DNS name that agents expect in each other's certificates, since their addresses change."""

log = logging.getLogger("pilotlight.agent.weights")
_decode = make_decoder(NodePeers)


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's peering options."""

    listen: Address
    advertised: Address | None = None
    """Advertised address; None: $POD_IP, or the listen address."""
    access: Access = Access()


class Neighbours:
    """Peering of the agent of `node`. Raises click's usage error for unusable files."""

    def __init__(
        self, node: str, ways: Sequence[HttpWay], options: PeerOptions, files: Files, metrics: StoreMetrics
    ) -> None:
        peering.check_port(options.listen, options.access)
        self._node, self._ways, self._options, self._files = node, ways, options, files
        self._shown = options.access
        self._token, _ = access.read_client_files(self._shown, files)  # the certificate is read again for each pull
        self._metrics, self._trouble = metrics, ""
        self.url = ""
        """Advertised URL; empty until the port is open."""

    async def open(self, store: Path) -> Runner:
        """Serve the store to other agents; `cleanup` of the returned runner stops it. Raises click's usage error."""
        try:
            await run_in_thread(Store(store).open)
        except StoreError as error:  # a read-only store can still be served; a pull reports the error
            log.warning("event=store_failed reason=%r", str(error))
        options = self._options
        runner = await peering.open_port(store, options.listen, self._shown, self._files, STREAMS_MAX, self._count)
        bound = Address(*runner.addresses[0][:2])
        at = options.advertised or Address(os.environ.get("POD_IP") or bound.host, bound.port)
        self.url = f"http{'' if self._shown.identity.cert is None else 's'}://{at.text}"
        if why := peering.describe_url_problem(self.url):
            log.warning("event=peer_not_advertised reason=%r", why)
            self.url = ""
        return runner

    async def peering(self, artifact: str) -> Peering:
        """Return the peers that may have the artifact now."""
        query = urlencode({"node": self._node, "artifact": artifact})
        found: dict[str, NodePeer] = {}
        for answer in [one for way in self._ways for one in await way.ask(f"/v1/peers?{query}")]:
            try:
                named = _decode(answer).peers
            except msgspec.DecodeError as error:
                self._say(f"invalid response: {error}")
                continue
            for one in named[:PEERS_MAX]:
                if self._believes(one.url) and (one.digest or one.node not in found):
                    found[one.node] = one
        peers = [Peer(one.node, one.url, _holds(one)) for one in found.values()]
        return peering.build_peering(self._shown.identity, self._node, lambda: peers, self._token, CERTIFIED)

    def _believes(self, url: str) -> bool:
        """Return whether another node's agent can be at this URL: a forged report could name a service of this machine.
        Such a URL is accepted only if this agent's own URL is one too: only then do several agents share the machine.
        """
        return not peering.describe_url_problem(url) and (
            not peering.is_own_machine(url) or peering.is_own_machine(self.url)
        )

    @property
    def _count(self) -> Middleware:
        @web.middleware
        async def count(request: web.Request, handler: Answer) -> web.StreamResponse:
            answer = await handler(request)
            gave = request.method == "GET" and answer.status in {200, 206}
            self._metrics.asked(answer.status, answer.content_length or 0 if gave else 0)
            return answer

        return count

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("event=peers_unknown reason=%r", trouble)


def _holds(one: NodePeer) -> frozenset[Digest]:
    try:
        return frozenset({parse_digest(one.digest)}) if one.digest else frozenset()
    except BadDigestError:
        return frozenset()
