"""Evaluates agents' reports: freshness, device health, which replica has which devices, and freed memory. Pure.

An expired report is ignored, and a missing report does not mean zero. In a cluster a slice does not identify a GPU:
NODE/gpuN only numbers the GPUs of a node, and the kubelet chooses the GPU of a pod. So the device of a slice is known
only through the pod of the replica on it, which the report lists with its devices. One free slice is closed for each
unhealthy device without a pod, and for each device that pods of others use.

If an MPS server fails, all replicas on it end at once, while its devices may stay healthy. Nothing new is placed there
for a pause; then one trial start is allowed. If it fails, the pause doubles; if it becomes ready, the pause ends. With
NVIDIA's device plug-in all MPS slices of a node are one domain, since the kubelet chooses among them; with a DRA driver
those of one device. A new leader does not know earlier failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autoscaler.agent_contract import NodeReport
from autoscaler.contract import ReplicaId
from autoscaler.queries.agent_reports import _node_of, find_device_report, is_report_fresh
from autoscaler.queries.mps_server_failures import list_mps_failed_slices
from autoscaler.queries.overcommitted_slices import list_crowded_slices
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import (
    DeviceId,
    NodeAgentStatus,
    Replica,
    Slice,
    SliceId,
    World,
)

ILL = "the agent of its node reports an unhealthy device"
OTHERS = "pods that this installation does not manage use a device of its node, and which one is unknown"
STUCK_S = 60.0
"""If a replica takes longer than this to stop or to scrub its memory, that memory is no longer expected to become free:
a request may evict another replica, and nothing new is placed on the device."""


def list_unhealthy_devices(report: NodeReport) -> tuple[str, ...]:
    """Return the ids of its unhealthy devices."""
    return tuple(device.id for device in report.devices if not device.healthy)


# --- devices of replicas ----------------------------------------------------------------------------------------------


# --- health -----------------------------------------------------------------------------------------------------------


def list_closed_slices(world: World, now_s: float) -> dict[SliceId, str]:
    """Return the slices on which nothing new is placed because of their node or device -> why."""
    sick = {
        **list_crowded_slices(world),
        **list_mps_failed_slices(world, now_s),
        **list_stuck_slices(world, now_s),
        **list_unhealthy_slices(world, now_s),
    }
    if not world.nodes.others:
        return sick
    free: dict[str, list[SliceId]] = {}
    for id in sorted(world.nodes.slices):
        counted = world.nodes.slices[id].counted
        if counted in world.nodes.others and id not in sick and not world.by_slice.get(id):
            free.setdefault(counted, []).append(id)
    taken = (id for counted, ids in free.items() for id in ids[max(0, len(ids) - world.nodes.others[counted]) :])
    return {**sick, **dict.fromkeys(taken, OTHERS)}


def list_stuck_slices(world: World, now_s: float) -> dict[SliceId, str]:
    """Return the slices of devices that an ended replica still holds -> why.
    Host memory is left out: a stuck replica there holds only its own part.
    """
    devices: dict[DeviceId, str] = {}
    for replica in world.replicas.values():
        if replica.state in {S.STOPPING, S.SCRUBBING} and now_s >= replica.since_s + STUCK_S:
            held = (world.nodes.slices[id] for id in replica.resources.slices if id in world.nodes.slices)
            devices.update((one.device, replica.model) for one in held if one.product or one.kind)
    if not devices:
        return {}
    why = "{} has stopped but still holds memory of its device"
    return {id: why.format(devices[one.device]) for id, one in world.nodes.slices.items() if one.device in devices}


def list_unhealthy_slices(world: World, now_s: float) -> dict[SliceId, str]:
    """Return the slices on which nothing new is placed because agents report unhealthy devices -> why."""
    sick = {name: node for name, node in world.nodes.agents.items() if node.unhealthy and is_report_fresh(node, now_s)}
    if not sick:
        return {}
    slices: dict[str, list[Slice]] = {}
    for id in sorted(world.nodes.slices):
        if world.nodes.slices[id].node in sick:
            slices.setdefault(world.nodes.slices[id].node, []).append(world.nodes.slices[id])
    return {id: ILL for name, node in sick.items() for id in _ill_of(world, node, slices.get(name, []), now_s)}


def list_lost_replicas(world: World, now_s: float) -> tuple[ReplicaId, ...]:
    """Return the replicas on a lost device, in order of ids."""
    if not any(node.unhealthy for node in world.nodes.agents.values()):
        return ()
    return tuple(id for id in sorted(world.replicas) if is_lost(world, world.replicas[id], now_s))


def is_lost(world: World, replica: Replica, now_s: float) -> bool:
    """Return whether one of the replica's devices is unhealthy while another device of its node is healthy.
    If all are unhealthy, the measurement itself may have failed; then the readiness of the engine counts.
    """
    node = _node_of(world, replica, now_s)
    if node is None or not 0 < len(node.unhealthy) < len(node.report.devices):
        return False
    slices = world.nodes.slices
    found = (find_device_report(world, slices[id], now_s) for id in replica.resources.slices if id in slices)
    return any(one is not None and not one.healthy for one in found)


def _ill_of(world: World, node: NodeAgentStatus, slices: list[Slice], now_s: float) -> Iterable[SliceId]:
    """Yield the slices of unhealthy devices. For each share of an unhealthy device that no known pod has, also yield
    one free slice, from the end of the list.

    All shares of an unhealthy device are closed. If the device plug-in has detected the fault, the node has fewer
    slices than devices.
    """
    known = {one.id: report for one in slices if (report := find_device_report(world, one, now_s)) is not None}
    yield from (id for id, report in known.items() if not report.healthy)
    shares = max(Counter(one.device for one in slices).values(), default=1)
    taken = Counter(id for pod in node.report.pods for id in pod.devices)
    if shares == 1:  # a slice may have the name of its device
        taken |= Counter({report.id: 1 for report in known.values()})
    left_out = max(0, len(node.report.devices) * shares - len(slices))
    unassigned = max(0, sum(max(0, shares - taken[id]) for id in node.unhealthy) - left_out)
    free = [one.id for one in slices if one.id not in known and not world.by_slice.get(one.id)]
    yield from free[len(free) - min(unassigned, len(free)) :]
