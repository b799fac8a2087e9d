"""Fault containment in a gateway: an exception that one model causes affects only that model. I/O: the log.

Dispatch closes a model that raised and rejects its requests with `model_faulty`; sync then requests the complete
catalogue and Routes again, with exponential back-off, until the model raises no more. MemoryError and cancellation
always propagate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.exception_handling import describe_error, reraise_memory_error

PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Pause before a retry: the first one, doubled each time up to the second value."""

_log = logging.getLogger("pilotlight.gateway.faults")


def report_fault(model: str | None, what: str, reason: str) -> None:
    """Log a contained exception. Tests replace this function, so that a fault they did not inject fails the test."""
    if model is None:
        _log.error("event=degraded operation=%r error=%s", what, reason)
    else:
        _log.error("event=model_faulty model=%s operation=%r error=%s", model, what, reason)


async def retry_until_success(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Run `work` until it returns without an exception; report each exception."""
    pause_s, loop = PAUSE_S, asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        try:
            await work()
        except Exception as error:
            reraise_memory_error(error)
            report_fault(None, what, describe_error(error))
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a TaskGroup with a failed child hides its cancellation
                raise asyncio.CancelledError from error
        else:
            return
        pause_s = PAUSE_S if loop.time() - began_s >= PAUSE_S_MAX else pause_s
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
