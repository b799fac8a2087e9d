"""Authentication and TLS for the contract between gateways and autoscalers on different machines.

A Unix socket is protected by its file mode alone. Over TCP, a gateway shows a token, a certificate, or both. Beyond
loopback, TLS is required. A configuration that violates these rules is rejected at startup in one line.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from aiohttp import web

from autoscaler.server.auth import Admits, ContractAuth
from gateway.control.client import HttpLink
from gateway.control.discovery import Discovery
from gateway.control.sync import Sync
from pilotlight.net import certificates
from pilotlight.net.certificates import Identity
from pilotlight.net.file_reload import Files, Renewed
from pilotlight.net.http_server import Runner
from pilotlight.net.listen import Address, socket_of
from pilotlight.safe_output import write_stderr

if TYPE_CHECKING:  # a gateway starts without the control plane
    from autoscaler.server.gateways import ContractServer

_URL = re.compile(r"(?:dns\+)?(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})/?")
CERTIFICATES = "--contract-cert-file and --contract-key-file"


SOCKET_PATH_MAX = 107
"""Maximum length of a Unix socket's path in bytes (unix(7))."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The files configured for one side of the contract."""

    identity: Identity = Identity()
    token: Path | None = None
    agent_token: Path | None = None
    """The file with the tokens of agents, on an autoscaler. If set, `token` is valid for gateways only."""
    agent_name: str = ""
    """The DNS name in the certificates of agents, on an autoscaler. All other certificates belong to gateways."""


def check_autoscalers(urls: Sequence[str]) -> None:
    """Raise click's usage error for an invalid autoscaler address, or one that would send plaintext over a network."""
    for url in urls:
        if url.startswith("unix:") and len(url) > len("unix:"):
            if len(os.fsencode(url.removeprefix("unix:"))) > SOCKET_PATH_MAX:
                raise click.UsageError(f"--autoscaler {url}: the path of a socket has at most {SOCKET_PATH_MAX} bytes")
            continue
        found = _URL.fullmatch(url)
        if found is None:
            raise click.UsageError(
                f"--autoscaler {url}: expected unix:PATH, https://HOST:PORT or dns+https://NAME:PORT"
            )
        if found["scheme"] == "http" and not Address(found["host"].strip("[]"), 0).loopback:
            raise click.UsageError(f"--autoscaler {url}: the connection would be unencrypted: use https://")


class Ways:
    """Clients for all autoscalers: `links` to individually named ones, and discovery for DNS names."""

    def __init__(self, urls: Sequence[str], access: Access, files: Files) -> None:
        """Create the links. Raises click's usage error."""
        check_autoscalers(urls)
        self._token, self._tls = read_client_files(access, files)
        warn_exposed_files(access)
        self._names = [url for url in urls if url.startswith("dns+")]
        self.links = [HttpLink(url, token=self._token, tls=self._tls) for url in urls if url not in self._names]

    def finding(self, sync: Sync) -> list[Discovery]:
        """Return the discovery tasks that keep `sync` connected to all addresses of each name."""
        found = [match for url in self._names if (match := _URL.fullmatch(url))]
        return [self._find(match["scheme"], match["host"], int(match["port"]), sync) for match in found]

    def _find(self, scheme: str, host: str, port: int, sync: Sync) -> Discovery:
        def link(address: str) -> HttpLink:
            url = f"{scheme}://{Address(address, port).text}"
            return HttpLink(url, token=self._token, tls=self._tls, server_name=host)

        return Discovery(host, port, link, sync)


def read_client_files(access: Access, files: Files) -> tuple[Renewed[str] | None, Renewed[ssl.SSLContext] | None]:
    """Return the token and the TLS context that a client shows, if configured. Raises click's usage error."""
    identity, path = access.identity, access.token
    token = None if path is None else files.read(lambda: certificates.load_tokens(path)[0], (path,))
    tls = files.read(lambda: certificates.build_client_context(identity), identity.files) if identity.files else None
    return token, tls


def warn_exposed_files(access: Access) -> None:
    """Warn about secret files that other users can read."""
    for line in certificates.list_exposed_files(access.identity.key, access.token, access.agent_token):
        write_stderr(line)


def check_port(address: Address, access: Access, *, accounts: bool = False) -> None:
    """Raise click's usage error if anyone could report or read. `accounts`: service accounts are configured."""
    identity = access.identity
    if access.agent_token is not None and access.token is None and not accounts:
        raise click.UsageError("--agent-token-file requires --token-file, or gateways cannot report")
    if access.agent_name and identity.ca is None:
        raise click.UsageError(
            "--agent-certificate-name requires --contract-ca-file, which verifies client certificates"
        )
    if access.token is None and identity.ca is None and not accounts:
        raise click.UsageError(
            f"--contract-listen {address.text}: any client could report: set --token-file, or --contract-ca-file to "
            "require client certificates"
        )
    if identity.cert is None and (identity.ca is not None or not address.loopback):
        raise click.UsageError(f"--contract-listen {address.text}: this address requires TLS: set {CERTIFICATES}")


async def open_port(
    contract: ContractServer, address: Address, access: Access, files: Files, admits: Admits | None = None
) -> Runner:
    """Serve the contract on TCP; `cleanup` of the returned runner stops it. Raises click's usage error."""
    check_port(address, access, accounts=admits is not None)
    return await start_server(contract.application(build_authenticator(access, files, admits)), address, access, files)


def build_authenticator(access: Access, files: Files, admits: Admits | None = None) -> ContractAuth | None:
    """Return the authenticator, or None if clients need at most a certificate. Raises click's usage error."""
    tokens, agent_tokens = _tokens(access.token, files), _tokens(access.agent_token, files)
    if tokens is None and agent_tokens is None and admits is None and not access.agent_name:
        return None
    return ContractAuth(tokens, admits=admits, agent_tokens=agent_tokens, agent_name=access.agent_name)


def _tokens(path: Path | None, files: Files) -> Callable[[], Sequence[str]] | None:
    return None if path is None else files.read(lambda: certificates.load_tokens(path), (path,))


async def start_server(application: web.Application, address: Address, access: Access, files: Files) -> Runner:
    """Serve an application, with TLS if a certificate is configured; `cleanup` stops it. Raises click's usage error."""
    identity = access.identity
    warn_exposed_files(access)
    tls = None
    if identity.cert is not None:
        tls = certificates.build_renewing_context(
            files.read(lambda: certificates.build_server_context(identity), identity.files)
        )
    runner = Runner(application)
    await runner.setup()
    await web.SockSite(runner, socket_of(None, address), ssl_context=tls).start()
    return runner
