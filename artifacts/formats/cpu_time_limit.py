"""Limits the CPU time for the headers of one artifact, also if several threads read it in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

CPU_S_MAX = 2.0
"""CPU time limit for the headers of one file, folder or artifact; real ones take less than a tenth of a second."""
STEP_S = 0.25
"""Reserve for a step that cannot be interrupted; decoding the largest safetensors header takes 0.2 s."""
OVERTIME = f"its header takes more than {CPU_S_MAX:.0f} s to read; no real model has such a header"


class CpuTime:
    """The CPU time that may still be used. One thread at a time enters `spend`."""

    def __init__(self) -> None:
        self._left_s, self._began_s = CPU_S_MAX - STEP_S, 0.0

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count the CPU time of this thread."""
        self._began_s = time.thread_time()
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - self._began_s

    def is_spent(self) -> bool:
        """Return whether the limit is reached. Call it within `spend`."""
        return time.thread_time() - self._began_s > self._left_s
