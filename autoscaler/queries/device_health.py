"""Evaluates agents' reports: freshness, device health, which replica has which devices, and freed memory. Pure.

An expired report is ignored, and a missing report does not mean zero. In a cluster a slice only counts the GPUs of its
node (NODE/gpuN), and the kubelet chooses the GPU of a pod. So the device of a slice is known only through the pod of
the replica on it, which the report lists with its devices. One free slice is closed for each unhealthy device without a
pod, and for each device that pods of others use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from autoscaler.contract import NODE_EXPIRY_S, DeviceReport, NodeReport, PodDevices, ReplicaId
from autoscaler.queries import mps_failures
from autoscaler.queries.crowded_slices import list_crowded_slices
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.operator_orders import NodeAgentStatus
from autoscaler.state.world import DeviceId, PodRef, Replica, Slice, SliceId, World

IDLE_BYTES_MAX = 1 << 30
"""Upper bound of what a driver and its daemons keep of an unused device: about 0.6 GiB of an H100."""
NOTICED_BYTES = 64 << 20
"""Smaller changes of a device's use are ignored."""
ILL = "the agent of its node reports an unhealthy device"
OTHERS = "pods of others use a device of its node"
STUCK_S = 60.0
"""Memory of a replica that stops or scrubs for longer than this is no longer expected: a request may take another
victim, and nothing new is placed on the device."""


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


def list_unhealthy_devices(report: NodeReport) -> tuple[str, ...]:
    """Return the ids of its unhealthy devices."""
    return tuple(device.id for device in report.devices if not device.healthy)


# --- devices of replicas ----------------------------------------------------------------------------------------------


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


# --- health -----------------------------------------------------------------------------------------------------------


def list_closed_slices(world: World, now_s: float) -> dict[SliceId, str]:
    """Return the slices on which nothing new is placed because of their node or device -> why."""
    sick = {
        **list_crowded_slices(world),
        **mps_failures.list_mps_failed_slices(world, now_s),
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
    """Whether one of its devices is unhealthy while another of its node is not.

    If all are unhealthy, the measurement itself may have failed; then the readiness of the engine counts.
    """
    node = _node_of(world, replica, now_s)
    if node is None or not 0 < len(node.unhealthy) < len(node.report.devices):
        return False
    slices = world.nodes.slices
    found = (find_device_report(world, slices[id], now_s) for id in replica.resources.slices if id in slices)
    return any(one is not None and not one.healthy for one in found)


def _ill_of(world: World, node: NodeAgentStatus, slices: list[Slice], now_s: float) -> Iterable[SliceId]:
    """Yield the slices of unhealthy devices, and one of the last free slices for each share of such a device that no
    known pod has.

    All shares of an unhealthy device are closed. If the device plug-in has detected the fault, the node has fewer
    slices than devices.
    """
    known = {one.id: report for one in slices if (report := find_device_report(world, one, now_s)) is not None}
    yield from (id for id, report in known.items() if not report.healthy)
    shares = max(Counter(one.device for one in slices).values(), default=1)
    taken = Counter(id for pod in node.report.pods for id in pod.devices)
    if shares == 1:  # the slice may be the device, by name
        taken |= Counter({report.id: 1 for report in known.values()})
    left_out = max(0, len(node.report.devices) * shares - len(slices))
    unassigned = max(0, sum(max(0, shares - taken[id]) for id in node.unhealthy) - left_out)
    free = [one.id for one in slices if one.id not in known and not world.by_slice.get(one.id)]
    yield from free[len(free) - min(unassigned, len(free)) :]
