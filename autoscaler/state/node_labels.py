"""Labels that nobody can tell ahead: those that a node may come to have beside what is known of it.

Owns the two lists, by which the rulings about what is only on offer go: a selector by one of these may be met, one by
any other label that is not told is not. Nothing is here that tells kinds of nodes or their groups apart (a type of
machine, a pool, a product): what is bought would be any, and be bought again. Those the Settings or the pool tell.

What keeps Models off nodes for a while: taints that a pod minds, and what a scheduler said lately. Pure.

Owns the matching of taints, which is Kubernetes' own (an empty effect is any, `Exists` without a key is all). Only
those that keep pods away count: NoSchedule and NoExecute. They come and go with the start of a node, so to be kept away
is to wait, and not never to fit. Of those that do not, one kind is read all the same: who removes nodes says by them
which it finds unneeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from autoscaler.spec.pod import Pod, Toleration


class PendingLabels(Enum):
    """What comes to a node, and labels with it."""

    NOTHING = ""
    DEVICES = "devices"
    NODE = "node"
    """It comes itself."""


MAKERS: Final = (
    "nvidia.com", "amd.com", "intel.com", "habana.ai", "huawei.com", "hygon.com", "metax-tech.com", "enflame.com",
    "kunlunxin.com", "vastaitech.com", "birentech.com", "cambricon.com", "mthreads.com", "iluvatar.ai",
    "aws.amazon.com",
)  # fmt: skip
"""Domains, and those within, of labels by which drivers and discovery tell what Devices a node has."""
FEATURES: Final = "feature.node.kubernetes.io"
"""The same of node feature discovery."""
OF_DEVICES: Final = frozenset({"node.kubernetes.io/npu.chip.name"})
TOPOLOGY: Final = ("topology.", "failure-domain.beta.kubernetes.io")
"""Domains of labels that tell where a node is begin so."""
MACHINES: Final = frozenset(f"{beta}kubernetes.io/{of}" for beta in ("", "beta.") for of in ("os", "arch"))
OF_NODES: Final = MACHINES | {"nvidia.com/gpu.present"}
"""Kubelets and drivers set them on nearly every node."""


def can_label_appear(key: str, coming: PendingLabels) -> bool:
    """Whether a node of which this label is not told may have it then."""
    domain, slash, _ = key.rpartition("/")
    if coming is PendingLabels.NOTHING or not slash:
        return False
    if coming is PendingLabels.NODE:
        return key in OF_NODES or domain.startswith(TOPOLOGY) or _is_within(domain, FEATURES)
    return key in OF_DEVICES or any(_is_within(domain, one) for one in (*MAKERS, FEATURES))


def filter_provisioning_labels(selector: Mapping[str, str]) -> dict[str, str]:
    """Of these labels those by which who adds a node can choose one, as all know them: where it is, and what machine.
    A node that has another of them would be of no use, and another be ordered after it.
    """
    return {key: of for key, of in selector.items() if key in MACHINES or key.rpartition("/")[0].startswith(TOPOLOGY)}


def _is_within(domain: str, of: str) -> bool:
    return domain == of or domain.endswith(f".{of}")


UNNEEDED = frozenset({"DeletionCandidateOfClusterAutoscaler"})
"""Taints of nodes that would be removed if nothing changes. They go again when somebody needs the node."""


class Taint(NamedTuple):
    """Of a node."""

    key: str
    value: str
    effect: str

    @property
    def keeps_away(self) -> bool:
        """Whether pods that do not tolerate it are kept off."""
        return self.effect != "PreferNoSchedule"

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class NodeBackoff(NamedTuple):
    """A Model is not placed on a node for a while: its Replica was kept off it (`autoscaler.queries.stranded_pods`)."""

    until_s: float
    times: int
    """In a row."""


def merge_tolerations(defaults: Pod | None, own: Pod) -> tuple[Toleration, ...]:
    """What the Settings and a Model say, together: lists of both are laid over a pod."""
    return own.tolerations if defaults is None else (*defaults.tolerations, *own.tolerations)


def find_untolerated_taint(taints: Iterable[Taint], tolerated: Sequence[Toleration]) -> Taint | None:
    """The first that keeps away who tolerates that; None: none does."""
    hard = (taint for taint in taints if taint.keeps_away)
    return next((taint for taint in hard if not any(_covers(one, taint) for one in tolerated)), None)


def _covers(one: Toleration, taint: Taint) -> bool:
    if one.effect is not None and one.effect != taint.effect:
        return False
    if one.key and one.key != taint.key:
        return False
    return one.operator == "Exists" or (bool(one.key) and (one.value or "") == taint.value)
