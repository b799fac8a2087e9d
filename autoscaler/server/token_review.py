"""Who shows a bound service-account token: the API server is asked (TokenReview), for our audience only. I/O.

Owns the question, and how long its answer counts. Who was let in within STANDS_S is let in at once, and from KEPT_S on
asked about anew meanwhile: no report waits for an API server that hangs. Promises: a token that the API server refuses
now (it keeps its own answers for 10 s, too) is let in no more once that was answered, which is asked when it is shown
for the first time after KEPT_S; nobody new is let in without an answer. No token is kept, only its hash. At most
KEPT_MAX answers of each kind are kept, and ASKED_MAX questions about strangers and AGAIN_MAX about others are under
way, whatever is sent: tokens that are none neither push out who is known, nor take the turn of a question about one.
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
"""As long as a bound token lives by default."""
KEPT_MAX = 1024
ASKED_MAX = 8
"""Questions about strangers at once; who comes when so many are under way is sent away, and tries again."""
AGAIN_MAX = 64
"""Questions at once about who was let in, one for each token; the next report is another chance."""
ASK_S_MAX = 2.0
TOKEN_BYTES_MAX = 16 << 10
NODE = "authentication.kubernetes.io/node-name"
"""Where the API server says on which node the pod is that a token is bound to (from Kubernetes 1.30 on)."""
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
        """When the API server said so, and of whom, by the token's hash, in the order of its answers."""
        self._refused: dict[bytes, float] = {}
        """The same."""
        self._asked = 0
        self._again: dict[bytes, asyncio.Task[Authenticated | None]] = {}
        """Questions about who was let in already."""

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = tuple(self._again.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def admits(self, token: str) -> Authenticated | None:
        """Who shows it, if it is one of ours."""
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
        """What comes of it counts for the next report. It ends within ASK_S_MAX."""
        if key not in self._again and len(self._again) < AGAIN_MAX:
            task = self._again[key] = asyncio.create_task(self._ask(key, token))
            task.add_done_callback(lambda done: self._asked_again(key, done))

    def _asked_again(self, key: bytes, done: asyncio.Task[Authenticated | None]) -> None:
        del self._again[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("event=token_review_failed error=%s", type(error).__name__)

    async def _ask(self, key: bytes, token: str) -> Authenticated | None:
        """Keeps the answer; None also where there is none."""
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
    """Of the pod that a token is bound to; empty: the API server does not say, or it is bound to none."""
    named = (user.get("extra") or {}).get(NODE) or [""]
    return str(named[0])
