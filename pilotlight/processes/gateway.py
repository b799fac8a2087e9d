"""Assembles one gateway process: front end, sync and its own operations port.

Defines the order of startup and shutdown. It receives addresses, sockets and limits, and makes no decisions.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from aiohttp import web

from autoscaler.contract import ID_PATTERN, GatewayId
from gateway.control.fault_containment import retry_until_success
from gateway.control.sync import Sync
from gateway.gateway import Gateway
from gateway.limits import Limits
from gateway.ops import build_ops_application
from gateway.server.tls_handshakes import Handshakes
from pilotlight import process
from pilotlight.net import certificates
from pilotlight.net import contract_access as access
from pilotlight.net import http_server as health
from pilotlight.net.certificates import Identity
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.listen import Address, check_operations, socket_of, start_servers
from pilotlight.processes.request_event_file import EventFile
from pilotlight.safe_output import write_stderr

INFORMED_S_MAX = 5.0
"""How long a starting gateway waits for the catalogue and routes before it accepts connections without them."""

log = logging.getLogger("pilotlight.gateway.process")


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one gateway process."""

    id: str
    autoscalers: tuple[str, ...]
    listen: Address
    ops: Address
    health: Address | None = None
    """Address of the health port (liveness, readiness, metrics)."""
    listen_fd: int | None = None
    """An inherited listening socket to use instead of opening `listen`."""
    ops_socket: Path | None = None
    """A Unix socket to use instead of `ops`."""
    state: Path | None = None
    parent: int | None = None
    grace_s: float = 30.0
    limits: Limits = Limits()
    tls: Identity = Identity()
    """Certificate of the inference port (without one it speaks plain HTTP), and authorities trusted for engines."""
    access: Access = Access()
    """Credentials for autoscalers that are not on a Unix socket, and the authorities trusted for them."""
    events: Path | None = None
    """File of request events; None: events are not recorded."""


def run_gateway(options: GatewayOptions) -> None:
    """Run until SIGTERM, then drain."""
    check_reach(options)
    if not re.search(ID_PATTERN, options.id):
        raise click.UsageError("--id: expected at most 253 letters, digits or ._-, the first a letter or digit")
    if options.parent is not None:
        process.die_with_parent(options.parent)
    process.run(serve_gateway(options))


def check_reach(options: GatewayOptions) -> None:
    """Raise click's usage error if others could reach its operations port.

    A gateway knows only the Settings in the environment; documents belong to the autoscaler.
    """
    if options.ops_socket is None and not options.ops.loopback:
        from pilotlight.models.document_loading import (
            load_files,  # imported here: gateways need documents for nothing else
        )

        check_operations(options.ops, load_files(()).settings.auth)


async def serve_gateway(options: GatewayOptions) -> None:
    """Run the process: get ready, serve, drain."""
    stop = process.stop_event()
    process.open_all_files()
    events = EventFile(options.events) if options.events is not None else None
    files = Files()
    boot = f"{os.getpid()}-{secrets.token_hex(4)}"
    front = Gateway(
        GatewayId(options.id),
        boot,
        time.monotonic,
        limits=options.limits,
        engine_tls=engine_tls(options.tls, files),
        events_fd=None if events is None else events.fd,
        service_address=os.environ.get("KUBERNETES_SERVICE_HOST", ""),
    )
    kept_at = options.state / f"{options.id}.kept.json" if options.state is not None else None
    handshakes = build_handshakes(front, options, files)
    ways = access.Ways(options.autoscalers, options.access, files)
    sync = Sync(GatewayId(options.id), ways.links, front, kept_at, boot=boot)
    front.on_report = sync.edge
    listener = socket_of(options.listen_fd, options.listen)  # it listens before the gateway can report that it is ready
    front.listens_at(listener.getsockname())
    runner = health.Runner(health.add_host_check(build_ops_application(front)))
    await runner.setup()
    await operations_site(runner, options).start()
    shown = await health.open_port(options.health, build_ops_application(front))
    process.freeze_gc()
    async with asyncio.TaskGroup() as tasks:
        kept = {"synchronization": sync.run, "timeouts": front.run, "credential files": files.follow}
        works = [*kept.items(), *(("autoscaler addresses", finding.run) for finding in ways.finding(sync))]
        if events is not None:
            works.append(("events file", events.keep_small))
        background = [tasks.create_task(retry_until_success(work, what)) for what, work in works]
        await wait_until_informed(front, stop)
        factory = front.connection if handshakes is None else handshakes.client
        servers = await start_servers(factory, listener)
        front.own_descriptors = process.count_open_files()
        await stop.wait()
        for server in servers:
            server.close()
        if handshakes is not None:
            handshakes.close()
        await front.drain(options.grace_s)
        await sync.flush()
        for task in background:
            task.cancel()
    for link in ways.links:
        await link.close()
    await shown.cleanup()
    await runner.cleanup()


def engine_tls(tls: Identity, files: Files) -> Callable[[], ssl.SSLContext]:
    """Return the TLS context for engines; the system's authorities are loaded when the first engine needs them."""
    if tls.ca is None:
        return functools.cache(lambda: certificates.build_client_context(Identity()))
    believed = Identity(ca=tls.ca)
    return files.read(lambda: certificates.build_client_context(believed), believed.files)


def build_handshakes(front: Gateway, options: GatewayOptions, files: Files) -> Handshakes | None:
    """Return the TLS handshakes of the inference port, or None if it speaks plain HTTP."""
    shown = Identity(cert=options.tls.cert, key=options.tls.key)
    if not shown.files:
        return None
    context = files.read(lambda: certificates.build_server_context(shown), shown.files)
    if options.parent is None:  # otherwise `serve` has already warned
        for line in certificates.list_exposed_files(shown.key):
            write_stderr(line)
    return Handshakes(front, context)


async def wait_until_informed(front: Gateway, stop: asyncio.Event) -> None:
    """Wait until the gateway knows the models, since an earlier request would be rejected as for an unknown model.

    Meanwhile connections wait in the listening socket. After INFORMED_S_MAX the gateway serves without this knowledge.
    A stop ends the wait.
    """
    waits = [asyncio.create_task(event.wait()) for event in (front.informed, stop)]
    done, rest = await asyncio.wait(waits, timeout=INFORMED_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    for wait in rest:
        wait.cancel()
    if not done:
        log.warning("event=model_sync_timed_out timeout_s=%g", INFORMED_S_MAX)


def operations_site(runner: web.AppRunner, options: GatewayOptions) -> web.BaseSite:
    """Return its operations site: under `serve` a Unix socket, where the autoscaler queries it, otherwise TCP."""
    if options.ops_socket is None:
        return web.TCPSite(runner, options.ops.host, options.ops.port)
    options.ops_socket.unlink(missing_ok=True)
    return web.UnixSite(runner, str(options.ops_socket))


def parse_limits(text: str) -> Limits:
    """Parse limits. Raises click's usage error."""
    try:
        return msgspec.json.decode(text, type=Limits)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else "not valid JSON"
        raise click.UsageError(f"--limits: {reason}") from None
