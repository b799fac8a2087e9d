"""A driver without processes: everything happens by the timers of the event loop it runs on. `tests.sim` builds on it.

A FakeMachine is the place where engines live; it outlives its drivers, so adoption can be tried. What an engine does is
its Fate, decided when it is started.
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
from tests.kit.observed import seen_of

STOPPED = "stopped"


class Fate(NamedTuple):
    """What will become of one start."""

    ready_after_s: float | None = 1.0
    """From the start of its process; None: never."""
    dies_after_s: float | None = None
    """From the start of its process, with `last_words`; None: not by itself."""
    last_words: str = "exited with status 1"
    stops_in_s: float = 0.05
    """From SIGTERM; longer than its grace: it is killed then."""
    clean_after_s: float = 0.0
    """From its end until nothing holds its memory."""
    refused: str = ""
    """It cannot even be started, for this reason."""


@dataclass(slots=True, eq=False)
class FakeEngine:
    """One engine on the machine, until it is clean."""

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
        """Its process exists."""
        return self.seen not in (Seen.EXITED, Seen.CLEAN)

    @property
    def ready(self) -> bool:
        """It takes Calls."""
        return self.seen is Seen.READY

    @property
    def stopping(self) -> bool:
        """It has got SIGTERM."""
        return self.kill_s is not None

    def seen_now(self) -> ReplicaSeen:
        """As a driver sees it."""
        return seen_of(self.replica, self.seen, address=self.address, started_s=self.started_s, reason=self.reason)


class FakeMachine:
    """Where engines live. `loop` gives time and timers; `fate` is asked at every start."""

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
        """Why a start of a Model would surely fail."""
        self.watching: list[Observe] = []
        """The drivers that watch now: of several processes each has one."""
        self.on_change: Callable[[FakeEngine, str], None] = lambda engine, what: None
        """Told of each `start`, `ready`, `stop` (ordered), `kill` (any other end) and `clean`, before a driver is."""
        self._loop = loop
        self.fate = fate
        self._unsaid: list[Replica] = []
        """Clean since while no driver watched."""

    def start(self, replica: Replica, model: Model) -> None:
        """A process starts, unless it exists or fate refuses."""
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
        """SIGTERM, and SIGKILL after the grace; the shortest of several graces counts."""
        engine = self.engines.get(replica.id)
        if engine is None:
            self._say(seen_of(replica, Seen.CLEAN, proof="exited"))
        elif engine.alive:
            kill_s = self._loop.time() + grace_s
            if engine.kill_s is None and engine.fate.stops_in_s < grace_s:
                engine.timers.append(self._loop.call_later(engine.fate.stops_in_s, self._end, engine, STOPPED))
            if engine.kill_s is None or kill_s < engine.kill_s:
                engine.kill_s = kill_s
                reason = "did not end within its grace after SIGTERM and was killed"
                engine.timers.append(self._loop.call_at(kill_s, self._end, engine, reason))

    def kill(self, replica: ReplicaId) -> None:
        """Its process gets SIGKILL from outside; one that is gone already is no error."""
        if replica in self.engines:
            self._end(self.engines[replica], "was killed by SIGKILL")

    def hang(self, replica: ReplicaId, *, answers: bool) -> None:
        """A ready engine stops answering its probes, or answers again."""
        self._see(self.engines[replica], Seen.READY if answers else Seen.UNREADY)

    def tell(self, engine: FakeEngine) -> None:
        """The driver that watches sees the engine as it is now."""
        self._say(engine.seen_now())

    def changed(self, engine: FakeEngine, what: str) -> None:
        """Something happened to the engine; for more than to tell of it, override this."""
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
        """What got clean while no driver watched, once."""
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
        """Tells all that exists, then every change, until cancelled. What ended unwatched is clean."""
        self._observe = observe
        self._machine.watching.append(observe)
        try:
            self.lead()
            await asyncio.get_running_loop().create_future()
        finally:
            self._machine.watching.remove(observe)

    def lead(self) -> None:
        """Tells all that exists (again)."""
        self._observe((SlicesSeen(slices=self._machine.slices),))
        for engine in tuple(self._machine.engines.values()):
            self._observe((engine.seen_now(),))
        for replica in self._machine.forgotten():
            self._observe((seen_of(replica, Seen.CLEAN, proof="exited"),))
        self._observe((Synced(),))

    async def follow(self) -> None:
        """Orders are carried out at once: none is under way."""

    def obstacle(self, model: Model) -> str:
        """As the machine is told."""
        return self._machine.obstacles.get(model.name, "")

    def start(self, replica: Replica, model: Model) -> None:
        """As the machine does."""
        self._machine.start(replica, model)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """As the machine does."""
        self._machine.stop(replica, grace_s)
