"""The backend without a GPU: reads the weights, holds memory of the simulated device, and answers with fixed tokens."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "simulated"))
import pynvml

CONTEXT_BYTES = 64 << 20
"""Device memory of a CUDA context."""
ROW_BYTES = 4096
"""Cache size of one token."""
TOKEN_S = 0.002
READ_BYTES = 8 << 20


class Model:
    """Holds memory; `allocate` sets the total of this process."""

    def __init__(self, size_bytes: int) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self.grow(size_bytes)

    def generate(self, prompt: bytes, tokens: int) -> Iterator[int]:
        """Count up from the prompt's length."""
        for number in range(tokens):
            time.sleep(TOKEN_S)
            yield len(prompt) + number

    def grow(self, size_bytes: int) -> None:
        """Allocate this many more bytes."""
        with self._lock:
            pynvml.allocate(self._bytes + size_bytes)
            self._bytes += size_bytes

    def used_bytes(self) -> int:
        """Device memory of this process."""
        return self._bytes


def load(arguments: argparse.Namespace, phases: Any) -> Model:
    """Run the phases of the real backend, in less time."""
    phases.note("torch")
    model = Model(CONTEXT_BYTES)
    phases.note("context")
    file = arguments.weights / "model.safetensors"
    weights_bytes = file.stat().st_size if arguments.empty else read(file)
    phases.note("weights", bytes=weights_bytes)
    needed = CONTEXT_BYTES + weights_bytes + arguments.slots * arguments.context_tokens * ROW_BYTES
    wanted = arguments.memory_bytes or int(
        arguments.gpu_memory_utilization * (pynvml.TOTAL_BYTES - pynvml.RESERVED_BYTES)
    )
    model.grow(max(needed, wanted - wanted // 100) - CONTEXT_BYTES)
    phases.note("warm")
    return model


def hold(size_bytes: int, device: str) -> None:
    """Hold memory until the process ends."""
    del device
    pynvml.allocate(size_bytes)


def read(path: Path) -> int:
    """Read a file; return its size."""
    size = 0
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            size += len(piece)
    return size
