"""Checks at the API server whether devices of a node are in use, right before they are released. I/O.

Device plug-ins report only how many devices a pod uses, so a pod with a device counts as a user of all devices of the
node. ResourceClaims (resource.k8s.io) name their devices. For a device with an unknown UUID, any claim on the node
counts as its user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autoscaler.providers import order_annotations
from autoscaler.providers.kubernetes_access import ENDED, ApiServer, Object
from autoscaler.spec.pod import DO_NOT_DISRUPT, MANAGED_BY, OURS, SAFE_TO_EVICT

MIRROR = "kubernetes.io/config.mirror"


PODS = "/api/v1/pods"
CLAIMS, SLICES = "/apis/resource.k8s.io/v1/resourceclaims", "/apis/resource.k8s.io/v1/resourceslices"
_NAMES = {"uuid", "parentUUID"}
_LIVE = "status.phase!=Succeeded,status.phase!=Failed"


async def find_device_user(server: ApiServer, node: str, uuids: Collection[str]) -> str:
    """Return the pod or claim that uses, or may use, one of these devices or a part of one; empty if there is none.
    An empty UUID stands for a device whose UUID is unknown. Raises AnswerError.
    """
    for pod in await server.items(PODS, fieldSelector=f"spec.nodeName={node},{_LIVE}"):
        if any(map(_is_device, _resources(pod))):
            return f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
    sought = frozenset(uuids)
    named = {
        (spec["driver"], spec["pool"]["name"], device["name"])
        for spec in (one["spec"] for one in await server.items(SLICES, fieldSelector=f"spec.nodeName={node}"))
        for device in spec.get("devices") or ()
        if "" in sought or not sought.isdisjoint(_uuids(device))
    }
    for claim in await server.items(CLAIMS) if named else ():
        if claim.get("status", {}).get("reservedFor") and not named.isdisjoint(_allocated(claim)):
            return f"claim {claim['metadata']['namespace']}/{claim['metadata']['name']}"
    return ""


def _uuids(device: Object) -> Iterator[str]:
    """The device's UUID and, for a partition, its parent's. Attribute names may be qualified: `gpu.nvidia.com/uuid`."""
    for name, value in (device.get("attributes") or {}).items():
        if name.rpartition("/")[2] in _NAMES:
            yield value.get("string", "")


def _allocated(claim: Object) -> Iterator[tuple[str, str, str]]:
    devices = (claim["status"].get("allocation") or {}).get("devices") or {}
    return ((one["driver"], one["pool"], one["device"]) for one in devices.get("results") or ())


def _resources(pod: Object) -> Iterator[str]:
    spec = pod["spec"]
    for one in (*spec["containers"], *(spec.get("initContainers") or ())):
        yield from (one.get("resources") or {}).get("limits") or {}


def _is_device(resource: str) -> bool:
    """`nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.10gb`, `amd.com/gpu`, `volcano.sh/vgpu-number`."""
    _, slash, name = resource.partition("/")
    return bool(slash) and name.startswith(("gpu", "mig-", "vgpu"))


def is_blocking_node_removal(pod: Object) -> bool:
    """Whether a pod prevents the release of its node.
    True for a running pod outside of DaemonSets that has a device, a disruption veto or no controller, or is an engine.
    """
    metadata: dict[str, Any] = pod["metadata"]
    notes: Mapping[str, str] = metadata.get("annotations") or {}
    owners = {one.get("kind") for one in metadata.get("ownerReferences") or () if one.get("controller")}
    if pod.get("status", {}).get("phase") in ENDED or "DaemonSet" in owners or "Node" in owners or MIRROR in notes:
        return False
    minds = notes.get(DO_NOT_DISRUPT, "false") != "false" or notes.get(SAFE_TO_EVICT) == "false"
    return not owners or minds or is_live_engine_pod(pod) or _has_device(pod["spec"])


def is_live_engine_pod(pod: Object) -> bool:
    """Whether the pod is an engine's and has not terminated."""
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    ended = pod.get("status", {}).get("phase") in ENDED
    return not ended and labels.get(MANAGED_BY) == order_annotations.WRITER and f"{OURS}intent" in labels


def _has_device(spec: Object) -> bool:
    asked = (one.get("resources") or {} for one in (*spec["containers"], *(spec.get("initContainers") or ())))
    limits = (name for one in asked for name in one.get("limits") or {})
    return bool(spec.get("resourceClaims")) or any("/" in name for name in limits)
