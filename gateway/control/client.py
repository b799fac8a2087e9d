"""Client for one autoscaler: HTTP over a Unix socket, or over TCP with TLS and a token.

Handles the connections, their timeouts and the gateway's authentication, and logs one line when authentication of
either side fails. An authentication failure is a LinkError like any other: it is retried, with the current contents of
the credential files.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec

from autoscaler.contract import Report, ReportAnswer, make_decoder
from gateway.control.sync import LinkError, MessageTooLargeError

REPORT_TIMEOUT_S = 2.0
STREAM_SILENT_S = 3.0
"""A stream without data for three heartbeats is considered dead and is reopened."""
LINE_BYTES_MAX = 64 << 20
ANSWER_BYTES_MAX = 64 << 10
"""Limit of the response to a report."""

log = logging.getLogger("pilotlight.gateway.contract")

_encode = msgspec.json.Encoder().encode
_decode_answer = make_decoder(ReportAnswer)


class HttpLink:
    """A link to `unix:PATH`, `http://host:port` or `https://host:port`, with at most two streams and one report.

    `token` and `tls` return the current credentials and trust settings; absent: no token, the system's CAs.
    `server_name`: the name expected in the certificate if the URL contains an address.
    """

    def __init__(
        self,
        url: str,
        *,
        token: Callable[[], str] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        server_name: str | None = None,
    ) -> None:
        self._unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://autoscaler" if self._unix is not None else url.rstrip("/")
        self._token = token
        self._tls = tls
        self._server_name = server_name
        self._distrust = ""
        """The authentication failure that was last logged."""
        self._session: aiohttp.ClientSession | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._unix) if self._unix is not None else aiohttp.TCPConnector()
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES_MAX)
        return self._session

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """Yield the lines of a stream until it ends. Raises LinkError when it breaks or times out, and
        MessageTooLargeError for a line over LINE_BYTES_MAX.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REPORT_TIMEOUT_S, sock_read=STREAM_SILENT_S)
        try:
            async with self._connected().get(
                self._base + path, timeout=timeout, raise_for_status=True, headers=self._shown(), ssl=self._believed(),
                server_hostname=self._server_name,
            ) as response:  # fmt: skip
                self._distrust = ""
                try:
                    async for line in response.content:
                        yield line
                except ValueError as error:
                    raise MessageTooLargeError(f"a message exceeds {LINE_BYTES_MAX >> 20} MiB") from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._broken(error) from error

    async def report(self, report: Report) -> ReportAnswer:
        """Post one report. Raises LinkError, and MessageTooLargeError for a response of ANSWER_BYTES_MAX or more."""
        timeout = aiohttp.ClientTimeout(total=REPORT_TIMEOUT_S)
        url = self._base + "/v1/report"
        try:
            async with self._connected().post(
                url, data=_encode(report), timeout=timeout, raise_for_status=True, headers=self._shown(),
                ssl=self._believed(), server_hostname=self._server_name,
            ) as answer:  # fmt: skip
                return _decode_answer(await read_body(answer, ANSWER_BYTES_MAX))
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise self._broken(error) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _shown(self) -> dict[str, str]:
        return {} if self._token is None else {"authorization": f"Bearer {self._token()}"}

    def _believed(self) -> ssl.SSLContext | bool:
        return True if self._tls is None else self._tls()

    def _broken(self, error: Exception) -> LinkError:
        why = explain_auth_failure(error)
        if not why and self._tls is not None and is_disconnect(error):
            why = "the autoscaler closes the connections: it may require another certificate (--contract-cert-file)"
        if why and why != self._distrust:
            self._distrust = why
            log.warning("event=autoscaler_distrust reason=%r", why)
        return LinkError(type(error).__name__)


async def read_body(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Return the body of a response. Raises MessageTooLargeError if it has `bytes_max` bytes or more."""
    try:
        await answer.content.readexactly(bytes_max)
    except asyncio.IncompleteReadError as whole:  # the body ended earlier; it may have arrived in chunks
        return whole.partial
    raise MessageTooLargeError(f"a response has {bytes_max >> 10} KiB or more")


def explain_auth_failure(error: Exception) -> str:
    """Explain why authentication between gateway and autoscaler failed; empty for every other error."""
    if isinstance(error, aiohttp.ClientResponseError) and error.status == 401:
        return (
            "the autoscaler rejects the token of this gateway: --token-file must contain a token that the autoscaler "
            "accepts from gateways"
        )
    if isinstance(error, aiohttp.ClientResponseError) and error.status == 403:
        return (
            "the autoscaler rejects this gateway's token or certificate: it belongs to an agent; use one for gateways"
        )
    cause = error.__cause__ if isinstance(error, aiohttp.ClientError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the autoscaler's certificate: {cause.verify_message.partition(',')[0]}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS with the autoscaler: {cause.reason}"
    return ""


def is_disconnect(error: Exception) -> bool:
    """Return whether the peer ended an established connection; with TLS 1.3 this also means a rejected certificate."""
    return isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError) and not isinstance(
        error, aiohttp.ClientConnectorError
    )
