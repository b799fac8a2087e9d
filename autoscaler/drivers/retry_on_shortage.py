"""Retries kernel queries while this process is short of file descriptors or memory. I/O.

Without descriptors or memory /proc is unreadable, so a process that was not found may still exist. A shortage is
therefore never treated as a result. All waiting queries together log one line per minute.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

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
    """Return the result of `query` as soon as it succeeds. Errors other than a shortage propagate."""
    while True:
        try:
            return query()
        except OSError as error:
            if error.errno not in SHORT:
                raise
            _log.error("event=process_query_failed error=%s", error.strerror)
            await asyncio.sleep(TRY_EVERY_S)
