"""Represents a capacity order as two pods for Cluster Autoscaler: a placeholder and a keeper. Pure.

The placeholder requests all devices of one node of the group and its owner's other resources, and so causes the
scale-up. It has a lower priority than engines, so the scheduler preempts it for the first replica; the planner ignores
it. The keeper requests next to nothing and is scheduled to the placeholder's node. It prevents the removal of that node
as idle until the order is released. The group's node template must contain the labels that describe its devices;
otherwise Cluster Autoscaler cannot scale the group from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from autoscaler.providers.future_nodes import NodeRequirements
from autoscaler.providers.kubernetes_access import ENDED, Object
from autoscaler.providers.order_annotations import PROVIDER, WRITER, build_lease_annotations, read_lease_annotations
from autoscaler.spec.capacity import ClusterAutoscaler
from autoscaler.spec.pod import DO_NOT_DISRUPT, GPU, MANAGED_BY, OURS, PLACE, SAFE_TO_EVICT, Toleration
from autoscaler.state.capacity import AcquireOrder, Listed
from autoscaler.text import unix_seconds

KEEPS: Final = OURS + "keeps"
"""Label of a keeper pod: the name of its order."""
HOST: Final = "kubernetes.io/hostname"
TRIGGERED, REFUSED = "TriggeredScaleUp", "NotTriggerScaleUp"
"""Reasons of Cluster Autoscaler's events about a pod."""
PATIENCE_S = 45.0
"""After this many seconds a refusal is final. Cluster Autoscaler retries every 10 s, also after a cloud's failure."""
HALF_S = 30.0
"""After this many seconds a keeper without a placeholder and without a node has failed."""
LITTLE = {"cpu": "1m", "memory": "8Mi"}
_SECURITY: Object = {
    "runAsNonRoot": True, "runAsUser": 65534, "runAsGroup": 65534, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
"""Required by Pod Security `restricted`."""


def keeper_name(name: str) -> str:
    """The name of an order's keeper; the placeholder has the order's name."""
    return f"{name}-keeper"


def build_pods(
    order: AcquireOrder, group: ClusterAutoscaler, tolerations: Sequence[Toleration], need: NodeRequirements
) -> tuple[Object, Object]:
    """Return (keeper, placeholder), to be created in this order, so that no placeholder lacks its keeper."""
    tolerated: list[Object] = [{"key": GPU, "operator": "Exists"}]
    tolerated += [
        {key: said for key, said in (
            ("key", one.key), ("operator", one.operator), ("value", one.value), ("effect", one.effect),
        ) if said}
        for one in tolerations
    ]  # fmt: skip
    name, of = order.id.name, {MANAGED_BY: WRITER, PROVIDER: order.id.provider}
    many = str(order.devices * order.offer.parts)
    common: Object = {
        "tolerations": tolerated, "nodeSelector": {**need.where, **group.node_labels}, "securityContext": _SECURITY,
        "automountServiceAccountToken": False, "enableServiceLinks": False, "terminationGracePeriodSeconds": 0,
    }  # fmt: skip
    with_it = {"labelSelector": {"matchLabels": {PLACE: name}}, "topologyKey": HOST}
    keeper: Object = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": keeper_name(name), "labels": {**of, KEEPS: name},
            "annotations": {**build_lease_annotations(order), DO_NOT_DISRUPT: "true", SAFE_TO_EVICT: "false"},
        },
        "spec": {
            **common, "containers": [_container(group.image, {"requests": LITTLE})],
            "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [with_it]}},
        },
    }  # fmt: skip
    placeholder: Object = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {**of, PLACE: name}, "annotations": build_lease_annotations(order)},
        "spec": {
            **common, "priorityClassName": group.priority_class,
            "containers": [_container(group.image, {"requests": {**LITTLE, **need.requests}, "limits": {GPU: many}})],
        },
    }  # fmt: skip
    return keeper, placeholder


def _container(image: str, resources: Object) -> Object:
    return {
        "name": "pause", "image": image, "resources": resources,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip


def read_lease(keeper: Object, placeholder: Object | None, events: Sequence[Object], unix_s: float) -> Listed | None:
    """Read an order from its pods; None while its placeholder is still being created."""
    metadata, node = keeper["metadata"], keeper["spec"].get("nodeName", "")
    half = placeholder is None and not node
    age_s = unix_s - unix_seconds(metadata["creationTimestamp"])
    if half and age_s < HALF_S:
        return None
    one = read_lease_annotations(keeper, metadata["labels"][PROVIDER])
    waits = "" if placeholder is None else placeholder["spec"].get("nodeName", "")
    one = replace(one, name=metadata["labels"][KEEPS], node=node or waits)
    if "deletionTimestamp" in metadata:
        return replace(one, phase="leaving", says="the pod that keeps its node from removal (keeper) is being deleted")
    if half:
        return replace(one, phase="failed", says="its placeholder pod was deleted before a node was added")
    if node and keeper.get("status", {}).get("phase") in ENDED:
        return replace(
            one,
            phase="failed",
            committed=True,
            says=f"the pod that keeps node {node} from removal (keeper) has terminated",
        )
    if node:
        return replace(one, phase="here", committed=True)
    last = max(events, key=_event_sort_key, default=None)
    said = "" if last is None else str(last.get("reason", ""))
    if waits or said == TRIGGERED:
        return replace(one, committed=True)
    if last is None or said != REFUSED:
        return one
    return replace(one, phase="failed" if age_s >= PATIENCE_S else "coming", says=str(last.get("message", "")))


def is_scale_up_event(event: Object) -> bool:
    """Whether the event is Cluster Autoscaler's report on a scale-up."""
    return event.get("reason") in {TRIGGERED, REFUSED}


def _event_sort_key(event: Object) -> tuple[float, str]:
    """Sort key: the last time of the event, then its name."""
    at = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return (unix_seconds(at) if at else 0.0, event["metadata"]["name"])
