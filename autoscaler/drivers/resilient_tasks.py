"""Driver tasks that survive exceptions, and kernel queries that survive a shortage: both are retried. I/O.

An exception in work for one replica quarantines its model (`autoscaler.controller.fault_attribution`). Work that
belongs to no model reports which part failed. `MemoryError` and cancellation propagate.

Without file descriptors or memory /proc is unreadable, so a process that was not found may still exist. A shortage is
therefore never treated as a result. All waiting queries together log one line per minute.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from types import CoroutineType
from typing import TypeVar

from autoscaler.contract import ModelName
from autoscaler.drivers.driver import Observe
from autoscaler.exception_handling import describe_error, reraise_memory_error
from autoscaler.state.events import FaultSeen

NO_MODEL = ModelName("")
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Pause before a retry: the first one, doubled each time up to the second value."""


async def retry_until_success(work: Callable[[], Awaitable[None]], report: Callable[[str], None]) -> None:
    """Run `work` until it returns without an exception.
    `report` receives each exception as one line, and "" once a run has lasted `PAUSE_S_MAX`.
    """
    pause_s, loop = PAUSE_S, asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        works = loop.call_later(PAUSE_S_MAX, report, "")
        try:
            await work()
        except Exception as error:
            reraise_memory_error(error)
            report(describe_error(error))
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a TaskGroup with a failed child hides its cancellation
                raise asyncio.CancelledError from error
        else:
            report("")
            return
        finally:
            works.cancel()
        pause_s = PAUSE_S if loop.time() - began_s >= PAUSE_S_MAX else pause_s
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def fault_reporter(model: ModelName, observe: Observe, part: str = "driver") -> Callable[[str], None]:
    """Return a `report` for `retry_until_success` that reports failures as faults of the model.
    With `NO_MODEL` they are reported as failures of `part`.
    """

    def report(reason: str) -> None:
        if reason or model == NO_MODEL:
            observe((FaultSeen(model=model, reason=reason, part=part),))

    return report


def start_contained_task(
    tasks: asyncio.TaskGroup, work: Coroutine[object, object, None], report: Callable[[str], None]
) -> asyncio.Task[None]:
    """Start a task whose work is not retried. Debuggers show the task under the name of `work`."""
    made = _once(work, report)
    if isinstance(made, CoroutineType) and isinstance(work, CoroutineType):
        made.__qualname__ = work.__qualname__
    task = tasks.create_task(made)
    task.add_done_callback(lambda _: work.close())  # a task cancelled before its first step never awaits `work`
    return task


async def _once(work: Awaitable[None], report: Callable[[str], None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
        reraise_memory_error(error)
        report(describe_error(error))


SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a shortage: the queried object may exist."""
TRY_EVERY_S = 0.2
LOG_EVERY_S = 60.0

T = TypeVar("T")


class Seldom(logging.Filter):
    """Passes at most one record per `LOG_EVERY_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s = -inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the interval has passed."""
        del record
        due = time.monotonic() - self._logged_s >= LOG_EVERY_S
        if due:
            self._logged_s = time.monotonic()
        return due


_log = logging.getLogger("pilotlight.autoscaler.resource_shortage")
_log.addFilter(Seldom())


async def retry_on_shortage(query: Callable[[], T]) -> T:
    """Return the result of `query`. Retry it while file descriptors or memory are short; raise any other error."""
    while True:
        try:
            return query()
        except OSError as error:
            if error.errno not in SHORT:
                raise
            _log.error("event=process_query_failed error=%s", error.strerror)
            await asyncio.sleep(TRY_EVERY_S)
