"""A fake NVML."""

from __future__ import annotations

import threading

from autoscaler.drivers.local.nvml import NvmlError, NvmlGpu


class FakeNvml:
    """Two GPUs. A test sets which processes hold memory, which GPUs are lost, and whether NVML responds at all."""

    def __init__(self) -> None:
        self.found: tuple[NvmlGpu, ...] = (
            NvmlGpu("GPU-a", "NVIDIA H200", 140 << 30),
            NvmlGpu("GPU-b", "NVIDIA H200", 140 << 30),
        )
        self.holders: dict[str, dict[int, int]] = {}
        self.failure = ""
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def gpus(self) -> tuple[NvmlGpu, ...]:
        self.asked += 1
        self.answers.wait(60)
        self._fail()
        return self.found

    def memory_by_pid(self, uuid: str) -> dict[int, int]:
        self._fail()
        return dict(self.holders.get(uuid, {}))

    def _fail(self) -> None:
        if self.failure:
            raise NvmlError(self.failure)
