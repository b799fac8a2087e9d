"""Connects an agent to autoscalers at an address, a Unix socket, or all addresses of a DNS name. I/O.

Each autoscaler behind a name has its own reports and streams; a broken stream is reopened.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from autoscaler.exception_handling import reraise_memory_error
from gateway.control.client import read_body
from gateway.control.discovery import ADDRESSES_MAX
from gateway.control.sync import MessageTooLargeError
from pilotlight.agent.reporter import WayError
from pilotlight.net.listen import Address

SEND_S_MAX = 2.0
AGAIN_S = 1.0
"""Delay before a broken stream is reopened."""
LOOK_UP_S = 10.0
"""Interval of DNS lookups."""
SILENT_S = 10.0
"""A stream that delivers nothing for this long, not even a blank line, is reopened."""
LINE_BYTES_MAX = 4 << 20
"""Limit of a line of a stream; autoscalers limit each part of a line."""
ANSWER_BYTES_MAX = 64 << 10
"""Limit of a response body."""

HINTS = {
    401: ": --token-file must hold one of its tokens",
    403: ": the token or certificate must be an agent's, and of this node",
}
Token = Callable[[], str]
Tls = Callable[[], ssl.SSLContext]


class HttpWay:
    """Client for `unix:PATH`, `https://HOST:PORT`, or all autoscalers behind `dns+https://NAME:PORT`."""

    def __init__(self, url: str, token: Token | None, tls: Tls | None) -> None:
        self.name = url
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def send(self, body: bytes) -> None:
        """Send a report, as in `pilotlight.agent.reporter.AutoscalerClient`."""
        try:
            urls, host = await self._addresses()
        except OSError as error:
            raise WayError("the name cannot be resolved") from error
        done = await asyncio.gather(*(self._post(url, host, body) for url in urls), return_exceptions=True)
        failed = [error for error in done if isinstance(error, BaseException)]
        for one in failed:
            if isinstance(one, Exception):
                reraise_memory_error(one)
        if failed:
            which = f"{len(failed)} of {len(done)}: " if len(done) > 1 else ""
            raise WayError(which + _said(failed[0])) from failed[0]

    async def _addresses(self) -> tuple[list[str], str | None]:
        """Return the URLs, and the host name expected in certificates if the URLs lack it. Raises OSError."""
        if self.name.startswith("unix:"):
            return ["http://autoscaler"], None
        if not self.name.startswith("dns+"):
            return [self.name.rstrip("/")], None
        at = urlsplit(self.name.removeprefix("dns+"))
        host, port = str(at.hostname), int(at.port or 0)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = sorted({str(address[0]) for *_, address in found})[:ADDRESSES_MAX]
        return [f"{at.scheme}://{Address(one, port).text}" for one in addresses], host

    async def _post(self, url: str, host: str | None, body: bytes) -> None:
        headers = {"content-type": "application/json", **self._headers()}
        async with self._connected().post(
            f"{url}/v1/node", data=body, headers=headers, raise_for_status=True, server_hostname=host,
            ssl=True if self._tls is None else self._tls(), timeout=aiohttp.ClientTimeout(total=SEND_S_MAX),
        ) as answer:  # fmt: skip
            await read_body(answer, ANSWER_BYTES_MAX)

    async def ask(self, path: str) -> list[bytes]:
        """Return the responses to GET `path` of all autoscalers that answer."""
        with contextlib.suppress(OSError):
            urls, host = await self._addresses()
            found = await asyncio.gather(*(self._get(f"{url}{path}", host) for url in urls))
            return [one for one in found if one is not None]
        return []

    async def _get(self, url: str, host: str | None) -> bytes | None:
        """Return the response body, or None on failure or if it has ANSWER_BYTES_MAX or more."""
        try:
            async with self._connected().get(
                URL(url, encoded=True), headers=self._headers(), raise_for_status=True, server_hostname=host,
                ssl=True if self._tls is None else self._tls(), timeout=aiohttp.ClientTimeout(total=SEND_S_MAX),
            ) as answer:  # fmt: skip
                return await read_body(answer, ANSWER_BYTES_MAX)
        except (aiohttp.ClientError, OSError, TimeoutError, MessageTooLargeError):
            return None

    async def follow(self, path: str, heard: Callable[[bytes], None]) -> None:
        """Stream `path` from each autoscaler and pass each line to `heard`, until cancelled."""
        streams: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                with contextlib.suppress(OSError):
                    urls, host = await self._addresses()
                    for gone in streams.keys() - set(urls):
                        streams.pop(gone).cancel()
                    for url in [one for one in urls if one not in streams]:
                        streams[url] = tasks.create_task(self._read(url, host, path, heard))
                await asyncio.sleep(LOOK_UP_S)

    async def _read(self, url: str, host: str | None, path: str, heard: Callable[[bytes], None]) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SEND_S_MAX, sock_read=SILENT_S)
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):  # ValueError: long line
                async with self._connected().get(
                    f"{url}{path}", headers=self._headers(), raise_for_status=True, server_hostname=host,
                    ssl=True if self._tls is None else self._tls(), timeout=timeout, read_bufsize=LINE_BYTES_MAX,
                ) as answer:  # fmt: skip
                    async for line in answer.content:
                        if line.strip():
                            heard(line)
            await asyncio.sleep(AGAIN_S)

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"authorization": f"Bearer {self._token()}"}

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self.name.removeprefix("unix:")
            connector = aiohttp.UnixConnector(path) if path != self.name else aiohttp.TCPConnector()
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def _said(error: BaseException) -> str:
    """Return why a report was not accepted, without an address."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it responded with {error.status}{HINTS.get(error.status, '')}"
    return type(error).__name__
