"""Nodes whose GPUs we may cut anew (MIG), as the World keeps them, and the observations that bring them there.

Owns these types only. What follows from them is `autoscaler.rearrange.mig_repartition`'s, how they get into the World
is `autoscaler.fold.mig`'s. Moments are seconds of the World's monotonic clock.
"""

from __future__ import annotations

from autoscaler.state.node_labels import Taint
from autoscaler.state.operator_orders import StateRecord

SUCCESS, FAILED = "success", "failed"
"""What NVIDIA's mig-manager says of a node when it is done; all else means that it is not, or does not run."""


class CutOrder(StateRecord, frozen=True):
    """How the GPUs of a node are to be cut."""

    node: str
    config: str
    """What it is called: made of what is in it, and unlike what the node was told before."""
    cuts: tuple[tuple[str, ...], ...]
    """Of each GPU, by its index: the profiles on it."""
    tries: int = 1
    """How many orders about the node this makes in a row, those before it having failed."""
    asked_s: float = 0.0
    before: str = ""
    """What the node was told when this was decided: is it another by then, somebody else cuts it."""


class MigNode(StateRecord, frozen=True):
    """One node of which Settings say that we may cut it, as its object shows it."""

    name: str
    product: str
    gpus: int
    config: str = ""
    """What it was told last, by whomever."""
    state: str = ""
    """What is said of that; empty: nobody says anything."""
    strategy: str = ""
    """How its device plug-in shows cuts; `single`: all of a node must be alike."""
    usable: bool = True
    """Ready, and open to new pods."""
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    order: CutOrder | None = None
    """The last one of ours, as long as `config` is its."""


class Intent(StateRecord, frozen=True):
    """An order of this leader that its node does not show yet."""

    order: CutOrder
    since_s: float
    refused: str = ""
    """Why it was not given after all; empty: it is on its way."""
    again_s: float = 0.0
    """Refused: no other is given to the node before."""


# --- observations -----------------------------------------------------------------------------------------------------


class CuttableSeen(StateRecord, frozen=True):
    """All nodes that we may cut, as they are now."""

    nodes: tuple[MigNode, ...]


class CutRefused(StateRecord, frozen=True):
    """An order was not given: the node was not as it was thought to be, or could not be told."""

    node: str
    reason: str
