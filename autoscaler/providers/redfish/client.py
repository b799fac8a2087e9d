"""Requests to one Redfish service: with its login, over TLS, bounded; nothing of an address or a secret is ever said.

Owns the session (a token of `SessionService`, else a name and a password with each request), and the two ways in which
an operation is answered: at once, or by a task. A request that was not answered raises NoAnswerError: nobody knows what
came of it. Redirects are not followed, and nothing is asked outside of the service.
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
"""Some answer only when the operation is through."""
ANSWER_BYTES_MAX = 8 << 20
AT_ONCE = 8
"""Requests to one service."""
POLL_S = (0.05, 0.4)
"""From one look at a task to the next: a tenth of what it has taken so far, within these."""
RETRY_AFTER_S_MAX = 5.0
TASK_S_MAX = 600.0
SESSIONS = f"{ROOT}SessionService/Sessions"
_WORD = re.compile(r"[A-Za-z0-9]{1,64}")
_UNAUTHORIZED, _ACCEPTED, _FORGOTTEN = 401, 202, frozenset({404, 410})
_NOT_OF_IT = frozenset({_UNAUTHORIZED, 403, 429})
"""What an operation's monitor answers of who asks, and not of the operation."""
Sleep = Callable[[float], Awaitable[None]]
Tls = Callable[[], Awaitable[ssl.SSLContext | None]]
"""Asked anew when a certificate did not hold, since authorities change, too; None: as the system has it."""


class NoAnswerError(Exception):
    """Nobody knows what came of a request. `str()` says why, without an address."""


class StatusError(Exception):
    """The service said no, and changed nothing. `str()` says its status and its word for it."""

    def __init__(self, status: int, word: str) -> None:
        super().__init__(f"the fabric answers {status}{f' ({word})' if word else ''}")
        self.status = status


class Login(NamedTuple):
    """Of a service; never said."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "Login"


class RedfishResponse(NamedTuple):
    """What a service said."""

    status: int
    body: bytes
    etag: str
    task: str
    """Where an operation that goes on is asked for; empty: it does not."""
    after_s: float
    """It asks not to be asked again before."""


Logins = Callable[[], Awaitable[Login | None]]
"""Asked anew for each session, so that a changed password is found; None: the service wants none."""


class Service:
    """One service. `close` ends its session."""

    def __init__(
        self, url: str, logins: Logins, tls: Tls, *, sleep: Sleep = asyncio.sleep,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`may_write`: whether this process may still change anything."""
        self._origin = url.rstrip("/")
        self._logins, self._tls, self._sleep, self.may_write = logins, tls, sleep, may_write
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] | None = None
        """Of a login; None: there is none yet."""
        self._own = ""
        """The path of our session."""
        self._turns, self._entering = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    async def get(self, path: str) -> RedfishResponse:
        """A document. Raises NoAnswerError, StatusError."""
        async with self._turns:
            return await self._ask("GET", path, None, {}, READ_S_MAX)

    async def patch(self, path: str, body: object, etag: str = "") -> RedfishResponse:
        """Changes one, if it is still of that `etag`. Raises NoAnswerError, StatusError (412: it is not)."""
        if not self.may_write():
            raise NoAnswerError("this process does not lead")
        told = {"If-Match": etag} if etag else {}
        return await self._ask("PATCH", path, msgspec.json.encode(body), told, CHANGE_S_MAX)

    async def through(self, answer: RedfishResponse, clock: Callable[[], float], wanted: Callable[[], bool]) -> None:
        """Until an operation is over, or not `wanted` any more. Raises NoAnswerError where nobody knows what came of
        it, StatusError where the service did not do it.
        """
        began_s, after_s = clock(), answer.after_s
        while answer.task and wanted() and clock() < began_s + TASK_S_MAX:
            await self._sleep(max(pause_s(clock() - began_s), after_s))
            try:
                told = await self.get(answer.task)
            except StatusError as error:
                if error.status in _FORGOTTEN:
                    return  # what there is now tells
                if error.status in _NOT_OF_IT:
                    raise NoAnswerError(str(error)) from None
                raise  # a monitor answers as the operation does (DSP0266, asynchronous operations)
            after_s = told.after_s
            if told.status != _ACCEPTED and _over(told.body):
                return
        if answer.task:
            raise NoAnswerError("its task does not end")

    async def close(self) -> None:
        """Nothing is asked any more."""
        if self._session is None:
            return
        await self._leave()
        await self._session.close()
        self._session = None

    # --- one request --------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], within_s: float
    ) -> RedfishResponse:
        login = await self._login(None)
        try:
            return await self._send(method, path, body, {**login, **headers}, within_s)
        except StatusError as error:
            if error.status != _UNAUTHORIZED or not login:
                raise
        login = await self._login(login)  # the session has ended, or the password is another
        return await self._send(method, path, body, {**login, **headers}, within_s)

    async def _login(self, stale: dict[str, str] | None) -> dict[str, str]:
        """`stale`: what did not do."""
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
            raise StatusError(status, "its Secret's user and password are not taken")
        if status >= 500 and status != 501:
            raise NoAnswerError(f"its sessions answer {status}")
        both = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
        return {"Authorization": f"Basic {both}"}

    async def _leave(self) -> None:
        """Ends our session: one that is not to be used is open all the same, and a service has room for few."""
        if self._own:
            with contextlib.suppress(
                NoAnswerError, StatusError, RedfishDocumentError
            ):  # it has ended, or ends by itself
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
        told = {"Accept": "application/json", "OData-Version": "4.0", **headers}
        if body is not None:
            told["Content-Type"] = "application/json"
        return await self._session.request(
            method, self._origin + path, data=body, headers=told, allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=within_s, sock_connect=CONNECT_S_MAX),
        )  # fmt: skip

    def _answered(self, response: aiohttp.ClientResponse, body: bytes) -> RedfishResponse:
        status = response.status
        if status >= 500 and status not in {501, 507}:
            raise NoAnswerError(f"it answers {status}")
        if status >= 300:
            raise StatusError(status, _word(body))
        place = parse_location(response.headers.get("Location", ""))
        going_on = place or (find_link(body) if body else "") if status == _ACCEPTED else ""
        if status == _ACCEPTED and not going_on and response.method != "GET":
            raise NoAnswerError("it does not say which task goes on")
        return RedfishResponse(status, body, response.headers.get("ETag", ""), going_on, _after_s(response))


def pause_s(took_s: float) -> float:
    """Until the next look at what has taken so long by now."""
    return min(max(took_s / 10.0, POLL_S[0]), POLL_S[1])


def _over(body: bytes) -> bool:
    """Raises StatusError where it went wrong."""
    told = parse_task(body or b"{}")
    if told.over and not told.well:
        raise StatusError(409, "its task failed")
    return told.over


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > ANSWER_BYTES_MAX:
            raise NoAnswerError(f"an answer of more than {ANSWER_BYTES_MAX >> 20} MiB")
    return bytes(body)


def _after_s(response: aiohttp.ClientResponse) -> float:
    said = response.headers.get("Retry-After", "")
    return min(float(said), RETRY_AFTER_S_MAX) if said.isascii() and said.isdecimal() and len(said) < 6 else 0.0


def _word(body: bytes) -> str:
    """The last part of the first MessageId (`Base.1.8.ResourceInUse`): messages themselves may hold anything."""
    told: Any
    try:
        told = msgspec.json.decode(body)["error"]
        told = (told.get("@Message.ExtendedInfo") or [{}])[0].get("MessageId") or told.get("code")
        word = str(told).rpartition(".")[2]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
    return word if _WORD.fullmatch(word) else ""
