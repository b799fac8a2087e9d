"""What a look at the kernel does while this process is short of file descriptors or memory: it waits. I/O.

Nothing of /proc can be read then, and that a process was not seen means nothing. Promises: a shortage is never taken
for an answer and ends nothing; however many looks wait, one line says so, and another one each minute that it lasts.
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
"""The kernel cannot answer now; what was asked about may well exist."""
TRY_EVERY_S = 0.2
SAY_EVERY_S = 60.0

T = TypeVar("T")


class Seldom(logging.Filter):
    """Lets one line pass in SAY_EVERY_S."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s = -inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is time again."""
        del record
        due = time.monotonic() - self._said_s >= SAY_EVERY_S
        if due:
            self._said_s = time.monotonic()
        return due


_log = logging.getLogger(__name__)
_log.addFilter(Seldom())


async def retry_on_shortage(look: Callable[[], T]) -> T:
    """What `look` gives, as soon as it can. Other errors are its caller's."""
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in SHORT:
                raise
            _log.error("engines cannot be looked at; it is tried again until they can error=%s", error.strerror)
            await asyncio.sleep(TRY_EVERY_S)
