"""The machine that engines run on, in virtual time: processes start slowly, serve, die, and outlive the autoscaler.

Owns the truth that the World only believes: which processes exist, what they hold, which Calls are on them. The driver
(`SimDriver`) shows it to one autoscaler; a new autoscaler gets a new driver over the same machine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from autoscaler.contract import ReplicaId
from autoscaler.drivers.base import Observe
from autoscaler.model import Model
from autoscaler.world import DeviceId, NodeId, Replica, ReplicaSeen, Seen, Slice, SliceId, SlicesSeen, Synced
from gateway.call import Call


class Manners(NamedTuple):
    """How engines behave."""

    start_s: tuple[float, float] = (0.2, 2.0)
    first_byte_share: float = 0.3
    serve_s: tuple[float, float] = (0.05, 1.0)
    dies_at_start: float = 0.0
    stop_s: tuple[float, float] = (0.005, 0.05)


QUICK = Manners()


class Owner(Protocol):
    """Who sent a Call to an engine (a gateway)."""

    def first_byte(self, call: Call) -> None:
        """The commit point."""

    def done(self, call: Call) -> None:
        """The answer is complete."""

    def broke(self, call: Call, reason: str) -> None:
        """The engine refused the connection (`connect`) or went away (`reset`)."""


class Process:
    """One engine process."""

    def __init__(self, replica: Replica, born_s: float) -> None:
        self.replica = replica
        self.born_s = born_s
        self.ready = False
        self.alive = True
        self.stopping = False
        self.calls: dict[str, tuple[Call, Owner, list[asyncio.TimerHandle]]] = {}

    @property
    def address(self) -> str:
        """As Routes name it."""
        return f"engine/{self.replica.id}"

    def seen(self, seen: Seen, *, reason: str = "", proof: str = "") -> ReplicaSeen:
        """What a driver says of it."""
        r = self.replica
        return ReplicaSeen(
            id=r.id, model=r.model, spec_hash=r.spec_hash, intent=r.intent, slices=r.slices,
            memory_bytes=r.memory_bytes, compute_percent=r.compute_percent, slots=r.slots, seen=seen,
            address=self.address, started_s=self.born_s, reason=reason, proof=proof,
        )  # fmt: skip


class Machine:
    """All processes of one installation."""

    def __init__(self, rng: random.Random, slices: tuple[Slice, ...], manners: Manners) -> None:
        self._rng = rng
        self.slices = slices
        self.manners = manners
        self.processes: dict[ReplicaId, Process] = {}
        self.by_address: dict[str, Process] = {}
        self.starts: list[tuple[float, ReplicaId, str]] = []
        self.observe: Observe | None = None
        self.on_change: Callable[[Process, str], None] = lambda process, what: None

    # --- what the driver is told ---

    def start(self, replica: Replica) -> None:
        """A process for this intent, once."""
        if replica.id in self.processes:
            return
        loop = asyncio.get_running_loop()
        process = Process(replica, loop.time())
        self.processes[replica.id] = self.by_address[process.address] = process
        self.starts.append((loop.time(), replica.id, replica.model))
        self.on_change(process, "start")
        self._say(process.seen(Seen.STARTING))
        delay_s = self._rng.uniform(*self.manners.start_s)
        if self._rng.random() < self.manners.dies_at_start:
            loop.call_later(delay_s * self._rng.random(), self.kill, replica.id, "exit status 1")
        else:
            loop.call_later(delay_s, self._get_ready, process)

    def stop(self, id: ReplicaId) -> None:
        """SIGTERM, and in the end a kill; clean a moment later."""
        process = self.processes.get(id)
        if process is None:
            return
        process.stopping = True
        asyncio.get_running_loop().call_later(self._rng.uniform(*self.manners.stop_s), self._end, process)

    # --- what happens ---

    def kill(self, id: ReplicaId, reason: str = "killed by SIGKILL") -> None:
        """The process dies of itself; the driver sees it, and a moment later that nothing is left."""
        process = self.processes.get(id)
        if process is None or not process.alive:
            return
        self._break(process, "kill")
        self._say(process.seen(Seen.EXITED, reason=reason))
        asyncio.get_running_loop().call_later(self._rng.uniform(*self.manners.stop_s), self._end, process)

    def call(self, address: str, call: Call, owner: Owner) -> None:
        """A connection arrives at the engine."""
        process = self.by_address.get(address)
        if process is None or not process.alive or not process.ready:
            owner.broke(call, "connect")
            return
        loop = asyncio.get_running_loop()
        serve_s = self._rng.uniform(*self.manners.serve_s)
        first = loop.call_later(serve_s * self.manners.first_byte_share, owner.first_byte, call)
        process.calls[call.id] = (call, owner, [first, loop.call_later(serve_s, self._answered, process, call)])

    def abort(self, address: str, call: Call) -> None:
        """The gateway closed the connection."""
        process = self.by_address.get(address)
        if process is not None:
            for timer in process.calls.pop(call.id, (None, None, []))[2]:
                timer.cancel()

    def living(self) -> Iterable[Process]:
        """All processes that hold something."""
        return self.processes.values()

    # --- inside ---

    def _get_ready(self, process: Process) -> None:
        if process.alive and not process.stopping:
            process.ready = True
            self.on_change(process, "ready")
            self._say(process.seen(Seen.READY))

    def _answered(self, process: Process, call: Call) -> None:
        _, owner, _ = process.calls.pop(call.id)
        owner.done(call)

    def _break(self, process: Process, what: str) -> None:
        process.alive = process.ready = False
        self.on_change(process, what)
        calls, process.calls = process.calls, {}
        for call, owner, timers in calls.values():
            for timer in timers:
                timer.cancel()
            owner.broke(call, "reset")

    def _end(self, process: Process) -> None:
        if self.processes.get(process.replica.id) is not process:
            return
        if process.alive:
            self._break(process, "stop")
        del self.processes[process.replica.id], self.by_address[process.address]
        self.on_change(process, "clean")
        self._say(process.seen(Seen.CLEAN, proof="exited"))

    def _say(self, seen: ReplicaSeen) -> None:
        if self.observe is not None:
            self.observe((seen,))


class SimDriver:
    """The Driver of one autoscaler over the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def run(self, observe: Observe) -> None:
        """Shows what exists, then what changes, until cancelled."""
        machine = self._machine
        observe((SlicesSeen(slices=machine.slices),))
        for process in machine.processes.values():
            state = Seen.READY if process.ready else Seen.STARTING if process.alive else Seen.EXITED
            observe((process.seen(state),))
        observe((Synced(),))
        machine.observe = observe
        try:
            await asyncio.Event().wait()
        finally:
            machine.observe = None

    def start(self, replica: Replica, model: Model) -> None:
        """Starts a process."""
        del model
        self._machine.start(replica)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Stops it, or says at once that there is nothing to stop."""
        del grace_s
        if replica.id in self._machine.processes:
            self._machine.stop(replica.id)
        elif self._machine.observe is not None:
            gone = Process(replica, 0.0)
            self._machine.observe((gone.seen(Seen.CLEAN, proof="exited"),))


def one_device(memory_bytes: int, name: str = "gpu0") -> Slice:
    """A shared Slice that is a whole Device."""
    return Slice(id=SliceId(name), device=DeviceId(name), node=NodeId("local"), memory_bytes=memory_bytes)
