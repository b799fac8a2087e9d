"""Who shows a bound service-account token: the API server is asked (TokenReview), for our audience only. I/O.

Owns the question, and how long its answer counts. Promises: a token that the API server refuses is let in for at most
KEPT_S more (it keeps its own answers for 10 s, too); no token is kept, only its hash; at most KEPT_MAX answers are kept
and ASKED_MAX questions are under way, whatever is sent. While the API server does not answer, what it said last stands,
for at most STANDS_S: a gateway that was let in goes on reporting, and nobody new is let in.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from autoscaler.drivers.kubernetes.api import Api, ApiError, UnreachableError

AUDIENCE = "pilotlight"
KEPT_S = 10.0
STANDS_S = 3600.0
"""As long as a bound token lives by default."""
KEPT_MAX = 1024
ASKED_MAX = 8
"""Questions at once; who comes when so many are under way is sent away, and tries again."""
ASK_S_MAX = 2.0
TOKEN_BYTES_MAX = 16 << 10
_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"


class _Answer(NamedTuple):
    admitted: bool
    at_s: float


class Tokens:
    """Lets in the service accounts `users` (`system:serviceaccount:NAMESPACE:NAME`). `api` has no fence."""

    def __init__(
        self,
        api: Api,
        users: Collection[str],
        audience: str = AUDIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._users = frozenset(users)
        self._audience = audience
        self._clock = clock
        self._kept: dict[bytes, _Answer] = {}
        """By the token's hash, in the order of their answers."""
        self._asked = 0

    async def admits(self, token: str) -> bool:
        """Whether whoever shows it is one of ours."""
        if not token or len(token) > TOKEN_BYTES_MAX:
            return False
        key = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        known = self._kept.get(key)
        if known is not None and self._clock() - known.at_s < KEPT_S:
            return known.admitted
        if self._asked >= ASKED_MAX:
            return False
        self._asked += 1
        try:
            return await self._ask(key, token)
        finally:
            self._asked -= 1

    async def _ask(self, key: bytes, token: str) -> bool:
        wanted = {"token": token, "audiences": [self._audience]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": wanted}
        try:
            async with asyncio.timeout(ASK_S_MAX):
                status = (await self._api.create(_PATH, body)).get("status") or {}
        except (ApiError, UnreachableError, TimeoutError):
            known = self._kept.get(key)
            return known is not None and known.admitted and self._clock() - known.at_s < STANDS_S
        user = (status.get("user") or {}).get("username", "")
        ours = self._audience in (status.get("audiences") or ())
        answer = _Answer(bool(status.get("authenticated")) and ours and user in self._users, self._clock())
        self._kept.pop(key, None)
        if len(self._kept) >= KEPT_MAX:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = answer
        return answer.admitted
