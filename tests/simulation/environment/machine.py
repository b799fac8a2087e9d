"""The machine that engines run on, in virtual time: they start slowly, serve, die, and outlive the autoscaler.

Holds the true state that the `World` only assumes. A FakeMachine, whose driver fulfils the contract of all drivers,
keeps the engines and their states; this module adds the seed's decisions and the requests on each engine.
"""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple, Protocol

from autoscaler.contract import ReplicaId
from autoscaler.spec.model import Model
from autoscaler.state.world import DeviceId, NodeId, Replica, Slice, SliceId
from gateway.dispatch.call import Call
from tests.support.fakes.driver import FakeEngine, FakeMachine, Fate


class Manners(NamedTuple):
    """Timing and failure behaviour of engines."""

    start_s: tuple[float, float] = (0.2, 2.0)
    first_byte_share: float = 0.3
    serve_s: tuple[float, float] = (0.05, 1.0)
    dies_at_start: float = 0.0
    stop_s: tuple[float, float] = (0.005, 0.05)


QUICK = Manners()


class Owner(Protocol):
    """The sender of a request to an engine (a gateway)."""

    def first_byte(self, call: Call) -> None:
        """The commit point."""

    def done(self, call: Call) -> None:
        """The response is complete."""

    def broke(self, call: Call, reason: str) -> None:
        """The engine refused the connection (`connect`) or closed it (`reset`)."""


class Served(NamedTuple):
    """One request on an engine."""

    call: Call
    owner: Owner
    timers: tuple[asyncio.TimerHandle, ...]
    """Timers of its first and its last byte; none on a mute engine."""


class Machine(FakeMachine):
    """All engines of one installation, and the requests on them."""

    def __init__(self, rng: random.Random, slices: tuple[Slice, ...], manners: Manners) -> None:
        super().__init__(asyncio.get_running_loop(), slices, self._draw)
        self._rng = rng
        self.manners = manners
        self.calls: dict[ReplicaId, dict[str, Served]] = {}
        self.killed: set[ReplicaId] = set()
        """Replicas that were killed by an injected fault."""
        self.mute: set[ReplicaId] = set()
        """Engines that accept requests and send nothing."""
        self._at: dict[str, ReplicaId] = {}

    def kill(self, replica: ReplicaId) -> None:
        """Kill a replica by a fault."""
        self.killed.add(replica)
        super().kill(replica)

    def _draw(self, replica: Replica, model: Model) -> Fate:
        """Draw the fate of a start."""
        del replica, model
        rng, manners = self._rng, self.manners
        start_s = rng.uniform(*manners.start_s)
        dies_s = start_s * rng.random() if rng.random() < manners.dies_at_start else None
        return Fate(
            ready_after_s=start_s,
            dies_after_s=dies_s,
            stops_in_s=rng.uniform(*manners.stop_s),
            clean_after_s=rng.uniform(*manners.stop_s),
        )

    def changed(self, engine: FakeEngine, what: str) -> None:
        """Update the requests: those on an engine that ends break."""
        id = engine.replica.id
        if what == "start":
            self.calls[id] = {}
            self._at[engine.address] = id
        super().changed(engine, what)
        if not engine.alive:
            self._at.pop(engine.address, None)
            for served in self.calls.pop(id, {}).values():
                for timer in served.timers:
                    timer.cancel()
                served.owner.broke(served.call, "reset")

    def call(self, address: str, call: Call, owner: Owner) -> None:
        """A connection arrives at an engine."""
        engine = self.engines.get(self._at.get(address, ReplicaId("")))
        if engine is None or not engine.ready:
            owner.broke(call, "connect")
            return
        if engine.replica.id in self.mute:
            self.calls[engine.replica.id][call.id] = Served(call, owner, ())
            return
        later = asyncio.get_running_loop().call_later
        serve_s = self._rng.uniform(*self.manners.serve_s)
        first = later(serve_s * self.manners.first_byte_share, owner.first_byte, call)
        last = later(serve_s, self._answered, engine.replica.id, call)
        self.calls[engine.replica.id][call.id] = Served(call, owner, (first, last))

    def abort(self, address: str, call: Call) -> None:
        """The gateway closed the connection."""
        served = self.calls.get(self._at.get(address, ReplicaId("")), {}).pop(call.id, None)
        if served is not None:
            for timer in served.timers:
                timer.cancel()

    def _answered(self, id: ReplicaId, call: Call) -> None:
        self.calls[id].pop(call.id).owner.done(call)


def one_device(memory_bytes: int, name: str = "gpu0") -> Slice:
    """A shared Slice that covers a whole Device."""
    return Slice(id=SliceId(name), device=DeviceId(name), node=NodeId("local"), memory_bytes=memory_bytes)
