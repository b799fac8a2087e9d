"""A Kubernetes API client on plain dicts: requests, paginated lists and watches, with a client-side rate limit. I/O.

An `Api` has one HTTP session. Every request ends within READ_S_MAX or WRITE_S_MAX, including all retries. 429 and
Retry-After are honoured, with at most TRIES_MAX attempts and random pauses. No write is sent or awaited after this
process has lost the right to write. An error contains the server's message. A watch is a stream of (type, object) that
may end without an error at any time, because the server drops slow watchers silently. The caller then resumes from the
last version. `autoscaler.kubernetes.watch` adds a cache.

The rate limit is a token bucket, so that neither a bug nor a burst in this process overloads the API server. A burst is
sent at once (all replicas of a node start together); further requests are sent in order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

import aiohttp
import msgspec

from autoscaler.kubernetes import safe_decoding
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.kubeconfig import ApiAccess
from autoscaler.kubernetes.safe_decoding import (
    ListPage,
    read_event,
    read_object,
    read_pages,
    read_response,
    read_truncated_event,
)
from autoscaler.kubernetes.unreadable_objects import Unreadable, UnreadableObjects

WRITES_PER_S = 50.0
BURST = 100.0
READ_COST = 0.2
"""Cost of a read relative to a write: reads are served from the server's cache."""


class RequestRateLimiter:
    """A token bucket. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = BURST
        self._at_s = clock()

    def take(self, cost: float) -> float:
        """Take `cost` tokens and return how many seconds to wait before sending the request."""
        now_s = self._clock()
        self._tokens = min(BURST, self._tokens + (now_s - self._at_s) * WRITES_PER_S)
        self._at_s = now_s
        self._tokens -= cost
        return max(0.0, -self._tokens / WRITES_PER_S)

    async def turn(self, method: str) -> None:
        """Wait until a request with this method may be sent."""
        cost = READ_COST if method == "GET" else 1.0
        wait_s = self.take(cost)
        if wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:  # not sent: refund its tokens
                self._tokens += cost
                raise


if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ConnectionKey

Object = safe_decoding.Object

READ_S_MAX = 30.0
"""Maximum duration of a read, because a hanging API server never responds."""
WRITE_S_MAX = 60.0
"""Maximum duration of a write: two webhooks in a row may take 30 s each (`timeoutSeconds`)."""
SEND_S_MIN = 0.001
"""Minimum timeout of a request that is sent at its deadline: in aiohttp 0 means no timeout."""
SILENT_S_MAX = 90.0
"""A watch that is silent for longer counts as dead: bookmarks arrive about every minute."""
TRIES_MAX = 5
"""Maximum attempts of a request while the server is overloaded (429, 503 with Retry-After)."""
RETRY_AFTER_S_MAX = 10.0
_SECONDS = re.compile(r"[0-9]{1,9}")
LATER = 1.25
"""Maximum random factor on Retry-After, so that requests rejected together are not retried together."""
PAGE = 500
"""Objects per page: decoding 5,000 pods at once blocks the event loop for a second."""
PAGE_BYTES_MAX = 32 << 20
"""Maximum size of a page. A larger one is requested again with fewer objects: 500 objects may have 1.5 MiB each."""
LIST_BYTES_MAX = 64 << 20
"""Maximum size of a page with one object, and of a list of a server that ignores `limit`."""
RESPONSE_BYTES_MAX = 16 << 20
"""Maximum size of any other response, and of a line of a watch. The 1.5 MiB of an object that etcd stores may become
9 MiB as JSON.
"""
ERROR_BYTES_MAX = 64 << 10
"""Maximum size of an error response; the rest is not read."""
MESSAGE_CHARS_MAX = 2000
"""Maximum length of the server's message and reason in an error."""
PREFIX_BYTES = 1 << 20
"""Size of the prefix that identifies the object in a line above the limit."""
UNREADABLE = 200
"""Status of the ApiError for a response that cannot be decoded."""
HALF_A_SECOND_S = 0.5
"""Mean error of a Date header, which is truncated to the second."""
BATCH = 50
"""Watch events processed before yielding to the event loop: a buffer holds hundreds."""
BUFFER_BYTES = 1 << 20

JSON, MERGE, APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The server rejected the request. `reason` is the API's term (NotFound, Conflict, Expired, ...)."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def is_transient(self) -> bool:
        """The server temporarily cannot process requests: etcd elects a leader, or a webhook is unreachable."""
        return self.status in {408, 429} or self.status >= 500


class UnreachableError(Exception):
    """No response: it is unknown whether the request was executed."""


class FencedError(Exception):
    """The request was not sent: this process may no longer write."""


class _LargeResponseError(ApiError):
    """The response is larger than the caller reads."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(UNREADABLE, "Unreadable", f"the response has more than {bytes_max} bytes")


class Api:
    """A client of one API server. Use as `async with`. `writes_s` returns for how many more seconds it may write.

    `agent` is the User-Agent: the server's audit log and default field manager use it.
    """

    def __init__(
        self, access: ApiAccess, writes_s: Callable[[], float] = lambda: math.inf, agent: str = WRITER,
        unreadable: UnreadableObjects | None = None,
    ) -> None:  # fmt: skip
        self._access = access
        self.unreadable = unreadable or UnreadableObjects()
        """Unreadable objects of all watches of this server; shared by all Apis of a process."""
        self._agent = {"User-Agent": agent} if agent else {}
        self._writes_s = writes_s
        self._session: aiohttp.ClientSession | None = None
        self._budget = RequestRateLimiter(time.monotonic)
        self.requests = 0
        """Requests sent so far, including watches."""
        self.answers = True
        """Whether the last request got a response, even an error."""
        self._ahead_s = 0.0
        """Seconds by which the server's clock is ahead of ours."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=_Connector(ssl=self._access.tls(), limit=0), headers=self._agent, read_bufsize=BUFFER_BYTES
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def unix_s(self) -> float:
        """The current time of the server's clock, to about a second.
        Used for times that other processes read, whose clocks may differ from ours by hours.
        """
        return time.time() + self._ahead_s

    def _answered(self, date: str | None) -> None:
        self.answers = True
        if date:
            with contextlib.suppress(ValueError):
                self._ahead_s = parsedate_to_datetime(date).timestamp() + HALF_A_SECOND_S - time.time()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def get(self, path: str, *, within_s: float = READ_S_MAX, **query: str) -> Object:
        """GET an object or a whole list. Raises ApiError, UnreachableError (like all methods below)."""
        return _object(path, await self._ask("GET", path, query=query, within_s=within_s))

    async def check(self, path: str) -> None:
        """Raise ApiError or UnreachableError unless the collection can be listed."""
        await self._ask("GET", path, query={"limit": "1"})

    async def create(self, path: str, body: Object) -> Object:
        """POST to a collection."""
        return _object(path, await self._ask("POST", path, body))

    async def replace(self, path: str, body: Object) -> Object:
        """PUT; a `resourceVersion` in the body makes it conditional (409)."""
        return _object(path, await self._ask("PUT", path, body))

    async def patch(self, path: str, body: Object | list[Object], kind: str = MERGE, **query: str) -> Object:
        """PATCH with one of the content types above."""
        return _object(path, await self._ask("PATCH", path, body, kind, query))

    async def apply(self, path: str, body: Object, owner: str, *, force: bool = True) -> Object:
        """Server-side apply: `owner` then owns the fields in `body`, also those that are 0 (KEP-555)."""
        query = {"fieldManager": owner, "force": str(force).lower()}
        return _object(path, await self._ask("PATCH", path, body, APPLY, query))

    async def delete(
        self, path: str, *, uid: str | None = None, version: str | None = None, grace_s: int | None = None
    ) -> Object:
        """DELETE an object. With `uid` or `version`, an object that differs from it is a 409."""
        wanted = {"uid": uid, "resourceVersion": version}
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if conditions := {key: value for key, value in wanted.items() if value is not None}:
            body["preconditions"] = conditions
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return _object(path, await self._ask("DELETE", path, body))

    async def pages(self, path: str, query: Mapping[str, str] | None = None) -> AsyncIterator[ListPage]:
        """List a collection in pages of at most PAGE objects. Fewer large objects are requested and yielded at once. A
        page with a single object, or a list of a server that ignores `limit`, may have LIST_BYTES_MAX.
        """
        asked, objects = {**(query or {})}, PAGE
        while True:
            bytes_max = PAGE_BYTES_MAX if objects > 1 else LIST_BYTES_MAX
            try:
                body = await self._ask("GET", path, query={**asked, "limit": str(objects)}, bytes_max=bytes_max)
            except _LargeResponseError:
                if objects == 1:
                    raise
                objects //= 2
                continue
            if len(body) < PAGE_BYTES_MAX // 4:
                objects = min(PAGE, 2 * objects)
            token = ""
            try:
                for page in read_pages(body):  # parts of the page
                    token = page.token
                    yield page
            except (ValueError, RecursionError) as error:
                raise UnreachableError(f"GET {path}: the response is not a list ({type(error).__name__})") from error
            if not token:
                return
            asked["continue"] = token

    async def _ask(  # noqa: PLR0917  called here only
        self,
        method: str,
        path: str,
        body: Object | list[Object] | None = None,
        kind: str = JSON,
        query: Mapping[str, str] | None = None,
        within_s: float | None = None,
        bytes_max: int = RESPONSE_BYTES_MAX,
    ) -> bytes:
        """Send a request; retry after Retry-After while attempts and time are left. Raises _LargeResponseError if the
        response has more than `bytes_max`.
        """
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + (within_s if within_s is not None else READ_S_MAX if method == "GET" else WRITE_S_MAX)
        for tries_left in range(TRIES_MAX - 1, -1, -1):
            try:
                return await self._ask_once(method, path, body, kind, query or {}, ends_s, bytes_max)
            except ApiError as error:
                if error.retry_after_s is None or not tries_left:
                    raise
                pause_s = error.retry_after_s * random.uniform(1, LATER)  # noqa: S311  jitter needs no cryptographic randomness
                if now_s() + pause_s >= ends_s:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("not reached")

    async def _ask_once(  # noqa: PLR0917  called once, above
        self,
        method: str,
        path: str,
        body: Object | list[Object] | None,
        kind: str,
        query: Mapping[str, str],
        ends_s: float,
        bytes_max: int,
    ) -> bytes:
        try:
            async with asyncio.timeout_at(ends_s):
                headers = await self._access.headers()
                await self._budget.turn(method)
        except TimeoutError:
            raise UnreachableError(f"{method} {path}: not sent in time because of the client's rate limit") from None
        within_s = max(SEND_S_MIN, ends_s - asyncio.get_running_loop().time())
        if method != "GET" and self._writes_s() <= 0:
            raise FencedError(f"{method} {path}: this process no longer leads")
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), kind
        self.requests += 1
        sent = self._send(method, path, data, query, headers, within_s, bytes_max)
        try:
            return await (sent if method == "GET" else self._while_we_may_write(sent))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.answers = False
            raise UnreachableError(f"{method} {path}: {type(error).__name__}") from error

    async def _while_we_may_write(self, sent: Coroutine[object, object, bytes]) -> bytes:
        """Await the response to a write.
        Each renewal of the leadership extends the time limit. If it is lost, cancel the write and raise TimeoutError.
        """
        task = asyncio.ensure_future(sent)
        try:
            while not task.done():
                left_s = self._writes_s()
                if left_s <= 0:
                    raise TimeoutError
                await asyncio.wait((task,), timeout=None if math.isinf(left_s) else left_s)
        finally:
            task.cancel()
        return task.result()

    async def _send(  # noqa: PLR0917  called once, above
        self,
        method: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        within_s: float,
        bytes_max: int,
    ) -> bytes:
        """Send one HTTP request. Raises ApiError, _LargeResponseError and aiohttp's exceptions."""
        async with self._open().request(
            method,
            self._access.server + path,
            data=data,
            params=query,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=within_s),
        ) as answer:
            if answer.status < 400:
                body = await _read_bounded(answer.content, bytes_max)
            else:
                body = await _read_prefix(answer.content, ERROR_BYTES_MAX)
        self._answered(answer.headers.get("Date"))
        if answer.status >= 400:
            raise _refusal(answer, body)
        return body

    # --- watches -----------------------------------------------------------------------------------------------------

    async def watch(
        self,
        path: str,
        version: str | None,
        query: Mapping[str, str],
        *,
        initial: bool = False,
        silent_s: float = SILENT_S_MAX,
    ) -> AsyncGenerator[tuple[str, Object | Unreadable], None]:
        """Yield events after a version: (ADDED, MODIFIED, DELETED or BOOKMARK; object). With `initial` the existing
        objects come first, up to a bookmark that marks the end (KEP-3157). Raises on an ERROR event and after silence
        of `silent_s`. Close the generator (`contextlib.aclosing`) to stop; otherwise its connection stays open until it
        is garbage-collected.
        """
        asked = {**query, "watch": "1", "allowWatchBookmarks": "true"}
        if version is not None:
            asked["resourceVersion"] = version
        if initial:
            asked |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        headers = await self._access.headers()
        await self._budget.turn("GET")
        self.requests += 1
        try:
            async with contextlib.aclosing(self._stream(path, asked, headers, silent_s)) as events:
                async for event, found in events:
                    if event == "ERROR":
                        raise _status({} if isinstance(found, Unreadable) else found)
                    yield event, found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.answers = False
            raise UnreachableError(f"watch {path}: {type(error).__name__}") from error

    async def _stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silent_s: float
    ) -> AsyncGenerator[tuple[str, Object | Unreadable], None]:
        """Open a watch and yield its events. Raises ApiError and aiohttp's exceptions."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=READ_S_MAX, sock_read=silent_s)
        async with self._open().get(
            self._access.server + path, params=query, headers=headers, timeout=timeout
        ) as answer:
            self._answered(answer.headers.get("Date"))
            if answer.status >= 400:
                raise _refusal(answer, await _read_prefix(answer.content, ERROR_BYTES_MAX))
            async with contextlib.aclosing(_lines(answer.content)) as events:
                async for event in events:
                    yield event

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Api as `async with`")
        return self._session


class _Connector(aiohttp.TCPConnector):
    """Aborts a connection that is not reused. aiohttp would close TLS gracefully and wait 30 s for the peer: with a
    hanging server each connection would stay open that long, and leak if the event loop ends sooner.
    """

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if should_close or protocol.should_close:
            protocol.abort()
        super()._release(key, protocol, should_close=should_close)


async def _read_bounded(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """Read a body, after decompression. Raises _LargeResponseError as soon as it exceeds `bytes_max`."""
    pieces, size = list[bytes](), 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > bytes_max:
            raise _LargeResponseError(bytes_max)
        pieces.append(piece)
    return b"".join(pieces)


async def _read_prefix(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """Read at most `bytes_max` of a body, after decompression."""
    pieces, left = list[bytes](), bytes_max
    async for piece in content.iter_any():
        pieces.append(piece[:left])
        left -= len(pieces[-1])
        if not left:
            break
    return b"".join(pieces)


class _Line:
    """A line of a watch that arrives in pieces. Only the prefix of a line above RESPONSE_BYTES_MAX is kept."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        kept = self._size <= RESPONSE_BYTES_MAX
        self._size += len(piece)
        if kept:
            self._pieces.append(piece)
            if self._size > RESPONSE_BYTES_MAX:
                self._pieces = [b"".join(self._pieces)[:PREFIX_BYTES]]

    def take(self) -> tuple[str, Object | Unreadable]:
        """Decode the line and begin the next one. Raises msgspec.DecodeError if it is not an event."""
        line, size = b"".join(self._pieces), self._size
        self._pieces, self._size = [], 0
        if size <= RESPONSE_BYTES_MAX:
            return read_event(line)
        return read_truncated_event(line, f"it has {size} bytes, more than {RESPONSE_BYTES_MAX}")


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[tuple[str, Object | Unreadable], None]:
    """Yield the events of a watch, one per line. Yields to the event loop after each BATCH."""
    line, count = _Line(), 0
    async for received in content.iter_any():
        *ends, rest = received.split(b"\n")
        for end in ends:
            count += 1
            if not count % BATCH:
                await asyncio.sleep(0)
            line.add(end)
            try:
                event = line.take()
            except (ValueError, RecursionError) as error:  # the server, or a proxy, closed the stream within a line
                raise aiohttp.ClientPayloadError(
                    f"a line of a watch is not an event: {type(error).__name__}"
                ) from error
            yield event
        line.add(rest)


def _object(path: str, body: bytes) -> Object:
    """Decode the object in a response. Raises ApiError if that fails."""
    found = read_response(body) if body else {}
    if isinstance(found, Unreadable):
        raise ApiError(UNREADABLE, "Unreadable", f"{path}: {found.reason}")
    return found


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> ApiError:
    after = answer.headers.get("Retry-After", "")
    retry_after_s = min(float(after), RETRY_AFTER_S_MAX) if _SECONDS.fullmatch(after) else None
    found = read_object(body)
    if isinstance(found, Unreadable) or not found.keys() & {"reason", "message"}:  # from a proxy, or a starting server
        return ApiError(answer.status, answer.reason or "", body[:200].decode(errors="replace"), retry_after_s)
    return _status({"code": answer.status, **found}, retry_after_s, answer.status)


class _Status(msgspec.Struct, frozen=True):
    """The Kubernetes kind Status."""

    code: int = 500
    reason: str = "Unknown"
    message: str = ""


def _status(status: Object, retry_after_s: float | None = None, code: int = 500) -> ApiError:
    """Convert a Status to an error. If it is not a Status, the error has the status `code`."""
    try:
        found = msgspec.convert(status, _Status)
    except msgspec.ValidationError:  # not from an API server
        found = _Status(code)
    reason, message = found.reason[:MESSAGE_CHARS_MAX], found.message[:MESSAGE_CHARS_MAX]
    return ApiError(found.code, reason, message, retry_after_s)
