"""What operators order and agents of nodes say, as the World keeps it, and the observations that bring it there.

Owns these types only. What an order means is `autoscaler.queries.cordons`'; how it gets into the World is
`autoscaler.fold.operator_orders`'. Moments are seconds of the World's monotonic clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from autoscaler.contract import ModelName, NodeReport, PodDevices


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all of it."""


class CordonTarget(NamedTuple):
    """A Device or a node, as an operator names it."""

    kind: Literal["device", "node"]
    name: str


class Cordon(StateRecord, frozen=True):
    """An operator's order about a Place: nothing new is put there. It holds until it is lifted, also over a restart."""

    place: CordonTarget
    node: str
    """Where the Place is."""
    since_s: float
    drain: bool = False
    """What runs there moves away, too."""
    force: bool = False
    """It does not wait for a Replica elsewhere, nor long for Calls."""
    why: str = ""
    """Not an operator's: the Place is taken away (`autoscaler.capacity.interruptions`); why, in words."""
    soon: bool = False
    """That is under way: there is a little time for a successor, and no more."""
    at_once: bool = False
    """It does not wait for a Replica elsewhere, but for Calls."""


class StopOrder(StateRecord, frozen=True):
    """An operator stopped a Model. It holds until the Replicas that were there stop; then Calls wake it again."""

    since_s: float
    force: bool = False


class NodeAgentStatus(StateRecord, frozen=True):
    """What the agent of a node last said."""

    report: NodeReport
    seen_s: float
    boots_before: tuple[str, ...] = ()
    """Of its agents before, newest last, at most 8: what still comes from them is ignored."""
    looked_s: float = 0.0
    """When the agent looked."""
    pods_before: tuple[PodDevices, ...] = ()
    """Pods that are not in the report any more, and what they had, newest last (`autoscaler.fold.operator_orders`)."""

    unhealthy: tuple[str, ...] = ()
    """Derived from `report`: its Devices that are."""


# --- observations -----------------------------------------------------------------------------------------------------


class CordonsSeen(StateRecord, frozen=True):
    """All orders about Places, as they are now."""

    cordons: tuple[Cordon, ...]


class ModelWoken(StateRecord, frozen=True):
    """An operator wants a Replica of the Model, as if a Call had been refused because it is cold."""

    model: ModelName


class ModelStopped(StateRecord, frozen=True):
    """An operator wants all Replicas of the Model gone. `force`: those with Calls, too, after a short while."""

    model: ModelName
    force: bool = False


class NodeReported(StateRecord, frozen=True):
    """The agent of a node reported."""

    report: NodeReport
