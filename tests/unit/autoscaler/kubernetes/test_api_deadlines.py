"""A request ends within its deadline, however often the server asks to retry later."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from autoscaler.kubernetes.api import (
    BURST,
    READ_S_MAX,
    TRIES_MAX,
    WRITE_S_MAX,
    WRITES_PER_S,
    Api,
    ApiError,
    FencedError,
    RequestRateLimiter,
    UnreachableError,
)
from autoscaler.kubernetes.kubeconfig import ApiAccess
from tests.simulation.environment import virtual_loop


class Anonymous:
    """Access without credentials."""

    async def headers(self) -> dict[str, str]:
        return {}


class Busy(Api):
    """An API client whose server takes `takes_s` to answer that it is busy, on a clock that the test controls."""

    def __init__(self, takes_s: float, retry_after_s: float) -> None:
        super().__init__(cast("ApiAccess", Anonymous()))
        self.takes_s = takes_s
        self.retry_after_s = retry_after_s
        self.now_s = 0.0
        self.limits_s: list[float] = []

    async def _send(  # noqa: PLR0917  the signature of Api._send, which it overrides
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str], headers: Mapping[str, str],
        within_s: float, bytes_max: int | None,
    ) -> bytes:  # fmt: skip
        self.limits_s.append(within_s)
        if self.takes_s >= within_s:
            self.now_s += within_s
            raise TimeoutError
        self.now_s += self.takes_s
        raise ApiError(429, "TooManyRequests", "", self.retry_after_s)


@pytest.mark.parametrize(
    ("takes_s", "retry_after_s", "tries"),
    [(0.0, 1.0, TRIES_MAX), (12.0, 0.0, 3), (29.0, 10.0, 1), (9.0, 8.0, 2), (READ_S_MAX, 0.0, 1)],
    ids=["patience", "slow", "no-time-for-a-pause", "slow-and-patience", "hangs"],
)
async def test_retried_request_ends_within_the_deadline_of_its_first_attempt(
    takes_s: float, retry_after_s: float, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, loop = Busy(takes_s, retry_after_s), asyncio.get_running_loop()
    began_s = loop.time()

    async def sleep(pause_s: float) -> None:
        api.now_s += pause_s

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(loop, "time", lambda: began_s + api.now_s)
    with pytest.raises((ApiError, UnreachableError)):
        await api.get("/x")
    assert len(api.limits_s) == tries
    assert api.limits_s[0] == READ_S_MAX
    assert api.now_s <= READ_S_MAX


class Slow(Api):
    """An API client whose server takes `takes_s` for a write. It leads until `leads_until_s`; each third of its Lease's
    duration it renews the Lease.
    """

    def __init__(self, takes_s: float, leads_until_s: float, lease_s: float = 15.0) -> None:
        super().__init__(cast("ApiAccess", Anonymous()), self._left_s)
        self._takes_s, self._leads_until_s, self._lease_s = takes_s, leads_until_s, lease_s
        self._clock = asyncio.get_running_loop().time
        self._begun_s = self._clock()
        self.answered = False

    def _left_s(self) -> float:
        every_s = self._lease_s / 3
        renewed_s = min(self.past_s() // every_s * every_s, self._leads_until_s - self._lease_s)
        return renewed_s + self._lease_s - self.past_s()

    def past_s(self) -> float:
        return self._clock() - self._begun_s

    async def _send(  # noqa: PLR0917  the signature of Api._send, which it overrides
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str], headers: Mapping[str, str],
        within_s: float, bytes_max: int | None,
    ) -> bytes:  # fmt: skip
        async with asyncio.timeout(within_s):
            await asyncio.sleep(self._takes_s)
        self.answered = True
        return b"{}"


@pytest.mark.parametrize(
    ("takes_s", "leads_until_s", "ends_s"),
    [(20.0, 1000.0, 20.0), (59.0, 1000.0, 59.0), (500.0, 1000.0, WRITE_S_MAX), (20.0, 18.0, 18.0)],
    ids=["20-s-of-webhooks", "59-s-of-webhooks", "hangs", "leadership-is-lost"],
)
@pytest.mark.parametrize("lease_s", [15.0, 5.0, 2.0])
@pytest.mark.parametrize("method", ["create", "patch"])
def test_write_is_cancelled_only_if_leadership_or_its_time_limit_ends(
    takes_s: float, leads_until_s: float, ends_s: float, lease_s: float, method: str
) -> None:
    async def write() -> None:
        api = Slow(takes_s, leads_until_s, lease_s)
        is_answered = takes_s == ends_s
        try:
            await getattr(api, method)("/x", {})
        except UnreachableError:
            assert not is_answered
        assert api.past_s() == pytest.approx(ends_s)
        await asyncio.sleep(takes_s)
        assert api.answered == is_answered, "an abandoned write is cancelled"

    virtual_loop.run(write())


def test_a_write_is_not_sent_without_leadership() -> None:
    async def write() -> None:
        api = Slow(1.0, 0.0)
        with pytest.raises(FencedError):
            await api.create("/x", {})

    virtual_loop.run(write())


async def test_request_that_the_rate_limiter_delays_too_long_fails_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Busy(0.0, 0.0)

    async def turn(method: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(api._budget, "turn", turn)
    with pytest.raises(UnreachableError, match="GET /x: not sent"):
        await api.get("/x", within_s=0.0)
    assert not api.limits_s
    assert api.answers, "the server was not even asked"


async def test_cancelled_request_uses_no_rate_limit_budget() -> None:
    budget = RequestRateLimiter(lambda: 0.0)
    budget.take(BURST)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await budget.turn("POST")
    assert budget.take(1.0) == pytest.approx(1.0 / WRITES_PER_S)
