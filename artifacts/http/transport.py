"""The only HTTP client for registries and their redirect targets: aiohttp under the rules of
`artifacts.http.url_policy`.

One session serves one registry. Credentials (`Authorization`, the registry's own headers, the client certificate) are
sent only to the registry's origin, and no more after a redirect has left it. There are no cookies. No connection is
made to a link-local address, nor to a private address of another host unless the registry's address is private or an
administrator allowed the host. Every wait has a limit. Do not add a second HTTP client: the protections of other
products were bypassed through one.

`Sealing` is a TLS context that keeps the encrypted buffers of each connection, so that a thread can receive from the
connection. asyncio and uvloop do not expose these buffers. Both libraries start each connection with the public method
`ssl.SSLContext.wrap_bio`, where `Sealing` captures the buffers.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, cast

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.resolver import ThreadedResolver
from multidict import CIMultiDictProxy
from yarl import URL

from artifacts.http.retry import STATUSES
from artifacts.http.safe_resolver import Resolver
from artifacts.http.url_policy import (
    Origin,
    get_origin,
    is_loopback,
    parse_address,
    parse_untrusted_url,
    resolve_redirect,
)
from artifacts.registry_errors import BrokenError, PolicyError


class Sealed(ssl.SSLObject):
    """The TLS object of one connection."""

    incoming: ssl.MemoryBIO
    """Received bytes that are not decrypted yet."""
    outgoing: ssl.MemoryBIO

    def into(self, room: memoryview) -> int:
        """Decrypt into `room` and return the count, at most one record (16 KiB); 0 at the end. Raises SSLError."""
        return cast("int", self.read(len(room), room))  # typeshed lacks the buffer argument


class Sealing(ssl.SSLContext):
    """A TLS context whose connections are `Sealed`."""

    sslobject_class = Sealed

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> Sealed:
        """See `ssl.SSLContext.wrap_bio`."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if not isinstance(made, Sealed):
            raise TypeError(made)
        made.incoming, made.outgoing = incoming, outgoing
        return made


def create_tls_context() -> Sealing:
    """Create a context as `ssl.create_default_context` does: certificates and host names are verified."""
    context = Sealing(ssl.PROTOCOL_TLS_CLIENT)
    if sys.version_info >= (3, 13):
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
    context.load_default_certs()  # loads all CA certificates, which takes as long as fetching a small blob
    return context


Body = bytes | Callable[[], AsyncIterator[bytes]]
"""Request body; a callable provides it again for each attempt."""

AGENT = "pilotlight"
CONNECTIONS_MAX = 64
CHUNK_BYTES = 256 << 10
ERROR_BYTES_MAX = 64 << 10
_LENGTH = re.compile(r"[0-9]{1,19}")
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts."""

    connect_s: float = 10.0
    head_s: float = 30.0
    """Until the response headers arrive, counted from the last byte sent."""
    read_s: float = 30.0
    """Between two reads."""
    whole_s: float = 60.0
    """For a body that is read completely into memory."""
    pace_s: float = 30.0
    """A blob must deliver `pace_bytes` in this time, so that a trickle does not count as progress."""
    pace_bytes: int = 64 << 10


@dataclass(frozen=True, slots=True)
class Site:
    """Configuration of one registry."""

    host: str
    """`host` or `host:port`, as in `Reference.host`."""
    plain_http: bool | None = None
    """None: plain HTTP only if the host is this machine."""
    ca: Path | None = None
    """CA certificates trusted in addition to the system's."""
    certificate: tuple[Path, Path] | None = field(default=None, repr=False)
    """Client certificate and its key."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Extra headers, sent only to the registry."""
    allowed: frozenset[str] = frozenset()
    """HOST or HOST:PORT entries that are allowed as the token realm, and allowed to have private addresses if the
    registry's address is public.
    """
    redirects: bool = True
    """Whether redirects are followed."""
    certified: str | None = None
    """Name expected in the certificate; None: the host."""

    def base(self) -> URL:
        """Return the registry's root URL. Raises PolicyError if `host` is invalid."""
        name = parse_untrusted_url(f"https://{self.host}/").raw_host or ""
        plain = is_loopback(name) if self.plain_http is None else self.plain_http
        return parse_untrusted_url(f"{'http' if plain else 'https'}://{self.host}/")


class DetachedBody(NamedTuple):
    """A response body whose connection the caller now owns; the request has already been validated."""

    head: bytes
    """Bytes already received."""
    rest: socket.socket
    """Socket from which `left` more bytes come. Non-blocking; the caller closes it."""
    left: int
    sealed: Sealed | None
    """Decrypts the bytes; None for plain HTTP."""


class CompleteResponse(NamedTuple):
    """A response that was read completely."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class Answer:
    """A response whose headers have arrived. Use as an async context manager."""

    def __init__(self, answer: aiohttp.ClientResponse, url: URL, *, foreign: bool, limits: Limits) -> None:
        self._answer = answer
        self._limits = limits
        self.url = url
        """URL of the last hop; must not be shown."""
        self.said = str(get_origin(url))
        self.status = answer.status
        self.headers: CIMultiDictProxy[str] = answer.headers
        self.foreign = foreign
        """Whether it comes from a host other than the registry."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.close()  # does not wait for unread data

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Raises BrokenError."""
        try:
            async for chunk in self._answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BrokenError(f"{self.said}: the connection broke during the response ({_kind(error)})") from None

    def take(self) -> DetachedBody | None:
        """Detach the connection so that the caller can move the body; None if it must be read here (unknown length)."""
        length, connection = self.headers.get("Content-Length", ""), self._answer.connection
        if "Transfer-Encoding" in self.headers or not _LENGTH.fullmatch(length):
            return None
        if connection is None or connection.transport is None:
            return None  # the body is complete
        stream, carrier = self._answer.content, connection.transport
        sealed = carrier.get_extra_info("ssl_object")
        if (self.url.scheme == "https") != isinstance(sealed, Sealed):
            raise RuntimeError("internal error: the connection has TLS and its URL is not https, or the reverse")
        number = os.dup(carrier.get_extra_info("socket").fileno())
        rest = socket.socket(fileno=number)
        try:
            parts = []
            while piece := stream.read_nowait():
                parts.append(piece)
            carrier.pause_reading()  # nothing is lost: the event loop does not run in between
        except (aiohttp.ClientError, OSError) as error:
            rest.close()
            raise BrokenError(f"{self.said}: the connection broke during the response ({_kind(error)})") from None
        if sealed is not None:
            carrier.abort()  # without a TLS close_notify, which close() would send
        self._answer.close()  # this closes only aiohttp's descriptor; the connection stays open in `rest`
        head = b"".join(parts)
        return DetachedBody(head, rest, int(length) - len(head), sealed)

    async def whole(self, bytes_max: int, what: str) -> bytes:
        """Read the whole body. Raises BrokenError, and PolicyError if it is larger than `bytes_max`."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.whole_s), aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > bytes_max:
                        raise PolicyError(f"{self.said}: {what} is larger than {bytes_max} bytes")
                    parts.append(chunk)
        except TimeoutError:
            raise BrokenError(f"{self.said}: {what} did not arrive within {self._limits.whole_s:.0f} s") from None
        if self.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}:
            raise PolicyError(f"{self.said}: {what} has a Content-Encoding, which a proxy must have added")
        return b"".join(parts)

    async def fault(self) -> bytes:
        """Read the body of an error response; empty if it is too large or breaks, since the status suffices."""
        try:
            return await self.whole(ERROR_BYTES_MAX, "an error")
        except (BrokenError, PolicyError):
            return b""


class Transport:
    """The HTTP client of one registry. Use as an async context manager."""

    def __init__(self, site: Site, limits: Limits | None = None, resolver: AbstractResolver | None = None) -> None:
        self.site = site
        self.base = site.base()
        self.own: Origin = get_origin(self.base)
        self._limits = limits or Limits()
        self._names = resolver
        self._resolver: Resolver | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tls: _Tls | None = None
        if self.base.scheme == "https" or site.ca is not None or site.certificate is not None:
            self._tls = _contexts(site)  # reports invalid certificates at once

    async def __aenter__(self) -> Self:
        self._resolver = Resolver(self._names or ThreadedResolver(), self.own.host, self.site.allowed)
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, resolver=self._resolver),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s, sock_read=limits.read_s),
            headers={"User-Agent": AGENT, "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
            read_bufsize=CHUNK_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self,
        method: str,
        url: URL,
        *,
        own: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        follow: bool = True,
    ) -> Answer:
        """Send a request once and return the response after redirects. `own` headers go only to the registry.

        Raises PolicyError, and BrokenError for failures and for statuses worth a retry (408, 429, 5xx).
        """
        hops, foreign = 0, get_origin(url) != self.own
        while True:
            given = dict(headers or {}) | ({} if foreign else {**self.site.headers, **(own or {})})
            answer = await self._hop(method, url, given, body, foreign=foreign)
            if answer.status not in REDIRECT_STATUSES or not (follow and self.site.redirects):
                return await self._judged(answer)
            async with answer:
                url = resolve_redirect(url, answer.headers.get("Location"), method, answer.status, hops)
            hops += 1
            foreign = foreign or get_origin(url) != self.own

    async def secret(self, url: URL, *, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        """Send a login (in `headers` or `body`) once to a realm whose URL the caller has checked. No redirects."""
        foreign = get_origin(url) != self.own
        given = dict(headers) | ({} if foreign else dict(self.site.headers))
        return await self._judged(await self._hop("GET" if body is None else "POST", url, given, body, foreign=foreign))

    async def _judged(self, answer: Answer) -> Answer:
        if answer.status in STATUSES:
            async with answer:
                text, asks = f"{answer.said}: answered {answer.status}", answer.headers.get("Retry-After")
                raise BrokenError(text, asks, answer.status)
        return answer

    def _context(self, url: URL, *, foreign: bool) -> ssl.SSLContext | bool:
        if url.scheme != "https":
            return True
        if self._tls is None:
            self._tls = _contexts(self.site)
        return self._tls.foreign if foreign else self._tls.own

    async def _hop(
        self, method: str, url: URL, headers: Mapping[str, str], body: Body | None, *, foreign: bool
    ) -> Answer:
        if self._session is None or self._resolver is None:
            raise RuntimeError("internal error: a Transport must be entered with `async with` before its first request")
        said = str(get_origin(url))
        literal = parse_address(url.raw_host or "")
        if literal is not None:
            self._resolver.judge(url.raw_host or "", [literal], url.port or 0)
        loop = asyncio.get_running_loop()
        failed: list[Exception] = []
        try:
            async with asyncio.timeout(self._limits.connect_s + self._limits.head_s) as limit:

                async def pieces(source: Callable[[], AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
                    try:
                        async for piece in source():
                            limit.reschedule(loop.time() + self._limits.head_s)
                            yield piece
                    except Exception as error:
                        failed.append(error)
                        raise

                found = await self._session.request(
                    method,
                    url,
                    headers=headers,
                    data=pieces(body) if callable(body) else body,
                    allow_redirects=False,
                    ssl=self._context(url, foreign=foreign),
                    server_hostname=None if foreign or url.scheme != "https" else self.site.certified,
                )
        except aiohttp.ClientConnectorCertificateError:
            raise PolicyError(
                f"{said}: its certificate is not valid; if a private authority issued it, set --ca-file, or "
                f"weights.caFile of the Settings, to the certificate of that authority"
            ) from None
        except aiohttp.ClientSSLError:
            raise BrokenError(f"{said}: the TLS handshake failed (is it plain HTTP?)") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if failed:
                raise failed[0] from None  # reading the request body failed, which is not the registry's fault
            raise BrokenError(f"{said}: does not answer ({_kind(error)})") from None
        return Answer(found, url, foreign=foreign, limits=self._limits)


class _Tls(NamedTuple):
    """TLS contexts; only `own` has the client certificate."""

    own: ssl.SSLContext
    foreign: ssl.SSLContext


def _contexts(site: Site) -> _Tls:
    """Create the contexts for the registry and for other hosts. Raises PolicyError."""
    own = create_tls_context()
    foreign = own if site.certificate is None else create_tls_context()
    try:
        if site.ca is not None:
            for one in {own, foreign}:  # blob storage often has the same private CA
                one.load_verify_locations(site.ca)
        if site.certificate is not None:
            own.load_cert_chain(*site.certificate)
    except (OSError, ssl.SSLError) as error:
        what = getattr(error, "strerror", None) or "not valid PEM"
        raise PolicyError(
            f"{site.host}: its configured CA certificates or our own client certificate cannot be loaded: {what}"
        ) from None
    return _Tls(own, foreign)


def _kind(error: BaseException) -> str:
    """Describe an error without its message, which may contain the URL."""
    if isinstance(error, TimeoutError):
        return "too slow"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return getattr(cause, "strerror", None) or type(error).__name__
