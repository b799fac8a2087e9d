"""Notifies when a process has ended, even if it is not our child. Uses pidfds (Linux 5.3, pidfd_open(2)).

A pidfd stays tied to the process it was opened for, so a reused pid is never mistaken for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable


class ProcessWatch:
    """Watches at most one process per name; watching another one under the same name replaces it."""

    def __init__(self) -> None:
        self._watched: dict[Hashable, tuple[int, int]] = {}

    def watch(self, name: Hashable, pid: int, ended: Callable[[], None]) -> None:
        """Call `ended` once when the process ends; at once if it does not exist."""
        known = self._watched.get(name)
        if known is not None and known[0] == pid:
            return
        self.forget(name)
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            ended()
            return
        self._watched[name] = (pid, fd)

        def on_exit() -> None:
            self.forget(name)
            ended()

        asyncio.get_running_loop().add_reader(fd, on_exit)

    def forget(self, name: Hashable) -> None:
        """Stop watching; `ended` is not called."""
        known = self._watched.pop(name, None)
        if known is not None:
            asyncio.get_running_loop().remove_reader(known[1])
            os.close(known[1])
