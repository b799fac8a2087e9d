"""Reconciles one model: compares its desired replica count with its live replicas. Pure.

Decides which replicas to revive, which to retire and in which order, and which placement requests the packer gets.
Draining replicas are revived before new ones start. No request is made before a retry time, or while an obstacle to a
start is known. A changed spec is rolled out `rollout.surge` new replicas at a time: on free slices first, else after
draining one old replica; a new spec that fails halts the rollout. `autoscaler.planner.plan` combines the models and
calls the packer.

`SettledModels` keeps models that need no action, with the inputs that this depends on. Most models are settled most of
the time, and planning skips them. Invariant: computing a settled model again would give the same outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.desired_replicas import DesiredReplicas, list_live_replicas, unserved_since_s
from autoscaler.demand.residency import residency_s
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest, Urgency
from autoscaler.queries.device_health import is_lost
from autoscaler.queries.gateway_reports import STALLED, is_demand_complete, list_stalled_replicas
from autoscaler.queries.operator_orders import explain_drain, find_drain_cordon, is_stop_ordered
from autoscaler.queries.unschedulable_replicas import is_drain_final, list_avoided_nodes
from autoscaler.spec.model import ADOPTED_HASH, Model, SignalName
from autoscaler.state.actions import DrainReplica, FailStart, ReviveReplica, StopReplica, Unmet
from autoscaler.state.lifecycle import BEGINNING, STOP_GRACE_S
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, NO_LOAD, History, ModelLoad, Move, Replica, Signal, World
from autoscaler.text import format_duration

WANTS_MAX = 32
"""Maximum placement requests for one model in one tick; the next tick makes more."""
READ_S_MAX = 15.0
"""How long a start waits until an agent has read the memory requirement from the artifact: agents report every few
seconds. After that time, the model is assumed to need whole devices."""
UNREAD = "waits until an agent has read its memory requirement from its artifact"
HOME = "on owned devices"
DRAINABLE = frozenset({S.STARTING, S.READY, S.UNREADY})
DROPPABLE = frozenset({S.PENDING, S.WAKING, S.ASLEEP, S.FALLING_ASLEEP})


class PlannedModel(NamedTuple):
    """One model and its desired replicas.
    `pressing`: models that lack replicas and may start some; `calls`: requests on each replica that has any.
    """

    world: World
    model: Model
    answer: DesiredReplicas
    pressing: Mapping[ModelName, int]
    calls: Mapping[ReplicaId, int]
    now_s: float
    stalled: frozenset[ReplicaId] = frozenset()
    """Replicas whose engines make no progress."""

    @property
    def history(self) -> History:
        """The recorded history of the model."""
        return self.world.learned.histories.get(self.model.name, NO_HISTORY)

    @property
    def obstacle(self) -> str:
        """Why a start would certainly fail; empty if no obstacle is known."""
        return self.world.learned.obstacles.get(self.model.name, "")


class ModelDiff(NamedTuple):
    """The changes that one model needs."""

    revives: tuple[ReviveReplica, ...] = ()
    retires: tuple[DrainReplica | StopReplica, ...] = ()
    """Drains, or stops of replicas that cannot have requests."""
    wants: tuple[PlacementRequest, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    fail: FailStart | None = None
    """Set if the model has no replica and none could start."""
    rollout: DrainReplica | None = None
    """Drain of an old replica, used if the packer finds no free slice for its successor."""
    next_s: float | None = None


NOTHING = ModelDiff()


def retire_replica(
    replica: Replica, reason: str, victim_of: ModelName | None = None
) -> DrainReplica | StopReplica | None:
    """Return the action that retires the replica; None if it is already ending."""
    if replica.state in DRAINABLE:
        return DrainReplica(replica=replica.id, reason=reason, victim_of=victim_of)
    if replica.state in DROPPABLE:
        return StopReplica(replica=replica.id, grace_s=STOP_GRACE_S, reason=reason)
    return None


def model_absence_reason(replica: Replica) -> str:
    """Return why the model of the replica no longer exists, as the predicate of a sentence."""
    adopted = replica.spec_hash == ADOPTED_HASH
    return "no longer annotated, or it was deleted" if adopted else "no longer in the documents"


def reconcile_model(case: PlannedModel) -> ModelDiff:
    """Return the changes that bring the model to its desired replica count."""
    supply = list_live_replicas(case.world, case.model.name)
    missing = case.answer.count - len(supply)
    if not missing and not case.stalled and not any(_outdated(case, replica) for replica in supply):
        return NOTHING
    forced = {replica.id: action for replica in supply if (action := _forced_out(case, replica)) is not None}
    if forced:  # the next plan starts replacements
        others, surplus = [replica for replica in supply if replica.id not in forced], -missing - len(forced)
        more = _surplus(case, others, surplus) if surplus > 0 else NOTHING
        return more._replace(retires=(*forced.values(), *more.retires))
    if missing < 0:
        return _surplus(case, supply, -missing)
    revives = _revive(case)[:missing]
    missing -= len(revives)
    more = _ask(case, len(supply) + len(revives), missing) if missing else _roll(case, supply)
    return more._replace(revives=revives)


def _outdated(case: PlannedModel, replica: Replica) -> bool:
    """Whether it must be replaced: its spec has changed, or a drain order covers its device or node."""
    return replica.spec_hash != case.model.spec_hash() or find_drain_cordon(case.world, replica) is not None


def _forced_out(case: PlannedModel, replica: Replica) -> DrainReplica | StopReplica | None:
    """Retire it at once, with or without a replacement, if its engine is stalled, or its drain order is forced or
    immediate.
    """
    if replica.id in case.stalled:
        return retire_replica(replica, STALLED)
    cordon = find_drain_cordon(case.world, replica)
    if cordon is None or not (cordon.force or cordon.at_once):
        return None
    return retire_replica(replica, explain_drain(cordon))


def _revive(case: PlannedModel) -> tuple[ReviveReplica, ...]:
    """Return draining replicas to revive, best first, without those that drain for another model that still waits."""
    hash = case.model.spec_hash()
    back: list[tuple[int, bool, float, ReplicaId]] = []
    for id in case.world.by_model.get(case.model.name, ()):
        replica = case.world.replicas[id]
        drain = replica.drain
        if replica.state != S.DRAINING or drain is None or replica.spec_hash != hash:
            continue
        if is_stop_ordered(case.world, replica) or is_drain_final(replica) or is_lost(case.world, replica, case.now_s):
            continue
        if id in case.stalled:
            continue
        if drain.victim_of is None or drain.victim_of not in case.pressing:
            back.append((replica.runtime.rank, drain.came_from != S.READY, -(replica.times.ready_s or 0.0), id))
    reason = f"wanted again: {case.answer.reason}"
    return tuple(ReviveReplica(replica=id, reason=reason) for *_, id in sorted(back))


def _ask(case: PlannedModel, have: int, missing: int) -> ModelDiff:
    """Return placement requests for the missing replicas, unless a failed start must wait for its next attempt."""
    history, answer, name = case.history, case.answer, case.model.name
    due_s = start_after_s(history)
    if case.now_s < due_s:
        why = history.failure or "its last start failed"
        reason = f"{why}; next attempt in {format_duration(due_s - case.now_s)}"
        return ModelDiff(unmet=(Unmet(model=name, reason=reason),), next_s=due_s)
    if case.obstacle:
        if not have:
            return ModelDiff(fail=FailStart(model=name, reason=case.obstacle))
        return ModelDiff(unmet=(Unmet(model=name, reason=f"another replica cannot start: {case.obstacle}"),))
    read_by_s = compute_read_deadline_s(case)
    if case.now_s < read_by_s:
        return ModelDiff(unmet=(Unmet(model=name, reason=UNREAD),), next_s=read_by_s)
    reason = f"wake {name}: {answer.reason}" if not have else f"scale up {name}: {answer.reason}"
    wants: list[PlacementRequest] = []
    avoids = list_avoided_nodes(case.world, name, case.now_s)
    first = build_placement_request(case.model, 0, inf, EvictionLevel.NONE, reason, case.world.settings.pod, avoids)
    for ordinal in range(min(missing, WANTS_MAX)):
        since_s, force = inf, choose_eviction_level(answer, have + ordinal)
        if answer.urgent:
            since_s = case.now_s if have + ordinal else unserved_since_s(case.world, name, case.now_s)
        begins_s = (answer.begins_s or 0.0) if have + ordinal >= answer.now else 0.0
        wants.append(first._replace(ordinal=ordinal, urgency=Urgency(first.urgency.priority, since_s, force, begins_s)))
    return ModelDiff(wants=tuple(wants))


def choose_eviction_level(answer: DesiredReplicas, before: int) -> EvictionLevel:
    """Return which replicas one more replica may evict, if `before` replicas exist already."""
    if not answer.urgent:
        return EvictionLevel.LOWER
    return EvictionLevel.IDLE if before else EvictionLevel.BUSY


def start_after_s(history: History) -> float:
    """Return the earliest time of the next start: the next attempt of an episode, or the end of a back-off."""
    return max(history.retry_at_s, history.refused_until_s)


def compute_read_deadline_s(case: PlannedModel) -> float:
    """Return the time until which a start waits for an unknown memory requirement; minus infinity: it does not wait.
    A new leader needs the agents' reports first. An artifact that could not be inspected delays no start.
    """
    model, unbrought = case.model, case.world.learned.unbrought
    if model.unread_s is None or any(one in unbrought for one in model.artifacts()):
        return -inf
    return max(model.unread_s, case.world.leadership.leading_since_s) + READ_S_MAX


def _surplus(case: PlannedModel, supply: Sequence[Replica], many: int) -> ModelDiff:
    """Retire surplus replicas.
    Order: replaced by a move, old spec, starting, on paid capacity, fewest requests, youngest.
    """
    answer, spec, moves = case.answer, case.model.spec, _moves(supply)
    many -= _surging(case, supply) if answer.count else 0
    resident_s = residency_s(case.model, case.history) if 0 < answer.count < spec.replicas.max else 0.0
    reason = answer.reason if answer.count == 0 else f"scale down to {answer.count}: {answer.reason}"
    retires: list[DrainReplica | StopReplica] = []
    next_s: float | None = None
    for replica in sorted(supply, key=lambda one: (one.id not in moves, *_going_order(case, one))):
        if len(retires) >= many:
            break
        end_s = resident_s + (replica.since_s if replica.times.ready_s is None else replica.times.ready_s)
        if replica.state not in BEGINNING and case.now_s < end_s:
            next_s = end_s if next_s is None else min(next_s, end_s)
            if replica.runtime.rank:
                break  # no other replica may retire before it
            continue
        cordon = find_drain_cordon(case.world, replica) if answer.count else None
        move = moves.get(replica.id) if answer.count and cordon is None else None
        if move is not None and replica.id in case.world.nodes.undisturbed:
            many -= 1  # both serve until a PodDisruptionBudget allows draining the old one
            continue
        why = reason if cordon is None else explain_drain(cordon)
        if move is not None:
            why = f"replaced by another replica {f'to make room for {move.room_for}' if move.room_for else HOME}"
        action = retire_replica(replica, why, victim_of=None if move is None else move.room_for or None)
        retires += [action] if action is not None else []
    return ModelDiff(retires=tuple(retires), next_s=next_s)


def _moves(supply: Sequence[Replica]) -> dict[ReplicaId, Move]:
    """Moves in progress, by the replica that is being replaced."""
    return {replica.move.replica: replica.move for replica in supply if replica.move is not None}


def _surging(case: PlannedModel, supply: Sequence[Replica]) -> int:
    """Return the number of new replicas that start while the replicas that they replace still run."""
    begin = sum(replica.state in BEGINNING and not _outdated(case, replica) for replica in supply)
    moves = _moves(supply)
    old = sum(replica.id in moves or _outdated(case, replica) for replica in supply)
    return min(begin, old, max(1, case.model.spec.rollout.surge))


def _going_order(case: PlannedModel, replica: Replica) -> tuple[bool, int, bool, bool, int, float, str]:
    new, ready = not _outdated(case, replica), replica.state not in BEGINNING
    home = replica.id not in case.world.rented.guests
    return (
        new,
        -replica.runtime.rank,
        ready,
        home,
        case.calls.get(replica.id, 0),
        -replica.times.created_s,
        replica.id,
    )


def _roll(case: PlannedModel, supply: Sequence[Replica]) -> ModelDiff:
    """One step of a rollout; nothing if all replicas have the current spec or a step is in progress."""
    history, surge = case.history, case.model.spec.rollout.surge
    old = [replica for replica in supply if _outdated(case, replica)]
    under_way = len(case.world.by_model.get(case.model.name, ())) > len(supply)
    begin = sum(r.state in BEGINNING and r not in old for r in supply)
    if not old or under_way or begin >= max(1, surge):
        return NOTHING
    first, due_s = min(old, key=lambda replica: _going_order(case, replica)), start_after_s(history)
    cordon = find_drain_cordon(case.world, first)
    who = "a replica with the changed spec" if cordon is None else "its replacement"
    if case.now_s < due_s:
        wait = format_duration(due_s - case.now_s)
        reason = f"{who} failed to start, and the old one keeps serving; next attempt in {wait}: {history.failure}"
        return ModelDiff(unmet=(Unmet(model=case.model.name, reason=reason),), next_s=due_s)
    if case.obstacle:
        reason = f"{who} cannot start, and the old one keeps serving: {case.obstacle}"
        return ModelDiff(unmet=(Unmet(model=case.model.name, reason=reason),))
    if case.now_s < (read_by_s := compute_read_deadline_s(case)):
        return ModelDiff(unmet=(Unmet(model=case.model.name, reason=UNREAD),), next_s=read_by_s)
    why = "its spec has changed" if cordon is None else explain_drain(cordon)
    if not surge and cordon is None:
        action = None if history.episodes else retire_replica(first, f"{why}, and rollout.surge is 0")
        return ModelDiff(retires=() if action is None else (action,))
    drain = retire_replica(first, f"{why}, and no slice is free for its replacement")
    gives_way = drain if isinstance(drain, DrainReplica) and not history.episodes and not begin else None
    force = EvictionLevel.NONE
    if cordon is not None and cordon.why:
        # It drains at its deadline. Until then, a place for its replacement is sought, or capacity is ordered.
        gives_way, force = None, EvictionLevel.LOWER
    reason = f"roll out the changed spec of {case.model.name}" if cordon is None else f"move {case.model.name}: {why}"
    many = min(max(1, surge), len(old)) - begin
    defaults, avoids = case.world.settings.pod, list_avoided_nodes(case.world, case.model.name, case.now_s)
    wants = tuple(
        build_placement_request(case.model, ordinal, inf, force, reason, defaults, avoids) for ordinal in range(many)
    )
    return ModelDiff(wants=wants, rollout=gives_way)


class SettledModel(NamedTuple):
    """One settled model, with the inputs that this depends on."""

    model: Model
    load: ModelLoad
    history: History
    signals: Mapping[SignalName, Signal] | None
    replicas: tuple[Replica, ...]
    since_s: float
    next_s: float | None
    """When the decision must be made again only because time passes."""


class SettledModels:
    """Models known to be settled; empty at first."""

    def __init__(self) -> None:
        self._known: dict[ModelName, SettledModel] = {}
        self._of_all: tuple[object, ...] = ()

    def look(self, world: World, now_s: float) -> None:
        """Forget all models if something changed that could unsettle any of them."""
        where = world.nodes.slices if world.nodes.cordons else None  # slices show which replicas are on a cordoned node
        leader = world.leadership.leading_since_s, world.epoch
        orders = world.stops, world.nodes.cordons, list_stalled_replicas(world)
        of_all = (is_demand_complete(world, now_s), *orders, where, world.rented, *leader)
        if of_all != self._of_all:
            self._known.clear()
            self._of_all = of_all
        if len(self._known) > len(world.models):
            self._known = {name: rest for name, rest in self._known.items() if name in world.models}

    def rest(self, world: World, model: Model, now_s: float) -> SettledModel | None:
        """Return the settled model; None if it is not known to be settled now."""
        known = self._known.get(model.name)
        if known is None:
            return None
        if known.model is model and known.since_s <= now_s and (known.next_s is None or now_s < known.next_s):
            name, ids = model.name, world.by_model.get(model.name, ())
            same = known.load is world.loads.get(name, NO_LOAD) or known.load == world.loads.get(name, NO_LOAD)
            same = same and known.history is world.learned.histories.get(name, NO_HISTORY)
            same = same and known.signals is world.learned.signals.get(name)
            same = same and len(ids) == len(known.replicas)
            if same and all(world.replicas[id] is one for id, one in zip(ids, known.replicas, strict=True)):
                return known
        del self._known[model.name]
        return None

    def note(self, world: World, model: Model, now_s: float, next_s: float | None) -> None:
        """Remember that a model is settled, so that later plans skip it until one of its inputs changes.

        A model with waiting requests is never settled, because serving them depends on inputs that are not kept here.
        """
        name, load = model.name, world.loads.get(model.name, NO_LOAD)
        if not load.waiting:
            replicas = tuple(world.replicas[id] for id in world.by_model.get(name, ()))
            history = world.learned.histories.get(name, NO_HISTORY)
            signals = world.learned.signals.get(name)
            self._known[name] = SettledModel(model, load, history, signals, replicas, now_s, next_s)
