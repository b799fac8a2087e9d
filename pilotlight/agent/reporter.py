"""The agent of a node: says what the node has to every autoscaler, at each change and every few seconds. I/O.

Owns the pace and who was told. What a look finds, how it is written and how it gets there is given to it, so that it
knows no autoscaler and no device. Promises: each way is told by itself, so that one that hangs keeps nobody waiting;
what is told is always the newest look, never a queue; a way that does not take it is said once, until it does again.
What changes beside the look is told at once, too, when whoever knows says so (`tell`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

LOOK_S = 1.0
"""How often the node is looked at: a change is told so late."""

log = logging.getLogger("pilotlight.agent")


class WayError(Exception):
    """It was not taken; `str()` says why, without an address."""


class AutoscalerClient(Protocol):
    """The way to one autoscaler, or to all behind a name."""

    name: str
    """As it was given."""

    async def send(self, body: bytes) -> None:
        """Returns when it was taken. Raises WayError; ends by itself within a few seconds."""


class Agent(Generic[T]):
    """`look` finds what there is; `news` says whether a look differs from what was told; `written` is (look, sequence,
    seconds since that look began) -> bytes. Told again after `period_s` at the latest.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[T]],
        news: Callable[[T, T], bool],
        written: Callable[[T, int, float], bytes],
        ways: Sequence[AutoscalerClient],
        period_s: float,
    ) -> None:
        self._look = look
        self._news = news
        self._written = written
        self._ways = ways
        self._period_s = period_s
        self._latest: T
        self._began_s = -inf
        """When the latest look began."""
        self._heard: dict[int, bool] = {}
        """Ways that were tried -> whether the last report was taken."""
        self._sequence = 0
        self._changed = [asyncio.Event() for _ in ways]

    @property
    def age_s(self) -> float:
        """Since the latest look began."""
        return time.monotonic() - self._began_s

    @property
    def heard(self) -> bool:
        """An autoscaler took the last report that it was sent."""
        return any(self._heard.values())

    def tell(self) -> None:
        """Something that `written` also tells has changed."""
        for changed in self._changed:
            changed.set()

    async def _look_again(self) -> T:
        began_s = time.monotonic()
        self._latest = await self._look()
        self._began_s = began_s
        return self._latest

    async def run(self) -> None:
        """Until cancelled."""
        told = await self._look_again()
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._ways)):
                tasks.create_task(self._tell(number))
            while True:
                await asyncio.sleep(LOOK_S)
                if self._news(told, await self._look_again()):
                    told = self._latest
                    self.tell()

    async def _tell(self, number: int) -> None:
        way, changed, unheard = self._ways[number], self._changed[number], ""
        while True:
            changed.clear()
            self._sequence += 1
            try:
                await way.send(self._written(self._latest, self._sequence, self.age_s))
                unheard, self._heard[number] = "", True
            except WayError as error:
                self._heard[number] = False
                if str(error) != unheard:
                    unheard = str(error)
                    log.warning("event=agent_unheard autoscaler=%s reason=%r", way.name, unheard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await changed.wait()
