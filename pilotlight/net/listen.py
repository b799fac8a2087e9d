"""Addresses as users write them, and their listening sockets.

Parses `host:port`, reports a port in use in one line, and rejects exposing a port that must stay local.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import NamedTuple

import click

from autoscaler.spec.quantity import whole_number
from gateway.http.host_check import is_loopback

PORT_MAX = 65_535
BACKLOG = 4096
"""Length of the accept queue (limited by somaxconn): with 128, connecting 1,000 clients at once took 4 s."""

ACCEPTS = 8
"""Listeners per socket. libuv accepts one connection per listener and event loop turn, and a turn that reads many
streams takes milliseconds: with 4 ms turns, accepting 300 clients took 2.1 s with one listener and 0.3 s with eight.
"""


UNSENT_BYTES = 128 << 10
"""Limit of unsent data in the kernel per client (TCP_NOTSENT_LOWAT, inherited by accepted connections). Without it, 600
clients that did not read used 1.4 GiB, and the kernel dropped packets of all connections.
"""


class Address(NamedTuple):
    """A TCP address. With port 0 the kernel chooses the port."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether it is reachable from this machine only."""
        return is_loopback(self.host)

    @property
    def text(self) -> str:
        """The address as `host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as `http://host:port`."""
        return f"http://{self.text}"


class AddressType(click.ParamType[Address]):
    """Parses `127.0.0.1:8080`, `[::1]:8080` or `:8080`."""

    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """Return the address. Raises click's usage error for anything else."""
        if isinstance(value, Address):
            return value
        host, colon, port = str(value).rpartition(":")
        number = whole_number(port)
        if not colon or number is None or number > PORT_MAX:
            self.fail(f"{value!r} is not HOST:PORT such as 127.0.0.1:8080", param, ctx)
        try:
            host.encode("idna")
        except UnicodeError:
            self.fail(f"{value!r} contains no valid host name", param, ctx)
        return Address(host.strip("[]") or "0.0.0.0", number)  # noqa: S104  `:8080` means every address, as elsewhere


def check_operations(ops: Address, auth: str) -> None:
    """Raise click's usage error if others could reach the operations port, unless Settings contain `auth: none`."""
    if not ops.loopback and auth != "none":
        raise click.UsageError(
            f"--ops {ops.text}: other machines could reach the operations port, which requires no key: keep it on "
            "127.0.0.1, behind an ssh tunnel or a reverse proxy, or set `auth: none` in Settings (PILOTLIGHT_AUTH=none)"
        )


def open_listeners(address: Address, count: int) -> list[socket.socket]:
    """Return `count` inheritable sockets on one address (SO_REUSEPORT). Raises ClickException if it is taken."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family) as trial:  # without SO_REUSEPORT, to detect another process that uses it
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address.host, address.port))
            trial.listen(1)
        made: list[socket.socket] = []
        port = address.port
        for _ in range(count):
            one = socket.socket(family)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((address.host, port))
            one.listen(BACKLOG)
            one.set_inheritable(True)
            port = one.getsockname()[1]
            made.append(one)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise click.ClickException(f"{address.text} is already in use: choose another port") from None
        raise click.ClickException(f"cannot listen on {address.text}: {error.strerror}") from None
    return made


async def start_servers(factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket) -> list[asyncio.Server]:
    """Accept connections on a listening socket; the returned Servers own it from now on."""
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    socks = [sock, *(sock.dup() for _ in range(ACCEPTS - 1))]
    return [await loop.create_server(factory, sock=one, backlog=BACKLOG) for one in socks]


def socket_of(fd: int | None, address: Address) -> socket.socket:
    """Return the supervisor's listening socket (open while this process restarts), or a new one."""
    made = open_listeners(address, 1)[0] if fd is None else socket.socket(fileno=fd)
    made.setblocking(False)
    made.set_inheritable(False)
    return made
