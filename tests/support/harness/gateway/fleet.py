"""Several gateways and one leader in virtual time, with faults of the network and of processes.

Owns the clock, the network (delays, lost reports, broken streams) and the checks: exceeding the slots of a replica is
an error at once; `gaps_s` records how long a free slot and a queued request coexist. The leader uses the real fold,
shares and publish; the gateways are models (`tests.support.harness.gateway.hold_gateway`).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from autoscaler.contract import BUSY_PERIOD_S, REPORT_GAP_S, GatewayId, ReplicaId, RoutesDelta, TenantName
from autoscaler.fold.fold import Observation
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.routing import routes
from autoscaler.routing import slots as shares
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.tenant import Tenant, TenantSpec
from autoscaler.state.events import DocumentsSeen, GatewayGone, GatewaySeen, ReplicaSeen, Reported, Seen, Synced, Tick
from autoscaler.state.world import Leadership, SliceId, World
from tests.support.harness.gateway.hold_gateway import MODEL, HoldGateway, Running

Service = Callable[[random.Random], float]
DELAY_S = (0.0002, 0.003)


class OverCommittedError(AssertionError):
    """More requests on a replica than it has Slots."""


class Fleet:
    """`gateways` gateways in front of one Model of `replicas` Replicas with `slots` each."""

    def __init__(
        self,
        gateways: int,
        slots: int,
        seed: int,
        *,
        service: Service = lambda r: r.expovariate(2.0),
        lost: float = 0.0,
        replicas: int = 1,
        weights: dict[str, float] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.slots, self.service, self.lost = slots, service, lost
        self.replicas = [ReplicaId(f"r{i}") for i in range(replicas)]
        self.weights = weights or {}
        self.gateways = [HoldGateway(GatewayId(f"g{i}")) for i in range(gateways)]
        self.gaps_s: list[float] = []
        self.done: dict[str, int] = {}
        self.granted_s: dict[str, float] = {}
        """When the first request of a Tenant was granted."""
        self.releases_s: list[float] = []
        self.messages = 0
        self._gap_s: float | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n = 0
        self._streams: dict[GatewayId, tuple[int, World, float]] = {}
        """(boot, last `World` sent, when it arrives)."""
        self.leads = False
        self.epoch = 0
        self.world = World(epoch=0)
        self.new_leader()
        for gateway in self.gateways:
            self._heartbeat(gateway, gateway.boot)

    # --- time ---------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedules a callback."""
        self._n += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._n, act))

    def run(self, until_s: float) -> None:
        """Advances the time, checking after every event."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
            self._check()
        self.now_s = until_s

    def _check(self) -> None:
        alive = [gateway for gateway in self.gateways if not gateway.dead]
        used = 0
        for replica in self.replicas:
            calls = sum(gateway.used(replica) for gateway in alive)
            if calls > self.slots:
                raise OverCommittedError(f"{calls} Calls on {self.slots} Slots of {replica} at {self.now_s:.4f} s")
            used += calls
        idle = used < self.slots * len(self.replicas) and any(gateway.waiting() for gateway in alive)
        if idle and self._gap_s is None:
            self._gap_s = self.now_s
        elif not idle and self._gap_s is not None:
            self.gaps_s.append(self.now_s - self._gap_s)
            self._gap_s = None

    # --- gateways -----------------------------------------------------------------------------------------------

    def arrive(self, gateway: HoldGateway, tenant: str) -> None:
        """A request arrives, unless the gateway is down."""
        if gateway.dead:
            return
        was = gateway.waiting()
        gateway.queues.setdefault(TenantName(tenant), deque()).append(self.now_s)
        self._dispatch(gateway)
        if gateway.waiting() and not was:
            self._edge(gateway)
            self._remind(gateway)

    def _dispatch(self, gateway: HoldGateway) -> None:
        for call in gateway.dispatch(self.now_s):
            self.granted_s.setdefault(call.tenant, self.now_s)
            self.at(self.service(self.random), partial(self._finish, gateway, call))

    def _finish(self, gateway: HoldGateway, call: Running) -> None:
        if gateway.dead or gateway.boot != call.boot:
            return
        gateway.finish(call, self.now_s)
        self.done[call.tenant] = self.done.get(call.tenant, 0) + 1
        self.releases_s.append(self.now_s)
        self._dispatch(gateway)
        held = gateway.held[call.replica]
        if gateway.give_back() or held.in_use >= held.hold or not gateway.calls:
            self._edge(gateway)

    def _edge(self, gateway: HoldGateway) -> None:
        if not gateway.due:
            gateway.due = True
            wait_s = max(0.0, gateway.reported_s + REPORT_GAP_S - self.now_s)
            self.at(wait_s, partial(self._report, gateway, gateway.boot))

    def _remind(self, gateway: HoldGateway) -> None:
        if not gateway.again:
            gateway.again = True
            self.at(BUSY_PERIOD_S, partial(self._again, gateway, gateway.boot))

    def _again(self, gateway: HoldGateway, boot: int) -> None:
        if gateway.boot != boot or gateway.dead:
            return
        gateway.again = False
        if gateway.waiting() or gateway.others_wait:
            self._edge(gateway)
            self._remind(gateway)

    def _heartbeat(self, gateway: HoldGateway, boot: int) -> None:
        if gateway.boot == boot and not gateway.dead:
            self._edge(gateway)
            self.at(1.0, lambda: self._heartbeat(gateway, boot))

    def _report(self, gateway: HoldGateway, boot: int) -> None:
        if gateway.boot != boot or gateway.dead:
            return
        gateway.give_back()
        report = gateway.report(self.now_s)
        if self.random.random() >= self.lost:
            self.at(self.random.uniform(*DELAY_S), lambda: self.step(Reported(report=report)))

    def _told(self, gateway: HoldGateway, boot: int, epoch: int, delta: RoutesDelta) -> None:
        if gateway.boot != boot or gateway.dead or epoch != self.epoch:
            return
        edge = gateway.take(delta)
        self._dispatch(gateway)
        lowered = gateway.give_back()
        if gateway.others_wait:
            self._remind(gateway)
        if edge or lowered or gateway.waiting():
            self._edge(gateway)

    # --- the leader ---------------------------------------------------------------------------------------------

    def step(self, *batch: Observation) -> None:
        """One iteration of the leader's loop: fold, allocate, publish."""
        if not self.leads:
            return
        self.world, _ = advance(self.world, batch, self.now_s)
        granted = shares.divide_slots(self.world, self.now_s)
        if granted is not None:
            self.world, _ = advance(self.world, (granted,), self.now_s)
        self._check_rule()
        for gateway in self.gateways:
            self._tell(gateway)

    def _check_rule(self) -> None:
        """Checks that the leader's grants, as it knows them, fit the slots, unless a former leader left more."""
        for replica in self.replicas:
            holds = [shares.read_latest_hold(gateway, replica) for gateway in self.world.gateways.values()]
            if sum(holds) > self.slots:
                raise OverCommittedError(f"holds {holds} on {self.slots} Slots of {replica} at {self.now_s:.4f} s")

    def _tell(self, gateway: HoldGateway) -> None:
        stream = self._streams.get(gateway.id)
        if stream is None or stream[0] != gateway.boot or gateway.dead:
            return
        boot, sent, arrives_s = stream
        delta = routes.routes_delta(sent, self.world, gateway.id, self.now_s, boot=gateway.boot_name())
        arrives_s = self._send(gateway, delta, arrives_s) if delta is not None else arrives_s
        self._streams[gateway.id] = (boot, self.world, arrives_s)

    def _send(self, gateway: HoldGateway, delta: RoutesDelta, after_s: float) -> float:
        """Sends in order: a later message does not arrive earlier."""
        self.messages += 1
        arrives_s = max(after_s, self.now_s + self.random.uniform(*DELAY_S))
        boot, epoch = gateway.boot, self.epoch
        self.at(arrives_s - self.now_s, lambda: self._told(gateway, boot, epoch, delta))
        return arrives_s

    def _connect(self, gateway: HoldGateway, boot: int, epoch: int) -> None:
        if gateway.dead or gateway.boot != boot or epoch != self.epoch or not self.leads:
            return
        full = routes.routes_full(self.world, gateway.id, self.now_s, boot=gateway.boot_name())
        self._streams[gateway.id] = (boot, self.world, self._send(gateway, full, self.now_s))
        self.step(GatewaySeen(gateway=gateway.id, boot=gateway.boot_name(), watched=True))

    # --- faults -------------------------------------------------------------------------------------------------

    def crash(self, gateway: HoldGateway, back_s: float) -> None:
        """The gateway crashes unless it is down; this is detected after 10 s, or when it restarts."""
        if gateway.dead:
            return
        gateway.crash()
        boot = gateway.boot
        self.at(10.0, lambda: self._proven_dead(gateway, boot))
        self.at(back_s, lambda: self._restart(gateway))

    def _proven_dead(self, gateway: HoldGateway, boot: int) -> None:
        if gateway.dead and gateway.boot == boot:
            self.step(GatewayGone(gateway=gateway.id))

    def _restart(self, gateway: HoldGateway) -> None:
        gateway.restart()
        self._heartbeat(gateway, gateway.boot)
        self._connect(gateway, gateway.boot, self.epoch)

    def leader_dies(self, back_s: float) -> None:
        """There is no leader for a while; the next one knows only what exists."""
        if self.leads:
            self.leads = False
            self._streams.clear()
            self.at(back_s, self.new_leader)

    def new_leader(self) -> None:
        """Learns the rest from the existing gateways' reports. Streams reconnect within a second."""
        self.epoch += 1
        self.leads = True
        self._streams.clear()
        self.world = World(
            epoch=self.epoch, version=self.random.randrange(10), leadership=Leadership(leading_since_s=self.now_s)
        )
        self.step(*self._found())
        for gateway in self.gateways:
            delay_s = self.random.uniform(0.0, 1.0) if self.epoch > 1 else 0.001
            self.at(delay_s, partial(self._connect, gateway, gateway.boot, self.epoch))
        self.at(1.0, partial(self._tick, self.epoch))

    def _tick(self, epoch: int) -> None:
        if epoch == self.epoch and self.leads:
            self.step(Tick())
            self.at(1.0, lambda: self._tick(epoch))

    def _found(self) -> Sequence[Observation]:
        model = Model(name=MODEL, spec=ModelSpec(engine="command"), slots=self.slots)
        tenants = tuple(Tenant(name=TenantName(n), spec=TenantSpec(weight=w)) for n, w in self.weights.items())
        seen = [
            ReplicaSeen(
                id=id,
                model=MODEL,
                spec_hash=model.spec_hash(),
                intent=id,
                slices=(SliceId(id),),
                memory_bytes=0,
                slots=self.slots,
                seen=Seen.READY,
                address=f"127.0.0.1:{i}",
            )
            for i, id in enumerate(self.replicas)
        ]
        known = [GatewaySeen(gateway=gateway.id, watched=True) for gateway in self.gateways if not gateway.dead]
        return [DocumentsSeen(models=(model,), tenants=tenants), *known, *seen, Synced()]
