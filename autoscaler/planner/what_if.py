"""Simulates where Models would start for an assumed demand, on empty devices or in a running `World`. Pure.

Runs the planner repeatedly, as if every start became ready and every stop completed at once. In a running `World`
(`simulate_world`), operations in progress count as completed and existing requests continue; queued requests have
precedence over assumed ones. Invariant: the simulation terminates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName
from autoscaler.documents.document_types import Documents
from autoscaler.fold.fold import Observation
from autoscaler.placement.model.bin_builder import build_bins
from autoscaler.planner.plan import Planner
from autoscaler.queries.gateway_reports import count_running_calls
from autoscaler.rearrange.mig_repartition import WAIT_S
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.state import StateRecord
from autoscaler.state.actions import (
    AcquireLease,
    Acted,
    Action,
    CutNode,
    DrainReplica,
    FailStart,
    Plan,
    ReleaseLease,
    StartReplica,
    StopReplica,
    Unmet,
)
from autoscaler.state.events import DocumentsSeen, GatewaySeen, ReplicaSeen, Reported, Seen, SlicesSeen, Synced
from autoscaler.state.lifecycle import BEGINNING
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_LOAD, Replica, Slice, SliceId, World

PATH = "/api/v1/what-if"
CALLS_MAX = 1_000_000
Calls = Annotated[int, msgspec.Meta(ge=0, le=CALLS_MAX)]
GATEWAY = GatewayId("what-if")
TENANT = TenantName("default")
BEGIN_S, STEP_S = 10_000.0, 0.001
"""So little time passes between two steps that no started replica reaches the end of its residency."""
WAITED_S = 3600.0
"""Assumed waiting time of all requests, so long that the planner delays no start."""
ROUNDS_MAX = 10_000
"""Maximum number of steps. A step without actions is the last."""
AHEAD_ROUNDS_MAX = 64
"""The same limit for a running `World`, because the leader has other work."""
ENDED = frozenset({S.STOPPING, S.SCRUBBING})


class AssumedDemand(NamedTuple):
    """The assumed requests for one Model."""

    waiting: int = 0
    running: int = 0


class Called(StateRecord, frozen=True, forbid_unknown_fields=True):
    """Assumed requests for one Model, in addition to the existing ones."""

    waiting: Calls = 0
    running: Calls = 0


class Question(StateRecord, frozen=True, forbid_unknown_fields=True):
    """The assumed demand, by name or alias of a Model."""

    demand: Annotated[dict[str, Called], msgspec.Meta(min_length=1)]


class Start(StateRecord, frozen=True):
    """One replica that would start, in the order of starts."""

    model: ModelName
    slices: tuple[SliceId, ...]
    memory_bytes: int
    """The memory on each slice."""
    reason: str


class Stop(StateRecord, frozen=True):
    """One replica that would stop after its requests have finished."""

    replica: ReplicaId
    model: ModelName
    reason: str


class OtherAction(StateRecord, frozen=True):
    """Another action.
    `cut` (repartition a node), `acquire` or `release` (capacity), `refuse` (reject a Model's requests).
    """

    kind: str
    what: str
    reason: str


class Left(StateRecord, frozen=True):
    """The free memory of a slice at the end."""

    slice: SliceId
    memory_bytes: int
    free_bytes: int


class Answer(StateRecord, frozen=True):
    """All actions that would follow."""

    starts: tuple[Start, ...]
    unmet: tuple[Unmet, ...]
    left: tuple[Left, ...]
    stops: tuple[Stop, ...] = ()
    orders: tuple[OtherAction, ...] = ()
    more: bool = False
    """Whether the simulation was stopped because it needs more steps than the limit."""


def what_if(documents: Documents, slices: Sequence[Slice], asked: Mapping[ModelName, AssumedDemand]) -> Answer:
    """Simulate on empty devices. Every Model of `asked` must be in the documents."""
    seen = DocumentsSeen(models=documents.models, tenants=documents.tenants, settings=documents.settings)
    world, _ = advance(World(epoch=1), (seen, SlicesSeen(slices=tuple(slices)), Synced()), BEGIN_S)
    return _Case(world, asked, cold_wait_s=WAITED_S).answer(BEGIN_S, ROUNDS_MAX)


def simulate_world(world: World, asked: Mapping[ModelName, AssumedDemand], now_s: float) -> Answer:
    """Simulate in a running `World` whose leader has listed its replicas. It must have every Model of `asked`."""
    return _Case(world, asked, cold_wait_s=0.0).answer(now_s, AHEAD_ROUNDS_MAX)


class _Case:
    """One simulation. `cold_wait_s`: how long requests of Models without a replica have waited.
    If nothing else happens, `cold_wait_s` is raised to the time after which a node is repartitioned for them.
    """

    def __init__(self, world: World, asked: Mapping[ModelName, AssumedDemand], cold_wait_s: float) -> None:
        self._asked, self._cold_wait_s = asked, cold_wait_s
        self._waiting = {name: world.loads.get(name, NO_LOAD).waiting for name in asked}
        """The number of existing queued requests. They have precedence."""
        self._world, self._sequence = world, 0
        self._starts, self._stops, self._orders = list[Start](), list[Stop](), list[OtherAction]()

    def answer(self, now_s: float, rounds: int) -> Answer:
        """Simulate up to `rounds` steps and return all actions."""
        self._fold((GatewaySeen(gateway=GATEWAY, watched=True),), now_s)
        planner, plan, more = Planner(), Plan(), True
        for _ in range(rounds):
            now_s += STEP_S
            self._fold((*self._under_way(), self._report()), now_s)
            plan = planner.plan(self._world, now_s)
            ends = () if plan.actions else tuple(_seen(one, Seen.CLEAN) for one in self._in(frozenset({S.DRAINING})))
            if not plan.actions and not ends:
                if self._cold_wait_s >= WAIT_S:
                    more = False
                    break
                self._cold_wait_s = WAIT_S
            for action in plan.actions:
                self._note(action)
            self._fold((*(Acted(action=action) for action in plan.actions), *ends), now_s)
        return Answer(
            starts=tuple(self._starts), stops=tuple(self._stops), orders=tuple(self._orders), unmet=plan.unmet,
            left=_left(self._world, now_s), more=more,
        )  # fmt: skip

    def _fold(self, batch: Sequence[Observation], now_s: float) -> None:
        self._world, _ = advance(self._world, batch, now_s)

    def _in(self, states: frozenset[S]) -> Iterator[Replica]:
        return (one for one in self._world.replicas.values() if one.state in states)

    def _under_way(self) -> tuple[ReplicaSeen, ...]:
        """Treat starting replicas as ready and stopped replicas as gone."""
        ready = (_seen(one, Seen.READY) for one in self._in(BEGINNING))
        return (*ready, *(_seen(one, Seen.CLEAN) for one in self._in(ENDED)))

    def _note(self, action: Action) -> None:
        match action:
            case StartReplica(replica=r):
                made = Start(
                    model=r.model, slices=r.resources.slices, memory_bytes=r.resources.memory_bytes, reason=r.reason
                )
                self._starts.append(made)
            case DrainReplica(replica=id, reason=reason):
                self._stops.append(Stop(replica=id, model=self._world.replicas[id].model, reason=reason))
            case StopReplica(replica=id, reason=reason) if self._world.replicas[id].state is not S.DRAINING:
                self._stops.append(Stop(replica=id, model=self._world.replicas[id].model, reason=reason))
            case CutNode(order=cut, reason=reason):
                self._orders.append(OtherAction(kind="cut", what=cut.node, reason=reason))
            case AcquireLease(order=lease, reason=reason):
                self._orders.append(OtherAction(kind="acquire", what=lease.id.name, reason=reason))
            case ReleaseLease(order=back, reason=reason):
                self._orders.append(OtherAction(kind="release", what=back.id.name, reason=reason))
            case FailStart(model=name, reason=reason):
                self._orders.append(OtherAction(kind="refuse", what=name, reason=reason))
            case _:
                pass  # a replica that is kept or that failed is neither a start nor a stop

    def _report(self) -> Reported:
        """Report the demand: the existing replicas serve as many requests as they can; the others wait."""
        world, levels, uses, calls = self._world, list[Level](), list[ReplicaUse](), self._calls()
        for name, asked in self._asked.items():
            on = [(one, max(0, one.slots - calls.get(one.id, 0))) for one in self._serving(name)]
            total = asked.waiting + asked.running
            running = min(total, max(0, sum(room for _, room in on) - self._waiting[name]))
            waiting = total - running
            if total:
                wait_s = (WAITED_S if on else self._cold_wait_s) if waiting else 0.0
                levels.append(Level(model=name, tenant=TENANT, waiting=waiting, running=running, oldest_wait_s=wait_s))
            for one, room in on:
                here = min(running, room)
                running -= here
                uses.append(ReplicaUse(replica=one.id, hold=here, in_use=here))
        self._sequence += 1
        report = Report(
            gateway=GATEWAY, boot="what-if", sequence=self._sequence, epoch=world.epoch, version=world.version,
            levels=tuple(levels), replicas=tuple(uses),
        )  # fmt: skip
        return Reported(report=report)

    def _calls(self) -> dict[ReplicaId, int]:
        """Existing requests on each replica, without the simulated ones."""
        mine = self._world.gateways[GATEWAY].uses
        return {
            id: many - (mine[id].in_use if id in mine else 0) for id, many in count_running_calls(self._world).items()
        }

    def _serving(self, name: ModelName) -> list[Replica]:
        there = (self._world.replicas[id] for id in self._world.by_model.get(name, ()))
        return [one for one in there if one.state in BEGINNING or one.state is S.READY]


def _seen(one: Replica, seen: Seen) -> ReplicaSeen:
    return ReplicaSeen(
        id=one.id, model=one.model, spec_hash=one.spec_hash, intent=one.intent, slices=one.resources.slices, seen=seen,
        memory_bytes=one.resources.memory_bytes, compute_percent=one.resources.compute_percent, slots=one.slots,
    )  # fmt: skip


def _left(world: World, now_s: float) -> tuple[Left, ...]:
    return tuple(
        Left(slice=one.slice.id, memory_bytes=one.slice.memory_bytes, free_bytes=max(0, one.free.memory_bytes))
        for one in build_bins(world, now_s)
    )
