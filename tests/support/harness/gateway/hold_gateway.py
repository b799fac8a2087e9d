"""A small model of a gateway, for tests of how slots are held: it applies Routes and reports, and has no engine.

Owns the gateway's half of the hold rule (interfaces section 6) in its simplest form: a hold is raised only by a newer
grant, lowered at once when others wait, and never exceeded. The real one is `gateway.dispatch.dispatcher`; this one
allows isolated tests of `autoscaler.routing.slots`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autoscaler.contract import (
    GatewayId,
    Level,
    ModelName,
    ReplicaId,
    ReplicaUse,
    Report,
    RoutesDelta,
    TenantName,
    Total,
)

MODEL = ModelName("m")


@dataclass
class Held:
    """One replica as this gateway uses it."""

    ready: bool = False
    hold: int = 0
    granted: tuple[int, int] = (0, 0)
    in_use: int = 0


@dataclass
class Running:
    """A request on a Replica."""

    tenant: TenantName
    replica: ReplicaId
    since_s: float
    boot: int


@dataclass
class HoldGateway:
    """One gateway process; `crash` and `restart` start a new boot of it."""

    id: GatewayId
    boot: int = 1
    dead: bool = False
    epoch: int = 0
    version: int = 0
    sequence: int = 0
    others_wait: bool = False
    held: dict[ReplicaId, Held] = field(default_factory=dict)
    queues: dict[TenantName, deque[float]] = field(default_factory=dict)
    served: dict[TenantName, float] = field(default_factory=dict)
    calls: list[Running] = field(default_factory=list)
    busy_s: dict[TenantName, float] = field(default_factory=dict)
    reported_s: float = -1.0
    due: bool = False
    """A report is being sent."""
    again: bool = False
    """A repeated report is scheduled, because requests wait."""

    def boot_name(self) -> str:
        """The boot name in the format of the protocol."""
        return f"boot{self.boot}"

    def waiting(self) -> int:
        """Number of requests queued here."""
        return sum(map(len, self.queues.values()))

    def used(self, replica: ReplicaId) -> int:
        """Number of our requests on a Replica."""
        return sum(call.replica == replica for call in self.calls)

    def dispatch(self, now_s: float) -> list[Running]:
        """Grants what fits, fairly over Tenants."""
        granted: list[Running] = []
        while self.waiting():
            open_ = [(held.hold - held.in_use, id) for id, held in self.held.items() if held.ready]
            free, replica = max(open_, default=(0, ReplicaId("")))
            if free <= 0:
                break
            waiting = [tenant for tenant, queue in self.queues.items() if queue]
            tenant = min(waiting, key=lambda tenant: self.served.get(tenant, 0.0))
            self.served[tenant] = self.served.get(tenant, 0.0) + 1
            self.queues[tenant].popleft()
            self.held[replica].in_use += 1
            granted.append(Running(tenant, replica, now_s, self.boot))
        self.calls += granted
        return granted

    def finish(self, call: Running, now_s: float) -> None:
        """A request ended."""
        self.calls.remove(call)
        self.held[call.replica].in_use -= 1
        self.busy_s[call.tenant] = self.busy_s.get(call.tenant, 0.0) + now_s - call.since_s

    def give_back(self) -> bool:
        """If others wait and no request waits here, lowers unused holds; returns whether any was lowered."""
        if not self.others_wait or self.waiting():
            return False
        lowered = [held for held in self.held.values() if held.in_use < held.hold]
        for held in lowered:
            held.hold = held.in_use
        return bool(lowered)

    def take(self, delta: RoutesDelta) -> bool:
        """Applies Routes; returns whether the leader needs a report at once."""
        if (delta.epoch, delta.version) < (self.epoch, self.version):
            return False
        edge = delta.epoch > self.epoch
        self.epoch, self.version = delta.epoch, delta.version
        removed = set(delta.replicas_gone)
        if delta.full:
            removed = self.held.keys() - {route.replica for route in delta.replicas}
        for id in removed & self.held.keys():
            self.held[id].hold, self.held[id].ready = 0, False
        for route in delta.replicas:
            held = self.held.setdefault(route.replica, Held())
            edge = edge or (held.ready and route.state != "ready")
            held.ready = route.state == "ready"
            if route.granted and (delta.epoch, route.granted) > held.granted:
                edge = edge or route.hold < held.hold
                held.hold, held.granted = route.hold, (delta.epoch, route.granted)
        for changed_model in delta.models:
            self.others_wait = changed_model.others_wait
        return edge

    def report(self, now_s: float) -> Report:
        """A report with the current levels."""
        self.sequence += 1
        self.reported_s, self.due = now_s, False
        running: dict[TenantName, int] = {}
        busy_s = dict(self.busy_s)
        for call in self.calls:
            running[call.tenant] = running.get(call.tenant, 0) + 1
            busy_s[call.tenant] = busy_s.get(call.tenant, 0.0) + now_s - call.since_s
        tenants = sorted({*running, *(tenant for tenant, queue in self.queues.items() if queue)})
        return Report(
            gateway=self.id,
            boot=self.boot_name(),
            sequence=self.sequence,
            epoch=self.epoch,
            version=self.version,
            levels=tuple(self._level(tenant, running.get(tenant, 0), now_s) for tenant in tenants),
            totals=tuple(
                Total(model=MODEL, tenant=tenant, busy_slot_us=round(s * 1e6)) for tenant, s in sorted(busy_s.items())
            ),
            replicas=tuple(
                ReplicaUse(replica=id, hold=held.hold, in_use=held.in_use)
                for id, held in sorted(self.held.items())
                if held.hold or held.in_use
            ),
        )

    def _level(self, tenant: TenantName, running: int, now_s: float) -> Level:
        queue = self.queues.get(tenant)
        return Level(
            model=MODEL,
            tenant=tenant,
            waiting=len(queue) if queue else 0,
            running=running,
            oldest_wait_s=now_s - queue[0] if queue else 0.0,
        )

    def crash(self) -> None:
        """The process crashes; all its requests are lost."""
        self.dead = True
        self.calls.clear()
        self.queues.clear()

    def restart(self) -> None:
        """Starts a new process under the same name, without state."""
        self.dead, self.boot, self.sequence = False, self.boot + 1, 0
        self.epoch = self.version = 0
        self.others_wait = self.due = self.again = False
        self.reported_s = -1.0
        self.held, self.busy_s, self.served = {}, {}, {}
