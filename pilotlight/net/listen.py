"""Addresses as people write them, and the sockets behind them.

Owns `host:port`, the one error of a taken port, and what may not be opened to others.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import NamedTuple

import click

from gateway.http.host_check import is_loopback

PORT_MAX = 65_535
BACKLOG = 4096
"""Connections that may wait for accept (somaxconn bounds it): with 128, 1,000 at once took 4 s to connect."""

ACCEPTS = 8
"""Connections taken in one turn of the event loop: libuv takes one from each listener, and a turn in which many streams
are read takes milliseconds. With turns of 4 ms and one listener 300 clients were accepted in 2.1 s, with eight 0.3.
"""


UNSENT_BYTES = 128 << 10
"""What the kernel keeps for a client beyond what it may send now (TCP_NOTSENT_LOWAT, which accepted connections
inherit). Without it 600 clients that read nothing held 1.4 GiB, and the kernel dropped everybody's packets.
"""


class Address(NamedTuple):
    """A TCP address. Port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def text(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://{self.text}"


class AddressType(click.ParamType[Address]):
    """`127.0.0.1:8080`, `[::1]:8080` or `:8080`."""

    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """Raises click's usage error on anything else."""
        if isinstance(value, Address):
            return value
        host, colon, port = str(value).rpartition(":")
        if not colon or not (port.isascii() and port.isdecimal()) or int(port) > PORT_MAX:
            self.fail(f"{value!r} is not HOST:PORT such as 127.0.0.1:8080", param, ctx)
        try:
            host.encode("idna")
        except UnicodeError:
            self.fail(f"{value!r} has no host name that can be looked up", param, ctx)
        return Address(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104  `:8080` means every address, as elsewhere


def check_operations(ops: Address, auth: str) -> None:
    """Raises click's usage error where others could reach an operations port, unless Settings say `auth: none`."""
    if not ops.loopback and auth != "none":
        raise click.UsageError(
            f"--ops {ops.text}: others could reach the operations port, which can be read without a key: keep it on "
            "127.0.0.1, behind an ssh tunnel or a reverse proxy, or say `auth: none` in Settings (PILOTLIGHT_AUTH=none)"
        )


def open_listeners(address: Address, count: int) -> list[socket.socket]:
    """`count` listening sockets on one address (SO_REUSEPORT), inheritable. ClickException when it is taken."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family) as trial:  # without SO_REUSEPORT: another process that has it would let us in
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
            raise click.ClickException(f"{address.text} is taken: name another port") from None
        raise click.ClickException(f"cannot listen on {address.text}: {error.strerror}") from None
    return made


async def start_servers(factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket) -> list[asyncio.Server]:
    """Serves what connects to a listening socket, which belongs to the Servers from now on."""
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    socks = [sock, *(sock.dup() for _ in range(ACCEPTS - 1))]
    return [await loop.create_server(factory, sock=one, backlog=BACKLOG) for one in socks]


def socket_of(fd: int | None, address: Address) -> socket.socket:
    """The listening socket that the supervisor made (open while this process is replaced), or one of our own."""
    made = open_listeners(address, 1)[0] if fd is None else socket.socket(fileno=fd)
    made.setblocking(False)
    made.set_inheritable(False)
    return made
