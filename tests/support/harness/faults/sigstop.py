"""A SIGSTOP that is sure to have taken effect: the signal is only queued, and threads run on until one handles it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOPPED_S_MAX = 60.0
_LOOK_S = 0.001


def freeze(pid: int) -> None:
    """Returns when no thread of the process runs any more. SIGCONT resumes it."""
    deliver(pid, signal.SIGSTOP)


def deliver(pid: int, number: int) -> None:
    """Sends any signal; SIGSTOP as `freeze` does."""
    os.kill(pid, number)
    until_s = time.monotonic() + STOPPED_S_MAX
    while number == signal.SIGSTOP and not _is_frozen(pid):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{pid} still runs {STOPPED_S_MAX:g} s after SIGSTOP")
        time.sleep(_LOOK_S)


def _is_frozen(pid: int) -> bool:
    """Whether each thread is in state T (proc(5); the name before it may contain parentheses and spaces)."""
    for one in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (one / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        if stat.rpartition(")")[2].split()[0] != "T":
            return False
    return True
