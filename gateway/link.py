"""The way from a gateway to one autoscaler: HTTP on a Unix socket or TCP. Owns the connections and their clocks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import msgspec

from autoscaler.contract import Report, ReportAnswer, decoder
from gateway.sync import LinkError

REPORT_TIMEOUT_S = 2.0
STREAM_SILENT_S = 3.0
"""A stream that says nothing for three heartbeats is dead and is opened anew."""
LINE_BYTES_MAX = 64 << 20

_encode = msgspec.json.Encoder().encode
_decode_answer = decoder(ReportAnswer)


class HttpLink:
    """`unix:PATH` or `http://host:port`; at most three connections (two streams, one report)."""

    def __init__(self, url: str) -> None:
        self._unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://autoscaler" if self._unix is not None else url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._unix) if self._unix is not None else aiohttp.TCPConnector()
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES_MAX)
        return self._session

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """The lines of a stream until it ends; LinkError when it breaks or falls silent."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REPORT_TIMEOUT_S, sock_read=STREAM_SILENT_S)
        try:
            async with self._connected().get(self._base + path, timeout=timeout, raise_for_status=True) as response:
                async for line in response.content:
                    yield line
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: over LINE_BYTES_MAX
            raise LinkError(type(error).__name__) from error

    async def report(self, report: Report) -> ReportAnswer:
        """Posts one report. Raises LinkError."""
        timeout = aiohttp.ClientTimeout(total=REPORT_TIMEOUT_S)
        url = self._base + "/v1/report"
        try:
            async with self._connected().post(
                url, data=_encode(report), timeout=timeout, raise_for_status=True
            ) as answer:
                return _decode_answer(await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise LinkError(type(error).__name__) from error

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
