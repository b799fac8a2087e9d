"""One gateway process in virtual time: real dispatch and sync; edge, upstream and autoscaler connection simulated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING

import msgspec

from autoscaler.contract import CatalogueDelta, GatewayId, ModelName, Report, ReportAnswer, RoutesDelta
from autoscaler.server.gateways import accept_report
from autoscaler.state.events import GatewayGone, GatewaySeen
from gateway import errors
from gateway.control import fault_containment
from gateway.control.sync import LinkError, Sync
from gateway.dispatch.call import Call, CallState, Outcome
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.effects import Effect, Grant, ModelFaulted, Refuse
from gateway.dispatch.model_dispatcher import Bounce
from gateway.exception_handling import describe_error
from tests.simulation.environment.network import Stream

if TYPE_CHECKING:
    from tests.simulation.installations.installation import Autoscaler, Town

PROOF_OF_DEATH_S = 0.002


class SimLink:
    """A gateway's connection to the autoscaler over the network (`gateway.control.sync.Link`)."""

    def __init__(self, town: Town, gateway: GatewayId) -> None:
        self._town = town
        self._gateway = gateway
        self.streams: list[tuple[Stream, asyncio.Queue[bytes | None]]] = []
        self.reachable = True

    def there(self) -> Autoscaler | None:
        """The process at the other end, if it is alive."""
        return self._town.autoscaler

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """A stream of the feed, until it is cut."""
        await asyncio.sleep(self._town.network.delay_s())
        control = self.there()
        if control is None or not self.reachable:
            raise LinkError("refused")
        routes, boot = path.startswith("/v1/routes"), ""
        if routes:
            boot = path.partition("boot=")[2]
            control.loop.observe((GatewaySeen(gateway=self._gateway, boot=boot, watched=True),))
        messages = control.feed.routes(self._gateway, boot) if routes else control.feed.catalogue()
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        stream = Stream(self._town.network)
        own = (stream, queue)
        self.streams.append(own)

        async def pump() -> None:
            async for message in messages:
                stream.send(lambda message=message: queue.put_nowait(message))  # type: ignore[misc]  # bound now

        pumping = self.serves(control, pump())
        try:
            while (message := await queue.get()) is not None:
                yield message
            raise LinkError("cut")
        finally:
            self.streams.remove(own)
            pumping.cancel()

    def serves(self, control: Autoscaler, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run work of the process at the other end on our behalf."""
        del control
        return self._town.task(work)

    def arrives(self, control: Autoscaler, take: Callable[[], None]) -> None:
        """Deliver a message to the process at the other end."""
        del control
        take()

    def cut(self) -> None:
        """Break all streams; messages in transit are lost."""
        for stream, queue in self.streams:
            stream.cut()
            queue.put_nowait(None)

    async def report(self, report: Report) -> ReportAnswer:
        """Post a report over the network; a lost one times out."""
        answered: asyncio.Future[ReportAnswer] = asyncio.get_running_loop().create_future()
        sent = msgspec.json.encode(report)

        def deliver() -> None:
            control = self.there()
            if control is None or not self.reachable:
                lose()
                return
            self.arrives(control, lambda: take(control))

        def take(control: Autoscaler) -> None:
            self._town.tell(control, report)
            answer = accept_report(control.loop, msgspec.json.decode(sent, type=Report))
            if self._town.standby is not None:
                accept_report(self._town.standby.loop, msgspec.json.decode(sent, type=Report))
            if not answered.done():
                answered.set_result(answer)

        def lose() -> None:
            if not answered.done():
                answered.set_exception(LinkError("lost"))

        self._town.network.post(deliver, lose)
        try:
            async with asyncio.timeout(2.0):
                return await answered
        except TimeoutError:
            raise LinkError("timed out") from None

    async def close(self) -> None:
        """Nothing to close."""


class SimGateway:
    """One gateway process: the real dispatch and sync, with a simulated edge and upstream."""

    def __init__(self, town: Town, number: int) -> None:
        self._town = town
        self.id = GatewayId(f"gateway-{number}")
        self.boots = 0
        self.alive = False
        self.informed = False
        """It has received the catalogue, so that its operations port reports it as ready."""
        self.started_s = 0.0
        self.heard_s = 0.0
        self.running: dict[str, Grant] = {}
        self.reports_s: list[float] = []
        self.start()

    def start(self) -> None:
        """Start a new boot."""
        self.boots += 1
        self.alive, self.informed = True, False
        self.started_s = self._town.now()
        self.dispatch = Dispatcher(self.id, f"boot-{self.boots}")
        self.links = self._town.links(self.id)
        self.link = self.links[0]
        jitter = random.Random(f"{self._town.seed}/{self.id}/{self.boots}").random
        self.sync = Sync(self.id, self.links, self, jitter=jitter, boot=f"boot-{self.boots}")
        self.task = self._town.task(self.sync.run())
        self._timer: asyncio.TimerHandle | None = None
        self.heard_s = self._town.now()

    def crash(self) -> None:
        """SIGKILL: client connections and engine connections break, and the process ends."""
        self.alive = False
        self.task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for grant in self.running.values():
            self._town.machine.abort(grant.address, grant.call)
        self.running.clear()
        for journey in self._town.open_journeys(self):
            self._town.end(journey.call, Outcome.FAILED, None)
        control = self._town.autoscaler
        if control is not None:
            removed = GatewayGone(gateway=self.id, boot=f"boot-{self.boots}")
            asyncio.get_running_loop().call_later(PROOF_OF_DEATH_S, control.loop.observe, (removed,))

    # --- I/O around dispatch ---

    def arrive(self, call: Call) -> None:
        """A request from a client; a gateway without a catalogue fails it."""
        if not self.informed:
            self._town.end(call, Outcome.FAILED, errors.gateway_starting())
            return
        self._perform(self.dispatch.arrive(call, self._town.now()))

    def leave(self, call: Call) -> None:
        """The client left."""
        grant = self.running.pop(call.id, None)
        if grant is not None:
            self._town.machine.abort(grant.address, call)
        self._perform(self.dispatch.leave(call, self._town.now()))

    def first_byte(self, call: Call) -> None:
        """The commit point of a request here."""
        self._town.committed(call, self.running[call.id].replica)
        call.first_byte_s = self._town.now()
        self._perform(self.dispatch.heard(call, self._town.now()))

    def done(self, call: Call) -> None:
        """A response is complete."""
        del self.running[call.id]
        self._town.end(call, Outcome.COMPLETED, None)
        self._perform(self.dispatch.finish(call, self._town.now(), Outcome.COMPLETED))

    def broke(self, call: Call, reason: str) -> None:
        """An engine failed while serving a request."""
        if self.running.pop(call.id, None) is None:
            return
        if self._town.is_committed(call):
            self._town.end(call, Outcome.FAILED, None)
            self._perform(self.dispatch.finish(call, self._town.now(), Outcome.FAILED))
        else:
            kind: Bounce = "connect" if reason == "connect" else "reset"
            self._perform(self.dispatch.bounce(call, self._town.now(), kind))

    def _perform(self, effects: list[Effect]) -> None:
        loop = asyncio.get_running_loop()
        for effect in effects:
            if isinstance(effect, Grant):
                self.running[effect.call.id] = effect
                self._town.granted(effect, self)
                loop.call_later(self._town.network.delay_s(), self._connect, effect)
            elif isinstance(effect, Refuse):
                self._town.end(effect.call, Outcome.FAILED, effect.error)
            elif isinstance(effect, ModelFaulted):
                fault_containment.report_fault(effect.model, "dispatch", describe_error(effect.error))
                self._fail_waiting(effect.model)
            else:
                self.sync.edge()
        self._arm()

    def _fail_waiting(self, model: ModelName) -> None:
        """After an exception of dispatch, as `gateway.gateway`: end the model's requests that are still waiting."""
        for journey in self._town.open_journeys(self):
            call = journey.call
            if call.model == model and call.id not in self.running and call.state is not CallState.ENDED:
                if call.state is CallState.PARKED:
                    call.state = CallState.ENDED
                self._town.end(call, Outcome.FAILED, errors.model_faulty())
                self._perform(self.dispatch.finish(call, self._town.now(), Outcome.FAILED))

    def _connect(self, grant: Grant) -> None:
        if self.running.get(grant.call.id) is grant:
            self._town.machine.call(grant.address, grant.call, self)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.dispatch.next_s()
        self._timer = None if due_s is None else asyncio.get_running_loop().call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.dispatch.tick(self._town.now()))

    # --- gateway.control.sync.Follower ---

    def catalogue(self, delta: CatalogueDelta) -> None:
        """A change of the catalogue."""
        self.informed = True
        self._perform(self.dispatch.catalogue(delta, self._town.now()))

    def routes(self, delta: RoutesDelta) -> None:
        """A change of Routes."""
        self.heard_s = self._town.now()
        self._perform(self.dispatch.routes(delta, self._town.now()))

    def restored(self, catalogue: CatalogueDelta, routes: RoutesDelta) -> None:
        """Nothing is persisted in virtual time."""
        raise NotImplementedError

    def report(self) -> Report:
        """The reported levels."""
        self.reports_s.append(self._town.now())
        report = self.dispatch.report(self._town.now())
        self._arm()  # an exception in it has effects
        return report

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """A report was accepted."""
        self.dispatch.answered(sequence, answer)

    def busy(self) -> bool:
        """Whether any request waits."""
        return self.dispatch.busy()

    def has_faults(self) -> bool:
        """Whether a model is faulty here."""
        return self.dispatch.has_faults()
