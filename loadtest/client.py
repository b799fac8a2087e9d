"""The open-loop client: sends each Shot at its planned time, independent of the others, and returns a Result for each.

Results are in the order of the Shots. Times are measured from the planned time with the system's clock (an event loop's
clock may lag by a millisecond). One core handles thousands of connections: a Protocol on httptools, one task per
request and none per chunk. A request is abandoned at its deadline by closing its connection, as a client would;
stopping the run abandons all requests in flight. Requests are not retried, with one exception: if a reused connection
closes before a response byte, the request is sent once on a new one, as HTTP clients do (RFC 9112, 9.3.1), and the
Result records it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from loadtest.response_reader import AnswerReader
from loadtest.result import Result, Shot
from loadtest.stop_signals import Stop

CONNECT_AHEAD_AT_ONCE = 64
SHOTS_MAX = 1_000_000
"""Maximum number of Shots in a run, whose Results are all kept for the report."""


class LoadError(Exception):
    """The run cannot continue; the message states the reason and the remedy."""


class Target(NamedTuple):
    """The target of requests: scheme and authority of a URL, and the path before /v1, if any."""

    host: str
    port: int
    prefix: str
    tls: bool

    @property
    def authority(self) -> str:
        """`host:port`; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def target_of(url: str) -> Target:
    """Parse `http(s)://host[:port][/prefix][/v1]`. Raises LoadError for anything else."""
    try:
        url.encode()  # the report names the whole URL
        parts = urlsplit(url)
        port, host, prefix = parts.port, parts.hostname or "", parts.path.encode("ascii")
        known = parts.scheme in {"http", "https"} and bool(host.encode("idna")) and b" " not in prefix
    except ValueError:
        known = False
    if not known:
        raise LoadError(f"not a URL of a server: {url!r}; expected http://HOST:PORT")
    tls = parts.scheme == "https"
    return Target(host, port or (443 if tls else 80), parts.path.rstrip("/").removesuffix("/v1"), tls)


def request_bytes(target: Target, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
    """Return a whole HTTP/1.1 request."""
    rows = [f"{method} {target.prefix}{path} HTTP/1.1", f"Host: {target.authority}"]
    rows += [f"{name}: {value}" for name, value in headers]
    if body:
        rows += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*rows, "", ""]).encode() + body


class ClientConnection(asyncio.Protocol):
    """One connection with at most one exchange at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.open = False
        self.used = False
        """Whether it has carried a complete response before."""
        self.answer = AnswerReader()
        self.first_byte_s: float | None = None
        self.last_byte_s: float | None = None
        self.reusable = False
        self._done: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: dict[str, str] = {}
        self._framed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the new connection."""
        self._transport, self.open = cast("asyncio.Transport", transport), True  # uvloop's is not a subclass of it

    def begin(self, request: bytes, *, stream: bool) -> asyncio.Future[None]:
        """Send a request; the future completes when its response has ended, successfully or not."""
        self.answer, self._done = AnswerReader(stream=stream), asyncio.get_running_loop().create_future()
        self.first_byte_s = self.last_byte_s = None
        self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Abort the connection, as a client that disconnects."""
        self.open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse response bytes; bytes outside of an exchange are an error."""
        if self._done is None or self._done.done():
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._finish("the response is not HTTP/1.1")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Handle a connection that the server closed or reset."""
        self.open = False
        if error is None and self.answer.status and not self._framed:
            self._finish("")  # neither length nor chunked: the end of the connection is the end of the body
        else:
            self._finish("the connection was " + ("closed" if error is None else "reset"))

    def on_message_begin(self) -> None:
        """Start a new response head."""
        self._head = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record one header."""
        self._head[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Process the final head; interim heads are ignored."""
        status = self._parser.get_status_code()
        if status >= 200:
            self._framed = "content-length" in self._head or "transfer-encoding" in self._head
            self.answer.head(status, self._head)

    def on_body(self, data: bytes) -> None:
        """Process bytes of the body, without transfer encoding."""
        self.last_byte_s = time.monotonic()
        self.answer.body(data)
        if self.first_byte_s is None and self.answer.has_content:
            self.first_byte_s = self.last_byte_s

    def on_message_complete(self) -> None:
        """Finish the response, unless it is an interim one."""
        if self.answer.status:
            self.last_byte_s = time.monotonic()
            self.reusable = self._parser.should_keep_alive()
            self._finish("")

    def _finish(self, broken: str) -> None:
        if self._done is not None and not self._done.done():
            self.answer.end(broken)
            self._done.set_result(None)


class Client:
    """Sends Shots to one target. `reuse`: connections are reused after a complete response."""

    def __init__(
        self, url: str, *, reuse: bool = False, headers: Sequence[tuple[str, str]] = (), stop: Stop | None = None
    ) -> None:
        self.stop = Stop() if stop is None else stop
        """When it is set, nothing more is sent and requests in flight are abandoned."""
        self._target = target_of(url)
        self._reuse = reuse
        self._headers = tuple(headers)
        self._idle: list[ClientConnection] = []
        self._addresses: list[str] = []
        self._tls = ssl.create_default_context() if self._target.tls else None

    async def open(self, count: int) -> None:
        """Open `count` connections before the run, so that connecting is not measured."""
        for first in range(0, count, CONNECT_AHEAD_AT_ONCE):
            more = range(first, min(count, first + CONNECT_AHEAD_AT_ONCE))
            self._idle += await asyncio.gather(*(self._connect() for _ in more))

    async def run(self, shots: Sequence[Shot], on_result: Callable[[Result], None] | None = None) -> list[Result]:
        """Send each Shot at its time from now; return when all requests sent have a Result."""
        if len(shots) > SHOTS_MAX:
            raise LoadError(f"{len(shots)} requests are more than {SHOTS_MAX}; run in parts")
        began_s = time.monotonic()
        results: list[Result | None] = [None] * len(shots)

        async def fire(index: int) -> None:
            if self.stop.requested:
                return
            result = await self.send(shots[index], began_s + shots[index].at_s)
            results[index] = result
            if on_result is not None:
                on_result(result)

        try:
            async with asyncio.TaskGroup() as group:
                for index in sorted(range(len(shots)), key=lambda i: shots[i].at_s):
                    if not await self._until(began_s + shots[index].at_s):
                        break
                    group.create_task(fire(index))
        except* LoadError as errors:
            raise errors.exceptions[0] from None
        finally:
            self.close()
        return [result for result in results if result is not None]

    async def send(self, shot: Shot, planned_s: float | None = None) -> Result:
        """Send one Shot now; times count from `planned_s` (monotonic). Raises LoadError at a limit of this machine."""
        fired_s = time.monotonic()
        planned_s = fired_s if planned_s is None else planned_s
        seen = _Seen(planned_s, fired_s - planned_s)
        try:
            async with self.stop.within(planned_s + shot.timeout_s - fired_s):
                await self._exchange(shot, seen)
        except TimeoutError:
            seen.abandoned = True
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
                raise LoadError(
                    "this machine has no more connections; raise `ulimit -n` or send fewer requests"
                ) from error
            seen.refused = True
        finally:
            self._give_back(seen)
        return seen.result(shot)

    async def _until(self, moment_s: float) -> bool:
        """Sleep until then (an event loop's timer may fire slightly early); return False if stopped."""
        while not self.stop.requested and (wait_s := moment_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with self.stop.within(None):
                    await asyncio.sleep(wait_s)
        return not self.stop.requested

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, shot: Shot, seen: _Seen) -> None:
        request = request_bytes(self._target, "POST", shot.path, (*self._headers, *shot.headers), shot.body)
        kept = self._take_idle()
        seen.connection = kept or await self._connect()
        seen.sent_s = time.monotonic()
        await seen.connection.begin(request, stream=shot.stream)
        if kept is not None and kept.used and kept.answer.broken and not kept.answer.status:
            seen.resent = True
            seen.connection = await self._connect()
            seen.sent_s = time.monotonic()
            await seen.connection.begin(request, stream=shot.stream)

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> ClientConnection:
        loop, target = asyncio.get_running_loop(), self._target
        if not self._addresses:  # resolved once: thousands of requests must not wait for the resolver's threads
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            self._addresses = [str(address[0]) for *_, address in found]
        name = target.host if self._tls else None
        while True:
            address = self._addresses[0]
            try:
                made = await loop.create_connection(
                    ClientConnection, address, target.port, ssl=self._tls, server_hostname=name
                )
            except ConnectionRefusedError:
                if len(self._addresses) == 1:
                    raise
                if address == self._addresses[0]:
                    del self._addresses[0]  # localhost often has two addresses with a server on only one of them
            else:
                return made[1]

    def _give_back(self, seen: _Seen) -> None:
        connection = seen.connection
        if connection is None:
            return
        if self._reuse and connection.reusable and connection.open and not seen.abandoned:
            connection.used = True
            self._idle.append(connection)
        else:
            connection.close()


class _Seen:
    """The state from which a Result is made."""

    def __init__(self, planned_s: float, lateness_s: float) -> None:
        self.planned_s = planned_s
        self.lateness_s = lateness_s
        self.connection: ClientConnection | None = None
        self.sent_s: float | None = None
        self.abandoned = self.resent = self.refused = False

    def result(self, shot: Shot) -> Result:
        """Return the Result, with times since the planned time."""
        connection = self.connection
        answer = connection.answer if connection is not None and not self.refused else AnswerReader()

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else moment_s - self.planned_s

        broken = "no connection" if self.refused else "given up" if self.abandoned else answer.broken
        return Result(
            model=shot.model,
            at_s=shot.at_s,
            status=answer.status,
            code=answer.code or ("" if answer.status or self.abandoned else "transport"),
            errors=answer.errors,
            clear=answer.clear,
            lateness_s=self.lateness_s,
            sent_s=since(self.sent_s),
            first_byte_s=since(connection.first_byte_s if connection else None),
            last_byte_s=since(connection.last_byte_s if connection else None),
            bytes=answer.bytes,
            text=answer.text,
            saw_done=answer.saw_done,
            finish_reason=answer.finish_reason,
            broken=broken,
            abandoned=self.abandoned,
            resent=self.resent,
            cold=answer.cold,
            server_timing=answer.phases,
            headers=answer.headers,
        )
