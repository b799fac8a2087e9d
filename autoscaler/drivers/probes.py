"""Readiness probes of engines, and addresses formatted as text. I/O; keeps no state of any replica.

A probe of a port without a listener takes 40 us. No probe takes longer than `PROBE_SECONDS_MAX`. `Pace`, shared by all
replicas, limits the rate of probes. Hosts and ports are formatted as in URLs and Host headers (RFC 3986, 3.2.2).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from functools import partial

from autoscaler.drivers.resilient_tasks import retry_on_shortage
from autoscaler.text import format_host_port

PROBE_SECONDS_MAX = 1.0
FAST_EVERY_S = 0.005
LISTENS_EVERY_S = 0.0025
"""Interval while the engine listens but is not ready. It is short, because llama.cpp is ready 10 ms after it listens,
and requests wait until a probe detects that."""
FAST_FOR_S = 2.0
SLOW_EVERY_S = 0.025
READY_EVERY_S = 1.0
FAILURES_MAX = 3
"""Consecutive failed probes after which a ready replica becomes unready."""
PROBES_PER_S_MAX = 500

ANSWER_BYTES = len(b"HTTP/1.1 200")

_UNDECIDED = (errno.EINPROGRESS, errno.EALREADY)
_CONNECTED = (0, errno.EISCONN)
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE


class Pace:
    """Limits all callers together to `PROBES_PER_S_MAX` turns per second, first come, first served."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_s = 0.0
        self.leads = True
        """Whether this process leads. Requests wait only for a leader's replicas; a follower probes slowly."""

    async def turn(self) -> None:
        """Wait for the caller's turn."""
        now_s = self._clock()
        at_s = max(now_s, self._free_s)
        self._free_s = at_s + 1 / PROBES_PER_S_MAX
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)

    def every_s(self, age_s: float, *, listens: bool = False) -> float:
        """Return `probe_interval_s` for a leader, `READY_EVERY_S` for a follower."""
        return probe_interval_s(age_s, listens=listens) if self.leads else READY_EVERY_S


def probe_interval_s(age_s: float, *, listens: bool = False) -> float:
    """Return the seconds between two probes of an engine that started `age_s` ago and is not ready yet."""
    if age_s >= FAST_FOR_S:
        return SLOW_EVERY_S
    return LISTENS_EVERY_S if listens else FAST_EVERY_S


async def probe_engine(host: str, port: int, path: str, *, tls_name: str | None = None) -> bool | None:
    """Return whether GET `path` at an IP address returns 200 within `PROBE_SECONDS_MAX`; None: nothing listens.

    During a local resource shortage the probe waits, because a failure would not be the engine's. With `tls_name` it
    uses TLS with that server name and does not verify the certificate: a probe contains no secret, and gateways verify
    the certificate before they send requests.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with await retry_on_shortage(partial(socket.socket, family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as s:
            error = s.connect_ex((host, port))
            if error in _UNDECIDED:
                error = s.connect_ex((host, port))  # on loopback the result is known by now: no event loop turn needed
            if error not in (*_CONNECTED, *_UNDECIDED):
                return None
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                if error not in _CONNECTED:  # its accept queue is full
                    await asyncio.get_running_loop().sock_connect(s, (host, port))
                request = (
                    f"GET {path} HTTP/1.1\r\nHost: {format_host_port(host, port)}\r\nConnection: close\r\n\r\n".encode()
                )
                answer = await (_exchange(s, request) if tls_name is None else _exchange_tls(s, request, tls_name))
                return answer.startswith(b"HTTP/1.") and answer[8:12] == b" 200"
    except (OSError, TimeoutError):
        return False


async def _exchange(s: socket.socket, request: bytes) -> bytes:
    """Return the start of the response; fewer than `ANSWER_BYTES` bytes if the connection ends early."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(s, request)
    answer = b""
    while len(answer) < ANSWER_BYTES and (piece := await loop.sock_recv(s, 4096)):
        answer += piece
    return answer


async def _exchange_tls(s: socket.socket, request: bytes, name: str) -> bytes:
    """Same as `_exchange`, over TLS."""
    own = socket.socket(fileno=s.detach())  # the transport closes it
    reader, writer = await asyncio.open_connection(sock=own, ssl=_UNVERIFIED, server_hostname=name)
    try:
        writer.write(request)
        answer = b""
        while len(answer) < ANSWER_BYTES and (piece := await reader.read(4096)):
            answer += piece
        return answer
    finally:
        writer.transport.abort()
