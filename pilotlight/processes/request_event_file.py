"""The file of request events: one line per request, ids only. Rotated to FILE.1 at 64 MiB."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

BYTES_MAX = 64 << 20
LOOK_S = 5.0
"""Interval at which its size is checked; the file may exceed the limit in between."""

log = logging.getLogger("pilotlight.gateway.events")


class EventFile:
    """An append-only file whose descriptor stays the same when the file is rotated.

    A write failure loses events but never affects requests: `fd` is None if the file cannot be opened, and a file that
    cannot be rotated is truncated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fd: int | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = self._open()
        except OSError as error:
            log.warning("event=events_file_open_failed path=%r error=%s", str(path), error.strerror)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    async def keep_small(self) -> None:
        """Rotate the file when it exceeds BYTES_MAX, until cancelled."""
        while self.fd is not None:
            if os.fstat(self.fd).st_size > BYTES_MAX:
                try:
                    self._replace(self.fd)
                except OSError as error:
                    log.warning(
                        "event=events_file_rotation_failed path=%r effect='the file is truncated' error=%s",
                        str(self._path), error.strerror,
                    )  # fmt: skip
                    os.ftruncate(self.fd, 0)
            await asyncio.sleep(LOOK_S)

    def _replace(self, fd: int) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_suffix(self._path.suffix + ".1"))
        fresh = self._open()
        os.dup2(fresh, fd, inheritable=False)
        os.close(fresh)
