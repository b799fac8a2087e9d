"""A Kubernetes API server, as plain dicts: requests, pages, watches.

Owns one HTTP session. Promises: every request ends within READ_S_MAX or WRITE_S_MAX, all its tries together; 429 and
Retry-After are obeyed, at most TRIES_MAX times and never all at once; requests keep to a budget; no write is sent, or
waited for, after this process may not write; a refusal says what the server said. A watch is a stream of (type, object)
that ends without an error whenever the server likes (it cuts slow watchers silently): who wants more goes on from the
last version. It must not keep anything: caches are `watching`'s.

How fast this process may ask an API server: a token bucket, so that no bug and no flood of ours is a storm there.

Owns the rate. A burst is let through at once (a whole node's Replicas start together), then requests take turns in the
order in which they came. Pure but for the sleep of `turn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

import aiohttp
import msgspec

from autoscaler.kubernetes import decoding
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.decoding import ListPage, read_event, read_object, read_page
from autoscaler.kubernetes.kubeconfig import ApiAccess
from autoscaler.kubernetes.unreadable import Unreadable, UnreadableObjects

WRITES_PER_S = 50.0
BURST = 100.0
READ_COST = 0.2
"""Of a write: reads come out of the server's cache."""


class RequestRateLimiter:
    """`clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = BURST
        self._at_s = clock()

    def take(self, cost: float) -> float:
        """Takes `cost` and says how many seconds to wait before the request may be sent."""
        now_s = self._clock()
        self._tokens = min(BURST, self._tokens + (now_s - self._at_s) * WRITES_PER_S)
        self._at_s = now_s
        self._tokens -= cost
        return max(0.0, -self._tokens / WRITES_PER_S)

    async def turn(self, method: str) -> None:
        """Returns when a request of this method may be sent."""
        cost = READ_COST if method == "GET" else 1.0
        wait_s = self.take(cost)
        if wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:  # it is not sent: others need not wait for it
                self._tokens += cost
                raise


if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ConnectionKey

Object = decoding.Object

READ_S_MAX = 30.0
"""An API server that hangs does not say so (its GET has no end)."""
WRITE_S_MAX = 60.0
"""Two webhooks in a row may take 30 s each (`timeoutSeconds`)."""
SEND_S_MIN = 0.001
"""Of a request whose turn comes in its last moment: to aiohttp 0 is no limit."""
SILENT_S_MAX = 90.0
"""A watch that says nothing for longer is dead: bookmarks come about every minute."""
TRIES_MAX = 5
"""Of a request that the server was too busy for (429, 503 with Retry-After)."""
RETRY_AFTER_S_MAX = 10.0
LATER = 1.25
"""Up to so many times what Retry-After says: who was refused together does not come back together."""
PAGE = 500
"""Objects of one answer: reading 5,000 pods at once holds the loop for a second."""
UNREADABLE = 200
"""Status of the ApiError for an answer that cannot be decoded."""
HALF_A_SECOND_S = 0.5
"""Of a Date, which is cut to the second."""
BATCH = 50
"""Events of a watch between two turns of the loop: a buffer holds hundreds."""
BUFFER_BYTES = 1 << 20

JSON, MERGE, APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
STRATEGIC, JSON_PATCH = "application/strategic-merge-patch+json", "application/json-patch+json"


class ApiError(Exception):
    """The server said no. `reason` is the API's word (NotFound, Conflict, Expired, ...)."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class UnreachableError(Exception):
    """No answer: nobody knows whether the request was carried out."""


class FencedError(Exception):
    """The request was not sent: this process may not write any more."""


class Api:
    """One API server. Use as `async with`. `writes_s` says for how many more seconds this process may write.

    `agent` is what the server's audit log calls it, and who it says wrote a field.
    """

    def __init__(
        self, access: ApiAccess, writes_s: Callable[[], float] = lambda: math.inf, agent: str = WRITER,
        unreadable: UnreadableObjects | None = None,
    ) -> None:  # fmt: skip
        self._access = access
        self.unreadable = unreadable or UnreadableObjects()
        """Of all watches of this server; given to each Api of a process."""
        self._agent = {"User-Agent": agent} if agent else {}
        self._writes_s = writes_s
        self._session: aiohttp.ClientSession | None = None
        self._budget = RequestRateLimiter(time.monotonic)
        self.requests = 0
        """Sent so far, watches included."""
        self.answers = True
        """The last that was asked was answered, also with a refusal."""
        self._ahead_s = 0.0
        """How far the server's clock is before ours."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=_Connector(ssl=self._access.tls(), limit=0),
            headers=self._agent,
            read_bufsize=BUFFER_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def unix_s(self) -> float:
        """Now by the server's clock, to about a second: what is written there is meant for others, whose clocks may be
        hours from ours.
        """
        return time.time() + self._ahead_s

    def _answered(self, date: str | None) -> None:
        self.answers = True
        if date:
            with contextlib.suppress(ValueError):
                self._ahead_s = parsedate_to_datetime(date).timestamp() + HALF_A_SECOND_S - time.time()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def get(self, path: str, *, within_s: float = READ_S_MAX, **query: str) -> Object:
        """One object, or one list whole. Raises ApiError, UnreachableError (like all below)."""
        return _object(path, await self._ask("GET", path, query=query, within_s=within_s))

    async def check(self, path: str) -> None:
        """Raises ApiError, UnreachableError unless the collection can be listed."""
        await self._ask("GET", path, query={"limit": "1"})

    async def create(self, path: str, body: Object) -> Object:
        """POST to a collection."""
        return _object(path, await self._ask("POST", path, body))

    async def replace(self, path: str, body: Object) -> Object:
        """PUT; a `resourceVersion` in it makes it conditional (409)."""
        return _object(path, await self._ask("PUT", path, body))

    async def patch(self, path: str, body: Object | list[Object], kind: str = MERGE, **query: str) -> Object:
        """PATCH of one of the kinds above."""
        return _object(path, await self._ask("PATCH", path, body, kind, query))

    async def apply(self, path: str, body: Object, owner: str, *, force: bool = True) -> Object:
        """Server-side apply: fields in `body` are the owner's from now on, also such as are 0 (KEP-555)."""
        query = {"fieldManager": owner, "force": str(force).lower()}
        return _object(path, await self._ask("PATCH", path, body, APPLY, query))

    async def delete(
        self, path: str, *, uid: str | None = None, version: str | None = None, grace_s: int | None = None
    ) -> Object:
        """DELETE of this very object, if `uid` and `version` say which; 409 where it is another."""
        wanted = {"uid": uid, "resourceVersion": version}
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if conditions := {key: value for key, value in wanted.items() if value is not None}:
            body["preconditions"] = conditions
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return _object(path, await self._ask("DELETE", path, body))

    async def pages(self, path: str, query: Mapping[str, str] | None = None) -> AsyncIterator[ListPage]:
        """A list in parts of at most PAGE objects."""
        asked = {**(query or {}), "limit": str(PAGE)}
        while True:
            said = await self._ask("GET", path, query=asked)
            try:
                page = read_page(said)
            except (ValueError, RecursionError) as error:
                raise UnreachableError(f"GET {path}: the answer is no list ({type(error).__name__})") from error
            yield page
            if not page.token:
                return
            asked["continue"] = page.token

    async def _ask(  # noqa: PLR0917  here only
        self,
        method: str,
        path: str,
        body: Object | list[Object] | None = None,
        kind: str = JSON,
        query: Mapping[str, str] | None = None,
        within_s: float | None = None,
    ) -> bytes:
        """One request, again while the server asks for patience, and there is time for it."""
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + (within_s if within_s is not None else READ_S_MAX if method == "GET" else WRITE_S_MAX)
        for tries_left in range(TRIES_MAX - 1, -1, -1):
            try:
                return await self._ask_once(method, path, body, kind, query or {}, ends_s)
            except ApiError as error:
                if error.retry_after_s is None or not tries_left:
                    raise
                pause_s = min(error.retry_after_s, RETRY_AFTER_S_MAX) * random.uniform(1, LATER)  # noqa: S311  no secret
                if now_s() + pause_s >= ends_s:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("not reached")

    async def _ask_once(  # noqa: PLR0917  once, above
        self,
        method: str,
        path: str,
        body: Object | list[Object] | None,
        kind: str,
        query: Mapping[str, str],
        ends_s: float,
    ) -> bytes:
        try:
            async with asyncio.timeout_at(ends_s):
                headers = await self._access.headers()
                await self._budget.turn(method)
        except TimeoutError:
            raise UnreachableError(f"{method} {path}: not sent, so many others were") from None
        within_s = max(SEND_S_MIN, ends_s - asyncio.get_running_loop().time())
        if method != "GET" and self._writes_s() <= 0:
            raise FencedError(f"{method} {path}: another leads now")
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), kind
        self.requests += 1
        sent = self._send(method, path, data, query, headers, within_s)
        try:
            return await (sent if method == "GET" else self._while_we_may_write(sent))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.answers = False
            raise UnreachableError(f"{method} {path}: {type(error).__name__}") from error

    async def _while_we_may_write(self, sent: Coroutine[object, object, bytes]) -> bytes:
        """The response to a write. Leadership is renewed meanwhile; if it is lost, the write is cancelled. Raises
        TimeoutError.
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

    async def _send(  # noqa: PLR0917  once, above
        self,
        method: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        within_s: float,
    ) -> bytes:
        """Raises ApiError, and what aiohttp raises."""
        async with self._open().request(
            method,
            self._access.server + path,
            data=data,
            params=query,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=within_s),
        ) as answer:
            said = await answer.read()
        self._answered(answer.headers.get("Date"))
        if answer.status >= 400:
            raise _refusal(answer, said)
        return said

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
        """What happens from a version on: (ADDED, MODIFIED, DELETED or BOOKMARK; object). With `initial` first all that
        is there, to a bookmark that says it is the end (KEP-3157). An ERROR of the server is raised, and so is silence
        of `silent_s`. Who stops listening closes it (`contextlib.aclosing`): else its connection stays until the
        collector comes.
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
        """Raises ApiError, and what aiohttp raises."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=READ_S_MAX, sock_read=silent_s)
        async with self._open().get(
            self._access.server + path, params=query, headers=headers, timeout=timeout
        ) as answer:
            self._answered(answer.headers.get("Date"))
            if answer.status >= 400:
                raise _refusal(answer, await answer.read())
            async with contextlib.aclosing(_lines(answer.content)) as events:
                async for event in events:
                    yield event

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Api as `async with`")
        return self._session


class _Connector(aiohttp.TCPConnector):
    """What is broken off ends at once. aiohttp says goodbye first, and TLS waits 30 s for the other side to say it too:
    a server that hangs would keep each connection so long, and a loop that ends sooner leaves its socket open.
    """

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if should_close or protocol.should_close:
            protocol.abort()
        super()._release(key, protocol, should_close=should_close)


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[tuple[str, Object | Unreadable], None]:
    """The events of a watch, one in each line, however long. Others have their turn after each BATCH."""
    rest, count = b"", 0
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            count += 1
            if not count % BATCH:
                await asyncio.sleep(0)
            try:
                event = read_event(line)
            except (ValueError, RecursionError) as error:  # the server, or a proxy, broke off within a line
                raise aiohttp.ClientPayloadError(f"a line of a watch is no event: {type(error).__name__}") from error
            yield event


def _object(path: str, said: bytes) -> Object:
    """The object of an answer. Raises ApiError if it cannot be decoded."""
    found = read_object(said) if said else {}
    if isinstance(found, Unreadable):
        raise ApiError(UNREADABLE, "Unreadable", f"{path}: {found.reason}")
    return found


def _refusal(answer: aiohttp.ClientResponse, said: bytes) -> ApiError:
    after = answer.headers.get("Retry-After", "")
    retry_after_s = float(after) if after.isdigit() else None
    found = read_object(said)
    if isinstance(found, Unreadable):  # a proxy before the server, or the server too early
        return ApiError(answer.status, answer.reason or "", said[:200].decode(errors="replace"), retry_after_s)
    return _status(found, retry_after_s)


class _Status(msgspec.Struct, frozen=True):
    """The API's kind Status."""

    code: int = 500
    reason: str = "Unknown"
    message: str = ""


def _status(status: Object, retry_after_s: float | None = None) -> ApiError:
    try:
        found = msgspec.convert(status, _Status)
    except msgspec.ValidationError:  # not from an API server
        found = _Status()
    return ApiError(found.code, found.reason, found.message, retry_after_s)
