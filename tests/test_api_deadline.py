"""A request ends in its time, however often the server asks for patience."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from autoscaler.drivers.kubernetes.access import Access
from autoscaler.drivers.kubernetes.api import REQUEST_S_MAX, TRIES_MAX, Api, ApiError, UnreachableError
from autoscaler.drivers.kubernetes.budget import BURST, WRITES_PER_S, Budget


class Nobody:
    """Who has no credentials."""

    async def headers(self) -> dict[str, str]:
        return {}


class Busy(Api):
    """Its server takes so long for each answer, which is that it is busy. Time is what the test makes of it."""

    def __init__(self, takes_s: float, retry_after_s: float) -> None:
        super().__init__(cast("Access", Nobody()))
        self.takes_s = takes_s
        self.retry_after_s = retry_after_s
        self.now_s = 0.0
        self.limits_s: list[float] = []

    async def _send(  # noqa: PLR0917  as that of Api
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str], headers: Mapping[str, str],
        within_s: float,
    ) -> bytes:  # fmt: skip
        self.limits_s.append(within_s)
        if self.takes_s >= within_s:
            self.now_s += within_s
            raise TimeoutError
        self.now_s += self.takes_s
        raise ApiError(429, "TooManyRequests", "", self.retry_after_s)


@pytest.mark.parametrize(
    ("takes_s", "retry_after_s", "tries"),
    [(0.0, 1.0, TRIES_MAX), (12.0, 0.0, 3), (29.0, 10.0, 1), (9.0, 8.0, 2), (REQUEST_S_MAX, 0.0, 1)],
    ids=["patience", "slow", "no-time-for-a-pause", "slow-and-patience", "hangs"],
)
async def test_all_tries_together_have_one_deadline(
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
    assert api.limits_s[0] == REQUEST_S_MAX
    assert api.now_s <= REQUEST_S_MAX


async def test_who_gets_no_turn_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Busy(0.0, 0.0)

    async def turn(method: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(api._budget, "turn", turn)
    with pytest.raises(UnreachableError, match="GET /x: not sent"):
        await api.get("/x", within_s=0.0)
    assert not api.limits_s
    assert api.answers, "the server was not even asked"


async def test_who_gives_up_takes_nobody_s_turn() -> None:
    budget = Budget(lambda: 0.0)
    budget.take(BURST)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await budget.turn("POST")
    assert budget.take(1.0) == pytest.approx(1.0 / WRITES_PER_S)
