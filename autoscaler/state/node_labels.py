"""Labels that nobody can tell ahead: those that a node may come to have beside what is known of it.

Owns the two lists, by which the rulings about what is only on offer go: a selector by one of these may be met, one by
any other label that is not told is not. Nothing is here that tells kinds of nodes or their groups apart (a type of
machine, a pool, a product): what is bought would be any, and be bought again. Those the Settings or the pool tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Coming(Enum):
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


def may_come(key: str, coming: Coming) -> bool:
    """Whether a node of which this label is not told may have it then."""
    domain, slash, _ = key.rpartition("/")
    if coming is Coming.NOTHING or not slash:
        return False
    if coming is Coming.NODE:
        return key in OF_NODES or domain.startswith(TOPOLOGY) or _is_within(domain, FEATURES)
    return key in OF_DEVICES or any(_is_within(domain, one) for one in (*MAKERS, FEATURES))


def asked_for(selector: Mapping[str, str]) -> dict[str, str]:
    """Of these labels those by which who adds a node can choose one, as all know them: where it is, and what machine.
    A node that has another of them would be of no use, and another be ordered after it.
    """
    return {key: of for key, of in selector.items() if key in MACHINES or key.rpartition("/")[0].startswith(TOPOLOGY)}


def _is_within(domain: str, of: str) -> bool:
    return domain == of or domain.endswith(f".{of}")
