"""Tasks of drivers that an exception does not end: it is reported, and the work is tried again. I/O.

An exception of a task that is about one Replica quarantines its Model (`autoscaler.controller.containment`). Tasks that
are about none report what failed. MemoryError and cancellation pass through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType

from autoscaler.contract import ModelName
from autoscaler.drivers.driver import Observe
from autoscaler.faults import describe_error, reraise_memory_error
from autoscaler.state.events import FaultSeen

NO_MODEL = ModelName("")
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Before the work is tried again: the first pause, doubled each time up to the second."""


async def retry_until_success(work: Callable[[], Awaitable[None]], report: Callable[[str], None]) -> None:
    """Runs `work` until it ends without an exception. `report` gets each exception in one line, and "" when a run has
    lasted for PAUSE_S_MAX.
    """
    pause_s, loop = PAUSE_S, asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        works = loop.call_later(PAUSE_S_MAX, report, "")
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
            reraise_memory_error(error)
            report(describe_error(error))
        else:
            report("")
            return
        finally:
            works.cancel()
        pause_s = PAUSE_S if loop.time() - began_s >= PAUSE_S_MAX else pause_s
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def fault_reporter(model: ModelName, observe: Observe, part: str = "driver") -> Callable[[str], None]:
    """A `report` for `retry_until_success`: a failure is a fault of the Model. NO_MODEL: no Model explains it; `part`
    failed.
    """

    def report(reason: str) -> None:
        if reason or model == NO_MODEL:
            observe((FaultSeen(model=model, reason=reason, part=part),))

    return report


def start_contained_task(
    tasks: asyncio.TaskGroup, work: Coroutine[object, object, None], report: Callable[[str], None]
) -> asyncio.Task[None]:
    """A task of what cannot be tried again by itself. It is shown under the name of `work`."""
    made = _once(work, report)
    if isinstance(made, CoroutineType) and isinstance(work, CoroutineType):
        made.__qualname__ = work.__qualname__
    task = tasks.create_task(made)
    task.add_done_callback(lambda _: work.close())  # one that is cancelled before its first step never awaits it
    return task


async def _once(work: Awaitable[None], report: Callable[[str], None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
        reraise_memory_error(error)
        report(describe_error(error))
