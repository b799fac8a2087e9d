"""Composes the agent of one node: what it looks at, how it shows who it is, and whom it tells.

Owns the command and the ways to autoscalers: an address, a Unix socket, or a name that stands for all of its addresses
(each is told). The contract's words are made here, because the agent knows no autoscaler.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import click
import msgspec
from aiohttp import web

from artifacts.agent import Agent, WayError
from artifacts.nodesockets import POD_RESOURCES, NodeSockets
from autoscaler.contract import NODE_PERIOD_S, NodeReport
from gateway.finding import ADDRESSES_MAX
from pilotlight import access, certificates, health, process
from pilotlight.access import Access
from pilotlight.certificates import Identity
from pilotlight.listen import Address
from pilotlight.nodelook import NodeLook, NodeLooks, news
from pilotlight.options import DIRECTORY, access_options, autoscalers_option, health_option
from pilotlight.renewal import Files

SEND_S_MAX = 2.0
LOOK_S_MAX = 30.0
"""An agent that has not looked for so long hangs."""
SOCKET = click.Path(path_type=Path)


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is told."""

    node: str
    autoscalers: tuple[str, ...]
    access: Access = Access()
    pod_resources: Path | None = None
    """The kubelet's socket; None: it is not asked."""
    runtime: Path | None = None
    """The container runtime's socket; None: it is not asked."""
    health: Address | None = None


Token = Callable[[], str]
Tls = Callable[[], ssl.SSLContext]


class HttpWay:
    """To `unix:PATH`, `https://HOST:PORT`, or everybody behind `dns+https://NAME:PORT`."""

    def __init__(self, url: str, token: Token | None, tls: Tls | None) -> None:
        self.name = url
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def send(self, body: bytes) -> None:
        """As `artifacts.agent.Way`."""
        try:
            urls, host = await self._addresses()
        except OSError as error:
            raise WayError("the name cannot be looked up") from error
        done = await asyncio.gather(*(self._post(url, host, body) for url in urls), return_exceptions=True)
        failed = [error for error in done if isinstance(error, BaseException)]
        if failed:
            which = f"{len(failed)} of {len(done)}: " if len(done) > 1 else ""
            raise WayError(which + _said(failed[0])) from failed[0]

    async def _addresses(self) -> tuple[list[str], str | None]:
        """(whom to tell, whose certificate is expected where that is not in the URL). Raises OSError."""
        if self.name.startswith("unix:"):
            return ["http://autoscaler"], None
        if not self.name.startswith("dns+"):
            return [self.name.rstrip("/")], None
        at = urlsplit(self.name.removeprefix("dns+"))
        host, port = str(at.hostname), int(at.port or 0)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = sorted({str(address[0]) for *_, address in found})[:ADDRESSES_MAX]
        return [f"{at.scheme}://{Address(one, port).text}" for one in addresses], host

    async def _post(self, url: str, host: str | None, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token()}"
        async with self._connected().post(
            f"{url}/v1/node", data=body, headers=headers, raise_for_status=True, server_hostname=host,
            ssl=True if self._tls is None else self._tls(), timeout=aiohttp.ClientTimeout(total=SEND_S_MAX),
        ) as answer:  # fmt: skip
            await answer.read()

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self.name.removeprefix("unix:")
            connector = aiohttp.UnixConnector(path) if path != self.name else aiohttp.TCPConnector()
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def close(self) -> None:
        """Ends its connections."""
        if self._session is not None:
            await self._session.close()


def _said(error: BaseException) -> str:
    """Why it was not taken, without an address."""
    if isinstance(error, aiohttp.ClientResponseError):
        hint = ": --token-file must hold one of its tokens" if error.status == 401 else ""
        return f"it answered {error.status}{hint}"
    return type(error).__name__


@click.command(epilog="Example: pilotlight agent --autoscaler https://autoscaler:8443 --token-file token")
@click.option(
    "--node", default=lambda: os.environ.get("NODE_NAME") or socket.gethostname(),
    show_default="$NODE_NAME, or the host's name", help="The node's name, as the cluster has it.",
)  # fmt: skip
@autoscalers_option
@access_options
@click.option("--store", type=DIRECTORY, help="Where weights of this node are kept; this version puts none there.")
@click.option(
    "--pod-resources",
    type=SOCKET,
    default=POD_RESOURCES,
    show_default=True,
    help="The kubelet's socket that tells which pod has which device; without it the agent goes on.",
)
@click.option(
    "--runtime",
    type=SOCKET,
    help="The container runtime's socket (CRI), such as /run/containerd/containerd.sock, which tells of images.",
)
@health_option
def agent(  # noqa: PLR0917  click passes by keyword
    node: str, autoscalers: tuple[str, ...], token_file: Path | None, contract_cert_file: Path | None,
    contract_key_file: Path | None, contract_ca_file: Path | None, store: Path | None, pod_resources: Path,
    runtime: Path | None, health: Address | None,
) -> None:  # fmt: skip
    """The agent of one node: tells autoscalers of its devices, their memory and health, and who has them."""
    del store
    access.check_autoscalers(autoscalers)
    identity = Identity(cert=contract_cert_file, key=contract_key_file, ca=contract_ca_file)
    options = AgentOptions(
        node=node, autoscalers=autoscalers, access=Access(identity=identity, token=token_file),
        pod_resources=pod_resources, runtime=runtime, health=health,
    )  # fmt: skip
    process.run(serve(options))


async def serve(options: AgentOptions) -> None:
    """The life of the process. Raises click's usage error for files that cannot be used."""
    stop, files, boot = process.stop_event(), Files(), secrets.token_hex(8)
    shown = options.access
    identity, path = shown.identity, shown.token
    token = None if path is None else files.read(lambda: certificates.tokens(path)[0], (path,))
    tls = files.read(lambda: certificates.client(identity), identity.files) if identity.files else None
    access.warn(shown)

    def written(look: NodeLook, sequence: int, age_s: float) -> bytes:
        report = NodeReport(
            node=options.node, boot=boot, sequence=sequence, devices=look.devices, pods=look.pods, images=look.images,
            age_s=age_s,
        )  # fmt: skip
        return msgspec.json.encode(report)

    ways = [HttpWay(url, token, tls) for url in options.autoscalers]
    sockets = NodeSockets(options.pod_resources, options.runtime)
    one = Agent(NodeLooks(sockets=sockets).look, news, written, ways, NODE_PERIOD_S)
    shown_at = await health.open_port(options.health, application(one))
    process.settle()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one.run()), tasks.create_task(files.follow())]
        await stop.wait()
        for task in running:
            task.cancel()
    for way in ways:
        await way.close()
    await sockets.close()
    await shown_at.cleanup()


def application(one: Agent[NodeLook]) -> web.Application:
    """GET /healthz: it looks at its node; /readyz: an autoscaler takes what it says."""

    async def healthz(_: web.Request) -> web.Response:
        return _says(one.age_s < LOOK_S_MAX, "ok", "it does not get to look at its node")

    async def readyz(_: web.Request) -> web.Response:
        return _says(one.heard, "ok", "no autoscaler takes what it says")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    return app


def _says(well: bool, yes: str, no: str) -> web.Response:
    return web.Response(text=f"{yes if well else no}\n", status=200 if well else 503)
