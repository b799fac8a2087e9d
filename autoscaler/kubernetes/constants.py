"""Words that stand in objects of a cluster, where several rooms read or write them: Kubernetes' own and one of ours.

Owns their spelling and nothing else; a word that only one room needs stands there, and what begins our own labels and
annotations in `autoscaler.spec.pod`, which documents are checked by. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

WRITER = "pilotlight"
"""Who wrote a field (KEP-555), made a pod or reports an Event: also the first word of our User-Agent."""
NODES = "/api/v1/nodes"
NODE_POOL = "karpenter.sh/nodepool"
"""The label of nodes that Karpenter added, and may take."""
TEMPLATE_HASH = "pod-template-hash"
"""The label that a Deployment's ReplicaSets and their pods have."""
ENDED = frozenset(("Succeeded", "Failed"))
"""Phases of a pod of which only its object is left."""
CRASHES = "CrashLoopBackOff"
"""Why a container waits that its kubelet starts again and again."""


class ConfigMapLocation(NamedTuple):
    """Where a ConfigMap may be."""

    namespace: str
    name: str
    by_label_only: bool = False

    @property
    def query(self) -> dict[str, str]:
        """Selects it, and no other: a right to it by its name is enough."""
        return {"fieldSelector": f"metadata.name={self.name}"}


PLACES = (
    ConfigMapLocation("kube-system", "nvidia-device-plugin"),
    ConfigMapLocation("gpu-operator", "time-slicing-config", by_label_only=True),
    ConfigMapLocation("gpu-operator", "time-slicing-config-all", by_label_only=True),
)
"""The plug-in's own, and those of the GPU operator's documentation. The first that has a node's key counts."""
