"""Runs a reconcile function when notified and again after failures. I/O.

Base of components that maintain API objects other than capacity orders, or that read API objects of other components.
Failures are retried with exponential backoff. A failure is logged in one line, without addresses, and only once while
its message stays the same. A notification during a run causes another run. All exceptions are caught and retried:
drivers raise their own types, which this layer may not import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

from autoscaler.exception_handling import reraise_memory_error
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.provider import RefusedError

REST_S: Final = (0.5, 30.0)
"""Retry delay in seconds after a failure: the first and the maximum; it doubles each time."""
log = logging.getLogger("pilotlight.autoscaler.providers")


class Reconciler:
    """Calls `keep`, which does the pending work and returns the seconds until the next call without a notification.
    `fails`: the effect of a failure of `keep`, for the log.
    """

    def __init__(self, keep: Callable[[], Awaitable[float]], fails: str) -> None:
        self._keep, self._fails = keep, fails
        self._news = asyncio.Event()
        self._logged = ""

    def look(self) -> None:
        """Notify the reconciler: there may be work."""
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled."""
        rest_s = REST_S[0]
        while True:
            self._news.clear()
            try:
                wait_s = await self._keep()
            except Exception as error:  # noqa: BLE001  drivers' error types may not be imported here
                reraise_memory_error(error)
                self._log_failure(error)
                await asyncio.sleep(rest_s)
                rest_s = min(rest_s * 2.0, REST_S[1])
                continue
            rest_s, self._logged = REST_S[0], ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s if wait_s < inf else None):
                    await self._news.wait()

    def _log_failure(self, error: Exception) -> None:
        """Log a new failure. Messages of unknown exception types are omitted, since they may contain an address."""
        says = str(error) if isinstance(error, AnswerError | RefusedError) else type(error).__name__
        if says != self._logged:
            log.warning("event=reconcile_failed effect=%r error=%s", self._fails, says)
        self._logged = says
