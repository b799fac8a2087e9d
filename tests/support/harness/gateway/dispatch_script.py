"""A small language for tests of dispatch: a Script feeds inputs to one gateway and returns the Effects as words.

`grant c1 r1`, `refuse c1 queue_full` and `report` are the words; `at` advances the time and ticks, as the shell does.
"""

from __future__ import annotations

import msgspec

from autoscaler.contract import (
    CatalogueDelta,
    Clocks,
    GatewayId,
    Level,
    ModelEntry,
    ModelName,
    ModelRoute,
    QueueLimits,
    Refusal,
    ReplicaId,
    ReplicaUse,
    Report,
    Route,
    RoutesDelta,
    TenantEntry,
    TenantName,
    Total,
)
from gateway.dispatch.call import Call, Outcome
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.effects import Effect, Grant, ModelFaulted, Refuse
from gateway.dispatch.model_dispatcher import Bounce


def words(effects: list[Effect]) -> list[str]:
    """Effects in the notation of the tests."""
    reported = []
    for effect in effects:
        if isinstance(effect, Grant):
            reported.append(f"grant {effect.call.id} {effect.replica}")
        elif isinstance(effect, Refuse):
            reported.append(f"refuse {effect.call.id} {effect.error.code}")
        elif isinstance(effect, ModelFaulted):
            reported.append(f"fault {effect.model}")
        else:
            reported.append("report")
    return reported


def call_of(
    id: str,
    *,
    tenant: str = "acme",
    model: str = "llama",
    priority: int = 0,
    now_s: float = 0.0,
    wait_s: float = 100.0,
    body_bytes: int = 10,
) -> Call:
    """A request as the edge creates it."""
    return Call(
        id=id,
        tenant=TenantName(tenant),
        model=ModelName(model),
        priority=priority,
        arrived_s=now_s,
        deadline_s=now_s + wait_s,
        body_bytes=body_bytes,
    )


class Script:
    """One gateway with the Model `llama` at time 0. Every method that acts returns the words of its Effects."""

    def __init__(
        self, *, calls_max: int = 1000, bytes_max: int = 1 << 20, weights: dict[str, float] | None = None
    ) -> None:
        self.dispatch = Dispatcher(GatewayId("g1"), "boot")
        self.now_s = 0.0
        self.epoch = 1
        self.version = 0
        self.calls: dict[str, Call] = {}
        self.refused: dict[str, Refuse] = {}
        tenants = tuple(TenantEntry(name=TenantName(name), weight=weight) for name, weight in (weights or {}).items())
        self.model(queue=QueueLimits(calls_max=calls_max, bytes_max=bytes_max), tenants=tenants)

    def play(self, effects: list[Effect]) -> list[str]:
        """Records rejections and returns the Effects as words."""
        self.refused.update((effect.call.id, effect) for effect in effects if isinstance(effect, Refuse))
        return words(effects)

    def model(
        self,
        name: str = "llama",
        *,
        queue: QueueLimits | None = None,
        paused: bool = False,
        removed: bool = False,
        tenants: tuple[TenantEntry, ...] = (),
        clocks: Clocks | None = None,
    ) -> list[str]:
        """Sets the Model's entry in the catalogue."""
        self.version += 1
        entry = ModelEntry(
            name=ModelName(name), served_name=name, paused=paused, queue=queue or QueueLimits(),
            clocks=clocks or Clocks(),
        )  # fmt: skip
        delta = CatalogueDelta(
            epoch=self.epoch,
            version=self.version,
            models=() if removed else (entry,),
            models_gone=(entry.name,) if removed else (),
            tenants=tenants,
        )
        return self.play(self.dispatch.catalogue(delta, self.now_s))

    def replica(
        self, replica: str, hold: int, *, state: str = "ready", slots: int = 8, model: str = "llama", gateways: int = 1
    ) -> list[str]:
        """Routes that grant this hold on a Replica."""
        route = Route(
            replica=ReplicaId(replica),
            model=ModelName(model),
            state=state,
            address=f"{replica}:80",
            slots=slots,
            hold=hold,
            granted=self.version + 1,
        )
        return self.routes(RoutesDelta(epoch=0, version=0, replicas=(route,), gateways=gateways))

    def remove_replica(self, replica: str) -> list[str]:
        """Routes that no longer contain the Replica."""
        return self.routes(RoutesDelta(epoch=0, version=0, replicas_gone=(ReplicaId(replica),)))

    def say(
        self,
        *,
        state: str = "zero",
        expected_s: float | None = None,
        others_wait: bool = False,
        refusal: Refusal | None = None,
        capacity_s: float | None = None,
        model: str = "llama",
    ) -> list[str]:
        """Routes with this state of the Model as a whole."""
        route = ModelRoute(
            model=ModelName(model), state=state, expected_wait_s=expected_s, others_wait=others_wait, refusal=refusal,
            capacity_wait_s=capacity_s,
        )  # fmt: skip
        return self.routes(RoutesDelta(epoch=0, version=0, models=(route,)))

    def routes(self, delta: RoutesDelta) -> list[str]:
        """Applies a Routes delta with the next version."""
        self.version += 1
        stamped = msgspec.structs.replace(delta, epoch=self.epoch, version=self.version)
        return self.play(self.dispatch.routes(stamped, self.now_s))

    def arrive(
        self,
        id: str,
        *,
        tenant: str = "acme",
        priority: int = 0,
        wait_s: float = 100.0,
        body_bytes: int = 10,
        model: str = "llama",
    ) -> list[str]:
        """A new request arrives."""
        call = call_of(
            id, tenant=tenant, priority=priority, wait_s=wait_s, body_bytes=body_bytes, model=model, now_s=self.now_s
        )
        self.calls[id] = call
        return self.play(self.dispatch.arrive(call, self.now_s))

    def arrive_many(self, count: int, prefix: str, *, tenant: str = "acme", wait_s: float = 100.0) -> list[str]:
        """Requests prefix0, prefix1, ... arrive one after the other."""
        return [word for n in range(count) for word in self.arrive(f"{prefix}{n}", tenant=tenant, wait_s=wait_s)]

    def finish(self, id: str, *, tokens_in: int = 0, tokens_out: int = 0) -> list[str]:
        """The request completes."""
        call = self.calls[id]
        call.tokens_in, call.tokens_out = tokens_in, tokens_out
        effects = self.dispatch.finish(call, self.now_s, Outcome.COMPLETED)
        return self.play(effects)

    def heard(self, id: str) -> list[str]:
        """The first byte of the response has arrived."""
        return self.play(self.dispatch.heard(self.calls[id], self.now_s))

    def leave(self, id: str) -> list[str]:
        """The client disconnects."""
        return self.play(self.dispatch.leave(self.calls[id], self.now_s))

    def bounce(self, id: str, reason: Bounce) -> list[str]:
        """The engine fails before the commit point."""
        return self.play(self.dispatch.bounce(self.calls[id], self.now_s, reason))

    def at(self, now_s: float) -> list[str]:
        """Advances the time; the shell ticks."""
        self.now_s = now_s
        return self.play(self.dispatch.tick(now_s))

    def report(self) -> Report:
        """Returns the next report."""
        return self.dispatch.report(self.now_s)

    def level(self, tenant: str = "acme", *, priority: int = 0) -> Level:
        """The Level of one Tenant in the next report."""
        return next(one for one in self.report().levels if (one.tenant, one.priority) == (tenant, priority))

    def totals(self, tenant: str = "acme") -> list[Total]:
        """The Totals of one Tenant in the next report: one or none."""
        return [total for total in self.report().totals if total.tenant == tenant]

    def total(self, tenant: str = "acme") -> Total:
        """The Total of one Tenant in the next report."""
        (total,) = self.totals(tenant)
        return total

    def use(self, replica: str) -> ReplicaUse:
        """The use of one replica in the next report."""
        return next(use for use in self.report().replicas if use.replica == replica)


def warm(hold: int) -> Script:
    """A gateway that holds slots of one ready Replica."""
    script = Script()
    script.replica("r1", hold)
    return script
