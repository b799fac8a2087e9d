"""Small Worlds for tests: a few lines create the snapshot of a decision, or run virtual time over it.

`Any` marks builders that pass on any field of a Struct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.plan import Planner, plan
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.spec.model import Gpu, Model, ModelSpec, ReplicaRange
from autoscaler.state.actions import (
    AcquireLease,
    Acted,
    Action,
    CutNode,
    FailReplica,
    FailStart,
    Plan,
    ReleaseLease,
    StartReplica,
    StopReplica,
)
from autoscaler.state.events import Reported, Seen, Tick, Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import (
    DeviceId,
    Drain,
    Gateway,
    History,
    NodeId,
    Replica,
    ReplicaResources,
    ReplicaTimes,
    Slice,
    SliceId,
    World,
)
from tests.support.harness.driver_events import seen_of

GI = 1 << 30
T0 = 1000.0
"""Start time of tests: monotonic clocks do not start at zero."""

Grouped = TypeVar("Grouped", World, Replica)


def model(
    name: str,
    memory_gi: float = 10,
    *,
    slots: int = 4,
    low: int = 0,
    high: int = 1,
    gpu: Gpu | None = None,
    **spec: Any,
) -> Model:
    """A Model of `memory_gi`; `spec` overrides any field of its spec."""
    made = ModelSpec(engine="command", replicas=ReplicaRange(min=low, max=high), gpu=gpu or Gpu(), **spec)
    return Model(name=ModelName(name), spec=made, memory_bytes=int(memory_gi * GI), slots=slots)


def device(name: str = "gpu0", memory_gi: float = 24, node: str = "n0", **fields: Any) -> Slice:
    """A whole shared device as one Slice."""
    size = int(memory_gi * GI)
    return Slice(id=SliceId(name), device=DeviceId(name), node=NodeId(node), memory_bytes=size, **fields)


def replica(of: Model, name: str, on: Iterable[str] = ("gpu0",), state: S = S.READY, **fields: Any) -> Replica:
    """A Replica of `of`, ready since T0 - 100 by default."""
    ready_s = T0 - 100 if state in {S.READY, S.UNREADY, S.DRAINING} else None
    default = Replica(
        id=ReplicaId(name),
        model=of.name,
        spec_hash=of.spec_hash(),
        intent=name,
        slots=of.slots,
        state=state,
        since_s=T0 - 100,
        resources=ReplicaResources(slices=tuple(SliceId(id) for id in on), memory_bytes=of.memory_bytes),
        times=ReplicaTimes(created_s=T0 - 110, started_s=T0 - 110, ready_s=ready_s),
    )
    return replace_fields(default, **fields)


def drain(since_s: float = T0 - 1, came_from: S = S.READY, victim_of: str | None = None) -> Drain:
    """Draining since Routes of version 2 of epoch 1."""
    victim = None if victim_of is None else ModelName(victim_of)
    return Drain(since_s=since_s, reason="idle", came_from=came_from, epoch=1, version=2, victim_of=victim)


def level(name: str, waiting: int = 0, running: int = 0, wait_s: float = 0.0, tenant: str = "acme") -> Level:
    """Demand of one Tenant."""
    return Level(
        model=ModelName(name), tenant=TenantName(tenant), waiting=waiting, running=running, oldest_wait_s=wait_s
    )


def gateway(
    name: str = "g1", levels: Iterable[Level] = (), uses: Iterable[ReplicaUse] = (), seen_s: float = T0, **fields: Any
) -> Gateway:
    """A gateway that has just reported to the leader of epoch 1, at version 1."""
    report = Report(
        gateway=GatewayId(name), boot="b", sequence=1, epoch=1, version=1, levels=tuple(levels), replicas=tuple(uses)
    )
    known = {"id": GatewayId(name), "boot": "b", "seen_s": seen_s, "report": report, "in_epoch": True, "watched": True}
    return Gateway(**{**known, **fields})


def use(name: str, in_use: int) -> ReplicaUse:
    """Requests on one Replica."""
    return ReplicaUse(replica=ReplicaId(name), hold=in_use, in_use=in_use)


def world(
    models: Iterable[Model] = (),
    slices: Iterable[Slice] = (),
    replicas: Iterable[Replica] = (),
    gateways: Iterable[Gateway] | None = None,
    histories: dict[str, History] | None = None,
    **fields: Any,
) -> World:
    """A synced `World` of an established leader, with its indices; by default with one gateway without requests.

    `fields` may be fields of the `World` and of its groups.
    """
    known = (gateway(),) if gateways is None else gateways
    made = replace_fields(
        World(epoch=1),
        documented=True,
        models={m.name: m for m in models},
        slices={s.id: s for s in slices},
        replicas={r.id: r for r in replicas},
        gateways={g.id: g for g in known},
        histories={ModelName(name): history for name, history in (histories or {}).items()},
        **{"version": 1, "synced": True, **fields},
    )
    return rebuild_indices(made, T0)


def replace_fields(of: Grouped, **fields: Any) -> Grouped:
    """The `World` or replica with other values of these fields, which may be fields of its groups."""
    groups = ("leadership", "nodes", "learned") if isinstance(of, World) else ("resources", "times", "runtime")
    for group in groups:
        before = fields.get(group, getattr(of, group))
        if inside := {name: fields.pop(name) for name in before.__struct_fields__ if name in fields}:
            fields[group] = replace(before, **inside)
    return replace(of, **fields)


def folded(before: World, actions: Iterable[Action], now_s: float = T0) -> World:
    """The `World` after our own Actions."""
    after, _ = advance(before, tuple(Acted(action=action) for action in actions), now_s)
    return after


def kinds(made: Plan) -> list[str]:
    """`start a`, `drain r1` ...: the Actions of a Plan as short words."""
    return [f"{verb(a)} {_of(a)}" for a in made.actions]


def _of(action: Action) -> str:
    """The Model of a start, else the Replica."""
    if isinstance(action, FailStart):
        return action.model
    if isinstance(action, CutNode):
        return action.order.node
    if isinstance(action, AcquireLease | ReleaseLease):
        return action.order.id.name
    return action.replica.model if isinstance(action, StartReplica) else action.replica


def verb(action: Action) -> str:
    """`start`, `drain`, `revive`, `stop` or `fail`."""
    return type(action).__name__.removesuffix("Replica").lower()


class Scene:
    """Virtual time over fold and plan: engines start in `start_s`, end at once, and one gateway reports.

    `demand(now_s, scene)` returns the levels of each report, (model, waiting, running) each; running requests are
    spread over the ready Replicas. A test that needs any ready replica to serve its requests does so in `demand`.
    """

    planned_twice = True
    """Whether each plan is also made by a new Planner and compared."""

    def __init__(
        self, begin: World, demand: Callable[[float, Scene], Iterable[tuple[str, int, int]]], start_s: float = 5.0
    ) -> None:
        self.world, self.demand, self.start_s = begin, demand, start_s
        self.now_s = T0
        self.actions: list[tuple[float, Action]] = []
        self.transitions: list[Transition] = []
        self.plan = Plan()
        self._planner = Planner()
        self._began: dict[ReplicaId, float] = {}
        self._sequence = 1
        self._waits_since: dict[str, float] = {}

    def ready(self, name: str) -> list[ReplicaId]:
        """The Model's replicas that accept requests."""
        ids = self.world.by_model.get(ModelName(name), ())
        return [id for id in ids if self.world.replicas[id].state is S.READY]

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        """Advances the time in steps; each has a report and as many plans as have Actions."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            self._engines()
            self._report()
            for _ in range(4):
                self.plan = self._planner.plan(self.world, self.now_s)
                if self.planned_twice:
                    assert self.plan == plan(self.world, self.now_s), (
                        "a reused planner returns the same plan as a new one"
                    )
                if not self.plan.actions:
                    break
                for action in self.plan.actions:
                    self._act(action)

    def verbs(self, *wanted: str) -> list[tuple[float, Action]]:
        """Actions of these verbs, with their times."""
        return [(at_s, action) for at_s, action in self.actions if verb(action) in wanted]

    def _fold(self, *batch: Any) -> None:
        self.world, moved = advance(self.world, batch, self.now_s)
        self.transitions += moved

    def _act(self, action: Action) -> None:
        self.actions.append((self.now_s, action))
        self._fold(Acted(action=action))
        if isinstance(action, StartReplica):
            self._began[action.replica.id] = self.now_s
        elif isinstance(action, StopReplica):
            self._see(self.world.replicas[action.replica], Seen.CLEAN)
        else:
            assert not isinstance(action, FailReplica)

    def _see(self, of: Replica, seen: Seen) -> None:
        self._fold(seen_of(of, seen, started_s=self._began.get(of.id), proof="exited"))

    def _engines(self) -> None:
        for id, began_s in list(self._began.items()):
            known = self.world.replicas.get(id)
            if known is None:
                del self._began[id]
            elif known.state is S.STARTING:
                self._see(known, Seen.READY if self.now_s - began_s >= self.start_s else Seen.STARTING)

    def _report(self) -> None:
        levels, uses = [], []
        for name, waiting, running in self.demand(self.now_s, self):
            since_s = self._waits_since.setdefault(name, self.now_s) if waiting else self.now_s
            if not waiting:
                self._waits_since.pop(name, None)
            if waiting or running:
                levels.append(level(name, waiting, running, self.now_s - since_s))
            on = self.ready(name)
            for i, id in enumerate(on):
                share = running // len(on) + (i < running % len(on))
                uses.append(use(id, share))
        self._sequence += 1
        report = Report(
            gateway=GatewayId("g1"), boot="b", sequence=self._sequence, epoch=self.world.epoch,
            version=self.world.version, levels=tuple(levels), replicas=tuple(uses),
        )  # fmt: skip
        self._fold(Tick(), Reported(report=report))
