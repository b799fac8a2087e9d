"""Labels that may appear on a node later, and taints that keep Models off nodes. Pure.

Labels: a new device or node brings labels that are not known in advance. A selector on a label in these lists may be
met by offered capacity; a selector on any other unknown label is not. The lists contain no labels that distinguish
kinds or groups of nodes (machine type, pool, product). With those, each node that could be ordered would count as a
match, and nodes without a match would be ordered again and again. The Settings or the pool must declare those labels.

Taints: owns the matching of taints, with the rules of Kubernetes (an empty effect matches any effect, `Exists` without
a key matches all taints). Only NoSchedule and NoExecute keep pods off a node. Taints change while a node starts, so a
Model that a taint keeps off waits; it does not count as unplaceable. One kind of other taint is read too: autoscalers
mark unneeded nodes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from autoscaler.spec.pod import Pod, Toleration


class PendingLabels(Enum):
    """The kind of change that a node waits for. It determines which labels may appear."""

    NOTHING = ""
    DEVICES = "devices"
    NODE = "node"
    """The node itself is added."""


MAKERS: Final = (
    "nvidia.com", "amd.com", "intel.com", "habana.ai", "huawei.com", "hygon.com", "metax-tech.com", "enflame.com",
    "kunlunxin.com", "vastaitech.com", "birentech.com", "cambricon.com", "mthreads.com", "iluvatar.ai",
    "aws.amazon.com",
)  # fmt: skip
"""Domains, including subdomains, of labels by which drivers and discovery describe the devices of a node."""
FEATURES: Final = "feature.node.kubernetes.io"
"""The domain of labels of node feature discovery."""
OF_DEVICES: Final = frozenset({"node.kubernetes.io/npu.chip.name"})
TOPOLOGY: Final = ("topology.", "failure-domain.beta.kubernetes.io")
"""Prefixes of the domains of topology labels."""
MACHINES: Final = frozenset(f"{beta}kubernetes.io/{of}" for beta in ("", "beta.") for of in ("os", "arch"))
OF_NODES: Final = MACHINES | {"nvidia.com/gpu.present"}
"""Labels that kubelets and drivers set on nearly every node."""


def can_label_appear(key: str, coming: PendingLabels) -> bool:
    """Return whether a node without this label may get it."""
    domain, slash, _ = key.rpartition("/")
    if coming is PendingLabels.NOTHING or not slash:
        return False
    if coming is PendingLabels.NODE:
        return key in OF_NODES or domain.startswith(TOPOLOGY) or _is_within(domain, FEATURES)
    return key in OF_DEVICES or any(_is_within(domain, one) for one in (*MAKERS, FEATURES))


def filter_provisioning_labels(selector: Mapping[str, str]) -> dict[str, str]:
    """Return the labels by which any node autoscaler can select a node: topology and machine labels.
    A new node with another value of these would be useless, and another node would be ordered after it.
    """
    return {key: of for key, of in selector.items() if key in MACHINES or key.rpartition("/")[0].startswith(TOPOLOGY)}


def _is_within(domain: str, of: str) -> bool:
    return domain == of or domain.endswith(f".{of}")


UNNEEDED = frozenset({"DeletionCandidateOfClusterAutoscaler"})
"""Taints of nodes that will be removed if they stay unneeded. A taint is removed when a pod needs its node."""


class Taint(NamedTuple):
    """A taint of a node."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class NodeBackoff(NamedTuple):
    """A period in which a Model is not placed on a node because its pod was not scheduled.
    See `autoscaler.queries.unschedulable_replicas`.
    """

    until_s: float
    times: int
    """The number of consecutive back-offs."""


def merge_tolerations(defaults: Pod | None, own: Pod) -> tuple[Toleration, ...]:
    """Return the tolerations of the Settings and the Model together."""
    return own.tolerations if defaults is None else (*defaults.tolerations, *own.tolerations)


def find_untolerated_taint(taints: Iterable[Taint], tolerated: Sequence[Toleration]) -> Taint | None:
    """Return the first taint that keeps off a pod with these tolerations; None: there is no such taint."""
    hard = (taint for taint in taints if taint.effect != "PreferNoSchedule")
    return next((taint for taint in hard if not any(_covers(one, taint) for one in tolerated)), None)


def _covers(one: Toleration, taint: Taint) -> bool:
    if one.effect is not None and one.effect != taint.effect:
        return False
    if one.key and one.key != taint.key:
        return False
    return one.operator == "Exists" or (bool(one.key) and (one.value or "") == taint.value)
