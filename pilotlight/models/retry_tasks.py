"""What is done beside everything else, for each of some weights once, and again later where it fails.

Owns when: at once, then after a back-off that doubles. Promises: one try of each at a time; a failure is warned of with
its reason, and told until it is over; what nobody wants any more is forgotten. Time is an argument of the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from artifacts.archives.tar import BadArchiveError
from artifacts.disk.disk import DiskError
from artifacts.errors import RegistryError
from artifacts.formats.gguf import GgufError
from artifacts.oci.descriptor import BadManifestError
from artifacts.reference import BadReferenceError
from artifacts.safe_paths import BadPathError
from artifacts.store.layout import StoreError
from pilotlight.models.weight_parts import Part

TROUBLE = (
    *(RegistryError, BadManifestError, BadReferenceError, BadArchiveError, BadPathError),
    *(GgufError, StoreError, DiskError, OSError),
)
"""What bringing weights, or their headers, raises."""
FIRST_S = 5.0
LAST_S = 600.0
"""The first and the longest wait after a failure."""

log = logging.getLogger("pilotlight.models.weights")


@dataclass(slots=True)
class _Try:
    task: asyncio.Task[None] | None = None
    """None: none is under way."""
    failures: int = 0
    due_s: float = 0.0
    done: bool = False
    reason: str = ""


class Errands:
    """Of one kind. `does` one of them; `changed` is called when one has ended."""

    def __init__(
        self, event: str, does: Callable[[Part], Awaitable[None]], changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """`event`: what the log calls a failure."""
        self._event = event
        self._does = does
        self._changed = changed
        self._clock = clock
        self._tries: dict[Part, _Try] = {}

    def want(self, wanted: Iterable[Part], now_s: float) -> None:
        """Exactly these: begins what is due. One that is under way goes on, wanted or not."""
        now = {part: self._tries.get(part) or _Try() for part in wanted}
        now |= {part: one for part, one in self._tries.items() if one.task is not None}
        self._tries = now
        for part, one in now.items():
            if one.task is None and not one.done and one.due_s <= now_s:
                one.task = asyncio.create_task(self._run(part, one))

    def next_s(self) -> float | None:
        """When the next try is due; None: none is waited for."""
        due = [one.due_s for one in self._tries.values() if one.failures and one.task is None and not one.done]
        return min(due, default=None)

    def failed(self) -> dict[Part, str]:
        """Whose last try failed, and why."""
        return {part: one.reason for part, one in self._tries.items() if one.reason}

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [one.task for one in self._tries.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, part: Part, one: _Try) -> None:
        one.due_s = self._clock() + LAST_S  # also of what nobody foresaw, which the event loop tells
        try:
            await self._does(part)
            one.done, one.failures, one.reason = True, 0, ""
        except TROUBLE as error:
            one.failures += 1
            one.reason = _said(error)
            one.due_s = self._clock() + backoff_s(one.failures)
            log.warning("event=%s artifact=%s tries=%d reason=%r", self._event, part.artifact, one.failures, one.reason)
        finally:
            one.task = None
            self._changed()


def backoff_s(failures: int) -> float:
    """How long is waited after so many failures in a row."""
    return min(FIRST_S * 2.0 ** min(failures - 1, 16), LAST_S)


def _said(error: Exception) -> str:
    """Without the path of this machine that an OSError has in its text."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
