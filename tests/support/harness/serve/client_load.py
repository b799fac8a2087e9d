"""Many clients of a real `serve` at once, with different behavior: they send slowly, idle, or do not read.

Every address of 127.0.0.0/8 is local on Linux, so hostile clients and the healthy one can use different addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

from loadtest.client import target_of
from tests.support.harness.serve.serve import Serving

DRIBBLE_EVERY_S = 0.1
SLACK_BYTES = 8 << 20
"""Memory that a process may use in addition to the cost of its clients."""


class Stream(NamedTuple):
    """Both directions of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def leave(self) -> None:
        """Disconnects at once."""
        self.writer.transport.abort()

    async def rest(self, within_s: float = 60.0) -> bytes:
        """Reads until the gateway closes; a reset also ends the read."""
        got = b""
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while data := await self.reader.read(1 << 16):
                    got += data
        return got


def chat(model: str, *, close: bool = False, key: str = "none", **members: object) -> bytes:
    """A chat request as bytes."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Who?"}], **members}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + ("Connection: close\r\n\r\n" if close else "\r\n")).encode() + body


class Crowd:
    """The clients of one test: `async with Crowd(one) as crowd`. On exit all remaining clients disconnect."""

    def __init__(self, one: Serving) -> None:
        target = target_of(one.url)
        self._address = (target.host, target.port)
        self._streams: list[Stream] = []

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.leave()

    async def connect(self, source: str = "127.0.0.1", receive_bytes: int | None = None) -> Stream:
        """Connects from `source`; `receive_bytes` is the approximate limit on what is buffered without being read."""
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.bind((source, 0))
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        limit = receive_bytes or 1 << 16
        self._streams.append(Stream(*await asyncio.open_connection(sock=sock, limit=limit)))
        return self._streams[-1]

    async def ask(self, request: bytes, source: str = "127.0.0.1") -> bytes:
        """Sends a request that closes the connection; returns the whole response."""
        stream = await self.connect(source)
        stream.writer.write(request)
        got = await stream.rest()
        self._streams.remove(stream)
        stream.leave()
        return got

    async def dribble(self, first: bytes, source: str) -> bytes:
        """Sends `first`, then single bytes as long as the gateway permits; returns the gateway's final response."""
        stream = await self.connect(source)
        stream.writer.write(first)
        answer = asyncio.ensure_future(stream.rest())
        while not answer.done():
            stream.writer.write(b"x")
            await asyncio.wait((answer,), timeout=DRIBBLE_EVERY_S)
        stream.leave()
        return await answer


def connected(one: Serving, gateway: int) -> int:
    """Number of clients of a gateway, as counted by the kernel."""
    port = target_of(one.url).port
    sockets = psutil.Process(gateway).net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in sockets)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(psutil.Process(pid).memory_info().rss)


def metrics_text(one: Serving) -> str:
    """All metrics of its gateways, scraped one by one: a combined scrape omits a slow gateway."""
    return "".join(_metrics(one.state / "run" / f"{name}.sock") for name in one.gateways())


def _metrics(path: Path) -> str:
    connection = http.client.HTTPConnection("gateway", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    connection.sock.connect(str(path))
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def counted(one: Serving, metric: str, *labels: str) -> float:
    """The sum over the gateways' series of the metric that have all these labels (`outcome="failed"`)."""
    rows = re.findall(rf"^{metric}(?:\{{(.*)\}})? (\S+)$", metrics_text(one), re.MULTILINE)
    return sum(float(value) for found, value in rows if all(label in found for label in labels))
