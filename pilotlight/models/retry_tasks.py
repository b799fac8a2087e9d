"""Background tasks on weights: each runs until it succeeds once, and is retried with backoff after a failure.

A task starts at once. The delay doubles with each failure. A task has at most one running attempt. A failure is logged
with its reason, and `failed` returns it until an attempt succeeds. Tasks that are no longer wanted are discarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from artifacts.archives.tar_reader import BadArchiveError
from artifacts.disk.durable_writes import DiskError
from artifacts.formats.gguf import GgufError
from artifacts.oci.descriptor import BadManifestError
from artifacts.reference import BadReferenceError
from artifacts.registry_errors import RegistryError
from artifacts.safe_paths import BadPathError
from artifacts.store.layout import StoreError
from autoscaler.exception_handling import describe_error, reraise_memory_error
from pilotlight.models.model_parts import Part

TROUBLE = (
    *(RegistryError, BadManifestError, BadReferenceError, BadArchiveError, BadPathError),
    *(GgufError, StoreError, DiskError, OSError),
)
"""Errors raised while fetching weights or their headers."""
FIRST_S = 5.0
LAST_S = 600.0
"""The first and the longest delay after a failure."""

log = logging.getLogger("pilotlight.models.weights_fetch")


@dataclass(slots=True)
class _Attempt:
    task: asyncio.Task[None] | None = None
    """None if no attempt is running."""
    failures: int = 0
    due_s: float = 0.0
    done: bool = False
    reason: str = ""


class RetryTasks:
    """Tasks of one kind. `does` runs one of them; `changed` is called when an attempt ends."""

    def __init__(
        self, event: str, does: Callable[[Part], Awaitable[None]], changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """`event`: the log event of a failure."""
        self._event = event
        self._does = does
        self._changed = changed
        self._clock = clock
        self._attempts: dict[Part, _Attempt] = {}
        self._faults: dict[Part, Exception] = {}

    def want(self, wanted: Iterable[Part], now_s: float) -> None:
        """Set the wanted tasks and start those that are due. A running task continues even if no longer wanted."""
        now = {part: self._attempts.get(part) or _Attempt() for part in wanted}
        now |= {part: one for part, one in self._attempts.items() if one.task is not None}
        self._attempts = now
        for part, one in now.items():
            if one.task is None and not one.done and one.due_s <= now_s:
                one.task = asyncio.create_task(self._run(part, one))

    def next_s(self) -> float | None:
        """Return when the next retry is due, or None."""
        due = [one.due_s for one in self._attempts.values() if one.failures and one.task is None and not one.done]
        return min(due, default=None)

    def failed(self) -> dict[Part, str]:
        """Return the tasks whose last attempt failed, with the reason."""
        return {part: one.reason for part, one in self._attempts.items() if one.reason}

    def take_faults(self) -> dict[Part, Exception]:
        """Return the unexpected exceptions since the last call."""
        taken, self._faults = self._faults, {}
        return taken

    async def close(self) -> None:
        """Cancel the running tasks."""
        tasks = [one.task for one in self._attempts.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, part: Part, one: _Attempt) -> None:
        one.due_s = self._clock() + LAST_S  # also after a MemoryError, which the event loop reports
        try:
            await self._does(part)
            one.done, one.failures, one.reason = True, 0, ""
        except Exception as error:  # noqa: BLE001 - a fault of any kind concerns this task only
            reraise_memory_error(error)
            is_expected = isinstance(error, TROUBLE)
            if not is_expected:
                self._faults[part] = error
            one.failures += 1
            one.reason = _error_text(error) if is_expected else describe_error(error)
            one.due_s = self._clock() + backoff_s(one.failures)
            log.warning(
                "event=%s artifact=%s attempt=%d reason=%r", self._event, part.artifact, one.failures, one.reason
            )
        finally:
            one.task = None
            self._changed()


def backoff_s(failures: int) -> float:
    """Return the delay after this number of failures in a row."""
    return min(FIRST_S * 2.0 ** min(failures - 1, 16), LAST_S)


def _error_text(error: Exception) -> str:
    """Return the error's text without the local path that an OSError contains."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
