"""The interface between decisions and whatever runs replicas. `tests/contracts/driver.py` tests every driver.

A driver starts and stops replicas as ordered and reports what it observes; it makes no decisions. It is idempotent:
starting an intent that exists succeeds, and so does stopping what is gone. Its reports are level-triggered: the same
state may be reported twice, and a new leader adopts replicas by receiving all reports again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from autoscaler.agent_contract import Laid
from autoscaler.queries.granted_memory import AS_ASKED, Given
from autoscaler.spec.model import Model
from autoscaler.state.events import FaultSeen, HostsSeen, ImagesSeen, ReplicaSeen, SlicesSeen, Synced
from autoscaler.state.mig import CutOrder
from autoscaler.state.pending_claims import AwaitedSeen
from autoscaler.state.world import ClusterFacts, Cordon, CordonTarget, Replica

Observation = ReplicaSeen | FaultSeen | HostsSeen | ImagesSeen | SlicesSeen | AwaitedSeen | Synced
Observe = Callable[[tuple[Observation, ...]], None]
"""Receives a driver's observations. Never blocks."""


class Launch(Protocol):
    """How to start an engine, as built by `autoscaler.engines` from a model and an address. Drivers execute it."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The program, found on PATH, and its arguments."""

    @property
    def env(self) -> Mapping[str, str]:
        """Variables added to the inherited environment."""

    @property
    def readiness_path(self) -> str:
        """Path on which GET returns 200 if and only if requests may be sent."""


class Launcher(Protocol):
    """(model, host, port) -> `Launch`. An exception is a failed start, with its message as the reason."""

    def __call__(self, model: Model, host: str, port: int, given: Given = AS_ASKED, /) -> Launch:
        """Build the launch. `given`: the resources granted to the engine."""


class WeightsHandle(Protocol):
    """A model's weights on this node; they are kept until every holder has released them."""

    @property
    def model(self) -> Model:
        """The requesting model, with local `file://` paths as its artifact and its adapters' artifacts."""

    @property
    def lease_fds(self) -> tuple[int, ...]:
        """A process that holds these files open uses the weights; an engine inherits them."""

    def close(self) -> None:
        """Release the weights."""


class Supply(Protocol):
    """Fetches weights from registries onto this node."""

    def __call__(self, model: Model, report: Callable[[str], None], /) -> Awaitable[WeightsHandle] | None:
        """Return None if the weights are present or the engine fetches them itself. `report` receives progress texts.

        An exception from the awaitable is a failed start, with its message as the reason. It may be cancelled.
        """


class NodeSupply(Protocol):
    """Orders weights to be fetched from registries onto the node of a replica."""

    def __call__(self, replica: Replica, model: Model, report: Callable[[str], None], /) -> Awaitable[Laid] | None:
        """Fetch the weights, as in `Supply`."""

    def brings(self, model: Model, /) -> Collection[str]:
        """Return the model's parts (`autoscaler.agent_contract.OWN`, adapters) that a call would have to wait for."""

    def obstacle(self, model: Model, /) -> str:
        """Return why no node could get the weights; empty if no obstacle is known."""

    def mounting(self) -> ClusterFacts:
        """Return the facts that decide how pods mount the weights."""


class Driver(Protocol):
    """The driver interface of the control loop. `start` and `stop` return at once; their results are observed."""

    async def run(self, observe: Observe) -> None:
        """Observe until cancelled: first everything that exists (adopted), then `Synced`, then changes."""

    def obstacle(self, model: Model) -> str:
        """Return why a start of the model would certainly fail now, and what to do; empty if no obstacle is visible.
        Fast, because it is called before any replica is evicted for the start. It starts nothing and may be called from
        any thread.
        """

    def start(self, replica: Replica, model: Model) -> None:
        """Start the replica's engine. A failed start is observed as EXITED with a reason, then CLEAN."""

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Stop the replica. It is observed as CLEAN, with a proof, when no process and no device memory is left."""


class SharedDriver(Driver, Protocol):
    """A driver for state that several processes observe. One of them leads; only the leader issues orders."""

    def lead(self) -> None:
        """Become the leader: report everything that exists again, ending with `Synced`."""

    async def follow(self) -> None:
        """Stop leading. Returns when no order is in progress any more."""


class Cutter(Protocol):
    """Repartitions the GPUs of nodes. Reports eligible nodes and the results of orders as observations."""

    def cut(self, order: CutOrder) -> None:
        """Submit the order and return at once.
        If the node is in use or has changed since the decision, the order is observed as refused.
        """


class CordonError(Exception):
    """An order about a target could not be stored and is not in force. `str()` gives the reason, for people."""


class Cordons(Protocol):
    """Stores operators' cordons so that they survive a restart of this process. Stored cordons are observed."""

    async def put(self, cordon: Cordon) -> None:
        """Store the cordon, replacing any for the same target. Raises `CordonError`."""

    async def lift(self, place: CordonTarget) -> None:
        """Remove the cordon of the target, if there is one. Raises `CordonError`."""
