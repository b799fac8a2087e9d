"""The seam between decisions and whatever runs Replicas. `tests/contracts/driver.py` holds every driver to it.

A driver starts and stops what it is told, and says what it sees; it decides nothing. It is idempotent: starting an
intent that exists is success, stopping what is gone is success. What it reports are levels: the same thing may be said
twice, and saying it again after a restart is how a new leader adopts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from autoscaler.agent_contract import Laid
from autoscaler.queries.memory import AS_ASKED, Given
from autoscaler.spec.model import Model
from autoscaler.state.device_claims import AwaitedSeen
from autoscaler.state.events import FaultSeen, HostsSeen, ImagesSeen, ReplicaSeen, SlicesSeen, Synced
from autoscaler.state.mig import CutOrder
from autoscaler.state.operator_orders import Cordon, CordonTarget
from autoscaler.state.world import ClusterFacts, Replica

Observation = ReplicaSeen | FaultSeen | HostsSeen | ImagesSeen | SlicesSeen | AwaitedSeen | Synced
Observe = Callable[[tuple[Observation, ...]], None]
"""Where a driver puts what it sees. Never blocks."""


class Launch(Protocol):
    """How an engine is started: what `autoscaler.engines` makes of a Model and an address. Drivers carry it out."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The program, found on PATH, and its arguments."""

    @property
    def env(self) -> Mapping[str, str]:
        """Added to the environment of who starts it."""

    @property
    def readiness_path(self) -> str:
        """GET on it answers 200 when, and only when, Calls may be sent."""


class Launcher(Protocol):
    """(Model, host, port) -> Launch. What it raises is a failed start, with its message as the reason."""

    def __call__(self, model: Model, host: str, port: int, given: Given = AS_ASKED, /) -> Launch:
        """`given`: what its engine has of what the document asks for."""


class WeightsHandle(Protocol):
    """A Model's weights on this node; they stay until all who have them in use have let go."""

    @property
    def model(self) -> Model:
        """The Model that asked for them: its artifact, and its adapters', where they lie, as `file://`."""

    @property
    def lease_fds(self) -> tuple[int, ...]:
        """Whoever has these files open has them in use: an engine inherits them."""

    def close(self) -> None:
        """We have them in use no more."""


class Supply(Protocol):
    """Brings weights from registries onto this node."""

    def __call__(self, model: Model, told: Callable[[str], None], /) -> Awaitable[WeightsHandle] | None:
        """None: they are there, or its engine gets them itself. `told` hears now and then how far it is, in words.

        What awaiting it raises is a failed start, with its message as the reason. It may be cancelled.
        """


class NodeSupply(Protocol):
    """Has weights from registries brought to the node that a Replica is placed on."""

    def __call__(self, replica: Replica, model: Model, told: Callable[[str], None], /) -> Awaitable[Laid] | None:
        """As Supply."""

    def brings(self, model: Model, /) -> Collection[str]:
        """Its parts (`autoscaler.agent_contract.OWN`, adapters) for which a call would give something to wait for."""

    def obstacle(self, model: Model, /) -> str:
        """Why no node could have them; empty: nothing is known to stand in the way."""

    def mounting(self) -> ClusterFacts:
        """By what it is chosen how pods see them."""


class Driver(Protocol):
    """What the loop needs of a driver. `start` and `stop` return at once; what came of them is observed."""

    async def run(self, observe: Observe) -> None:
        """Observes until cancelled. First everything that exists (adopted), then Synced, then changes."""

    def obstacle(self, model: Model) -> str:
        """Why a start of the Model would surely fail now, and what to do; empty where a look tells of nothing.

        Cheap: it is asked before anything is displaced. Starts nothing; may be called in any thread.
        """

    def start(self, replica: Replica, model: Model) -> None:
        """Starts the Replica's engine. A start that fails is observed as EXITED with a reason, then CLEAN."""

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Stops it; observed as CLEAN, with a proof, when nothing of it is left."""


class SharedDriver(Driver, Protocol):
    """A driver of what several processes see. One of them leads; the others are told all the same and order nothing."""

    def lead(self) -> None:
        """We lead from now on: all that exists is said again, to a Synced."""

    async def follow(self) -> None:
        """We lead no more: returns when nothing that was ordered is under way."""


class Cutter(Protocol):
    """Who has the GPUs of nodes cut anew. Which nodes may be, and what came of an order, is observed."""

    def cut(self, order: CutOrder) -> None:
        """Gives the order, if the node is as it was thought to be and nobody has anything there; else it is observed as
        refused. Returns at once.
        """


class CordonError(Exception):
    """An order about a Place could not be kept, and is not in force. `str()` says why, for people."""


class Cordons(Protocol):
    """Where operators' orders about Places are kept, so that they outlive this process. What is kept is observed."""

    async def put(self, cordon: Cordon) -> None:
        """Keeps it in the place of one about the same Place. Raises CordonError."""

    async def lift(self, place: CordonTarget) -> None:
        """Forgets the one about a Place; none is fine. Raises CordonError."""
