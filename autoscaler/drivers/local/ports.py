"""Ports of engines: selects a free one for each start, and finds the processes that listen on it. I/O.

Ports are below the kernel's range for outgoing connections. So no outgoing connection can use the port between the
selection and the engine's bind, and no probe can connect to itself. The only state is the recently assigned ports.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from autoscaler.drivers.resilient_tasks import SHORT

HOST = "127.0.0.1"
REUSE_S = 60.0
"""A port is not assigned twice within this time."""
SPREAD = 12_000
"""Number of ports below the kernel's range that are used."""
TRIES_MAX = 200

_LISTEN = "0A"
_EXACT = f"{int.from_bytes(socket.inet_aton(HOST), sys.byteorder):08X}"
_ANY = "00000000"


class PortsTakenError(Exception):
    """No free port was found. `str()` is one line."""


class Ports:
    """Assigns free ports on 127.0.0.1."""

    def __init__(self) -> None:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        self._low = max(1024, first_outgoing - SPREAD)
        self._count = first_outgoing - self._low
        self._next = secrets.randbelow(max(1, self._count))
        self._given: dict[int, float] = {}

    def choose(self, now_s: float) -> int:
        """Return a port without a listener. Raises `PortsTakenError`."""
        self._given = {port: at_s for port, at_s in self._given.items() if now_s - at_s < REUSE_S}
        for _ in range(TRIES_MAX):
            port = _free(self._low + self._next if self._count > 0 else 0)
            self._next = (self._next + 1) % max(1, self._count)
            if port is not None and port not in self._given:
                self._given[port] = now_s
                return port
        raise PortsTakenError(f"no free port on {HOST} was found in {TRIES_MAX} attempts")


def _free(port: int) -> int | None:
    """Return the port if it can be bound (0: any that can), else None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        try:
            s.bind((HOST, port))
        except OSError:
            return None
        return int(s.getsockname()[1])


def list_listening_sockets(port: int) -> frozenset[str]:
    """Return the inodes of the sockets that accept connections to 127.0.0.1:port; empty if none is visible.
    Raises `OSError` in a resource shortage, as `has_open_socket` does.
    """
    found = _listening("/proc/net/tcp", port)
    inodes = found.get(_EXACT) or found.get(_ANY)
    return frozenset(inodes or (i for each in _listening("/proc/net/tcp6", port).values() for i in each))


def _listening(table: str, port: int) -> dict[str, list[str]]:
    """Return address -> inodes of sockets listening on `port`.
    The table lists listening sockets first; the rest is not read.
    """
    found: dict[str, list[str]] = {}
    try:
        with open(table, buffering=4096) as lines:  # noqa: PTH123 - in small pieces, since the rest may be megabytes
            next(lines, None)
            for line in lines:
                fields = line.split()
                if fields[3] != _LISTEN:
                    break
                address, _, hex_port = fields[1].rpartition(":")
                if int(hex_port, 16) == port:
                    found.setdefault(address, []).append(fields[9])
    except FileNotFoundError:
        return {}
    return found


def has_open_socket(pids: Iterable[int], inodes: frozenset[str]) -> bool | None:
    """Return whether any of these processes has any of these sockets open; None: some could not be inspected."""
    none: bool | None = False
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in pids:
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                names = [entry.path for entry in entries]
        except PermissionError:  # it changed its user, or forbids inspection
            none = None
            continue
        except OSError as error:
            if error.errno in SHORT:
                raise
            continue  # it ended meanwhile
        for name in names:
            try:
                if os.readlink(name) in wanted:  # noqa: PTH115 - hundreds of them
                    return True
            except OSError:  # closed meanwhile
                continue
    return none
