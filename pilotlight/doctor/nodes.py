"""Checks the GPUs of Node objects: device plug-in, labels, taints, sharing, MPS. Pure.

Knows the relevant labels and taints (NVIDIA's device plug-in and GPU feature discovery) and the fix for each problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autoscaler.slicing import nvidia_device_plugin as shared
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.spec.pod import GPU
from autoscaler.state.world import NodeId
from autoscaler.text import format_count
from pilotlight.doctor.finding import Finding
from pilotlight.safe_output import list_names

NVIDIA = "nvidia.com/"
PRODUCT, MEMORY, MPS_CAPABLE = shared.PRODUCT, shared.MEMORY_MIB, NVIDIA + "mps.capable"
UNKNOWN = "unknown"
NAMES = {shared.TIMESLICE: "time-slicing"}
TOLERATED = frozenset({GPU})
"""Taints that engine pods tolerate by default."""
NAMES_MAX = 5

Node = dict[str, Any]


def check_gpu_nodes(nodes: Sequence[Node], *, dra: bool) -> list[Finding]:
    """Return all findings about a cluster's nodes."""
    with_gpus = [node for node in nodes if count_gpus(node)]
    if not with_gpus:
        says = f"none of {format_count(len(nodes), 'node')} offers {GPU}"
        if dra:
            says += "; devices of DRA drivers are not included"
        fix = "install the NVIDIA GPU operator, or its device plug-in and GPU feature discovery"
        return [Finding("GPUs", "warning", says, fix)]
    total = sum(count_gpus(node) for node in with_gpus)
    found = [Finding("GPUs", "ok", f"{total} on {format_count(len(with_gpus), 'node')}")]
    return [
        *found,
        *check_gpu_labels(with_gpus),
        *check_taints(with_gpus),
        *check_sharing(with_gpus),
        *check_mps_daemon(with_gpus),
    ]


def count_gpus(node: Node) -> int:
    """Return how many GPUs, shares of GPUs, or MIG slices a node offers."""
    amounts = _amounts(node)
    mig = sum(shared.parse_number(count) for name, count in amounts.items() if name.startswith(NVIDIA + "mig-"))
    return shared.read_offered_gpus(amounts)[1] + mig


def check_gpu_labels(nodes: Sequence[Node]) -> list[Finding]:
    """Check that labels contain the GPUs' product and memory."""
    bare = [_name(node) for node in nodes if not {PRODUCT, MEMORY} <= _labels(node).keys()]
    if not bare:
        return [Finding("GPU labels", "ok", f"all nodes have {PRODUCT} and {MEMORY}")]
    says = f"{_some(bare)} lacks the labels {PRODUCT} and {MEMORY}, so most Models are not placed there"
    fix = "install GPU feature discovery, or describe these nodes in Settings `nodes`"
    return [Finding("GPU labels", "warning", says, fix)]


def check_taints(nodes: Sequence[Node]) -> list[Finding]:
    """Check for taints of GPU nodes that engine pods do not tolerate."""
    kept: dict[str, list[str]] = {}
    for node in nodes:
        for taint in node["spec"].get("taints") or []:
            key = str(taint["key"])
            if taint["effect"] == "PreferNoSchedule" or key in TOLERATED or key.startswith("node.kubernetes.io/"):
                continue
            kept.setdefault(f"{key}:{taint['effect']}", []).append(_name(node))
    return [
        Finding(
            "taints", "warning", f"engine pods do not tolerate {taint} on {_some(names)}",
            f"add to `pod.tolerations` of a Model or of Settings: {{key: {taint.partition(':')[0]}, operator: Exists}}",
        )
        for taint, names in sorted(kept.items())
    ] or [Finding("taints", "ok", "engine pods tolerate all taints")]  # fmt: skip


def check_sharing(nodes: Sequence[Node]) -> list[Finding]:
    """Report how GPUs are shared, with the number of nodes."""
    kinds = Counter(read_sharing_kind(node) for node in nodes)
    counts = ", ".join(f"{name} on {format_count(count, 'node')}" for name, count in sorted(kinds.items()))
    unlabelled = [_name(node) for node in nodes if read_sharing_kind(node) == UNKNOWN]
    if unlabelled:
        fix = "install GPU feature discovery, or set `slicing` in Settings `nodes`; until then nothing is placed there"
        says = f"{counts}: the labels of {_some(unlabelled)} do not describe how GPUs are shared"
        return [Finding("sharing", "warning", says, fix)]
    return [Finding("sharing", "ok", counts)]


def read_sharing_kind(node: Node) -> str:
    """Return whole, time-slicing, mps or mig according to the labels, or UNKNOWN if they do not state it."""
    amounts = _amounts(node)
    if any(name.startswith(NVIDIA + "mig-") for name in amounts):
        return "mig"
    found = shared.read_gpus(NodeFacts(NodeId(_name(node)), _labels(node), allocatable=amounts))
    if found is None or found.sharing is None:
        return UNKNOWN
    return NAMES.get(found.sharing.kind, found.sharing.kind)


def check_mps_daemon(nodes: Sequence[Node]) -> list[Finding]:
    """Check that the MPS daemon runs on nodes that share GPUs by MPS."""
    without = [_name(n) for n in nodes if read_sharing_kind(n) == "mps" and _labels(n).get(MPS_CAPABLE) != "true"]
    if not without:
        return []
    says = f"the MPS daemon does not run on {_some(without)}, where GPUs are shared by MPS"
    return [Finding("MPS daemon", "warning", says, "check the DaemonSet of the MPS control daemon on these nodes")]


def _amounts(node: Node) -> dict[str, str]:
    return dict(node.get("status", {}).get("allocatable", {}))


def _labels(node: Node) -> dict[str, str]:
    return node["metadata"].get("labels") or {}


def _name(node: Node) -> str:
    return str(node["metadata"]["name"])


def _some(names: Iterable[str]) -> str:
    return list_names(sorted(names), NAMES_MAX)
