"""Nodes whose GPUs can be repartitioned (MIG), as the `World` keeps them, and the observations about them.

Owns the types only. `autoscaler.rearrange.mig_repartition` decides, `autoscaler.fold.mig` folds the observations. Times
are in seconds of the `World`'s monotonic clock.
"""

from __future__ import annotations

from autoscaler.state import StateRecord
from autoscaler.state.node_labels_and_taints import Taint

SUCCESS, FAILED = "success", "failed"
"""The states that NVIDIA's mig-manager reports at the end. Any other value: it has not finished, or it does not run."""


class CutOrder(StateRecord, frozen=True):
    """An order to repartition the GPUs of a node."""

    node: str
    config: str
    """The name of the configuration. It is derived from the content and differs from the node's previous one."""
    cuts: tuple[tuple[str, ...], ...]
    """For each GPU, by index: the MIG profiles on it."""
    tries: int = 1
    """The number of consecutive orders for the node including this one, if the earlier ones failed."""
    asked_s: float = 0.0
    before: str = ""
    """The node's configuration at the time of the decision. If it has changed, another program repartitions it."""


class MigNode(StateRecord, frozen=True):
    """A node that Settings allow to be repartitioned, as its object shows it."""

    name: str
    product: str
    gpus: int
    config: str = ""
    """The last configuration that any program requested."""
    state: str = ""
    """The reported state of that configuration. Empty: none is reported."""
    strategy: str = ""
    """How the device plug-in exposes MIG devices. `single`: all partitions of a node must be equal."""
    usable: bool = True
    """Whether the node is ready and schedulable."""
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    order: CutOrder | None = None
    """The last order of this installation. None: `config` is not the configuration that it requested."""


class Intent(StateRecord, frozen=True):
    """An order of this leader that the node's object does not reflect yet."""

    order: CutOrder
    since_s: float
    refused: str = ""
    """Why the order was not executed. Empty: it is in progress."""
    again_s: float = 0.0
    """After a rejected order, the earliest time of the next order for the node."""


# --- observations -----------------------------------------------------------------------------------------------------


class CuttableSeen(StateRecord, frozen=True):
    """All nodes that can be repartitioned."""

    nodes: tuple[MigNode, ...]


class CutRefused(StateRecord, frozen=True):
    """An order was not executed: the node was in another state than expected, or its update failed."""

    node: str
    reason: str
