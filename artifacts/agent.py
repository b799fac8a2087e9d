"""The agent of a node: says what the node has to every autoscaler, at each change and every few seconds. I/O.

Owns the pace and who was told. What a look finds, how it is written and how it gets there is given to it, so that it
knows no autoscaler and no device. Promises: each way is told by itself, so that one that hangs keeps nobody waiting;
what is told is always the newest look, never a queue; a way that does not take it is said once, until it does again.
Later also: weights of the node, pulled and kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

LOOK_S = 1.0
"""How often the node is looked at: a change is told so late."""

log = logging.getLogger("pilotlight.agent")


class WayError(Exception):
    """It was not taken; `str()` says why, without an address."""


class Way(Protocol):
    """The way to one autoscaler, or to all behind a name."""

    name: str
    """As it was given."""

    async def send(self, body: bytes) -> None:
        """Returns when it was taken. Raises WayError; ends by itself within a few seconds."""


class Agent(Generic[T]):
    """`look` finds what there is; `news` says whether a look differs from what was told; `written` is (look, sequence)
    -> bytes. Told again after `period_s` at the latest.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[T]],
        news: Callable[[T, T], bool],
        written: Callable[[T, int], bytes],
        ways: Sequence[Way],
        period_s: float,
    ) -> None:
        self._look = look
        self._news = news
        self._written = written
        self._ways = ways
        self._period_s = period_s
        self._latest: T
        self._sequence = 0
        self._changed = [asyncio.Event() for _ in ways]

    async def run(self) -> None:
        """Until cancelled."""
        self._latest = told = await self._look()
        async with asyncio.TaskGroup() as tasks:
            for way, changed in zip(self._ways, self._changed, strict=True):
                tasks.create_task(self._tell(way, changed))
            while True:
                await asyncio.sleep(LOOK_S)
                self._latest = await self._look()
                if self._news(told, self._latest):
                    told = self._latest
                    for changed in self._changed:
                        changed.set()

    async def _tell(self, way: Way, changed: asyncio.Event) -> None:
        unheard = ""
        while True:
            changed.clear()
            self._sequence += 1
            try:
                await way.send(self._written(self._latest, self._sequence))
                unheard = ""
            except WayError as error:
                if str(error) != unheard:
                    unheard = str(error)
                    log.warning("event=agent_unheard autoscaler=%s reason=%r", way.name, unheard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await changed.wait()
