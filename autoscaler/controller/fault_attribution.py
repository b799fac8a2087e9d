"""Fault containment: an exception that one Model causes quarantines that Model and affects no other. Pure.

Decisions are pure functions of a `World`. `find_culprits` finds the Model at fault by repeating a decision without some
Models, so the planner and the fold need no fault handling. `World.learned.faults` lists quarantined Models, see
`autoscaler.fold.model_quarantine`. The planner gets a `World` in which their replicas keep their resources under
another name (`autoscaler.fold.quarantine_mask`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.exception_handling import Failure, attempt, can_complete, describe_error
from autoscaler.fold.draft import Draft
from autoscaler.fold.fold import Observation
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import assume_quarantined
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.actions import AcquireLease, Acted, Action, FailStart, StartReplica
from autoscaler.state.capacity import LeaseRefused, LeasesSeen, OffersSeen, ProviderTroubled
from autoscaler.state.events import (
    DocumentsSeen,
    FaultSeen,
    FollowingSeen,
    GatewayGone,
    GatewaySeen,
    HistorySeen,
    HoldsGranted,
    LeadingSeen,
    ModelStopped,
    ModelWoken,
    NodeReported,
    ReplicaSeen,
    Reported,
    Seen,
    SignalsSeen,
    StartSeen,
    Transition,
)
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.mig import CutRefused
from autoscaler.state.world import Replica, ReplicaResources, ReplicaRuntime, ReplicaTimes, World

CULPRITS_MAX: Final = 16
"""Maximum number of culprits returned by one search."""

Name = TypeVar("Name", bound=Hashable)


def find_culprits(names: Sequence[Name], works: Callable[[Collection[Name]], bool]) -> tuple[Name, ...]:
    """Return at most CULPRITS_MAX of `names` whose exclusion makes `works` true; empty if there are none.

    If two names fail only together, return the one later in `names` (see `rank_suspects`). `works` takes the names to
    exclude. It is called about log2(len(names)) times for each culprit.
    """
    found: list[Name] = []
    if not names or not works(names):
        return ()
    while len(found) < CULPRITS_MAX and not works(found):
        rest = [name for name in names if name not in found]
        fine, broken = 0, len(rest)  # it works with the first `fine` names and fails with the first `broken`
        while broken - fine > 1:
            middle = (fine + broken) // 2
            if works([*found, *rest[middle:]]):
                fine = middle
            else:
                broken = middle
        found.append(rest[broken - 1])
    return tuple(found)


def rank_suspects(names: Iterable[ModelName], error: Exception) -> list[ModelName]:
    """Sort `names` by suspicion, the most suspect last.

    A Model is suspect if a local variable of a frame in the traceback refers to it; the innermost frame counts most.
    When a replica is examined on behalf of another Model, the culprit is therefore the replica's Model.
    """
    rank: dict[ModelName, int] = {}
    known = frozenset(names)
    trace, depth = error.__traceback__, 0
    while trace is not None:
        depth += 1
        for value in trace.tb_frame.f_locals.values():
            name = value.name if isinstance(value, Model) else getattr(value, "model", value)
            name = name.name if isinstance(name, Model) else name
            if isinstance(name, str) and name in known:
                rank[ModelName(name)] = depth
        trace = trace.tb_next
    return sorted(known, key=lambda name: (rank.get(name, 0), name))


# --- folding a batch in which some observations raise -----------------------------------------------------------------


class Folded(NamedTuple):
    """The result of folding a batch. `aside`: observations not folded, or only in part; `folded`: all others."""

    world: World
    transitions: tuple[Transition, ...]
    faults: tuple[tuple[ModelName, Exception], ...]
    """The Models that were quarantined, each with its exception."""
    aside: tuple[Observation, ...]
    folded: tuple[Observation, ...]
    error: Exception | None
    """The last exception that could not be attributed to a Model."""


def fold_separately(world: World, batch: Sequence[Observation], now_s: float) -> Folded:
    """After `fold` raised for a batch: fold its observations one by one, without the Models that cause exceptions."""
    transitions: list[Transition] = []
    faults: list[tuple[ModelName, Exception]] = []
    aside: dict[Hashable, Observation] = {}
    folded: dict[Hashable, Observation] = {}
    last: Exception | None = None
    for one in batch:
        done, key = attempt(partial(advance, world, (one,), now_s)), observation_key(one)
        aside.pop(key, None)
        if isinstance(done, Failure):
            folded.pop(key, None)
            if not isinstance(one, Reported | Acted):  # the next report repeats its content; Actions are not retried
                aside[key] = one
            error, found = done.error, _culprits_of(world, one, done.error, now_s)
            seen = [FaultSeen(model=name, reason=describe_error(error), part="fold") for name in found]
            held = _holding(world, one, now_s)
            done = attempt(partial(advance, held, (*_rest(held, one, found), *seen), now_s)) if found else done
            if isinstance(done, Failure):  # no Model explains it, or not all of it
                last = done.error
                done = attempt(partial(advance, held, seen, now_s))
            if isinstance(done, Failure):
                continue
            faults += [(name, error) for name in found]
        else:
            folded[key] = one
        world, moved = done
        transitions += moved
    return Folded(world, tuple(transitions), tuple(faults), tuple(aside.values()), tuple(folded.values()), last)


def _holding(world: World, one: Observation, now_s: float) -> World:
    """The `World` plus a replica that could not be adopted, so that the resources that it uses do not count as free."""
    if not isinstance(one, ReplicaSeen) or one.seen is Seen.CLEAN or one.id in world.replicas:
        return world
    draft = Draft(world, now_s)
    draft.put_replica(
        Replica(
            id=one.id,
            model=one.model,
            spec_hash=one.spec_hash,
            intent=one.intent,
            slots=one.slots,
            state=ReplicaState.STARTING,
            since_s=now_s,
            resources=ReplicaResources(
                slices=one.actual or one.slices, memory_bytes=one.memory_bytes, compute_percent=one.compute_percent
            ),
            times=ReplicaTimes(created_s=now_s),
            runtime=ReplicaRuntime(found=True),
        )
    )
    return draft.finish()


def _culprits_of(world: World, one: Observation, error: Exception, now_s: float) -> tuple[ModelName, ...]:
    """The culprits among the Models of an observation. If there is none, among all Models, because the fold updates
    other Models, too.
    """

    def works(names: Collection[ModelName]) -> bool:
        return can_complete(lambda: advance(assume_quarantined(world, names), _rest(world, one, names), now_s))

    about = find_culprits(rank_suspects(models_of(world, one), error), works)
    return about or find_culprits(rank_suspects(world.models.keys() - list_quarantined_models(world), error), works)


def _rest(world: World, one: Observation, names: Collection[ModelName]) -> tuple[Observation, ...]:
    rest = exclude_models(world, one, names)
    return () if rest is None else (rest,)


def observation_key(one: Observation) -> Hashable:
    """The key of an observation: a later observation with the same key replaces the earlier one."""
    match one:
        case ReplicaSeen() | LeaseRefused():
            return type(one), one.id
        case StartSeen() | HistorySeen() | FaultSeen() | SignalsSeen():
            return type(one), one.model
        case ModelWoken() | ModelStopped():
            return ModelStopped, one.model
        case GatewaySeen() | GatewayGone():
            return GatewaySeen, one.gateway
        case NodeReported():
            return type(one), one.report.node
        case CutRefused():
            return type(one), one.node
        case OffersSeen() | LeasesSeen() | ProviderTroubled():
            return type(one), one.provider
        case LeadingSeen() | FollowingSeen():
            return LeadingSeen
        case _:
            return type(one)


def models_of(world: World, one: Observation) -> frozenset[ModelName]:
    """The Models that an observation concerns; empty: none in particular."""
    match one:
        case DocumentsSeen():
            return frozenset(model.name for model in one.models)
        case ReplicaSeen() | StartSeen() | HistorySeen() | SignalsSeen() | ModelWoken() | ModelStopped():
            return frozenset({one.model})
        case Reported():
            used = (world.replicas.get(use.replica) for use in one.report.replicas)
            counted = {row.model for row in one.report.levels} | {row.model for row in one.report.totals}
            return frozenset(counted | {replica.model for replica in used if replica is not None})
        case Acted():
            name = model_of(world, one.action)
            return frozenset() if name is None else frozenset({name})
        case HoldsGranted():
            return frozenset(name for _, id, _ in one.holds if (name := _owner(world, id)) is not None)
        case _:
            return frozenset()


def model_of(world: World, action: Action) -> ModelName | None:
    """The Model that an Action concerns; None: none in particular."""
    match action:
        case StartReplica():
            return action.replica.model
        case FailStart():
            return action.model
        case AcquireLease():
            return action.order.owner
        case _:
            return _owner(world, action.replica) if hasattr(action, "replica") else None


def _owner(world: World, id: ReplicaId) -> ModelName | None:
    replica = world.replicas.get(id)
    return None if replica is None else replica.model


def exclude_models(world: World, one: Observation, names: Collection[ModelName]) -> Observation | None:
    """The observation without its content about these Models; None: nothing is left.

    Their documents stay as the `World` has them. A new document is replaced by one with only the name and the tenants,
    so that requests for it are rejected by name. A report keeps the use of their replicas: otherwise their slots would
    count as free, and one slot would be allocated to two gateways.
    """
    match one:
        case DocumentsSeen():
            kept = {model.name: _harmless(world, model, names) for model in one.models}
            removed = {name: world.models[name] for name in names if name in world.models and name not in kept}
            return replace(one, models=(*kept.values(), *removed.values()))
        case Reported():
            report = one.report
            rest = replace(
                report,
                levels=tuple(row for row in report.levels if row.model not in names),
                totals=tuple(row for row in report.totals if row.model not in names),
            )
            return replace(one, report=rest)
        case HoldsGranted():
            return HoldsGranted(holds=tuple(row for row in one.holds if _owner(world, row[1]) not in names))
        case _:
            return None if models_of(world, one) & frozenset(names) else one


def _harmless(world: World, model: Model, names: Collection[ModelName]) -> Model:
    if model.name not in names:
        return model
    spec = ModelSpec(engine="command", tenants=model.spec.tenants)
    new = Model(name=model.name, spec=spec, namespace=model.namespace, created_unix_s=model.created_unix_s)
    return world.models.get(model.name, new)
