"""Shares weights between nodes: serves this node's store to others, and configures peers for a pull.

Defines the options for peers and their authentication, which works as for the contract: a shared token, a certificate
of an authority, or both. Beyond loopback, TLS and one of the two are required. On loopback without either, only weights
that were fetched without a login are served. Contains `pilotlight weights serve`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from aiohttp.typedefs import Middleware

from artifacts.peers.client import Peering
from artifacts.peers.selection import Peer
from artifacts.peers.servable_blobs import BlobOffers
from artifacts.peers.server import STREAMS_MAX, BlobServer
from artifacts.store.layout import StoreError, StoreLayout
from artifacts.store.store import Store
from pilotlight import process
from pilotlight.net import certificates, contract_access
from pilotlight.net.certificates import FileError, Identity
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.http_server import Runner
from pilotlight.net.listen import Address, AddressType
from pilotlight.options import file_options, store_option
from pilotlight.safe_output import write_stderr

LISTEN = Address("127.0.0.1", 8484)
_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})/?")
PEER_OPTIONS = {
    "--peer-token-file": "The file with the token that nodes send to each other.",
    "--peer-cert-file": "The certificate of this node for other nodes (PEM).",
    "--peer-key-file": "The private key of --peer-cert-file (PEM).",
    "--peer-ca-file": "The CAs for the certificates of other nodes (PEM).",
}
peer_options = file_options(PEER_OPTIONS)
peer_option = click.option(
    "--peer", "peers", metavar="URL", multiple=True,
    help="Another node's `weights serve`, https://HOST:PORT. Files are fetched from it before the registry. "
    "Repeatable.",
)  # fmt: skip


def build_peer_access(token: Path | None, cert: Path | None, key: Path | None, ca: Path | None) -> Access:
    """Return the access that `peer_options` describe."""
    return Access(identity=Identity(cert=cert, key=key, ca=ca), token=token)


def build_static_peering(urls: Sequence[str], shown: Access) -> Peering:
    """Return peering with peers of which only the URL is known. Raises click's usage error."""
    for url in urls:
        if why := describe_url_problem(url):
            raise click.UsageError(f"--peer {url}: {why}")
    peers = tuple(Peer(f"peer-{number}", url) for number, url in enumerate(dict.fromkeys(urls), 1))
    identity, path = shown.identity, shown.token
    contract_access.warn_exposed_files(shown)
    try:
        token = None if path is None else certificates.load_tokens(path)[0]
        if identity.files:
            certificates.build_client_context(identity)  # report invalid files at once
    except FileError as error:
        raise click.UsageError(str(error)) from None
    own = f"host:{socket.gethostname()}"  # differs from the names above, whatever this machine is called
    return build_peering(identity, own, lambda: peers, None if token is None else lambda: token)


def describe_url_problem(url: str) -> str:
    """Return why the URL is not a valid peer address, or an empty string."""
    found = _URL.fullmatch(url)
    if found is None:
        return "expected https://HOST:PORT"
    clear = found["scheme"] == "http" and not Address(found["host"].strip("[]"), 0).loopback
    return "weights and token would cross the network in clear: use https://" if clear else ""


def is_own_machine(url: str) -> bool:
    """Return whether the URL addresses the caller's own machine or link, which is never another node's agent. Names are
    not resolved; the peer's certificate verifies them.
    """
    found = _URL.fullmatch(url)
    host = "" if found is None else found["host"].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    plain = (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address
    return plain.is_loopback or plain.is_link_local or plain.is_unspecified or plain.is_multicast


def build_peering(
    identity: Identity, own: str, peers: Callable[[], Sequence[Peer]], token: Callable[[], str] | None,
    certified: str | None = None,
) -> Peering:  # fmt: skip
    """Return peering with these files; see Peering for the other arguments."""
    pair = (identity.cert, identity.key) if identity.cert is not None and identity.key is not None else None
    return Peering(peers, own=own, token=token, ca=identity.ca, certificate=pair, certified=certified)


async def open_port(
    store: Path, address: Address, shown: Access, files: Files, streams: int = STREAMS_MAX, *inner: Middleware
) -> Runner:
    """Serve the store's blobs to peers; call `cleanup` of the returned runner to stop. `inner` middlewares run after
    authentication. Raises click's usage error.
    """
    check_port(address, shown)
    known = shown.token is not None or shown.identity.ca is not None
    door = contract_access.build_authenticator(shown, files)
    doors = () if door is None else (door.check,)
    app = BlobServer(BlobOffers(StoreLayout(store), private=known), streams).application((*doors, *inner))
    return await contract_access.start_server(app, address, shown, files)


def check_port(address: Address, shown: Access) -> None:
    """Raise click's usage error if weights would be accessible without authentication."""
    identity = shown.identity
    if shown.token is None and identity.ca is None and not address.loopback:
        raise click.UsageError(
            f"{address.text}: any client could fetch weights: set --peer-token-file, or --peer-ca-file to require "
            "client certificates"
        )
    if identity.cert is None and (identity.ca is not None or not address.loopback):
        raise click.UsageError(f"{address.text}: this address requires TLS: set --peer-cert-file and --peer-key-file")


@click.command("serve", epilog="Example: pilotlight weights serve --peer-token-file token")
@store_option
@click.option(
    "--listen",
    type=AddressType(),
    default=LISTEN,
    show_default=LISTEN.text,
    help="The address at which other nodes fetch weights.",
)
@click.option(
    "--streams", type=click.IntRange(1, 1024), default=STREAMS_MAX, show_default=True,
    help="The maximum number of files that are sent at the same time. Further requests are rejected, and the peer uses "
    "the registry.",
)  # fmt: skip
@peer_options
def serve_(  # noqa: PLR0917  click passes by keyword
    store: Path, listen: Address, streams: int, peer_token_file: Path | None, peer_cert_file: Path | None,
    peer_key_file: Path | None, peer_ca_file: Path | None,
) -> None:  # fmt: skip
    """Serve this node's weights to other nodes until interrupted. Use it with `weights pull --peer URL`.

    Weights are served even while they are still being pulled. Without a token or certificate, it serves only weights
    that were fetched without a login, and only on this machine.
    """
    shown = build_peer_access(peer_token_file, peer_cert_file, peer_key_file, peer_ca_file)
    try:
        Store(store).open()
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    asyncio.run(_serve(store, listen, shown, streams))  # asyncio's own loop: uvloop has no sendfile


async def _serve(store: Path, listen: Address, shown: Access, streams: int) -> None:
    stop, files = process.stop_event(), Files()
    runner = await open_port(store, listen, shown, files, streams)
    at = Address(*runner.addresses[0][:2])
    write_stderr(f"serving the weights of {store} on {at.text}")
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(files.follow())
        await stop.wait()
        following.cancel()
    await runner.cleanup()
