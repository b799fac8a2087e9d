"""Names in Kubernetes objects that several packages read or write. Pure.

A name that only one package uses is defined there. The prefix of our own labels and annotations is in
`autoscaler.spec.pod`, because the validation of documents uses it.
"""

from __future__ import annotations

WRITER = "pilotlight"
"""Field manager (KEP-555), `managed-by` value, Event reporter, and the first word of our User-Agent."""
NODES = "/api/v1/nodes"
NODE_POOL = "karpenter.sh/nodepool"
"""Label of nodes that Karpenter added and may remove."""
TEMPLATE_HASH = "pod-template-hash"
"""Label of a Deployment's ReplicaSets and their pods."""
ENDED = frozenset(("Succeeded", "Failed"))
"""Phases of a pod whose containers have all ended."""
CRASHES = "CrashLoopBackOff"
"""Waiting reason of a container that its kubelet restarts repeatedly."""
