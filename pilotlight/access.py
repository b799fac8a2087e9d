"""The contract between gateways and autoscaler beyond one machine: what each side shows, believes and refuses.

Owns the rules: a Unix socket needs nothing, its file modes are enough; over TCP a gateway shows a token, a certificate,
or both; beyond loopback everything goes through TLS. What breaks a rule is refused at the start in one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from aiohttp import web

from autoscaler.door import Door
from autoscaler.serve import ContractServer
from gateway.link import HttpLink
from pilotlight import certificates
from pilotlight.certificates import Identity
from pilotlight.listen import Address
from pilotlight.process import socket_of
from pilotlight.quiet import say
from pilotlight.renewal import Files
from pilotlight.webserver import Runner

SHUTDOWN_S = 0.5
"""How long open connections may take to end."""
_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}/?")
CERTIFICATES = "--contract-cert-file and --contract-key-file"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one side of the contract was given."""

    identity: Identity = Identity()
    token: Path | None = None


def check_autoscalers(urls: Sequence[str]) -> None:
    """Raises click's usage error on what is no address of an autoscaler, or would go over a network in clear."""
    for url in urls:
        if url.startswith("unix:") and len(url) > len("unix:"):
            continue
        found = _URL.fullmatch(url)
        if found is None:
            raise click.UsageError(f"--autoscaler {url}: expected unix:PATH or https://HOST:PORT")
        if found["scheme"] == "http" and not Address(found["host"].strip("[]"), 0).loopback:
            raise click.UsageError(f"--autoscaler {url}: the contract would cross the network in clear: use https://")


def links(urls: Sequence[str], access: Access, files: Files) -> list[HttpLink]:
    """The ways to all autoscalers. Raises click's usage error."""
    check_autoscalers(urls)
    identity, path = access.identity, access.token
    token = None if path is None else files.read(lambda: certificates.tokens(path)[0], (path,))
    warn(access)
    tls = files.read(lambda: certificates.client(identity), identity.files) if identity.files else None
    return [HttpLink(url, token=token, tls=tls) for url in urls]


def warn(access: Access) -> None:
    """Says which secrets others can read."""
    for line in certificates.too_open(access.identity.key, access.token):
        say(line)


def check_port(address: Address, access: Access) -> None:
    """Raises click's usage error where anybody could report, or read along."""
    identity = access.identity
    if access.token is None and identity.ca is None:
        raise click.UsageError(
            f"--contract-listen {address.text}: anybody could report: give --token-file, or --contract-ca-file to let "
            "in whom it has certified"
        )
    if identity.cert is None and (identity.ca is not None or not address.loopback):
        raise click.UsageError(f"--contract-listen {address.text}: it needs TLS here: give {CERTIFICATES}")


async def open_port(contract: ContractServer, address: Address, access: Access, files: Files) -> Runner:
    """The contract on TCP; `cleanup` of what is returned ends it. Raises click's usage error."""
    check_port(address, access)
    identity, path = access.identity, access.token
    door = None if path is None else Door(files.read(lambda: certificates.tokens(path), (path,)))
    warn(access)
    tls = None
    if identity.cert is not None:
        tls = certificates.renewed(files.read(lambda: certificates.server(identity), identity.files))
    runner = Runner(contract.application(door), shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.SockSite(runner, socket_of(None, address), ssl_context=tls).start()
    return runner
