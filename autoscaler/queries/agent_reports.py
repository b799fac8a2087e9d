"""Reads the last reports of node agents about devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from autoscaler.agent_contract import NODE_EXPIRY_S, DeviceReport, NodeReport, PodDevices
from autoscaler.contract import ReplicaId
from autoscaler.state.world import (
    NodeAgentStatus,
    PodRef,
    Replica,
    Slice,
    World,
)

IDLE_BYTES_MAX = 1 << 30
"""Upper bound of what a driver and its daemons keep of an unused device: about 0.6 GiB of an H100."""


NOTICED_BYTES = 64 << 20
"""Smaller changes of a device's use are ignored."""


def is_report_fresh(node: NodeAgentStatus, now_s: float) -> bool:
    """Whether the agent's report still counts."""
    return now_s < node.seen_s + NODE_EXPIRY_S


def is_redundant_node_report(known: NodeReport, report: NodeReport) -> bool:
    """Whether a later report of the same agent contains no change, apart from its time."""
    return _without_usage(known) == _without_usage(report) and all(
        abs(before.used_bytes - after.used_bytes) < NOTICED_BYTES
        for before, after in zip(known.devices, report.devices, strict=True)
    )


def _without_usage(report: NodeReport) -> NodeReport:
    devices = tuple(replace(device, used_bytes=0) for device in report.devices)
    return replace(report, sequence=0, age_s=0.0, devices=devices, uses=())


def devices_of(world: World, replica: Replica, now_s: float) -> tuple[DeviceReport, ...]:
    """Return the devices of a replica's pod by the last report of its agent, in order of ids; empty: unknown."""
    node = _node_of(world, replica, now_s)
    if node is None or replica.runtime.pod is None:
        return ()
    return _reported(node, _listed(node.report.pods, replica.runtime.pod))


def find_device_report(world: World, slice_: Slice, now_s: float) -> DeviceReport | None:
    """Return the last report of a slice's device by the agent of its node; None: there is none, or it has expired."""
    node = world.nodes.agents.get(slice_.node)
    if node is None or not is_report_fresh(node, now_s):
        return None
    named = next((device for device in node.report.devices if device.id == slice_.device), None)
    if named is not None or slice_.shared:
        return named
    for holder in (world.replicas[id] for id in world.by_slice.get(slice_.id, ())):
        pairs = dict(zip(sorted(holder.resources.slices), devices_of(world, holder, now_s), strict=False))
        if slice_.id in pairs:
            return pairs[slice_.id]
    return None


def is_device_memory_free(world: World, id: ReplicaId, since_s: float, now_s: float) -> bool:
    """Whether the memory of a replica's devices was measured to be free again, later than `since_s`.

    Its pod is gone since then. False for devices that no report listed for it, for shared ones, and while the kubelet
    or a process that holds memory still names the pod.
    """
    replica = world.replicas.get(id)
    if replica is None or replica.runtime.pod is None:
        return False
    node = _node_of(world, replica, now_s)
    if any(world.nodes.slices[id].shared for id in replica.resources.slices if id in world.nodes.slices):
        return False
    if node is None or node.looked_s <= since_s or _listed(node.report.pods, replica.runtime.pod):
        return False
    had = _listed(node.pods_before, replica.runtime.pod)
    idle = [one for one in _reported(node, had) if one.healthy and one.used_bytes <= IDLE_BYTES_MAX]
    return bool(had) and len(idle) == len(had)


def _node_of(world: World, replica: Replica, now_s: float) -> NodeAgentStatus | None:
    names = {world.nodes.slices[id].node for id in replica.resources.slices if id in world.nodes.slices}
    node = world.nodes.agents.get(names.pop()) if len(names) == 1 else None
    return node if node is not None and is_report_fresh(node, now_s) else None


def _reported(node: NodeAgentStatus, ids: Iterable[str]) -> tuple[DeviceReport, ...]:
    wanted = frozenset(ids)
    return tuple(sorted((one for one in node.report.devices if one.id in wanted), key=lambda one: one.id))


def _listed(pods: Iterable[PodDevices], pod: PodRef) -> tuple[str, ...]:
    """Return the devices of a pod, found by its uid, or by its name if only that is known."""
    for one in pods:
        if one.pod_uid == pod.uid if one.pod_uid else (one.namespace, one.name) == (pod.namespace, pod.name):
            return one.devices
    return ()
