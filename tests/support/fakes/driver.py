"""A driver without processes: everything happens by timers of its event loop. `tests.simulation` builds on it.

A FakeMachine hosts the engines. It outlives its drivers, so tests can cover adoption. The behavior of an engine is its
Fate, which is decided when it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import Observe
from autoscaler.spec.model import Model
from autoscaler.state.events import ReplicaSeen, Seen, SlicesSeen, Synced
from autoscaler.state.world import Replica, Slice
from tests.support.harness.driver_events import seen_of

STOPPED = "stopped"


class Fate(NamedTuple):
    """The outcome of one start."""

    ready_after_s: float | None = 1.0
    """From the start of its process; None: never."""
    dies_after_s: float | None = None
    """From the start of its process, with `last_words`; None: it does not exit by itself."""
    last_words: str = "exited with status 1"
    stops_in_s: float = 0.05
    """From SIGTERM; if this is longer than its grace period, it is killed when that ends."""
    clean_after_s: float = 0.0
    """From its end until its memory is free."""
    refused: str = ""
    """The reason why it cannot be started at all."""


@dataclass(slots=True, eq=False)
class FakeEngine:
    """One engine on the machine, until its cleanup is complete."""

    replica: Replica
    fate: Fate
    address: str
    started_s: float
    seen: Seen = Seen.STARTING
    reason: str = ""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    kill_s: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its process exists."""
        return self.seen not in (Seen.EXITED, Seen.CLEAN)

    @property
    def ready(self) -> bool:
        """Whether it accepts requests."""
        return self.seen is Seen.READY

    @property
    def stopping(self) -> bool:
        """Whether it has received SIGTERM."""
        return self.kill_s is not None

    def seen_now(self) -> ReplicaSeen:
        """The engine as a driver observes it."""
        return seen_of(self.replica, self.seen, address=self.address, started_s=self.started_s, reason=self.reason)


class FakeMachine:
    """Hosts the engines. `loop` provides time and timers; `fate` is called at every start."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slices: tuple[Slice, ...],
        fate: Callable[[Replica, Model], Fate] = lambda _replica, _model: Fate(),
    ) -> None:
        self.engines: dict[ReplicaId, FakeEngine] = {}
        self.started: list[ReplicaId] = []
        """Every process that was ever started."""
        self.slices = slices
        self.obstacles: dict[ModelName, str] = {}
        """Why a start of a Model is certain to fail."""
        self.watching: list[Observe] = []
        """The active drivers: one for each process that watches."""
        self.on_change: Callable[[FakeEngine, str], None] = lambda engine, what: None
        """Called before the drivers, with each `start`, `ready`, `stop` (order), `kill` (any other end) and `clean`."""
        self._loop = loop
        self.fate = fate
        self._unsaid: list[Replica] = []
        """Replicas that were cleaned up while no driver watched."""

    def start(self, replica: Replica, model: Model) -> None:
        """Starts a process, unless it exists or its Fate rejects the start."""
        known = self.engines.get(replica.id)
        if known is not None:
            self.tell(known)
            return
        fate, now_s = self.fate(replica, model), self._loop.time()
        engine = FakeEngine(replica, fate, f"10.0.0.1:{len(self.started) + 1}", now_s)
        self.engines[replica.id] = engine
        if fate.refused:
            self._end(engine, fate.refused)
            return
        self.started.append(replica.id)
        self.changed(engine, "start")
        self.tell(engine)
        if fate.ready_after_s is not None:
            engine.timers.append(self._loop.call_at(now_s + fate.ready_after_s, self._see, engine, Seen.READY))
        if fate.dies_after_s is not None:
            engine.timers.append(self._loop.call_at(now_s + fate.dies_after_s, self._end, engine, fate.last_words))

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period; the shortest of several grace periods applies."""
        engine = self.engines.get(replica.id)
        if engine is None:
            self._say(seen_of(replica, Seen.CLEAN, proof="exited"))
        elif engine.alive:
            kill_s = self._loop.time() + grace_s
            if engine.kill_s is None and engine.fate.stops_in_s < grace_s:
                engine.timers.append(self._loop.call_later(engine.fate.stops_in_s, self._end, engine, STOPPED))
            if engine.kill_s is None or kill_s < engine.kill_s:
                engine.kill_s = kill_s
                reason = "did not end within its grace period after SIGTERM and was killed"
                engine.timers.append(self._loop.call_at(kill_s, self._end, engine, reason))

    def kill(self, replica: ReplicaId) -> None:
        """Sends SIGKILL to the process from outside; it is no error if the process is gone."""
        if replica in self.engines:
            self._end(self.engines[replica], "was killed by SIGKILL")

    def hang(self, replica: ReplicaId, *, answers: bool) -> None:
        """A ready engine stops answering its probes, or answers again."""
        self._see(self.engines[replica], Seen.READY if answers else Seen.UNREADY)

    def tell(self, engine: FakeEngine) -> None:
        """Reports the current state of the engine to the active drivers."""
        self._say(engine.seen_now())

    def changed(self, engine: FakeEngine, what: str) -> None:
        """The state of the engine changed. Override this to do more than report it."""
        self.on_change(engine, what)

    def _see(self, engine: FakeEngine, seen: Seen, reason: str = "") -> None:
        engine.seen, engine.reason = seen, reason
        if not engine.alive:
            self.changed(engine, "stop" if reason == STOPPED else "kill")
        elif engine.ready:
            self.changed(engine, "ready")
        self.tell(engine)

    def _end(self, engine: FakeEngine, reason: str) -> None:
        if not engine.alive:
            return
        for timer in engine.timers:
            timer.cancel()
        engine.timers.clear()
        self._see(engine, Seen.EXITED, reason)
        self._loop.call_later(engine.fate.clean_after_s, self._clean, engine)

    def _clean(self, engine: FakeEngine) -> None:
        del self.engines[engine.replica.id]
        self.changed(engine, "clean")
        if not self.watching:
            self._unsaid.append(engine.replica)
        self._say(seen_of(engine.replica, Seen.CLEAN, proof="exited"))

    def forgotten(self) -> list[Replica]:
        """Returns once what was cleaned up while no driver watched."""
        unsaid, self._unsaid = self._unsaid, []
        return unsaid

    def _say(self, seen: ReplicaSeen) -> None:
        for observe in tuple(self.watching):
            observe((seen,))


class FakeDriver:
    """The driver of a FakeMachine."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine
        self._observe: Observe = lambda _: None

    async def run(self, observe: Observe) -> None:
        """Reports everything that exists, then every change, until cancelled. What ended unobserved counts as clean."""
        self._observe = observe
        self._machine.watching.append(observe)
        try:
            self.lead()
            await asyncio.get_running_loop().create_future()
        finally:
            self._machine.watching.remove(observe)

    def lead(self) -> None:
        """Reports everything that exists (again)."""
        self._observe((SlicesSeen(slices=self._machine.slices),))
        for engine in tuple(self._machine.engines.values()):
            self._observe((engine.seen_now(),))
        for replica in self._machine.forgotten():
            self._observe((seen_of(replica, Seen.CLEAN, proof="exited"),))
        self._observe((Synced(),))

    async def follow(self) -> None:
        """Returns at once: orders are carried out immediately."""

    def obstacle(self, model: Model) -> str:
        """As configured in the machine."""
        return self._machine.obstacles.get(model.name, "")

    def start(self, replica: Replica, model: Model) -> None:
        """As the machine does."""
        self._machine.start(replica, model)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """As the machine does."""
        self._machine.stop(replica, grace_s)
