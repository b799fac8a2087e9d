"""Devices of one machine as slices: declared devices, else NVML's, else the host's memory. I/O: `Nvml`, in a thread.

The local driver's inventory and its measurements. Each device has one shared slice of the same name. Declared devices
are trusted: NVML is not queried, and engines see all devices of the machine. If NVML fails or hangs after the start,
its slices are unhealthy until it recovers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import psutil

from autoscaler.drivers.local.nvml import Nvml, NvmlError, NvmlGpu, open_nvml
from autoscaler.queries.granted_memory import has_variable_memory
from autoscaler.spec.model import Model
from autoscaler.spec.settings import DeclaredDevice
from autoscaler.state.world import DeviceId, NodeId, Replica, Slice, SliceId

NODE = NodeId("local")
ANSWER_SECONDS_MAX = 5.0
"""Timeout after which NVML counts as failed."""
RESERVED_BYTES, RESERVED_SHARE = 2 << 30, 0.2
"""The larger of the two is reserved for other use of the host's memory, but never more than half of it."""

_log = logging.getLogger("pilotlight.autoscaler.local_driver")


class Devices:
    """The inventory. `declared` takes precedence over NVML, NVML over the host."""

    def __init__(
        self, declared: tuple[DeclaredDevice, ...] = (), nvml_opener: Callable[[], Nvml | None] = open_nvml
    ) -> None:
        self._declared = declared
        self._nvml_opener = nvml_opener
        self._nvml: Nvml | None = None
        self._slices: tuple[Slice, ...] = ()
        self._asked: asyncio.Future[tuple[NvmlGpu, ...]] | None = None
        """The pending NVML query: never more than one at a time."""

    async def open(self) -> tuple[Slice, ...]:
        """Return the inventory; call it once, first."""
        if not self._declared:
            self._nvml = await asyncio.to_thread(self._nvml_opener)
        gpus: tuple[NvmlGpu, ...] = ()
        if self._nvml is not None:
            gpus = filter_visible_gpus(await asyncio.to_thread(self._nvml.gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
            self._nvml = self._nvml if gpus else None
        if self._declared:
            self._slices = tuple(_slice(d.name, d.memory_bytes, d.model) for d in self._declared)
        elif gpus:
            self._slices = tuple(_slice(g.uuid, g.memory_bytes, g.product, healthy=g.healthy) for g in gpus)
        else:
            self._slices = (_slice("host", host_bytes(psutil.virtual_memory().total, _cgroup_bytes()), ""),)
        return self._slices

    @property
    def measured(self) -> bool:
        """Whether NVML measures these devices; without it the inventory never changes."""
        return self._nvml is not None

    @property
    def host(self) -> bool:
        """Whether its only device is the host's memory."""
        return self._nvml is None and not self._declared

    async def look(self) -> tuple[Slice, ...] | None:
        """Return the inventory if it changed since the last call, else None."""
        if self._nvml is None:
            return None
        healthy = await self._healthy(self._nvml)
        slices = tuple(msgspec.structs.replace(s, healthy=s.device in healthy) for s in self._slices)
        if slices == self._slices:
            return None
        self._slices = slices
        return slices

    async def _healthy(self, nvml: Nvml) -> frozenset[str]:
        if self._asked is None:
            self._asked = asyncio.ensure_future(asyncio.to_thread(nvml.gpus))
        try:
            gpus = await asyncio.wait_for(asyncio.shield(self._asked), ANSWER_SECONDS_MAX)
        except TimeoutError:
            _log.warning("event=nvml_timed_out timeout_s=%g effect='its devices are unhealthy'", ANSWER_SECONDS_MAX)
            return frozenset()
        except NvmlError as error:
            self._asked = None
            _log.warning("event=nvml_failed effect='its devices are unhealthy' error=%s", error)
            return frozenset()
        self._asked = None
        return frozenset(gpu.uuid for gpu in gpus if gpu.healthy)

    def environment(self, slices: Iterable[SliceId]) -> dict[str, str]:
        """Return variables that restrict an engine to the GPUs of these slices; none without NVML."""
        if self._nvml is None:
            return {}
        known = {s.id: s.device for s in self._slices}
        return {"CUDA_VISIBLE_DEVICES": ",".join(known[s] for s in slices if s in known)}

    def fraction(self, model: Model, replica: Replica) -> float | None:
        """Return the replica's share of its device, rounded down, which only its engine enforces. None: the whole
        device. A share exists if the model's memory is variable or its document requests less than the device.
        """
        sizes = [s.memory_bytes for s in self._slices if s.id in replica.resources.slices]
        said = model.spec.gpu.memory_bytes
        part = bool(said) and len(sizes) == 1 and replica.resources.memory_bytes < max(sizes)
        if not sizes or not (part or has_variable_memory(model)):
            return None
        return max(1, min(1000, replica.resources.memory_bytes * 1000 // max(sizes))) / 1000

    async def holding(self, slices: Iterable[SliceId], pids: Iterable[int]) -> dict[int, int]:
        """Return pid -> bytes on these slices' devices, for the given processes. Raises `NvmlError`."""
        if self._nvml is None:
            return {}
        wanted, found = set(pids), dict[int, int]()
        for s in slices:
            for pid, size_bytes in (await asyncio.to_thread(self._nvml.memory_by_pid, s)).items():
                if pid in wanted:
                    found[pid] = found.get(pid, 0) + size_bytes
        return found


def filter_visible_gpus(gpus: tuple[NvmlGpu, ...], names: str | None) -> tuple[NvmlGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows: indices in PCI bus order, or prefixes of UUIDs. As in CUDA, the
    first invalid name ends the list. None: all.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if names is None:
        return gpus
    found: list[NvmlGpu] = []
    for name in (part.strip() for part in names.split(",")):
        of = (
            gpus[int(name) : int(name) + 1]
            if name.isdecimal()
            else [g for g in gpus if name and g.uuid.startswith(name)]
        )
        if not of:
            break
        found += of[:1]
    return tuple(found)


def host_bytes(total_bytes: int, limit_bytes: int | None) -> int:
    """Return how much of the host's memory replicas may use, given the total and the cgroup's limit, if any."""
    usable = min(total_bytes, limit_bytes) if limit_bytes is not None else total_bytes
    reserved = max(RESERVED_BYTES, int(usable * RESERVED_SHARE))
    return max(usable - reserved, usable // 2)


def _cgroup_bytes() -> int | None:
    """Return the memory limit of the container (cgroup v2); None without one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _slice(name: str, memory_bytes: int, product: str, *, healthy: bool = True) -> Slice:
    return Slice(
        id=SliceId(name),
        device=DeviceId(name),
        node=NODE,
        memory_bytes=int(memory_bytes),
        product=product,
        healthy=healthy,
    )
