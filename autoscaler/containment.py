"""Containment of faults: an exception that one Model causes quarantines that Model and affects no other.

Decisions are pure functions of a World, so the Model at fault is found by computing a decision again without some
Models (`culprits`): the planner and the fold need not know of faults. `World.faults` lists quarantined Models, see
`autoscaler.fold_faults`. The planner gets `masked(world)`, where Replicas of quarantined Models keep their room under
another name. Pure.

Invariants: in a masked World, Replicas of a quarantined Model keep their Slices, their state and the Tenants that they
are for, and cannot be evicted; nothing of another Model differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from autoscaler.actions import AcquireLease, Acted, Action, FailStart, StartReplica
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.fold import Observation, fold
from autoscaler.fold_faults import quarantined
from autoscaler.model import Model, ModelSpec
from autoscaler.observations import (
    DocumentsSeen,
    FaultSeen,
    Granted,
    HistorySeen,
    ReplicaSeen,
    Reported,
    StartSeen,
    Transition,
)
from autoscaler.ordered import ModelStopped, ModelWoken
from autoscaler.world import Fault, World

CULPRITS_MAX: Final = 16
"""An exception that more Models cause at once is not theirs, but a defect that any Model may cause."""
PINNED: Final = 2_000_000_000
"""Priority of what cannot be evicted: above the highest that a document may have."""
NEVER_S: Final = 1e9
"""A moment that the monotonic clock does not reach."""
REASON_MAX: Final = 300
"""Characters of a reason."""

T = TypeVar("T")
V = TypeVar("V")
Name = TypeVar("Name", bound=Hashable)


class Failure(NamedTuple):
    """What `attempt` returns instead of a result."""

    error: Exception


def attempt(compute: Callable[[], T]) -> T | Failure:
    """What `compute` returns, or its exception. MemoryError passes through, and so does cancellation."""
    try:
        return compute()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
        return Failure(error)


def culprits(names: Sequence[Name], works: Callable[[Collection[Name]], bool]) -> tuple[Name, ...]:
    """A few of `names` without which `works` is true; empty: there are none, or more than CULPRITS_MAX.

    Where two are at fault only together, it is the one that comes later in `names` (see `suspected`). `works` gets
    the names to leave out. It is called about log2(len(names)) times for each culprit.
    """
    found: list[Name] = []
    if not names or not works(names):
        return ()
    while not works(found):
        if len(found) == CULPRITS_MAX:
            return ()
        rest = [name for name in names if name not in found]
        fine, broken = 0, len(rest)  # with the first `fine` of them it works, with the first `broken` it does not
        while broken - fine > 1:
            middle = (fine + broken) // 2
            if works([*found, *rest[middle:]]):
                fine = middle
            else:
                broken = middle
        found.append(rest[broken - 1])
    return tuple(found)


def suspected(names: Iterable[ModelName], error: Exception) -> list[ModelName]:
    """`names` in the order in which they are suspected, the most suspect last.

    Suspect is what functions worked on when the exception was raised, the innermost most: a replica that is looked at
    for another Model raises, and not the Model that needs its room.
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


def described(error: BaseException) -> str:
    """The exception in one line: its type, the function that raised it, and its message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" in {PurePath(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
    text = " ".join(ascii(str(error))[1:-1].split())[:REASON_MAX]
    return f"{type(error).__name__}{where}" + (f": {text}" if text else "")


def supposing(world: World, names: Collection[ModelName]) -> World:
    """The World in which these are quarantined, too."""
    if not names:
        return world
    fault = Fault(reason="", seen_s=0.0, until_s=NEVER_S)
    return replace(world, faults={**world.faults, **dict.fromkeys(names, fault)})


# --- the World without some Models ------------------------------------------------------------------------------------


def masked(world: World, names: Collection[ModelName] | None = None) -> World:
    """The World as the planner may see it while `names` (None: those quarantined now) are quarantined.

    Their Replicas belong to stand-ins that want nothing. A stand-in of a Model that an operator stopped is missing, so
    that its Replicas drain.
    """
    out = quarantined(world) if names is None else frozenset(names)
    if not out:
        return world
    aliases = {name: ModelName(f"{name} (quarantined)") for name in out}
    models = {name: model for name, model in world.models.items() if name not in out}
    by_model = _without(world.by_model, out)
    stops = _without(world.stops, out)
    replicas = dict(world.replicas)
    for name in out:
        ids = world.by_model.get(name, ())
        for id in ids:
            replicas[id] = replace(replicas[id], model=aliases[name], move=None)
        if name in world.stops or name not in world.models:
            by_model[aliases[name]] = ids
        else:
            models[aliases[name]] = _stand_in(world.models[name], aliases[name])
        if name in world.stops:
            stops[aliases[name]] = world.stops[name]
    hidden = {id for name in out for id in world.by_model.get(name, ())}
    rented = replace(world.rented, guests=world.rented.guests - hidden, idlers=world.rented.idlers - out)
    return replace(
        world, models=models, by_model=by_model, replicas=replicas, stops=stops, rented=rented,
        loads=_without(world.loads, out), histories=_without(world.histories, out),
    )  # fmt: skip


def _stand_in(model: Model, name: ModelName) -> Model:
    spec = ModelSpec(engine="command", tenants=model.spec.tenants, priority=PINNED, paused=True)
    return Model(name=name, spec=spec, memory_bytes=model.memory_bytes)


def _without(mapping: Mapping[ModelName, V], names: Collection[ModelName]) -> dict[ModelName, V]:
    return {name: value for name, value in mapping.items() if name not in names}


# --- a fold of observations some of which raise -----------------------------------------------------------------------


class Folded(NamedTuple):
    """What came of a batch. `aside`: observations that could not be folded, or only in part."""

    world: World
    transitions: tuple[Transition, ...]
    faults: tuple[tuple[ModelName, Exception], ...]
    """Models that were quarantined, each with its exception."""
    aside: tuple[Observation, ...]
    error: Exception | None
    """The last exception that no Model explains."""


def fold_apart(world: World, batch: Sequence[Observation], now_s: float) -> Folded:
    """Folds a batch whose `fold` raised: each observation for itself, and without the Models that make it raise."""
    transitions: list[Transition] = []
    faults: list[tuple[ModelName, Exception]] = []
    aside: list[Observation] = []
    last: Exception | None = None
    for one in batch:
        done = attempt(partial(fold, world, (one,), now_s))
        if isinstance(done, Failure):
            found = _culprits_of(world, one, done.error, now_s)
            if not isinstance(one, Reported | Acted):  # the next report repeats all of it; Actions are not repeated
                aside.append(one)
            if not found:
                last = done.error
                continue
            faults += [(name, done.error) for name in found]
            seen = [FaultSeen(model=name, reason=described(done.error)) for name in found]
            done = fold(world, (*seen, *_rest(world, one, found)), now_s)
        world, moved = done
        transitions += moved
    return Folded(world, tuple(transitions), tuple(faults), tuple(aside), last)


def _culprits_of(world: World, one: Observation, error: Exception, now_s: float) -> tuple[ModelName, ...]:
    """Models that an observation is about, or else any of which the fold keeps something as time passes."""

    def works(names: Collection[ModelName]) -> bool:
        return succeeds(lambda: fold(supposing(world, names), _rest(world, one, names), now_s))

    about = culprits(suspected(models_of(world, one), error), works)
    return about or culprits(suspected(world.models.keys() - quarantined(world), error), works)


def _rest(world: World, one: Observation, names: Collection[ModelName]) -> tuple[Observation, ...]:
    rest = without(world, one, names)
    return () if rest is None else (rest,)


def succeeds(compute: Callable[[], object]) -> bool:
    """Whether `compute` raises nothing."""
    return not isinstance(attempt(compute), Failure)


def key_of(one: Observation) -> Hashable:
    """Two observations with one key are about the same thing: the later one replaces the earlier."""
    match one:
        case ReplicaSeen():
            return type(one), one.id
        case StartSeen() | HistorySeen() | ModelWoken() | ModelStopped() | FaultSeen():
            return type(one), one.model
        case _:
            return type(one)


def models_of(world: World, one: Observation) -> frozenset[ModelName]:
    """Models that an observation is about; empty: it is about none in particular."""
    match one:
        case DocumentsSeen():
            return frozenset(model.name for model in one.models)
        case ReplicaSeen() | StartSeen() | HistorySeen() | ModelWoken() | ModelStopped():
            return frozenset({one.model})
        case Reported():
            used = (world.replicas.get(use.replica) for use in one.report.replicas)
            counted = {row.model for row in one.report.levels} | {row.model for row in one.report.totals}
            return frozenset(counted | {replica.model for replica in used if replica is not None})
        case Acted():
            name = model_of(world, one.action)
            return frozenset() if name is None else frozenset({name})
        case Granted():
            return frozenset(name for _, id, _ in one.holds if (name := _owner(world, id)) is not None)
        case _:
            return frozenset()


def model_of(world: World, action: Action) -> ModelName | None:
    """The Model that an Action is about; None: none in particular."""
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


def without(world: World, one: Observation, names: Collection[ModelName]) -> Observation | None:
    """An observation without what it says of these Models; None: nothing is left.

    Of documents, theirs stay as the World has them.
    """
    match one:
        case DocumentsSeen():
            known = (world.models[name] for name in names if name in world.models)
            return replace(one, models=(*(model for model in one.models if model.name not in names), *known))
        case Reported():
            report = one.report
            rest = replace(
                report,
                levels=tuple(row for row in report.levels if row.model not in names),
                totals=tuple(row for row in report.totals if row.model not in names),
                replicas=tuple(row for row in report.replicas if _owner(world, row.replica) not in names),
            )
            return replace(one, report=rest)
        case Granted():
            return Granted(holds=tuple(row for row in one.holds if _owner(world, row[1]) not in names))
        case _:
            return None if models_of(world, one) & frozenset(names) else one
