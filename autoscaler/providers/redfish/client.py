"""HTTP client of one Redfish service: login, TLS and limits. Its errors contain no address and no secret. I/O.

Authenticates with a session token (`SessionService`) or, without sessions, with username and password in each request.
An operation completes at once or as a task. A request without a response raises NoAnswerError: its outcome is unknown.
Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from autoscaler.providers.redfish.schema import ROOT, RedfishDocumentError, find_link, parse_location, parse_task

CONNECT_S_MAX = 5.0
READ_S_MAX = 15.0
CHANGE_S_MAX = 180.0
"""Long, since some services respond only when the operation has completed."""
ANSWER_BYTES_MAX = 8 << 20
AT_ONCE = 8
"""Maximum concurrent requests to one service."""
POLL_S = (0.05, 0.4)
"""Minimum and maximum seconds between polls of a task; in between, a tenth of its current duration."""
RETRY_AFTER_S_MAX = 5.0
TASK_S_MAX = 600.0
SESSIONS = f"{ROOT}SessionService/Sessions"
_WORD = re.compile(r"[A-Za-z0-9]{1,64}")
_UNAUTHORIZED, _ACCEPTED, _FORGOTTEN = 401, 202, frozenset({404, 410})
_NOT_OF_IT = frozenset({_UNAUTHORIZED, 403, 429})
"""Responses of a task monitor that concern the client, not the operation."""
Sleep = Callable[[float], Awaitable[None]]
Tls = Callable[[], Awaitable[ssl.SSLContext | None]]
"""Called again if a certificate fails verification, since the CA may have changed; None: the system's CAs."""


class NoAnswerError(Exception):
    """The outcome of a request is unknown. `str()`: the reason, without an address."""


class StatusError(Exception):
    """The service rejected a request and changed nothing. `str()`: its status and message ID."""

    def __init__(self, status: int, word: str) -> None:
        super().__init__(f"the fabric returned status {status}{f' ({word})' if word else ''}")
        self.status = status


class Login(NamedTuple):
    """Credentials of a service; never printed."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "Login"


class RedfishResponse(NamedTuple):
    """A response of a service."""

    status: int
    body: bytes
    etag: str
    task: str
    """Path of the monitor of an operation in progress; empty: the operation is completed."""
    after_s: float
    """Seconds to wait before the next request."""


Logins = Callable[[], Awaitable[Login | None]]
"""Called for each session, so that a changed password is used; None: the service needs no login."""


class Service:
    """Client of one service. `close` ends its session."""

    def __init__(
        self, url: str, logins: Logins, tls: Tls, *, sleep: Sleep = asyncio.sleep,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`may_write`: whether this process may still change anything."""
        self._origin = url.rstrip("/")
        self._logins, self._tls, self._sleep, self.may_write = logins, tls, sleep, may_write
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] | None = None
        """Authentication headers; None: not logged in yet."""
        self._own = ""
        """Path of the current session."""
        self._turns, self._entering = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    async def get(self, path: str) -> RedfishResponse:
        """Get a document. Raises NoAnswerError, StatusError."""
        async with self._turns:
            return await self._ask("GET", path, None, {}, READ_S_MAX)

    async def patch(self, path: str, body: object, etag: str = "") -> RedfishResponse:
        """Patch a document if it still has that `etag`. Raises NoAnswerError, StatusError (412: it was changed)."""
        if not self.may_write():
            raise NoAnswerError("this process is not the leader")
        condition = {"If-Match": etag} if etag else {}
        return await self._ask("PATCH", path, msgspec.json.encode(body), condition, CHANGE_S_MAX)

    async def through(self, answer: RedfishResponse, clock: Callable[[], float], wanted: Callable[[], bool]) -> None:
        """Wait until an operation has ended or is not `wanted` any more.
        Raises NoAnswerError if its outcome is unknown, StatusError if the service did not perform it.
        """
        began_s, after_s = clock(), answer.after_s
        while answer.task and wanted() and clock() < began_s + TASK_S_MAX:
            await self._sleep(max(pause_s(clock() - began_s), after_s))
            try:
                polled = await self.get(answer.task)
            except StatusError as error:
                if error.status in _FORGOTTEN:
                    return  # the current state shows the outcome
                if error.status in _NOT_OF_IT:
                    raise NoAnswerError(str(error)) from None
                raise  # a monitor returns the operation's response (DSP0266, asynchronous operations)
            after_s = polled.after_s
            if polled.status != _ACCEPTED and _over(polled.body):
                return
        if answer.task:
            raise NoAnswerError("its task does not complete")

    async def close(self) -> None:
        """End the session and close the connections."""
        if self._session is None:
            return
        await self._leave()
        await self._session.close()
        self._session = None

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], within_s: float
    ) -> RedfishResponse:
        login = await self._login(None)
        try:
            return await self._send(method, path, body, {**login, **headers}, within_s)
        except StatusError as error:
            if error.status != _UNAUTHORIZED or not login:
                raise
        login = await self._login(login)  # the session has ended, or the password has changed
        return await self._send(method, path, body, {**login, **headers}, within_s)

    async def _login(self, stale: dict[str, str] | None) -> dict[str, str]:
        """Return authentication headers. `stale`: those that were rejected."""
        async with self._entering:
            if self._headers is None or self._headers is stale:
                self._headers = await self._entered()
            return self._headers

    async def _entered(self) -> dict[str, str]:
        await self._leave()
        login = await self._logins()
        if login is None:
            return {}
        body = msgspec.json.encode({"UserName": login.user, "Password": login.password})
        try:
            response = await self._opened("POST", SESSIONS, body, {}, READ_S_MAX)
            async with response:
                token, place = response.headers.get("X-Auth-Token"), response.headers.get("Location", "")
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise await self._unanswered(error) from None
        if token and status < 300:
            self._own = parse_location(place)
            return {"X-Auth-Token": token}
        if status in {400, _UNAUTHORIZED, 403}:
            raise StatusError(status, "its Secret's user and password were rejected")
        if status >= 500 and status != 501:
            raise NoAnswerError(f"its session service returned status {status}")
        both = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
        return {"Authorization": f"Basic {both}"}

    async def _leave(self) -> None:
        """End the session: services allow few open sessions."""
        if self._own:
            with contextlib.suppress(NoAnswerError, StatusError, RedfishDocumentError):  # it will expire
                await self._send("DELETE", self._own, None, self._headers or {}, CONNECT_S_MAX)
        self._own = ""

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], within_s: float
    ) -> RedfishResponse:
        try:
            async with asyncio.timeout(within_s):
                response = await self._opened(method, path, body, headers, within_s)
                async with response:
                    return self._answered(response, await _read(response))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise await self._unanswered(error) from None

    async def _unanswered(self, error: Exception) -> NoAnswerError:
        session = self._session
        if isinstance(error, aiohttp.ClientConnectorCertificateError) and session is not None:
            self._session = None
            await session.close()
        return NoAnswerError(type(error).__name__)

    async def _opened(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], within_s: float
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            tls = await self._tls()
            tcp = aiohttp.TCPConnector(ssl=True if tls is None else tls, limit=AT_ONCE * 2)
            self._session = aiohttp.ClientSession(connector=tcp, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        sent = {"Accept": "application/json", "OData-Version": "4.0", **headers}
        if body is not None:
            sent["Content-Type"] = "application/json"
        return await self._session.request(
            method, self._origin + path, data=body, headers=sent, allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=within_s, sock_connect=CONNECT_S_MAX),
        )  # fmt: skip

    def _answered(self, response: aiohttp.ClientResponse, body: bytes) -> RedfishResponse:
        status = response.status
        if status >= 500 and status not in {501, 507}:
            raise NoAnswerError(f"it returned status {status}")
        if status >= 300:
            raise StatusError(status, _word(body))
        place = parse_location(response.headers.get("Location", ""))
        going_on = place or (find_link(body) if body else "") if status == _ACCEPTED else ""
        if status == _ACCEPTED and not going_on and response.method != "GET":
            raise NoAnswerError("it accepted the request without naming a task")
        return RedfishResponse(status, body, response.headers.get("ETag", ""), going_on, _after_s(response))


def pause_s(took_s: float) -> float:
    """Seconds until the next poll of an operation that has taken `took_s` so far."""
    return min(max(took_s / 10.0, POLL_S[0]), POLL_S[1])


def _over(body: bytes) -> bool:
    """Whether a task has ended. Raises StatusError if it failed."""
    task = parse_task(body or b"{}")
    if task.over and not task.well:
        raise StatusError(409, "its task failed")
    return task.over


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > ANSWER_BYTES_MAX:
            raise NoAnswerError(f"its response exceeds {ANSWER_BYTES_MAX >> 20} MiB")
    return bytes(body)


def _after_s(response: aiohttp.ClientResponse) -> float:
    said = response.headers.get("Retry-After", "")
    return min(float(said), RETRY_AFTER_S_MAX) if said.isascii() and said.isdecimal() and len(said) < 6 else 0.0


def _word(body: bytes) -> str:
    """Last part of the first MessageId (`Base.1.8.ResourceInUse`); the messages may contain secrets."""
    error: Any
    try:
        error = msgspec.json.decode(body)["error"]
        error = (error.get("@Message.ExtendedInfo") or [{}])[0].get("MessageId") or error.get("code")
        word = str(error).rpartition(".")[2]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
    return word if _WORD.fullmatch(word) else ""
