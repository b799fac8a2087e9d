"""Authenticates bound service-account tokens with the API server (TokenReview), for one audience only. I/O.

Owns the reviews and the validity of their results. A client that was admitted within STANDS_S is admitted at once. If
its review is older than KEPT_S, the review is repeated in the background, so that no report waits for a hanging API
server. Invariants: a token that the API server now rejects is no longer admitted after that repeated review, which
starts at the token's first use after KEPT_S; the API server caches its own results for 10 s. A new client is never
admitted without a review. Only hashes of tokens are stored, at most KEPT_MAX results of each kind. At most ASKED_MAX
reviews of unknown tokens and AGAIN_MAX repeated reviews run at the same time, so invalid tokens neither displace known
clients nor delay their reviews.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.server.auth import Authenticated, Roles

AUDIENCE = "pilotlight"
KEPT_S = 10.0
STANDS_S = 3600.0
"""The default lifetime of a bound token, in seconds."""
KEPT_MAX = 1024
ASKED_MAX = 8
"""The maximum number of concurrent reviews of unknown tokens. Further clients are rejected and retry."""
AGAIN_MAX = 64
"""The maximum number of concurrent repeated reviews, one per token. The next report of a client retries it."""
ASK_S_MAX = 2.0
TOKEN_BYTES_MAX = 16 << 10
NODE = "authentication.kubernetes.io/node-name"
"""The key with the node of the pod that a token is bound to (from Kubernetes 1.30 on)."""
_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"

T = TypeVar("T")

_log = logging.getLogger("pilotlight.autoscaler.auth")


class Tokens:
    """Admits the service accounts `users` (`system:serviceaccount:NAMESPACE:NAME`), each with its roles.
    `api` has no fence.
    """

    def __init__(
        self,
        api: Api,
        users: Mapping[str, Roles],
        audience: str = AUDIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._users = users
        self._audience = audience
        self._clock = clock
        self._let_in: dict[bytes, tuple[float, Authenticated]] = {}
        """Admitted tokens, by hash, in the order of their reviews: the time of the review and the client."""
        self._refused: dict[bytes, float] = {}
        """Rejected tokens, by hash: the time of the review."""
        self._asked = 0
        self._again: dict[bytes, asyncio.Task[Authenticated | None]] = {}
        """Repeated reviews of admitted tokens."""

    async def close(self) -> None:
        """Cancel running reviews."""
        tasks = tuple(self._again.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def admits(self, token: str) -> Authenticated | None:
        """Return the client of a token if it is one of the permitted accounts."""
        if not token or len(token) > TOKEN_BYTES_MAX:
            return None
        key, now_s = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest(), self._clock()
        known = self._let_in.get(key)
        if known is not None and now_s - known[0] < STANDS_S:
            if now_s - known[0] >= KEPT_S:
                self._ask_again(key, token)
            return known[1]
        if (since_s := self._refused.get(key)) is not None and now_s - since_s < KEPT_S:
            return None
        if self._asked >= ASKED_MAX:
            return None
        self._asked += 1
        try:
            return await self._ask(key, token)
        finally:
            self._asked -= 1

    def _ask_again(self, key: bytes, token: str) -> None:
        """Repeat the review of a token, within ASK_S_MAX. The result counts for the next report."""
        if key not in self._again and len(self._again) < AGAIN_MAX:
            task = self._again[key] = asyncio.create_task(self._ask(key, token))
            task.add_done_callback(lambda done: self._asked_again(key, done))

    def _asked_again(self, key: bytes, done: asyncio.Task[Authenticated | None]) -> None:
        del self._again[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("event=token_review_failed error=%s", type(error).__name__)

    async def _ask(self, key: bytes, token: str) -> Authenticated | None:
        """Review a token and store the result. None also if there is no response."""
        wanted = {"token": token, "audiences": [self._audience]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": wanted}
        try:
            async with asyncio.timeout(ASK_S_MAX):
                status = (await self._api.create(_PATH, body)).get("status") or {}
        except (ApiError, UnreachableError, TimeoutError):
            return None
        user = status.get("user") or {}
        ours = self._audience in (status.get("audiences") or ())
        roles = self._users.get(user.get("username", ""))
        for kept in (self._let_in, self._refused):
            kept.pop(key, None)
        if roles is None or not ours or not status.get("authenticated"):
            _put(self._refused, key, self._clock())
            return None
        found = Authenticated(node=_node(user), roles=roles)
        _put(self._let_in, key, (self._clock(), found))
        return found


def _put(kept: dict[bytes, T], key: bytes, value: T) -> None:
    if len(kept) >= KEPT_MAX:
        kept.pop(next(iter(kept)))
    kept[key] = value


def _node(user: Object) -> str:
    """Return the node of the pod that a token is bound to; empty if there is none or the server does not report it."""
    named = (user.get("extra") or {}).get(NODE) or [""]
    return str(named[0])
