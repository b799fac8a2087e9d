"""Computes the plan: turns a `World` into actions, each with a reason. The only module that decides. Pure.

`plan(world, now_s)` reads one snapshot. It orders its actions as follows:

1. Overdue starts fail, and so do starts with a known obstacle.
2. Replicas with an acknowledged drain stop. Replicas that are wanted again are revived.
3. Unwanted replicas and victims drain.
4. Requests that fit are started.
5. An idle node is repartitioned for requests that fit no MIG slice (`autoscaler.rearrange.mig_repartition`).
6. Capacity is ordered for unplaced requests, or released (`autoscaler.provisioning`).

A partitioned GPU is vacated for a request that needs all of it (`autoscaler.rearrange.vacate_gpu`). A replica whose pod
the scheduler does not bind drains if there is room on another node. If free room is fragmented, one replica at a time
moves (`autoscaler.rearrange.defragmentation`).

Invariants: once the actions of a plan are folded, a new plan for the same time has no further actions of these kinds;
one replica at a time starts on a device. `next_s` is when the plan changes only because time passes, so that the loop
can sleep.

`wind_down` plans the shutdown of a local autoscaler: it drains and stops every replica and starts none. On one machine
the gateways have drained and exited before, so no drain needs an acknowledgement. In a cluster the autoscaler just
exits, and another one leads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from math import inf

from msgspec.structs import replace

from autoscaler.capacity import delivered_slices
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand import desired_replicas
from autoscaler.demand.desired_replicas import DesiredReplicas
from autoscaler.demand.model_history import start_deadline_s
from autoscaler.placement.capacity_simulation import SimulationContext as Trial
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index_cache import IndexCache
from autoscaler.placement.model.bin_builder import ENDING, list_start_locks, stuck_s
from autoscaler.placement.model.topology import add_spread_nodes
from autoscaler.placement.model.types import PackResult, Placement, PlacementRequest, RestartCosts, Unplaced
from autoscaler.placement.partitionable_gpus import mark_gpu_waits
from autoscaler.planner.reconcile import (
    NOTHING,
    ModelDiff,
    PlannedModel,
    SettledModels,
    model_absence_reason,
    reconcile_model,
    retire_replica,
)
from autoscaler.provisioning import provisioner
from autoscaler.queries.device_health import ILL, list_lost_replicas
from autoscaler.queries.gateway_reports import count_running_calls, decide_stop, list_stalled_replicas, next_change_s
from autoscaler.queries.granted_memory import compute_slots
from autoscaler.queries.operator_orders import STOPPED
from autoscaler.queries.overcommitted_slices import list_excess_replicas
from autoscaler.rearrange import vacate_gpu
from autoscaler.rearrange.consolidation import plan_consolidation
from autoscaler.rearrange.defragmentation import defragment
from autoscaler.rearrange.mig_repartition import plan_repartition
from autoscaler.rearrange.replica_migration import MigrationContext, build_relocation_requests, drain_stranded_replica
from autoscaler.spec.document_names import format_replica_id
from autoscaler.spec.model import Model
from autoscaler.state.actions import (
    AcquireLease,
    Action,
    CutNode,
    DrainReplica,
    FailReplica,
    FailStart,
    Plan,
    ReleaseLease,
    ReviveReplica,
    StartReplica,
    StopReplica,
    Unmet,
)
from autoscaler.state.lifecycle import STOP_GRACE_S, ReplicaState
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, Move, Replica, ReplicaResources, ReplicaRuntime, ReplicaTimes, World
from autoscaler.text import format_duration


def plan(world: World, now_s: float) -> Plan:
    """Return the ordered actions for this snapshot; none before the driver has listed what exists."""
    return Planner().plan(world, now_s)


class Planner:
    """Plans one `World` after another, incrementally. A result does not depend on earlier calls."""

    def __init__(self) -> None:
        self._survey, self._resting = IndexCache(), SettledModels()

    def plan(self, world: World, now_s: float) -> Plan:
        """Plan one snapshot; see the function `plan`."""
        if not world.leadership.synced or not world.leadership.leads:
            return Plan()
        try:
            return self._plan(world, now_s)
        except BaseException:
            self._survey, self._resting = IndexCache(), SettledModels()  # they may be inconsistent after an error
            raise

    def _plan(self, world: World, now_s: float) -> Plan:
        tick = PlanBuilder(world, now_s, self._survey, self._resting)
        tick.compare_models()
        tick.leave_lost()
        tick.leave_crowded()
        tick.end_replicas()
        tick.place()
        return tick.plan()


def all_wanted(world: World, now_s: float, models: Iterable[Model] | None = None) -> dict[ModelName, DesiredReplicas]:
    """Return the desired replicas of these models, by name; None: of every model that needs or has any."""
    if models is None:
        models = (model for model in world.models.values() if not desired_replicas.is_inactive(world, model))
    answers = [desired_replicas.compute_desired_replicas(world, model, now_s) for model in models]
    return {answer.model: answer for answer in sorted(answers, key=lambda answer: answer.model)}


def count_missing_replicas(
    world: World, answers: dict[ModelName, DesiredReplicas], now_s: float
) -> dict[ModelName, int]:
    """Return how many replicas each model lacks, if it may start some now or at the next attempt of this episode."""
    lacking: dict[ModelName, int] = {}
    learned = world.learned
    for name, answer in answers.items():
        lack = answer.count - len(desired_replicas.list_live_replicas(world, name)) if answer.count else 0
        if lack <= 0 or name in learned.obstacles:
            continue
        if now_s >= learned.histories.get(name, NO_HISTORY).refused_until_s:
            lacking[name] = lack
    return lacking


class PlanBuilder:
    """Builds one plan."""

    def __init__(self, world: World, now_s: float, survey: IndexCache, resting: SettledModels) -> None:
        self.world, self.now_s = world, now_s
        self.survey, self.resting = survey, resting
        self.fails: list[FailReplica] = []
        self.impossible: list[FailStart] = []
        self.stops: list[StopReplica] = []
        self.revives: list[ReviveReplica] = []
        self.drains: list[DrainReplica] = []
        self.starts: list[StartReplica] = []
        self.cut: CutNode | None = None
        self.supplies: tuple[AcquireLease | ReleaseLease, ...] = ()
        self.unmet: dict[ModelName, Unmet] = {}
        self.wants: list[PlacementRequest] = []
        self.rollouts: dict[ModelName, DrainReplica] = {}
        self.tries: set[ModelName] = set()
        self.next_s = inf

    def later(self, at_s: float | None) -> None:
        """Note that the plan changes at `at_s` only because time passes."""
        if at_s is not None and self.now_s < at_s < self.next_s:
            self.next_s = at_s

    def compare_models(self) -> None:
        """Compare desired and live replicas, model by model, in order of names."""
        world, now_s = self.world, self.now_s
        answers = all_wanted(world, now_s, self._stirring())
        lacking, calls = count_missing_replicas(world, answers, now_s), count_running_calls(world)
        stalled = list_stalled_replicas(world)
        for name, answer in answers.items():
            self.later(answer.next_s)
            if answer.count == 0 and name not in world.by_model:
                continue
            model = world.models[name]
            compared = reconcile_model(PlannedModel(world, model, answer, lacking, calls, now_s, stalled))
            self._take(name, compared)
            if compared is NOTHING:
                self.resting.note(world, model, now_s, answer.next_s)
        for name in sorted(world.by_model.keys() - world.models.keys()):
            for replica in (world.replicas[id] for id in world.by_model[name]):
                why = STOPPED if name in world.stops else f"its Model is {model_absence_reason(replica)}"
                self._retire(retire_replica(replica, why))

    def _stirring(self) -> Iterator[Model]:
        """Models that are not known to be settled."""
        self.resting.look(self.world, self.now_s)
        for model in self.world.models.values():
            if desired_replicas.is_inactive(self.world, model):
                continue
            rest = self.resting.rest(self.world, model, self.now_s)
            if rest is None:
                yield model
            else:
                self.later(rest.next_s)

    def _take(self, name: ModelName, compared: ModelDiff) -> None:
        self.later(compared.next_s)
        self.revives += compared.revives
        self.wants += compared.wants
        for action in compared.retires:
            self._retire(action)
        for unmet in compared.unmet:
            self.unmet.setdefault(unmet.model, unmet)
        if compared.fail is not None:
            self.impossible.append(compared.fail)
        if compared.rollout is not None:
            self.rollouts[name] = compared.rollout

    def _retire(self, action: DrainReplica | StopReplica | None) -> None:
        if isinstance(action, DrainReplica):
            self.drains.append(action)
        elif action is not None:
            self.stops.append(action)

    def leave_lost(self) -> None:
        """Retire replicas on lost devices at once; the next plan starts replacements."""
        going = self._going()
        for id in list_lost_replicas(self.world, self.now_s):
            if id not in going:
                self._retire(retire_replica(self.world.replicas[id], ILL))

    def leave_crowded(self) -> None:
        """Retire the youngest replicas on overcommitted slices; the next plan starts replacements on other slices."""
        for id, reason in list_excess_replicas(self.world, self._going()).items():
            action = retire_replica(self.world.replicas[id], reason)
            self._retire(replace(action, crowded=True) if isinstance(action, DrainReplica) else action)

    def end_replicas(self) -> None:
        """Fail overdue starts; stop failed replicas and acknowledged drains, unless they are revived."""
        revived = {action.replica for action in self.revives}
        retired = {action.replica for action in self.drains} | {action.replica for action in self.stops}
        for id in sorted(self.world.replicas):
            replica = self.world.replicas[id]
            if replica.state == S.READY or id in revived or id in retired:
                continue
            limit = start_deadline_s(self.world, replica)
            if limit is not None and self.now_s >= limit:
                self.fails.append(FailReplica(replica=id, reason=self._too_long(replica)))
            elif replica.state == S.FAILED:
                reason = replica.failure or "it failed, and no reason was reported"
                self.stops.append(StopReplica(replica=id, grace_s=STOP_GRACE_S, reason=reason))
            elif replica.state == S.DRAINING:
                answer = decide_stop(self.world, replica, self.now_s)
                self.later(answer.next_s)
                if answer.stop:
                    why = f"{replica.drain.reason}; {answer.reason}" if replica.drain is not None else answer.reason
                    self.stops.append(StopReplica(replica=id, grace_s=STOP_GRACE_S, reason=why))
            else:
                self.later(limit)

    def _too_long(self, replica: Replica) -> str:
        model = self.world.models[replica.model]
        return f"not ready after {format_duration(model.spec.start.seconds_max)} (start.secondsMax)"

    def place(self) -> None:
        """Call the packer, and turn its result into starts, evictions and reasons."""
        going = self._going()
        asked = build_relocation_requests(self.world, self.now_s, going, len(self.wants))
        self.later(asked.next_s)
        moves = asked.by_want
        if not self.wants and not moves:
            self._consolidate()
            self._settle(PackResult(), self.survey.restart_costs)
            return
        wants = [*(add_spread_nodes(self.world, want, going) for want in self.wants), *moves]
        staying, expected = {action.replica for action in self.revives}, self.survey.restart_costs
        packing, index, next_s = vacate_gpu.pack_vacating_gpus(
            wants,
            lambda more, kept: self.survey.update(self.world, self.now_s, going | more, staying, kept),
            vacate_gpu.VacateContext(self.world, expected, self.now_s),
            moves,
        )
        self.later(next_s)
        for placement in packing.placements:
            if placement.want not in moves:
                self.starts.append(self._start(placement))
        for victim in packing.victims:
            if victim.want not in moves:
                self._evict(victim.replica, victim.want)
        for missing in packing.unmet:
            for node in missing.want.choice.avoids:
                shun = self.world.nodes.backoffs.get((missing.want.model, node))
                self.later(None if shun is None else shun.until_s)
        room = dict.fromkeys((*(one.want for one in packing.placements), *(one.want for one in packing.victims)))
        self.drains += [drain_stranded_replica(moves[want]) for want in room if want in moves]
        unmet = tuple(one for one in packing.unmet if one.want not in moves)
        unmet = self._cut(self._defragment(mark_gpu_waits(unmet, self.world), packing, index, expected), packing)
        packing = packing._replace(unmet=unmet)
        self._wait(packing._replace(unmet=self._settle(packing, expected)), index, expected)

    def _consolidate(self) -> None:
        """Start to move one replica from paid capacity to an owned device; called only if no request lacks room."""
        if not self.world.rented.guests:
            return
        going = self._going()
        index = self.survey.update(self.world, self.now_s, going, {action.replica for action in self.revives})
        found = plan_consolidation(MigrationContext(self.world, index, self.survey.restart_costs, self.now_s, going))
        self.later(found.next_s)
        if found.step is not None:
            self.starts.append(self._start(found.step.home, found.step.move))

    def _settle(self, packing: PackResult, expected: RestartCosts) -> tuple[Unplaced, ...]:
        """Order capacity for unplaced requests, and release what is not needed."""
        ground = Trial(self.world, expected, self.now_s, frozenset(self._going()))
        found = provisioner.provision_capacity(packing, [start.replica for start in self.starts], ground)
        self.supplies = found.actions
        owners = {action.order.owner for action in found.actions if isinstance(action, AcquireLease)}
        self.tries |= owners & self.world.models.keys()
        self.later(found.next_s)
        return found.unmet

    def _cut(self, unmet: tuple[Unplaced, ...], packing: PackResult) -> tuple[Unplaced, ...]:
        """Repartition an idle node if that makes room for unplaced requests."""
        taken = [id for placement in packing.placements for id in placement.slices]
        taken += [id for start in self.starts for id in start.replica.resources.slices]
        found = plan_repartition(unmet, self.world, self.now_s, taken)
        self.cut = found.order
        self.later(found.next_s)
        return found.unmet

    def _defragment(
        self, unmet: tuple[Unplaced, ...], packing: PackResult, index: SliceIndex, expected: RestartCosts
    ) -> tuple[Unplaced, ...]:
        """Explain which requests are unplaced because of fragmentation, and start at most one move for them."""
        ground = MigrationContext(
            world=self.world,
            slice_index=index,
            restart_costs=expected,
            now_s=self.now_s,
            going=self._going(),
            changed_models={want.model for want in self.wants} | {action.replica.model for action in self.starts},
            taken=[id for placement in packing.placements for id in placement.slices],
        )
        found = defragment(unmet, ground)
        self.later(found.next_s)
        self.starts += [self._start(step.home, step.move) for step in found.steps[:1]]
        return found.unmet

    def _going(self) -> set[ReplicaId]:
        return {a.replica for a in self.drains} | {a.replica for a in self.stops} | {a.replica for a in self.fails}

    def _start(self, placement: Placement, move: Move | None = None) -> StartReplica:
        want, world = placement.want, self.world
        self.tries.add(want.model)
        model = world.models[want.model]
        hash = model.spec_hash()
        taken = {action.replica.id for action in self.starts}
        id, intent, ordinal = ReplicaId(""), "", want.ordinal
        while not id or id in taken or id in world.replicas:
            intent = build_intent_key(world.installation, world.epoch, world.version, want.model, ordinal)
            id = format_replica_id(want.model, hash, intent)
            ordinal += 1
        replica = Replica(
            id=id,
            model=want.model,
            spec_hash=hash,
            intent=intent,
            slots=compute_slots(model, placement.memory_bytes),
            state=S.PENDING,
            since_s=self.now_s,
            reason=want.reason,
            move=move,
            resources=ReplicaResources(
                slices=placement.slices,
                memory_bytes=placement.memory_bytes,
                compute_percent=want.kind.compute_percent,
                host_request=want.kind.host_request,
            ),
            times=ReplicaTimes(
                created_s=self.now_s,
                wanted_s=None if want.urgency.unserved_since_s == inf else want.urgency.unserved_since_s,
            ),
            runtime=ReplicaRuntime(marks=delivered_slices.select_pod_marks(world, want.model, placement.slices)),
        )
        return StartReplica(replica=replica, reason=want.reason)

    def _evict(self, id: ReplicaId, want: PlacementRequest) -> None:
        """Drain the victim; stop it if it cannot have requests."""
        self.tries.add(want.model)
        replica = self.world.replicas[id]
        ready_s = replica.times.ready_s
        resident = "was starting" if ready_s is None else f"was resident {format_duration(self.now_s - ready_s)}"
        why = want.reason.removeprefix(f"wake {want.model}: ")
        reason = f"make room for {want.model}: {replica.model} {resident}, {why}"
        self._retire(retire_replica(replica, reason, victim_of=want.model))

    def _wait(self, packing: PackResult, index: SliceIndex, expected: RestartCosts) -> None:
        """Record why requests are unplaced, drain for rollouts that need a slice, and note when to plan again."""
        for missing in packing.unmet:
            name = missing.want.model
            where = missing.slices if missing.promised else ()
            unmet = Unmet(
                model=name, reason=missing.reason, never=missing.never, slices=where, ready_s=missing.ready_s,
                lease=missing.lease,
            )  # fmt: skip
            self.unmet.setdefault(name, unmet)
            drain = self.rollouts.get(name)
            if drain is None or drain.replica in self._going():  # it may be evicted for another model
                continue
            if not any(start.replica.model == name for start in self.starts):
                self.tries.add(name)
                self.drains.append(drain)
        if not packing.unmet:
            return
        for end_s in (
            *list_start_locks(self.world, self.now_s).values(),
            *(one.until_s for one in self.world.nodes.mps_failures.values()),
        ):
            self.later(end_s)
        index.look(expected)
        self.later(index.eviction_costs.next_s(self.now_s))
        for replica in self.world.replicas.values():
            if replica.state in ENDING and any(id in index.shelves for id in replica.resources.slices):
                self.later(stuck_s(replica))

    def plan(self) -> Plan:
        """Return the plan with its actions in order."""
        actions: list[Action] = [*self.fails, *self.impossible, *self.stops, *self.revives, *self.drains]
        actions += self.starts
        actions += [*([] if self.cut is None else [self.cut]), *self.supplies]
        self.later(next_change_s(self.world, self.now_s))
        unmet = tuple(self.unmet[name] for name in sorted(self.unmet))
        next_s = None if self.next_s == inf else self.next_s
        return Plan(actions=tuple(actions), unmet=unmet, next_s=next_s, tries=tuple(sorted(self.tries)))


def build_intent_key(installation: str, epoch: int, version: int, model: ModelName, ordinal: int) -> str:
    """Return the idempotency key of a start: a decision repeated by the same leader has the same key."""
    decision = f"{epoch}/{version}/{model}/{ordinal}"
    key = f"{installation}/{decision}" if installation else decision
    return hashlib.sha256(key.encode()).hexdigest()[:10]


REASON = "pilotlight is stopping"
_RUNS = {ReplicaState.STARTING, ReplicaState.READY, ReplicaState.UNREADY}
_STOPS = {ReplicaState.DRAINING, ReplicaState.PENDING, ReplicaState.FAILED}


def wind_down(world: World, grace_s: float) -> Plan:
    """Return the next actions of a shutdown; none once all stops are issued. `grace_s`: from SIGTERM to SIGKILL."""
    actions: list[Action] = []
    for replica in world.replicas.values():
        if replica.state in _RUNS:
            actions.append(DrainReplica(replica=replica.id, reason=REASON))
        elif replica.state in _STOPS:
            actions.append(StopReplica(replica=replica.id, grace_s=grace_s, reason=REASON))
    return Plan(actions=tuple(actions))
