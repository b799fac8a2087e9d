"""Calls the servers of external checks over HTTP, outside of the path of requests without checks.

Each name is resolved once per connection, all of its addresses are compared with `AddressRules`, and the connection
goes to one of these addresses, so that a second look-up cannot return another one. Redirects are not followed, and
neither proxies nor cookies are used. A failed check logs one line without content and addresses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from autoscaler.contract import PolicyCheck
from gateway.errors import CallError, check_failed, request_rejected
from gateway.exception_handling import reraise_memory_error
from gateway.policy.external_check_addresses import AddressRules
from gateway.policy.external_checks import RESPONSE_BYTES_MAX, CheckFailedError, Verdict, read_verdict

CHECKS_MAX = 1000
"""Concurrent checks of one gateway. A Tenant may have as many as are still free, so one whose checks are slow gets at
most half of them, and always leaves some for the others (dynamic thresholds, Choudhury and Hahne, 1998). Above it
requests get 503.
"""
CONTENT_BYTES_MAX = 64 << 20
"""Size of the messages of all concurrent checks, divided in the same way."""
HELD_BYTES_MAX = 64 << 20
"""Size of all answers that arrive for a check; above it their requests get 503."""
IDLE_S_MAX = 15.0
"""How long an idle connection to the server of a check is kept."""
LOG_GAP_S = 1.0
"""Minimum time between two log lines."""
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "pilotlight"}

log = logging.getLogger("pilotlight.gateway.checks")


def _ignore_failure(kind: str, is_allowed: bool) -> None:
    del kind, is_allowed


class ForbiddenAddressError(OSError):
    """The host of a check has an address that is not allowed."""


class _Resolver(AbstractResolver):
    """Resolves a host, and rejects it if one of its addresses is not allowed."""

    def __init__(self, client: CheckClient) -> None:
        self._client = client

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses. Raises ForbiddenAddressError, OSError."""
        found = await self._client.look_up(host, port, family)
        for _, address in found:
            if not self._client.rules.allows(host, address):
                raise ForbiddenAddressError("the host has an address that is not allowed")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=of, proto=0, flags=socket.AI_NUMERICHOST)
            for of, address in found
        ]

    async def close(self) -> None:
        """Nothing is held."""


class CheckClient:
    """The running checks of one gateway. `rules` may be replaced at any time."""

    def __init__(self) -> None:
        self.rules = AddressRules()
        self.held_bytes = 0
        """Size of the answers that arrive for a check."""
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, list[int]] = {}
        """Tenant -> sizes of the messages of its running checks."""
        self.content_bytes = 0
        """Size of the messages of the running checks."""
        self._logged_s = -math.inf
        self.on_failure: Callable[[str, bool], None] = _ignore_failure
        """Called for each failed check with its kind, and whether it allowed the request or the answer."""

    async def look_up(self, host: str, port: int, family: socket.AddressFamily) -> list[tuple[int, str]]:
        """Return (family, address) of each address of a host. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        return [(of, str(address[0])) for of, _, _, _, address in found]

    def set_rules(self, rules: AddressRules) -> None:
        """Use other rules. Existing connections are not used for further checks."""
        self.rules = rules
        session, self._session = self._session, None
        if session is not None:
            task = asyncio.get_running_loop().create_task(self._retire(session, set(self._tasks)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _retire(self, session: aiohttp.ClientSession, tasks: set[asyncio.Task[None]]) -> None:
        """Close a session after the checks that may use it."""
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await session.close()

    def start(
        self, kind: str, tenant: str, checks: tuple[PolicyCheck, ...], content: bytes,
        done: Callable[[CallError | None], None],
    ) -> asyncio.Task[None] | None:  # fmt: skip
        """Check a request or an answer (`kind`) until one check rejects it, then call `done`, unless the task is
        canceled. None: too many checks are running.
        """
        own, size = self._running.get(tenant, []), len(content)
        if len(own) >= CHECKS_MAX - len(self._tasks) or sum(own) + size > CONTENT_BYTES_MAX - self.content_bytes:
            return None
        self.content_bytes += size
        self._running.setdefault(tenant, own).append(size)
        task = asyncio.get_running_loop().create_task(self._run(kind, checks, content, done))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.content_bytes -= size
            own.remove(size)
            if not own:
                del self._running[tenant]

        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        """Cancel all checks and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _run(
        self, kind: str, checks: tuple[PolicyCheck, ...], content: bytes, done: Callable[[CallError | None], None]
    ) -> None:
        error: CallError | None = None
        for check in checks:
            error = await self._judge(kind, check, content)
            if error is not None:
                break
        done(error)

    async def _judge(self, kind: str, check: PolicyCheck, content: bytes) -> CallError | None:
        """Return the error for the client; None if the check allows it."""
        try:
            async with asyncio.timeout(check.timeout_s):
                verdict = await self._post(check.url, content)
        except Exception as error:  # noqa: BLE001 - a fault of any kind is a failed check
            reraise_memory_error(error)
            self._report(kind, check, error)
            self.on_failure(kind, check.fail_open)
            return None if check.fail_open else check_failed(should_retry=_should_retry(error))
        what = "the request" if kind == "request" else "the answer to this request"
        return None if verdict.allow else request_rejected(what, verdict.reason)

    async def _post(self, url: str, content: bytes) -> Verdict:
        target = URL(url)
        host = target.host or ""
        if (":" in host or host.replace(".", "").isdigit()) and not self.rules.allows(host, host):
            raise ForbiddenAddressError("the URL has an address that is not allowed")  # never resolved
        async with self._connected().post(target, data=content, headers=_HEADERS, allow_redirects=False) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise CheckFailedError("the response is compressed")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > RESPONSE_BYTES_MAX:
                    raise CheckFailedError(f"the response has more than {RESPONSE_BYTES_MAX} bytes")
            return read_verdict(response.status, bytes(body))

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_Resolver(self), use_dns_cache=False, limit=CHECKS_MAX, keepalive_timeout=IDLE_S_MAX
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                read_bufsize=RESPONSE_BYTES_MAX,
            )
        return self._session

    def _report(self, kind: str, check: PolicyCheck, error: Exception) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= LOG_GAP_S:
            self._logged_s = now_s
            log.warning("event=check_failed check=%s fail_open=%s reason=%r", kind, check.fail_open, _reason(error))


def _reason(error: Exception) -> str:
    """Return the reason of a failed check. Messages of other libraries contain addresses and are left out."""
    cause = _cause(error)
    return str(cause) if isinstance(cause, CheckFailedError | ForbiddenAddressError) else type(error).__name__


def _should_retry(error: Exception) -> bool:
    """Return whether a retry may succeed. It cannot cure a forbidden address, a bad certificate or a wrong response."""
    cause = _cause(error)
    if isinstance(cause, CheckFailedError):
        return cause.should_retry
    return not isinstance(cause, ForbiddenAddressError | ssl.CertificateError)


def _cause(error: Exception) -> Exception:
    return error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
