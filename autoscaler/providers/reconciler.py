"""Keeps something at an API server as it should be: when there is news, and again after what failed. I/O.

Owns the loop of whoever keeps more there than Leases, or looks at what others keep. Promises: what fails is told in one
line, once as long as it is the same and with nobody's address, and tried again, soon and then ever less often; news
that come while something is done are not missed. By Server all that is raised but AnswerError means that nobody knows
what came of it; what a driver raises then its rooms know, and these may not (the wall between capacity and drivers), so
whatever it is, it is told by its name and tried again. That catch is here once for all who keep something.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

from autoscaler.providers.kube import AnswerError
from autoscaler.providers.provider import RefusedError

REST_S: Final = (0.5, 30.0)
"""After what failed: twice as long each time, up to the last."""
log = logging.getLogger(__name__)


class Reconciler:
    """`keep` does what there is to do, nothing if there is none, and returns in how many seconds it wants to be asked
    again without news. `fails`: in words, what is not as it should be when that raises.
    """

    def __init__(self, keep: Callable[[], Awaitable[float]], fails: str) -> None:
        self._keep, self._fails = keep, fails
        self._news = asyncio.Event()
        self._told = ""

    def look(self) -> None:
        """There may be news."""
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        rest_s = REST_S[0]
        while True:
            self._news.clear()
            try:
                wait_s = await self._keep()
            except Exception as error:  # noqa: BLE001  see the module: whose errors these are may not be known here
                self._tell(error)
                await asyncio.sleep(rest_s)
                rest_s = min(rest_s * 2.0, REST_S[1])
                continue
            rest_s, self._told = REST_S[0], ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s if wait_s < inf else None):
                    await self._news.wait()

    def _tell(self, error: Exception) -> None:
        """The message of another than those may have an address in it."""
        says = str(error) if isinstance(error, AnswerError | RefusedError) else type(error).__name__
        if says != self._told:
            log.warning("%s: %s", self._fails, says)
        self._told = says
