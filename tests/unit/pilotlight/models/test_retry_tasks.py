"""Each task runs once and is retried with back-off if it fails; the failure is reported."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from artifacts.registry_errors import UnreachableError
from pilotlight.models.model_parts import Part
from pilotlight.models.retry_tasks import FIRST_S, LAST_S, RetryTasks, backoff_s

A, B = Part("oci://r.io/a:1"), Part("oci://r.io/b:1")


class Doing:
    """Records the started tasks, and raises `raises` if it is set."""

    def __init__(self) -> None:
        self.began: list[Part] = []
        self.raises: BaseException | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.changes = 0
        self.now_s = 0.0
        self.tasks = RetryTasks("weights_thing_failed", self, self._changed, lambda: self.now_s)

    def _changed(self) -> None:
        self.changes += 1

    async def __call__(self, part: Part) -> None:
        self.began.append(part)
        await self.go.wait()
        if self.raises is not None:
            raise self.raises

    async def want(self, *wanted: Part) -> None:
        """Set the wanted tasks and let them finish, except for those that wait."""
        self.tasks.want(wanted, self.now_s)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_task_wanted_repeatedly_runs_once_until_it_is_unwanted() -> None:
    one = Doing()
    await one.want(A)
    await one.want(A, B)
    assert one.began == [A, B]
    assert one.changes == 2
    await one.want()
    await one.want(A)
    assert one.began == [A, B, A], "it was forgotten"


async def test_running_task_is_not_started_twice_after_being_unwanted() -> None:
    one = Doing()
    one.go.clear()
    await one.want(A)
    await one.want()
    await one.want(A)
    one.go.set()
    await one.want(A)
    assert one.began == [A]


async def test_failed_task_is_logged_and_retried_after_backoff(caplog: pytest.LogCaptureFixture) -> None:
    one = Doing()
    one.raises = UnreachableError("r: it did not answer")
    with caplog.at_level(logging.WARNING):
        await one.want(A)
    assert "event=weights_thing_failed artifact=oci://r.io/a:1 attempt=1 reason='r: it did not answer'" in caplog.text
    assert one.tasks.failed() == {A: "r: it did not answer"}
    assert one.tasks.next_s() == FIRST_S
    one.now_s = FIRST_S - 0.1
    await one.want(A)
    assert one.began == [A], "it is not due"
    one.now_s = FIRST_S
    await one.want(A)
    assert (one.began, one.tasks.next_s()) == ([A, A], FIRST_S + 2 * FIRST_S)
    one.now_s, one.raises = 3 * FIRST_S, None
    await one.want(A)
    assert (one.tasks.failed(), one.tasks.next_s()) == ({}, None)
    one.raises = OSError(28, "No space left on device", "/a/path")
    await one.want(B)
    assert one.tasks.failed() == {B: "No space left on device"}
    await one.want()
    assert one.tasks.failed() == {}


async def test_task_that_is_short_of_memory_is_retried_after_the_max_backoff() -> None:
    one, exceptions = Doing(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: exceptions.append(context["exception"]))
    one.raises = MemoryError()
    await one.want(A)
    await one.want(A)
    assert (one.began, one.changes) == ([A], 1)
    one.now_s = LAST_S
    await one.want(A)
    assert one.began == [A, A]
    del one.tasks
    gc.collect()
    assert exceptions == [one.raises] * 2


async def test_closing_the_retry_runner_cancels_and_awaits_running_tasks() -> None:
    one = Doing()
    one.go.clear()
    await one.want(A)
    await one.tasks.close()
    assert one.changes == 1


def test_retry_delay_doubles_with_each_failure_up_to_its_limit() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 7, 8, 1000)] == [5.0, 10.0, 20.0, 320.0, LAST_S, LAST_S]


async def test_unexpected_exception_is_reported_and_retried_like_a_failure() -> None:
    one = Doing()
    one.raises = LookupError("injected")
    await one.want(A)
    assert one.tasks.failed()[A].startswith("LookupError in test_retry_tasks.py")
    assert one.tasks.next_s() == FIRST_S
    assert one.tasks.take_faults() == {A: one.raises}
    assert one.tasks.take_faults() == {}
    one.raises, one.now_s = None, FIRST_S
    await one.want(A)
    assert (one.began, one.tasks.failed()) == ([A, A], {})
