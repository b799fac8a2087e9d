"""Retries kernel queries while this process is short of file descriptors or memory. I/O.

Without them /proc is unreadable, so a process that was not found may still exist. A shortage is never taken for an
answer and ends nothing. However many queries wait, only one line is logged, repeated each minute while it lasts.
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
"""The kernel cannot answer now; the queried object may well exist."""
TRY_EVERY_S = 0.2
SAY_EVERY_S = 60.0

T = TypeVar("T")


class Seldom(logging.Filter):
    """Passes at most one record per `SAY_EVERY_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s = -inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the interval has passed."""
        del record
        due = time.monotonic() - self._said_s >= SAY_EVERY_S
        if due:
            self._said_s = time.monotonic()
        return due


_log = logging.getLogger("pilotlight.autoscaler.resource_shortage")
_log.addFilter(Seldom())


async def retry_on_shortage(look: Callable[[], T]) -> T:
    """Return the result of `look` as soon as it succeeds. Errors other than a shortage propagate."""
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in SHORT:
                raise
            _log.error("event=process_query_failed error=%s", error.strerror)
            await asyncio.sleep(TRY_EVERY_S)
