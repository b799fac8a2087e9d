"""Readiness probes: is there an engine on this port, and does it say 200? I/O; keeps no state of any Replica.

One probe costs 40 us when nobody listens yet and never takes longer than PROBE_SECONDS_MAX, whatever the other side
does; how often and in which order is the Pace's, which all Replicas share.

A host and a port as one text, as URLs, Host headers and Routes want it (RFC 3986, 3.2.2). Pure.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from functools import partial

from autoscaler.drivers.resource_shortage import retry_on_shortage


def format_host_port(host: str, port: int) -> str:
    """`host:port`; an address of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_engine_address(host: str, port: int, tls_name: str | None) -> str:
    """As Routes say it (`autoscaler.contract`). `tls_name`: whom its certificate is for, empty where that is the host;
    None: it speaks plain HTTP.
    """
    if tls_name is None:
        return format_host_port(host, port)
    return (
        f"https://{tls_name}@{format_host_port(host, port)}" if tls_name else f"https://{format_host_port(host, port)}"
    )


PROBE_SECONDS_MAX = 1.0
FAST_EVERY_S = 0.005
LISTENS_EVERY_S = 0.0025
"""While it already listens and says `not yet`: llama.cpp is ready 10 ms later, and everybody waits for that."""
FAST_FOR_S = 2.0
SLOW_EVERY_S = 0.025
READY_EVERY_S = 1.0
FAILURES_MAX = 3
"""So many failed probes in a row make a ready Replica unready."""
PROBES_PER_S_MAX = 500

ANSWER_BYTES = len(b"HTTP/1.1 200")

_UNDECIDED = (errno.EINPROGRESS, errno.EALREADY)
_CONNECTED = (0, errno.EISCONN)
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE


class Pace:
    """At most PROBES_PER_S_MAX turns a second over all who ask, first come first served: all get the same rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_s = 0.0
        self.leads = True
        """Calls wait for what we start; who only follows has no haste."""

    async def turn(self) -> None:
        """Returns when it is the caller's turn."""
        now_s = self._clock()
        at_s = max(now_s, self._free_s)
        self._free_s = at_s + 1 / PROBES_PER_S_MAX
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)

    def every_s(self, age_s: float, *, listens: bool = False) -> float:
        """As `probe_interval_s` below, for who leads."""
        return probe_interval_s(age_s, listens=listens) if self.leads else READY_EVERY_S


def probe_interval_s(age_s: float, *, listens: bool = False) -> float:
    """Seconds between two probes of an engine that started `age_s` ago and is not ready yet."""
    if age_s >= FAST_FOR_S:
        return SLOW_EVERY_S
    return LISTENS_EVERY_S if listens else FAST_EVERY_S


async def probe_engine(host: str, port: int, path: str, *, tls_name: str | None = None) -> bool | None:
    """Whether GET `path` answers 200 at an address (no name), within PROBE_SECONDS_MAX; None: nobody listens.

    A shortage on this side says nothing of the engine: the probe waits for its end. With `tls_name` it asks over TLS
    for that name and does not verify the certificate: a probe has no secret, the kernel says whose the port is, and
    gateways, which send Calls, do verify.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with await retry_on_shortage(partial(socket.socket, family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as s:
            error = s.connect_ex((host, port))
            if error in _UNDECIDED:
                error = s.connect_ex((host, port))  # on loopback the answer is there by now: the loop need not turn
            if error not in (*_CONNECTED, *_UNDECIDED):
                return None
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                if error not in _CONNECTED:  # its accept queue is full
                    await asyncio.get_running_loop().sock_connect(s, (host, port))
                ask = (
                    f"GET {path} HTTP/1.1\r\nHost: {format_host_port(host, port)}\r\nConnection: close\r\n\r\n".encode()
                )
                answer = await (_ask(s, ask) if tls_name is None else _ask_tls(s, ask, tls_name))
                return answer.startswith(b"HTTP/1.") and answer[8:12] == b" 200"
    except (OSError, TimeoutError):
        return False


async def _ask(s: socket.socket, ask: bytes) -> bytes:
    """The beginning of the answer; less than ANSWER_BYTES when it ends sooner."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(s, ask)
    answer = b""
    while len(answer) < ANSWER_BYTES and (piece := await loop.sock_recv(s, 4096)):
        answer += piece
    return answer


async def _ask_tls(s: socket.socket, ask: bytes, name: str) -> bytes:
    """The same over TLS."""
    own = socket.socket(fileno=s.detach())  # the transport closes it
    reader, writer = await asyncio.open_connection(sock=own, ssl=_UNVERIFIED, server_hostname=name)
    try:
        writer.write(ask)
        answer = b""
        while len(answer) < ANSWER_BYTES and (piece := await reader.read(4096)):
            answer += piece
        return answer
    finally:
        writer.transport.abort()
