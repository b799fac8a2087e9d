"""API objects are reconciled after changes, and again after failures."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.reconciler import REST_S, Reconciler
from tests.simulation.environment.virtual_loop import run


class Kept:
    """Records the time of each run; run n raises `fails[n]`, if any."""

    def __init__(self, *fails: Exception | None, wait_s: float = inf, takes_s: float = 0.0) -> None:
        self.fails, self.wait_s, self.takes_s = [*fails], wait_s, takes_s
        self.at_s: list[float] = []
        self.one = Reconciler(self.keep, "it is not as it should be")

    async def keep(self) -> float:
        self.at_s.append(round(asyncio.get_running_loop().time(), 3))
        await asyncio.sleep(self.takes_s)
        if self.fails and (error := self.fails.pop(0)):
            raise error
        return self.wait_s

    def play(self, until_s: float, *news_s: float) -> list[float]:
        """The times of the runs, from the start, with changes at these times."""

        async def whole() -> float:
            loop = asyncio.get_running_loop()
            began_s, task = loop.time(), asyncio.create_task(self.one.run())
            for at_s in news_s:
                loop.call_at(began_s + at_s, self.one.look)
            await asyncio.sleep(until_s)
            task.cancel()
            return began_s

        began_s = run(whole())
        return [round(at_s - began_s, 3) for at_s in self.at_s]


def test_reconciler_runs_at_start_and_on_each_notification() -> None:
    assert Kept().play(100.0, 3.0, 7.0) == [0.0, 3.0, 7.0]


def test_reconciler_runs_after_its_wait_time_without_notifications() -> None:
    assert Kept(wait_s=5.0).play(11.0, 2.0) == [0.0, 2.0, 7.0]


def test_notification_during_a_run_triggers_another_run() -> None:
    assert Kept(takes_s=4.0).play(100.0, 1.0, 2.0) == [0.0, 4.0]


def test_failed_run_is_retried_with_backoff_that_success_resets() -> None:
    error, first = TimeoutError(), REST_S[0]
    at_s = Kept(error, error, None, error).play(20.0, 10.0)
    assert at_s == [0.0, first, 3 * first, 10.0, 10.0 + first]
    assert Kept(*[error] * 20).play(1000.0)[-1] == pytest.approx(14 * REST_S[1], abs=2 * REST_S[1])


def test_repeated_failure_is_logged_once_and_without_addresses(caplog: pytest.LogCaptureFixture) -> None:
    no, off = AnswerError(403, "Forbidden", "no right"), RefusedError("it is off")
    Kept(no, no, off, None, off, ConnectionError("10.0.0.1 is away")).play(100.0, 50.0)
    messages = [
        f"event=reconcile_failed effect='it is not as it should be' error={expected}"
        for expected in (str(no), "it is off", "it is off", "ConnectionError")
    ]
    assert caplog.messages == messages, "and the reason contains no address"
