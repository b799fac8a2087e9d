"""Reports a node to every autoscaler, at each change and every few seconds. I/O.

The caller provides the observation, its encoding and the clients, so this module knows neither autoscalers nor devices.
Each client has its own task, so one that hangs does not delay the others. Each report contains the latest observation;
reports are not queued. A failing client is logged once per reason until it works again. `tell` sends a report at once
when data outside of the observation changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Generic, Protocol, TypeVar

from autoscaler.exception_handling import describe_error, reraise_memory_error

T = TypeVar("T")

LOOK_S = 1.0
"""Interval of observations, the maximum delay before a change is noticed."""

log = logging.getLogger("pilotlight.agent.reporter")


class WayError(Exception):
    """A report was not accepted; `str()` is the reason, without an address."""


class AutoscalerClient(Protocol):
    """A client for one autoscaler, or for all behind a name."""

    name: str
    """The URL as configured."""

    async def send(self, body: bytes) -> None:
        """Return once the report is accepted. Raises WayError; times out within a few seconds."""


class Agent(Generic[T]):
    """Reports observations. `look` observes; `news` compares an observation with the reported one; `written` encodes
    (observation, sequence, seconds since the observation began). A report is repeated after `period_s` at the latest.
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
        """When the latest observation began."""
        self._heard: dict[int, bool] = {}
        """Whether the last report was accepted, by index of the client."""
        self._sequence = 0
        self._changed = [asyncio.Event() for _ in ways]

    @property
    def age_s(self) -> float:
        """Seconds since the latest observation began."""
        return time.monotonic() - self._began_s

    @property
    def heard(self) -> bool:
        """Whether an autoscaler accepted the last report sent to it."""
        return any(self._heard.values())

    def tell(self) -> None:
        """Send a report now, because other data that `written` includes has changed."""
        for changed in self._changed:
            changed.set()

    async def _look_again(self) -> T:
        began_s = time.monotonic()
        self._latest = await self._look()
        self._began_s = began_s
        return self._latest

    async def run(self) -> None:
        """Observe and report until cancelled."""
        reported = await self._look_again()
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._ways)):
                tasks.create_task(self._tell(number))
            while True:
                await asyncio.sleep(LOOK_S)
                if self._news(reported, await self._look_again()):
                    reported = self._latest
                    self.tell()

    async def _tell(self, number: int) -> None:
        way, changed, unheard = self._ways[number], self._changed[number], ""
        while True:
            changed.clear()
            self._sequence += 1
            try:
                await way.send(self._written(self._latest, self._sequence, self.age_s))
                unheard, self._heard[number] = "", True
            except Exception as error:  # noqa: BLE001 - the next report may succeed, and other clients must get theirs
                reraise_memory_error(error)
                self._heard[number] = False
                reason = str(error) if isinstance(error, WayError) else describe_error(error)
                if reason != unheard:
                    unheard = reason
                    log.warning("event=report_failed autoscaler=%s reason=%r", way.name, unheard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await changed.wait()
