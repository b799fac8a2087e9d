"""What a node has, as its agent looks at it: devices and their memory by NVML, and which pods use them. I/O.

Owns the look. NVML blocks, so it is asked in a thread; one that hangs or fails makes its devices unhealthy, and is
never asked a second time beside a question that it has not answered. Which pod has which device is the kubelet's own
table (PodResources) where it can be asked; else pods are told by the processes that hold a device's memory, which needs
the node's own process ids (`hostPID`): without them, and before a pod's first allocation, nothing is told. Nor is then
how much memory each pod holds, which only its processes show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from autoscaler.contract import DeviceReport, PodDevices, PodUse
from autoscaler.drivers.local.nvml import Nvml, NvmlError, open_nvml
from autoscaler.queries.device_health import NOTICED_BYTES
from pilotlight.agent.kubelet.sockets import NodeSockets, pod_uid

ANSWER_S_MAX = 5.0
"""NVML that takes longer is taken for broken."""
INITIAL_PIDS = "pid:[4026531836]"
"""The node's own process ids (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h)."""


class NodeLook(NamedTuple):
    """What there is."""

    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()
    images: tuple[str, ...] = ()
    uses: tuple[PodUse, ...] = ()
    """Of each pod by each device, where all of its processes there say how much."""


class NodeLooks:
    """Looks at this node. `proc` is where its processes are, if `sees_node` says that they are the node's."""

    def __init__(
        self,
        opener: Callable[[], Nvml | None] = open_nvml,
        proc: Path = Path("/proc"),
        sees_node: Callable[[], bool] = lambda: sees_node(Path("/proc")),
        sockets: NodeSockets | None = None,
    ) -> None:
        self._sockets = NodeSockets() if sockets is None else sockets
        self._opener = opener
        self._proc = proc
        self._sees_node = sees_node
        self._nvml: Nvml | None = None
        self._last = NodeLook()
        self._asked: asyncio.Future[NodeLook] | None = None
        self.pods: tuple[PodDevices, ...] = ()
        """Of the last look."""

    async def look(self) -> NodeLook:
        """The node now; without a driver there are no devices, which is no error."""
        found, given, images = await asyncio.gather(self._devices(), self._sockets.pods(), self._sockets.images())
        if given is None:
            self.pods = found.pods
        else:
            self.pods = tuple(PodDevices(namespace=one.namespace, name=one.name, devices=one.devices) for one in given)
        return NodeLook(found.devices, self.pods, images, found.uses)

    async def _devices(self) -> NodeLook:
        """By NVML alone."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._ask))
        try:
            self._last = await asyncio.wait_for(asyncio.shield(self._asked), ANSWER_S_MAX)
        except TimeoutError:
            return self._ill()
        except NvmlError:
            self._nvml = None  # a driver that was reloaded wants a new handle
            self._asked = None
            return self._ill()
        self._asked = None
        return self._last

    def _ill(self) -> NodeLook:
        """What was there, and cannot be trusted now."""
        return NodeLook(tuple(_unhealthy(device) for device in self._last.devices), self._last.pods)

    def _ask(self) -> NodeLook:
        if self._nvml is None:
            self._nvml = self._opener()
        if self._nvml is None:
            if self._last.devices:
                raise NvmlError("the driver is gone")
            return NodeLook()
        devices = tuple(
            DeviceReport(
                id=gpu.uuid, product=gpu.product, memory_bytes=gpu.memory_bytes, used_bytes=gpu.used_bytes,
                healthy=gpu.healthy,
            )
            for gpu in self._nvml.gpus()
        )  # fmt: skip
        if not self._sees_node():
            return NodeLook(devices)
        held = {one.id: self._held(self._nvml, one.id) for one in devices if one.healthy}
        pods = sorted({uid for by_pod in held.values() for uid in by_pod})
        return NodeLook(
            devices,
            tuple(PodDevices(pod_uid=uid, devices=tuple(id for id in held if uid in held[id])) for uid in pods),
            uses=tuple(
                PodUse(pod_uid=uid, device=id, used_bytes=sum(held[id][uid]))
                for uid in pods for id in held if all(held[id].get(uid, (0,)))
            ),
        )  # fmt: skip

    def _held(self, nvml: Nvml, device: str) -> dict[str, list[int]]:
        """The uids of pods -> bytes of a device that each of their processes holds; 0: the driver does not tell."""
        found: dict[str, list[int]] = {}
        for pid, used_bytes in nvml.memory_by_pid(device).items():
            if uid := self._pod(pid):
                found.setdefault(uid, []).append(used_bytes)
        return found

    def _pod(self, pid: int) -> str:
        try:
            return pod_uid((self._proc / str(pid) / "cgroup").read_text())
        except OSError:  # it has ended since
            return ""


def sees_node(proc: Path) -> bool:
    """Whether process ids here are the node's own."""
    try:
        return str((proc / "self/ns/pid").readlink()) == INITIAL_PIDS
    except OSError:
        return False


def should_report(told: NodeLook, now: NodeLook) -> bool:
    """Whether anything has changed that is worth a report of its own."""
    if (told.pods, told.images) != (now.pods, now.images):
        return True
    if [_at_rest(one) for one in told.devices] != [_at_rest(one) for one in now.devices]:
        return True
    pairs = zip(told.devices, now.devices, strict=True)
    return any(abs(before.used_bytes - after.used_bytes) >= NOTICED_BYTES for before, after in pairs)


def _at_rest(device: DeviceReport) -> tuple[object, ...]:
    return (device.id, device.product, device.memory_bytes, device.healthy)


def _unhealthy(device: DeviceReport) -> DeviceReport:
    return DeviceReport(
        id=device.id, product=device.product, memory_bytes=device.memory_bytes, used_bytes=device.used_bytes,
        healthy=False,
    )  # fmt: skip
