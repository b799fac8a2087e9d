"""A whole installation in virtual time: gateways, one autoscaler, a machine, a network, and clients.

Everything that decides is the real code: dispatch, sync, loop, fold, plan, shares, publish. Only engines, network and
clients are simulated. This module wires them and injects faults; the invariants are in
`tests.simulation.checks.continuous_invariants`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName, Report, TenantName
from autoscaler.controller.loop import Loop, LoopStep
from autoscaler.drivers.driver import Cutter, SharedDriver
from autoscaler.drivers.local.learned_files import EVERY_S, FORGOTTEN
from autoscaler.providers.runner import ProviderRunner
from autoscaler.server.gateways import Feed
from autoscaler.spec.model import Model
from autoscaler.spec.tenant import Tenant
from autoscaler.state.events import DocumentsSeen, GatewaySeen, HistorySeen, LeadingSeen
from autoscaler.state.world import History, Leadership, Slice, World
from gateway.dispatch.call import Call, Outcome
from gateway.dispatch.effects import Grant
from gateway.errors import CallError
from tests.simulation.checks.gateway_reports import ReceivedReports
from tests.simulation.environment.machine import QUICK, Machine, Manners
from tests.simulation.environment.network import CALM, Network, Rates
from tests.simulation.installations.gateway import SimGateway, SimLink
from tests.simulation.installations.model_objects import DocumentTasks
from tests.support.fakes.driver import FakeDriver


class Ended(NamedTuple):
    """How a request ended, as its client saw it."""

    outcome: Outcome
    at_s: float
    error: CallError | None = None


class Journey:
    """One request as its client sees it."""

    def __init__(self, call: Call, gateway: SimGateway) -> None:
        self.call = call
        self.gateway = gateway
        self.granted_to: list[str] = []
        self.granted_s: list[float] = []
        self.first_byte_s: float | None = None
        self.served_by: set[str] = set()
        self.ended: list[Ended] = []

    def __repr__(self) -> str:
        return f"<Journey {self.call.id} {self.call.model} {self.ended or self.call.state}>"


class Autoscaler:
    """One autoscaler process: the real loop and feed over a driver of the machine. `epoch` 0: it follows."""

    def __init__(
        self, town: Town, epoch: int, driver: SharedDriver | None = None, writes_s: Callable[[], float] = lambda: inf,
        in_touch: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        clock = asyncio.get_running_loop().time
        self.driver = FakeDriver(town.machine) if driver is None else driver
        world = World(epoch=epoch, leadership=Leadership(leads=epoch > 0, leading_since_s=clock()))
        self.supplying = town.supplying(self)
        cutter = town.cutter(self)
        self.loop = Loop(world, self.driver, clock, writes_s, in_touch, cutter=cutter, supplier=self.supplying)
        self.feed = Feed(self.loop)
        self.loop.listeners.append(lambda step: town.note(*(f"{t.replica} {t.after}" for t in step.transitions)))
        self.loop.listeners.append(town.stepped)
        self.documents = town.document_tasks(self.loop, f"autoscaler-{epoch}")
        if self.documents is None:
            self.loop.observe([DocumentsSeen(models=town.models, tenants=town.tenants)])
        self.loop.observe([HistorySeen(model=m, history=h) for m, h in town.histories.items()])
        self.loop.observe([GatewaySeen(gateway=gateway.id, watched=True) for gateway in town.gateways])
        self.task = town.task(self._run(town, random.Random(f"{town.seed}/saves/{epoch}").uniform(0.0, EVERY_S)))

    async def _run(self, town: Town, save_in_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.documents is not None:
                tasks.create_task(self.documents.run())
                await self.documents.observed.wait()  # a process leads only then
            tasks.create_task(self.loop.run())
            tasks.create_task(self._save(town, save_in_s))
            tasks.create_task(self.more())
            if self.supplying is not None:
                tasks.create_task(self.supplying.run())

    async def more(self) -> None:
        """Hook for further tasks of the process."""

    async def _save(self, town: Town, in_s: float) -> None:
        """Save the learned values once a minute, as `HistoryFile` does. `in_s`: seconds until the first save."""
        while True:
            await asyncio.sleep(in_s)
            histories = self.loop.world.learned.histories
            town.histories = {m: replace(h, **dict.fromkeys(FORGOTTEN, ())) for m, h in histories.items()}
            in_s = EVERY_S


class Town:
    """The installation. Create it inside a running VirtualLoop, from a seed."""

    def __init__(
        self,
        seed: int,
        *,
        models: tuple[Model, ...],
        slices: tuple[Slice, ...],
        tenants: tuple[Tenant, ...] = (),
        gateways: int = 1,
        manners: Manners = QUICK,
        rates: Rates = CALM,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.models = models
        self.tenants = tenants
        self.histories: dict[ModelName, History] = {}
        """The file of histories: up to a minute older than the autoscaler's state."""
        self.network = Network(self.rng, rates)
        self.machine = self.make_machine(slices, manners)
        self.machine.on_change = lambda engine, what: self.note(f"{engine.replica.id} {what}")
        self.journeys: dict[str, Journey] = {}
        self.open: dict[str, Journey] = {}
        """Requests without an outcome."""
        self.trace = hashlib.sha256()
        self.on_note: Callable[[str], None] = lambda line: None
        self.on_arrive: Callable[[Journey], None] = lambda journey: None
        self.on_grant: Callable[[str], None] = lambda replica: None
        self.on_end: Callable[[Journey], None] = lambda journey: None
        self.on_step: Callable[[LoopStep], None] = lambda step: None
        self.crashes: list[BaseException] = []
        """Exceptions in any task, which no injected fault explains."""
        self.further_tasks = 0
        """Maximum number of tasks of an autoscaler, and of their timers, in addition to those of every autoscaler."""
        self.autoscaler: Autoscaler | None = None
        """The leader."""
        self.standby: Autoscaler | None = None
        """A follower: every report reaches it, too."""
        self.reports = ReceivedReports(self.now())
        self._epoch = 0
        self.gateways: list[SimGateway] = []
        self.start_autoscaler()
        self.gateways = [SimGateway(self, number) for number in range(1, gateways + 1)]

    def make_machine(self, slices: tuple[Slice, ...], manners: Manners) -> Machine:
        """The machine on which engines run."""
        return Machine(self.rng, slices, manners)

    def cutter(self, autoscaler: Autoscaler) -> Cutter | None:
        """The component that repartitions nodes for it; none here."""
        del autoscaler
        return None

    def document_tasks(self, loop: Loop, who: str) -> DocumentTasks | None:
        """The tasks of an autoscaler that read its documents; None: they never change."""
        del loop, who
        return None

    def supplying(self, autoscaler: Autoscaler) -> ProviderRunner | None:
        """The component that orders capacity for it; none here."""
        del autoscaler
        return None

    def links(self, gateway: GatewayId) -> list[SimLink]:
        """A gateway's connections to the autoscalers."""
        return [SimLink(self, gateway)]

    @staticmethod
    def now() -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    def task(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task whose unexpected end is recorded."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.crashes.append(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def note(self, *events: str) -> None:
        """Add to the trace, by which two runs are compared (I13)."""
        for event in events:
            line = f"{self.now():.6f} {event}"
            self.trace.update(f"{line}\n".encode())
            self.on_note(line)

    # --- faults ---

    def start_autoscaler(self) -> None:
        """Start a new leader, in a new epoch."""
        self._epoch += 1
        self.reports = ReceivedReports(self.now())
        self.autoscaler = Autoscaler(self, self._epoch)

    def stand_by(self) -> None:
        """Start another process that follows."""
        self.standby = Autoscaler(self, 0)

    def take_over(self) -> None:
        """Kill the leader; the follower leads."""
        assert self.standby is not None
        self.crash_autoscaler()
        self._epoch += 1
        self.autoscaler, self.standby = self.standby, None
        self.autoscaler.loop.observe([LeadingSeen(epoch=self._epoch)])
        self.autoscaler.driver.lead()

    def crash_autoscaler(self) -> None:
        """SIGKILL: engines and gateways live on, and values learned since the file was written are lost."""
        assert self.autoscaler is not None
        self.autoscaler.task.cancel()
        self.autoscaler = None
        for gateway in self.gateways:
            gateway.link.cut()

    # --- clients ---

    def call(
        self,
        model: str,
        tenant: str = "default",
        *,
        gateway: int | None = None,
        wait_s: float = 600.0,
        priority: int = 0,
        body_bytes: int = 0,
    ) -> Journey:
        """Send a request now, through a ready gateway if there is one, otherwise through one that is alive."""
        living = [g for g in self.gateways if g.alive]
        living = [g for g in living if g.informed] or living
        through = self.rng.choice(living) if gateway is None else self.gateways[gateway]
        now_s = self.now()
        call = Call(
            id=f"call-{len(self.journeys)}", tenant=TenantName(tenant), model=ModelName(model), arrived_s=now_s,
            deadline_s=now_s + wait_s, priority=priority, body_bytes=body_bytes, stream=True,
        )  # fmt: skip
        journey = self.journeys[call.id] = self.open[call.id] = Journey(call, through)
        through.arrive(call)
        self.on_arrive(journey)
        return journey

    def leave(self, journey: Journey) -> None:
        """The client disconnects, if it has no response yet."""
        if not journey.ended:
            self.end(journey.call, Outcome.ABANDONED, None)
            journey.gateway.leave(journey.call)

    def open_journeys(self, gateway: SimGateway | None = None) -> list[Journey]:
        """Requests without an outcome."""
        return [j for j in self.open.values() if gateway in {None, j.gateway}]

    # --- events ---

    def tell(self, control: Autoscaler, report: Report) -> None:
        """A report reached that process."""
        del control
        self.reports.take(report, self.now())

    def stepped(self, step: LoopStep) -> None:
        """A leader decided; notify the watchers."""
        self.on_step(step)

    def granted(self, grant: Grant, gateway: SimGateway) -> None:
        """A request got a Slot."""
        journey = self.journeys[grant.call.id]
        journey.granted_to.append(grant.replica)
        journey.granted_s.append(self.now())
        self.note(f"{grant.call.id} granted {grant.replica} by {gateway.id}")
        self.on_grant(grant.replica)

    def committed(self, call: Call, replica: str) -> None:
        """A request's first byte reached its client."""
        journey = self.journeys[call.id]
        journey.first_byte_s = self.now()
        journey.served_by.add(replica)

    def is_committed(self, call: Call) -> bool:
        """Whether a first byte was sent."""
        return self.journeys[call.id].first_byte_s is not None

    def end(self, call: Call, outcome: Outcome, error: CallError | None) -> None:
        """A request ended, as its client saw it."""
        journey = self.journeys[call.id]
        journey.ended.append(Ended(outcome, self.now(), error))
        self.open.pop(call.id, None)
        self.note(f"{call.id} {outcome} {error.code if error else ''}")
        self.on_end(journey)

    def used(self, replica: str) -> int:
        """Number of requests on a replica now, over all gateways."""
        return sum(grant.replica == replica for g in self.gateways for grant in g.running.values())

    async def close(self) -> None:
        """End all tasks."""
        tasks = [g.task for g in self.gateways] + [a.task for a in (self.autoscaler, self.standby) if a is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
