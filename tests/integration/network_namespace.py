"""A separate network for this process and its children: loopback with the addresses of pods, 10.244.0.0/16.

EndpointSlices reject loopback addresses, so pods need others. Fixed ports never collide, and no process can connect to
the outside. On `lo` a whole prefix is local (RTN_LOCAL), so any process can bind any of its addresses. Linux only;
requires root or user namespaces. Enter it before any thread exists.

    python -m tests.integration.network_namespace COMMAND ARGUMENTS...
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

POD_NETWORK, POD_MASK = "10.244.0.1", "255.255.0.0"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_UP_AND_RUNNING = 0x1 | 0x40


def entered() -> bool:
    """Whether this process is in such a network, in which the addresses of pods are local."""
    with socket.socket() as trial:
        try:
            trial.bind((POD_NETWORK, 0))
        except OSError:
            return False
        return True


def enter() -> None:
    """Moves this process into a network of its own. Raises OSError if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWNET if uid == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "no network of our own: unshare(2) is refused")
    if flags & _CLONE_NEWUSER:  # keep the owner of our files
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, _interface("lo", struct.pack("h", _UP_AND_RUNNING)))
        fcntl.ioctl(control, _SIOCSIFADDR, _interface("lo:1", _address(POD_NETWORK)))
        fcntl.ioctl(control, _SIOCSIFNETMASK, _interface("lo:1", _address(POD_MASK)))
        fcntl.ioctl(control, _SIOCSIFADDR, _interface("lo:2", _address(nameserver())))
    with contextlib.suppress(OSError):  # for the DNS server of a test; root can bind its port in any case
        Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")


def nameserver() -> str:
    """The first name server in resolv.conf, whose address `tests.integration.cluster.support.network.dns_server`
    uses.
    """
    for line in Path("/etc/resolv.conf").read_text().splitlines():
        word, _, address = line.strip().partition(" ")
        if word == "nameserver" and ":" not in address:
            return address.strip()
    return "127.0.0.1"


def _interface(name: str, value: bytes) -> bytes:
    """Packs a `struct ifreq`."""
    return name.encode().ljust(16, b"\0") + value.ljust(24, b"\0")


def _address(ip: str) -> bytes:
    """Packs a `struct sockaddr_in`."""
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ip))


if __name__ == "__main__":
    try:
        enter()
    except OSError as error:  # the tests that need the network are skipped with a reason
        sys.stderr.write(f"{error}\n")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  the command given by the caller
