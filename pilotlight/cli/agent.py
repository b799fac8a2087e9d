"""`pilotlight agent`: assembles the agent of one node from its observation, its credentials and its autoscalers.

Defines the command and the clients for autoscalers: an address, a Unix socket, or a name whose addresses all get
reports. Also encodes the reports, since `pilotlight.agent.reporter` does not depend on the messages to autoscalers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from urllib.parse import quote

import click
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from autoscaler.agent_contract import NODE_PERIOD_S, NodeReport
from autoscaler.drivers.resilient_tasks import retry_until_success
from autoscaler.spec.installation_ownership import Ownership
from pilotlight import process
from pilotlight.agent.autoscaler_client import HttpWay
from pilotlight.agent.gpu.device_plugin_pods import parse_pod_selector
from pilotlight.agent.gpu.fabric_node import open_gpu_attachment
from pilotlight.agent.gpu.hotplug_loop import Attaching
from pilotlight.agent.kubelet.grpc_clients import POD_RESOURCES, NodeSockets
from pilotlight.agent.kubelet.image_pull import Images, ImageWanted
from pilotlight.agent.node_observer import NodeLook, NodeLooks, should_report
from pilotlight.agent.reporter import Agent
from pilotlight.agent.weights import peer_sharing
from pilotlight.agent.weights.fetch import PullSecrets
from pilotlight.agent.weights.keeper import WeightsKeeper
from pilotlight.agent.weights.peers import Neighbours, PeerOptions
from pilotlight.net import contract_access as access
from pilotlight.net import http_server as health
from pilotlight.net.certificates import Identity
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.listen import Address, AddressType
from pilotlight.options import DIRECTORY, FILE, access_options, autoscalers_option, health_option

LOOK_S_MAX = 30.0
"""An agent that has not observed its node for this long counts as hung."""
STORE = Path("/var/lib/pilotlight/weights")

log = logging.getLogger("pilotlight.agent")
SOCKET = FILE


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an agent."""

    node: str
    autoscalers: tuple[str, ...]
    access: Access = Access()
    pod_resources: Path | None = None
    """The kubelet's socket; None: do not use it."""
    runtime: Path | None = None
    """The container runtime's socket; None: do not use it."""
    health: Address | None = None
    store: Path = STORE
    """Folder of the node's weights."""
    pull_secrets: str | None = None
    """The namespace whose pull secrets may be read; None: read none."""
    kubeconfig: Path | None = None
    peers: PeerOptions | None = None
    """None: weights are not exchanged with other agents."""
    fabric: tuple[str, ...] | None = None
    """Selectors of pods to restart when a device is attached or detached (`parse_pod_selector`); None: disabled."""
    installation: str = ""
    """Value of the installation label on DeviceTaintRules; empty: there is only one installation."""


def _pods_of(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Validate the selectors; they are parsed where they are used."""
    for one in value:
        try:
            parse_pod_selector(one)
        except ValueError:
            raise click.BadParameter(
                f"{one}: expected NAMESPACE/LABEL=VALUE[,LABEL=VALUE]", context, parameter
            ) from None
    return value


@click.command(epilog="Example: pilotlight agent --autoscaler https://autoscaler:8443 --token-file token")
@click.option(
    "--node", default=lambda: os.environ.get("NODE_NAME") or socket.gethostname(),
    show_default="$NODE_NAME, or the host's name", help="The name of the node in the cluster.",
)  # fmt: skip
@autoscalers_option
@access_options
@click.option(
    "--store", type=DIRECTORY, default=STORE, show_default=True,
    help="The folder of the node's weights. The agent pulls the weights that autoscalers request; engine pods mount"
    " them from this path.",
)  # fmt: skip
@click.option(
    "--pull-secrets", metavar="NAMESPACE",
    help="The namespace whose pull secrets the agent reads with its service account. Default: none are read.",
)  # fmt: skip
@click.option("--kubeconfig", type=FILE, help="Path to a kubeconfig file for reading pull secrets outside of a pod.")
@click.option(
    "--pod-resources",
    type=SOCKET,
    default=POD_RESOURCES,
    show_default=True,
    help="The kubelet's socket that reports the devices of each pod. The agent also runs without it.",
)
@click.option(
    "--runtime",
    type=SOCKET,
    help="The container runtime's socket (CRI), for example /run/containerd/containerd.sock. The agent uses it to "
    "report images and to pull engine images before a start.",
)
@click.option(
    "--fabric", is_flag=True,
    help="Make GPUs of a fabric usable when they are attached to the node, and release them before they are "
    "detached. This requires all privileges of root on the node, and the host's process IDs.",
)  # fmt: skip
@click.option(
    "--restart", multiple=True, metavar="NAMESPACE/LABEL=VALUE", callback=_pods_of,
    help="With --fabric: pods of the node that detect GPUs only when they start (device plug-in, DRA driver, dcgm),"
    " which the agent restarts. Repeatable.",
)  # fmt: skip
@click.option(
    "--installation", default="",
    help="With --fabric: the value of the label pilotlight.dev/installation of the agent's DeviceTaintRules. Default: "
    "the rules have no such label.",
)  # fmt: skip
@health_option
@click.option(
    "--peer-listen", type=AddressType(),
    help="The address at which agents of other nodes fetch weights. Default: weights are not exchanged with other "
    "nodes.",
)  # fmt: skip
@click.option(
    "--peer-address",
    type=AddressType(),
    help="The address that other nodes use for --peer-listen. Default: $POD_IP, else the address of --peer-listen.",
)
@peer_sharing.peer_options
def agent(  # noqa: PLR0917  click passes by keyword
    node: str, autoscalers: tuple[str, ...], token_file: Path | None, contract_cert_file: Path | None,
    contract_key_file: Path | None, contract_ca_file: Path | None, store: Path, pull_secrets: str | None,
    kubeconfig: Path | None, pod_resources: Path, runtime: Path | None, fabric: bool,
    restart: tuple[str, ...], installation: str, health: Address | None,
    peer_listen: Address | None, peer_address: Address | None, peer_token_file: Path | None,
    peer_cert_file: Path | None, peer_key_file: Path | None, peer_ca_file: Path | None,
) -> None:  # fmt: skip
    """Run the agent of one node: report devices, their memory, health and pods, and pull weights.

    The agent reports to every autoscaler and pulls the weights that the leader requests for the node.
    """
    access.check_autoscalers(autoscalers)
    identity = Identity(cert=contract_cert_file, key=contract_key_file, ca=contract_ca_file)
    among = peer_sharing.build_peer_access(peer_token_file, peer_cert_file, peer_key_file, peer_ca_file)
    peers = None if peer_listen is None else PeerOptions(listen=peer_listen, advertised=peer_address, access=among)
    options = AgentOptions(
        node=node, autoscalers=autoscalers, access=Access(identity=identity, token=token_file),
        pod_resources=pod_resources, runtime=runtime, health=health, store=store, pull_secrets=pull_secrets,
        kubeconfig=kubeconfig, peers=peers, fabric=restart if fabric else None,
        installation=installation,
    )  # fmt: skip
    process.run(run_agent(options))


async def run_agent(options: AgentOptions) -> None:
    """Run the process. Raises click's usage error for files that cannot be used."""
    stop, files, boot = process.stop_event(), Files(), secrets.token_hex(8)
    shown = options.access
    token, tls = access.read_client_files(shown, files)
    access.warn_exposed_files(shown)

    logins = PullSecrets(options.pull_secrets, options.kubeconfig)
    keeping = WeightsKeeper(options.store, logins)

    ways = [HttpWay(url, token, tls) for url in options.autoscalers]
    among = None if options.peers is None else Neighbours(options.node, ways, options.peers, files, keeping.metrics)
    port = None
    if among is not None:
        port = await among.open(options.store)
        keeping.fetching.peering = among.peering

    def written(look: NodeLook, sequence: int, age_s: float) -> bytes:
        copies, weights = keeping.report()
        report = NodeReport(
            node=options.node, boot=boot, sequence=sequence, devices=look.devices, pods=look.pods, images=look.images,
            uses=look.uses, age_s=age_s, brings=True, copies=copies, weights=weights,
            epoch=keeping.epoch, peer="" if among is None else among.url,
            attaches=bay is not None, fabric=() if bay is None else bay.report(),
        )  # fmt: skip
        return msgspec.json.encode(report)

    sockets = NodeSockets(options.pod_resources, options.runtime)
    looks = NodeLooks(sockets=sockets)
    one = Agent(looks.look, should_report, written, ways, NODE_PERIOD_S)
    keeping.changed = one.tell
    reach = AsyncExitStack()
    bay = await _bay(options, looks, reach)
    if bay is not None:
        bay.changed, keeping.fabric = one.tell, bay.want
    images = None if options.runtime is None else Images(options.runtime, logins, sockets.images_changed)
    if images is not None:
        keeping.images = lambda wanted: images.want(ImageWanted(one.image, one.pull_secret) for one in wanted)
    shown_at = await health.open_port(options.health, build_health_app(one, keeping.metrics.text))
    process.freeze_gc()
    async with asyncio.TaskGroup() as tasks:
        parts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("reports", one.run), ("files", files.follow), ("weights", keeping.run),
        ]  # fmt: skip
        parts += [("images", images.run)] if images is not None else []
        parts += [("fabric", bay.run)] if bay is not None else []
        wants = f"/v1/wants?node={quote(options.node)}"
        parts += [(way.name, partial(way.follow, wants, keeping.heard)) for way in ways]
        running = [tasks.create_task(run_contained(part, work)) for part, work in parts]
        await stop.wait()
        for task in running:
            task.cancel()
    for way in ways:
        await way.close()
    await sockets.close()
    await reach.aclose()
    await shown_at.cleanup()
    if port is not None:
        await port.cleanup()


async def run_contained(part: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a part of the agent; an exception is logged and the part is started again, while the others go on."""

    def report(reason: str) -> None:
        if reason:
            log.error("event=agent_part_failed part=%s error=%s", part, reason)

    await retry_until_success(work, report)


async def _bay(options: AgentOptions, looks: NodeLooks, reach: AsyncExitStack) -> Attaching | None:
    """Start the attachment of fabric devices; None if it is disabled."""
    if options.fabric is None:
        return None
    owner = Ownership(options.installation)
    made = open_gpu_attachment(options.node, options.fabric, options.kubeconfig, lambda: looks.pods, owner)
    return await reach.enter_async_context(made)


def build_health_app(one: Agent[NodeLook], metrics: Callable[[], bytes]) -> web.Application:
    """Serve /healthz (the node is observed), /readyz (an autoscaler accepts reports) and /metrics (weights)."""

    async def healthz(_: web.Request) -> web.Response:
        return _says(one.age_s < LOOK_S_MAX, "ok", f"the node was not observed for {LOOK_S_MAX:g} s")

    async def readyz(_: web.Request) -> web.Response:
        return _says(one.heard, "ok", "no autoscaler accepts the agent's reports")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
    return app


def _says(well: bool, yes: str, no: str) -> web.Response:
    return web.Response(text=f"{yes if well else no}\n", status=200 if well else 503)
