"""Orders of operators and reports of node agents, as the World keeps them, and the observations about them.

Owns the types only. `autoscaler.queries.operator_orders` interprets orders; `autoscaler.fold.operator_orders` folds the
observations. Times are in seconds of the World's monotonic clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from autoscaler.contract import ModelName, NodeReport, PodDevices


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base of records in the World's state."""


class CordonTarget(NamedTuple):
    """A device or a node, as an operator names it."""

    kind: Literal["device", "node"]
    name: str


class Cordon(StateRecord, frozen=True):
    """An operator's order: nothing new is placed on a device or node until it is removed, also after a restart."""

    place: CordonTarget
    node: str
    """The node of the target."""
    since_s: float
    drain: bool = False
    """Whether running replicas are moved away, too."""
    force: bool = False
    """Whether to stop replicas without waiting for a replacement and after a short time for running requests."""
    why: str = ""
    """The reason if the order is not an operator's: the target is interrupted (`autoscaler.capacity.interruptions`)."""
    soon: bool = False
    """Whether the interruption is in progress, with little time left for a replacement."""
    at_once: bool = False
    """Whether to drain without waiting for a replacement; running requests are still awaited."""


class StopOrder(StateRecord, frozen=True):
    """An operator stopped a Model. The order applies until its replicas have stopped; then requests start it again."""

    since_s: float
    force: bool = False


class NodeAgentStatus(StateRecord, frozen=True):
    """The last report of a node's agent."""

    report: NodeReport
    seen_s: float
    boots_before: tuple[str, ...] = ()
    """Boots of earlier agents, newest last, at most 8. Their late reports are ignored."""
    looked_s: float = 0.0
    """When the agent collected the report."""
    pods_before: tuple[PodDevices, ...] = ()
    """Pods no longer in the report, with their devices, newest last (`autoscaler.fold.operator_orders`)."""

    unhealthy: tuple[str, ...] = ()
    """Derived from `report`: the unhealthy devices."""


# --- observations -----------------------------------------------------------------------------------------------------


class CordonsSeen(StateRecord, frozen=True):
    """All current cordons."""

    cordons: tuple[Cordon, ...]


class ModelWoken(StateRecord, frozen=True):
    """An operator starts a Model. It has the effect of a request that was rejected because the Model is cold."""

    model: ModelName


class ModelStopped(StateRecord, frozen=True):
    """An operator stops all replicas of a Model. `force`: replicas with running requests, too, after a short time."""

    model: ModelName
    force: bool = False


class NodeReported(StateRecord, frozen=True):
    """A report of the agent of a node."""

    report: NodeReport
