"""Observes a node: devices and their memory through NVML, and which pods use them. I/O.

NVML blocks, so it is called in a thread. If it hangs or fails, its devices are reported unhealthy, and it is not called
again before the pending call returns. The pods of each device come from the kubelet's PodResources API if available,
else from the processes that hold device memory, which requires the node's PID namespace (`hostPID`). Without either, or
before a pod's first allocation, no pod is reported. The memory held by each pod is known only from its processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from autoscaler.agent_contract import DeviceReport, PodDevices, PodUse
from autoscaler.contract import TOTAL_MAX
from autoscaler.drivers.local.nvml import Nvml, NvmlError, open_nvml
from autoscaler.queries.agent_reports import NOTICED_BYTES
from pilotlight.agent.kubelet.grpc_clients import NodeSockets, pod_uid
from pilotlight.agent.weights.report_limits import limit_images

ANSWER_S_MAX = 5.0
"""An NVML call that takes longer counts as failed."""
INITIAL_PIDS = "pid:[4026531836]"
"""The node's initial PID namespace (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h)."""


class NodeLook(NamedTuple):
    """One observation of the node."""

    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()
    images: tuple[str, ...] = ()
    uses: tuple[PodUse, ...] = ()
    """Memory use per pod and device, if the driver reports it for all of the pod's processes there."""


class NodeLooks:
    """Observes this node. `proc` is read only if `sees_node` reports that PIDs are the node's own."""

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
        """Pods of the latest observation."""

    async def look(self) -> NodeLook:
        """Return the current state of the node; a node without a driver has no devices, which is no error."""
        found, given, images = await asyncio.gather(self._devices(), self._sockets.pods(), self._sockets.images())
        if given is None:
            self.pods = found.pods
        else:
            self.pods = tuple(PodDevices(namespace=one.namespace, name=one.name, devices=one.devices) for one in given)
        return NodeLook(found.devices, self.pods, limit_images(images), found.uses)

    async def _devices(self) -> NodeLook:
        """Return what NVML reports."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._ask))
        asked = self._asked
        try:
            self._last = await asyncio.wait_for(asyncio.shield(asked), ANSWER_S_MAX)
        except TimeoutError:
            return self._ill()
        except NvmlError:
            self._nvml = None  # a reloaded driver needs a new handle
            return self._ill()
        finally:
            if asked.done():
                self._asked = None
        return self._last

    def _ill(self) -> NodeLook:
        """Return the last observation with all devices unhealthy."""
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
                id=gpu.uuid, product=gpu.product, memory_bytes=_clamp(gpu.memory_bytes),
                used_bytes=_clamp(gpu.used_bytes), healthy=gpu.healthy,
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
                PodUse(pod_uid=uid, device=id, used_bytes=_clamp(sum(held[id][uid])))
                for uid in pods for id in held if all(held[id].get(uid, (0,)))
            ),
        )  # fmt: skip

    def _held(self, nvml: Nvml, device: str) -> dict[str, list[int]]:
        """Return by pod UID the memory of each process of the pod, in bytes; 0 if the driver does not report it."""
        found: dict[str, list[int]] = {}
        for pid, used_bytes in nvml.memory_by_pid(device).items():
            if uid := self._pod(pid):
                found.setdefault(uid, []).append(used_bytes)
        return found

    def _pod(self, pid: int) -> str:
        try:
            return pod_uid((self._proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace"))
        except OSError:  # the process has ended since
            return ""


def _clamp(size_bytes: int) -> int:
    """Return the size within the limits of a report. A driver may return an invalid size, and autoscalers reject the
    whole report if one number exceeds its limits.
    """
    return max(0, min(size_bytes, TOTAL_MAX))


def sees_node(proc: Path) -> bool:
    """Return whether PIDs in this process are the node's own."""
    try:
        return str((proc / "self/ns/pid").readlink()) == INITIAL_PIDS
    except OSError:
        return False


def should_report(reported: NodeLook, now: NodeLook) -> bool:
    """Return whether the observation changed enough to be reported at once."""
    if (reported.pods, reported.images) != (now.pods, now.images):
        return True
    if [_at_rest(one) for one in reported.devices] != [_at_rest(one) for one in now.devices]:
        return True
    pairs = zip(reported.devices, now.devices, strict=True)
    return any(abs(before.used_bytes - after.used_bytes) >= NOTICED_BYTES for before, after in pairs)


def _at_rest(device: DeviceReport) -> tuple[object, ...]:
    return (device.id, device.product, device.memory_bytes, device.healthy)


def _unhealthy(device: DeviceReport) -> DeviceReport:
    return DeviceReport(
        id=device.id, product=device.product, memory_bytes=device.memory_bytes, used_bytes=device.used_bytes,
        healthy=False,
    )  # fmt: skip
