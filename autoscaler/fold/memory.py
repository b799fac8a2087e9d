"""Folds the measured memory use of engines into the `World`: from the local driver, or in a cluster from node agents.

Selects the measurements that count for a Model's next replica; `autoscaler.queries.measured_memory` has the correction
rule. Pods are identified by UID, so that a new pod of the same name is not mistaken for the old one.
"""

from __future__ import annotations

from autoscaler.agent_contract import NodeReport
from autoscaler.contract import ReplicaId
from autoscaler.demand.residency import has_activity_since
from autoscaler.fold.draft import Draft
from autoscaler.queries import measured_memory
from autoscaler.queries.granted_memory import has_grown, has_shrunk, is_memory_minimum
from autoscaler.spec.model import Model
from autoscaler.state.world import Replica


def apply_memory_use(draft: Draft, replica: Replica, used_bytes: int) -> None:
    """Record what a replica uses of each device, if it runs with the current spec; 0: unknown. The use never counts for
    more than the replica's slice has: otherwise the Model of a leaking engine would never fit anywhere again.
    """
    model = draft.world.models.get(replica.model)
    if model is None or used_bytes == 0 or replica.spec_hash != model.spec_hash():
        return
    if has_grown(model, replica):
        return  # it uses all that it was granted, and needs less
    if is_memory_minimum(model):
        used_bytes = _beyond(draft, replica, model, used_bytes)
        if used_bytes == 0:
            return
    history, ready_s = draft.history(model.name), replica.times.ready_s
    served = (
        ready_s is not None
        and draft.now_s >= ready_s + measured_memory.SERVED_S
        and has_activity_since(history, ready_s)
    )
    room_bytes = [
        draft.world.nodes.slices[id].memory_bytes for id in replica.resources.slices if id in draft.world.nodes.slices
    ]
    served = served and not has_shrunk(model, replica) and not is_memory_minimum(model)  # with more, it would use more
    after = measured_memory.record_measured_memory(history, model, min((used_bytes, *room_bytes)), served=served)
    if after is not history:
        draft.put_history(model.name, after)
        draft.correct(model.name)


def _beyond(draft: Draft, replica: Replica, model: Model, used_bytes: int) -> int:
    """The memory that counts for an engine that uses all it is granted: its estimate plus its use above the grant. 0:
    it does not exceed the grant. On an exclusive slice or on several devices it uses all memory, so nothing is learned.
    """
    on = [draft.world.nodes.slices[id] for id in replica.resources.slices if id in draft.world.nodes.slices]
    if len(on) != 1 or any(not one.shared or one.device_bytes for one in on):
        return 0
    outside = used_bytes - replica.resources.memory_bytes
    return model.estimated_bytes + outside if outside > 0 else 0


def apply_reported_memory(draft: Draft, report: NodeReport) -> None:
    """Record what the replicas' pods use on the reporting node."""
    found: dict[str, int] = {}
    for one in report.uses:
        found[one.pod_uid] = found.get(one.pod_uid, 0) + max(0, one.used_bytes)
    for uid, used_bytes in found.items():
        replica = draft.replicas.now.get(draft.by_pod.get(uid, ReplicaId("")))
        if replica is not None and replica.runtime.pod is not None and replica.runtime.pod.uid == uid:
            apply_memory_use(draft, replica, used_bytes // max(1, len(replica.resources.slices)))
