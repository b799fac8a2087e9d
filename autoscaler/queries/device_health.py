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

from msgspec.structs import replace

from autoscaler.agent_contract import NODE_EXPIRY_S, DeviceReport, NodeReport, PodDevices
from autoscaler.contract import ReplicaId
from autoscaler.queries.overcommitted_slices import list_crowded_slices
from autoscaler.slicing.nvidia_gpus import MPS
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Isolation
from autoscaler.state.world import (
    DeviceId,
    MpsServerFailure,
    NodeAgentStatus,
    NodeId,
    PodRef,
    Replica,
    Slice,
    SliceId,
    World,
)

TOGETHER_S = 5.0
"""Replicas that fail within this time after the first one belong to the same failure of an MPS server."""
TOGETHER = 2
"""Minimum number of replicas that fail together; a single failure is assumed to have another cause."""
PAUSE_S, PAUSE_S_MAX = 5.0, 300.0
"""Pause after the first failure, doubled with each failed trial start; and its maximum."""
FELL = "all replicas on its MPS server failed at once"
_BEGINNING = frozenset({S.PENDING, S.STARTING})
_LIVING = frozenset({S.STARTING, S.READY, S.UNREADY, S.WAKING, S.DRAINING})
Falls = dict[tuple[NodeId, DeviceId | None], MpsServerFailure]


def find_mps_domain(slice_: Slice) -> tuple[NodeId, DeviceId | None] | None:
    """Return the domain of its MPS server: (node, device), or (node, None) for all MPS slices of it. None: no MPS."""
    if slice_.kind == MPS:
        return slice_.node, None
    if slice_.kind == "dra" and slice_.shared and slice_.isolation is Isolation.MEMORY:
        return slice_.node, slice_.device
    return None


def record_replica_failure(world: World, others: Iterable[Replica], replica: Replica, now_s: float) -> Falls:
    """Return the MPS server failures, updated with the failure of this replica. `others`: the other replicas. Old
    single failures expire.
    """
    falls = {at: one for at, one in world.nodes.mps_failures.items() if one.times or now_s < one.first_s + TOGETHER_S}
    for at in _domains(world, replica):
        fall = falls.get(at, MpsServerFailure(first_s=now_s))
        before = replica.times.ready_s is not None and replica.times.created_s < fall.first_s
        gone = fall.replicas | ({replica.id} if before else set())
        times = fall.times
        if times:
            times += replica.times.created_s >= fall.first_s
        elif len(gone) >= TOGETHER:
            times = int(not any(one.state in _LIVING for one in others if at in _domains(world, one)))
        until_s = fall.until_s if times == fall.times else now_s + min(PAUSE_S * 2.0 ** min(times - 1, 16), PAUSE_S_MAX)
        falls[at] = MpsServerFailure(first_s=fall.first_s, replicas=gone, times=times, until_s=until_s)
    return falls


def record_replica_ready(world: World, replica: Replica) -> Falls:
    """Return the MPS server failures without those that are over, since this replica was ordered later and became
    ready.
    """
    there = _domains(world, replica)
    known = world.nodes.mps_failures
    return {at: one for at, one in known.items() if at not in there or replica.times.created_s < one.first_s}


def list_mps_failed_slices(world: World, now_s: float) -> dict[SliceId, str]:
    """Return the slices on which nothing new is placed because their MPS server failed -> why."""
    falls = {at: one for at, one in world.nodes.mps_failures.items() if one.times}
    if not falls:
        return {}
    tried = {
        at for one in world.replicas.values() if one.state in _BEGINNING
        for at in _domains(world, one) if at in falls and one.times.created_s >= falls[at].first_s
    }  # fmt: skip
    found: dict[SliceId, str] = {}
    for id, one in world.nodes.slices.items():
        at = find_mps_domain(one)
        if at in tried:
            found[id] = f"{FELL}, and a trial start there is in progress"
        elif at in falls and now_s < falls[at].until_s:
            found[id] = f"{FELL}, and starts there are paused"
    return found


def _domains(world: World, replica: Replica) -> set[tuple[NodeId, DeviceId | None]]:
    """Return its MPS domains; most replicas have none or one."""
    there = (find_mps_domain(world.nodes.slices[id]) for id in replica.resources.slices if id in world.nodes.slices)
    return {at for at in there if at is not None}


IDLE_BYTES_MAX = 1 << 30
"""Upper bound of what a driver and its daemons keep of an unused device: about 0.6 GiB of an H100."""
NOTICED_BYTES = 64 << 20
"""Smaller changes of a device's use are ignored."""
ILL = "the agent of its node reports an unhealthy device"
OTHERS = "pods that this installation does not manage use a device of its node, and which one is unknown"
STUCK_S = 60.0
"""If a replica takes longer than this to stop or to scrub its memory, that memory is no longer expected to become free:
a request may evict another replica, and nothing new is placed on the device."""


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
