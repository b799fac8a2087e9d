"""The status of a Model object, including learned values that survive a restart (interfaces, section 2). Pure.

Defines the types of `status`, derives a status from the `World`, and restores learned values. A condition's
`lastTransitionTime` changes only with its status. An unchanged Model yields an equal status, also in another process.
Times are whole seconds UTC; a reading of both clocks (`now_s`, `unix_now_s`) converts them from the monotonic clock of
the `World`.

`list_subjects` joins the Model objects that `document_watcher` reads (with UID and generation) with the names of their
Models in the installation. Every object is a subject, whether or not it is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from autoscaler.contract import ModelName
from autoscaler.demand.model_history import STARTS_MAX
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.kubernetes.resources.document_merge import CUSTOMS
from autoscaler.kubernetes.resources.document_watcher import ModelObject
from autoscaler.kubernetes.resources.model_conditions import (
    ELSEWHERE,
    INVALID,
    NAME_TAKEN,
    SpecProblem,
    StatusInput,
    build_conditions,
)
from autoscaler.kubernetes.watch import ObjectKey
from autoscaler.queries.start_phases import last_start, phases_s, phases_with_parts_s
from autoscaler.spec.decode import Part
from autoscaler.spec.document_names import Origin, Settled
from autoscaler.state.actions import Unmet
from autoscaler.state.events import HistorySeen
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import NO_HISTORY, NO_LOAD, History, Replica, World


class Subject(NamedTuple):
    """One Model object whose status is written."""

    namespace: str
    name: str
    uid: str
    generation: int
    model: ModelName | None
    """Its name in the `World`; None: it is not in force."""
    problem: SpecProblem | None = None
    elsewhere: str = ""
    """Why another installation serves it; empty: this one does."""
    shown: str = ""
    """The message of the object's condition ELSEWHERE; empty if it has none."""


def list_subjects(
    objects: Mapping[ObjectKey, ModelObject], settled: Settled, whose: Callable[[str, str | None], str | None]
) -> Iterator[Subject]:
    """Yield a subject for each object whose serving installation is known (`Installation.whose`).
    An invalid spec takes precedence over a taken name.
    """
    for key, found in objects.items():
        elsewhere = whose(key.namespace, found.named)
        if elsewhere is None:
            continue
        origin = Origin(CUSTOMS, *key)
        problem = None
        if found.wrong:
            problem = SpecProblem(INVALID, found.wrong)
        elif origin in settled.taken:
            problem = SpecProblem(NAME_TAKEN, settled.taken[origin])
        name = None if elsewhere else settled.names.get(origin)
        yield Subject(key.namespace, key.name, found.uid, found.generation, name, problem, elsewhere, found.shown)


K = TypeVar("K")
V = TypeVar("V")

REASON_MAX = 256
"""Maximum characters of the reason of a start."""


class StatusPart(Part, frozen=True, forbid_unknown_fields=False):
    """Base of all parts of a status: camelCase keys; unknown fields of other versions are ignored."""


class Counts(StatusPart, frozen=True):
    """Replicas by state."""

    pending: int = 0
    starting: int = 0
    ready: int = 0
    unready: int = 0
    draining: int = 0
    stopping: int = 0
    falling_asleep: int = 0
    asleep: int = 0
    waking: int = 0
    scrubbing: int = 0
    failed: int = 0


class DemandShown(StatusPart, frozen=True):
    """Requests, summed over the gateways."""

    waiting: int = 0
    running: int = 0


class StatusCondition(StatusPart, frozen=True):
    """One of Ready, Placed, WeightsReady, Starting, Degraded, Adopted, Faulty."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: datetime


class LastStart(StatusPart, frozen=True):
    """The last completed start: seconds from the order to readiness, its phases, and its reason."""

    seconds: float
    phases: dict[str, float]
    reason: str = ""


class LearnedStatus(StatusPart, frozen=True, omit_defaults=True):
    """The part of a History that survives a restart."""

    start_seconds: tuple[float, ...] = ()
    tries: int = 0
    episodes: int = 0
    retry_at: datetime | None = None
    refused_until: datetime | None = None
    failure: str = ""
    last_activity: datetime | None = None


class Status(StatusPart, frozen=True):
    """The whole status of a Model."""

    observed_generation: int = 0
    replicas: Counts = Counts()
    demand: DemandShown = DemandShown()
    conditions: tuple[StatusCondition, ...] = ()
    last_start: LastStart | UnsetType = UNSET
    learned: LearnedStatus = LearnedStatus()


NO_STATUS = Status()


class ClockReading(NamedTuple):
    """A simultaneous reading of both clocks."""

    now_s: float
    unix_now_s: float

    def unix(self, at_s: float | None) -> datetime | None:
        """Convert a monotonic time to UTC, rounded to a second; None for `never` (None and 0.0)."""
        if not at_s:
            return None
        return datetime.fromtimestamp(round(self.unix_now_s + at_s - self.now_s), UTC)

    def monotonic(self, at: datetime | None) -> float | None:
        """Convert a UTC time to the monotonic clock; never exactly 0.0, which would mean `never`."""
        return None if at is None else (at.timestamp() - self.unix_now_s + self.now_s) or -1e-9


# --- `World` -> status ------------------------------------------------------------------------------------------------


def build_status_input(world: World, unmet: Mapping[ModelName, Unmet], one: Subject) -> StatusInput:
    """Collect the facts from which the status of `one` is computed."""
    name = one.model
    if name is None:
        return StatusInput(one.generation, None, (), NO_LOAD, NO_HISTORY, problem=one.problem)
    replicas = tuple(world.replicas[id] for id in world.by_model.get(name, ()))
    return StatusInput(
        one.generation, world.models.get(name), replicas, world.loads.get(name, NO_LOAD),
        world.learned.histories.get(name, NO_HISTORY), unmet.get(name),
        world.learned.obstacles.get(name, ""), one.problem,
        world.learned.faults[name].reason if name in list_quarantined_models(world) else "",
    )  # fmt: skip


def summarize_input(case: StatusInput) -> tuple[object, ...]:
    """The important part of a status: a change in it is written soon, any other change later.
    Equal to `summarize_status` of the status that `render_status` renders from the same `case`.
    """
    return case.generation, _counts(case), tuple(said[:3] for said in build_conditions(case))


def summarize_status(status: Status) -> tuple[object, ...]:
    """The important part of an existing status, see `summarize_input`."""
    return (
        status.observed_generation,
        status.replicas,
        tuple((one.type, one.status, one.reason) for one in status.conditions),
    )


def render_status(case: StatusInput, before: Status, clocks: ClockReading) -> Status:
    """Render the new status of a Model whose last status was `before`."""
    was = {one.type: one for one in before.conditions}
    now = datetime.fromtimestamp(round(clocks.unix_now_s), UTC)
    shown: list[StatusCondition] = []
    for type, status, reason, message in build_conditions(case):
        old = was.get(type)
        since = old.last_transition_time if old is not None and old.status == status else now
        shown.append(StatusCondition(
            type=type, status=status, reason=reason, message=message, last_transition_time=since
        ))  # fmt: skip
    return Status(
        observed_generation=case.generation,
        replicas=_counts(case),
        demand=DemandShown(waiting=case.load.waiting, running=case.load.running),
        conditions=tuple(shown),
        last_start=before.last_start if case.fault else _last_start(case.replicas, before.last_start),
        learned=before.learned if case.fault else build_learned(case.history, clocks),
    )


def _counts(case: StatusInput) -> Counts:
    tally: dict[str, int] = {}
    for replica in case.replicas:
        if replica.state is not ReplicaState.GONE:
            field = replica.state.value.replace("-", "_")
            tally[field] = tally.get(field, 0) + 1
    return Counts(**tally)


def _last_start(replicas: Iterable[Replica], before: LastStart | UnsetType) -> LastStart | UnsetType:
    """The last observed start among the existing replicas; else the one in the status."""
    last = last_start(replicas)
    if last is None:
        return before
    phases = {name: round(took_s, 3) for name, took_s in phases_with_parts_s(last).items()}
    took_s = round(sum(phases[name] for name in phases_s(last)), 3)
    return LastStart(seconds=took_s, phases=phases, reason=last.reason[:REASON_MAX])


# --- learned values: writing and restoring ----------------------------------------------------------------------------


def build_learned(history: History, clocks: ClockReading) -> LearnedStatus:
    """Build the persistent part of a History."""
    return LearnedStatus(
        start_seconds=tuple(round(start_s, 3) for start_s in history.starts_s),
        tries=history.tries,
        episodes=history.episodes,
        retry_at=clocks.unix(history.retry_at_s),
        refused_until=clocks.unix(history.refused_until_s),
        failure=history.failure,
        last_activity=clocks.unix(history.last_activity_s),
    )


def restore_history(status: Status, now_s: float, unix_now_s: float) -> History:
    """Restore a History from a status, in this process's clock. An episode of start attempts continues from now."""
    kept, clocks = status.learned, ClockReading(now_s, unix_now_s)
    return History(
        starts_s=kept.start_seconds[-STARTS_MAX:],
        tries=kept.tries,
        first_try_s=now_s if kept.tries else None,
        episodes=kept.episodes,
        retry_at_s=clocks.monotonic(kept.retry_at) or 0.0,
        refused_until_s=clocks.monotonic(kept.refused_until) or 0.0,
        failure=kept.failure,
        last_activity_s=clocks.monotonic(kept.last_activity),
    )


def restore_histories(
    statuses: Mapping[ModelName, Mapping[str, object]], now_s: float, unix_now_s: float
) -> tuple[tuple[HistorySeen, ...], tuple[str, ...]]:
    """Restore Histories from statuses, as observations for the loop; also return a line for each invalid status."""
    seen: list[HistorySeen] = []
    wrong: list[str] = []
    for model, status in statuses.items():
        try:
            history = restore_history(read_status(status), now_s, unix_now_s)
        except ValueError as error:
            wrong.append(f"status of Model {model}: {error}: its learned values are lost")
        else:
            seen.append(HistorySeen(model=model, history=history))
    return tuple(seen), tuple(wrong)


def read_status(status: object) -> Status:
    """Decode a status from the API server, without the condition ELSEWHERE that other installations write.
    Raises msgspec.ValidationError (a ValueError) if it is not a status.
    """
    found = msgspec.convert(status, Status)
    if all(one.type != ELSEWHERE for one in found.conditions):
        return found
    return msgspec.structs.replace(found, conditions=tuple(one for one in found.conditions if one.type != ELSEWHERE))


def encode_status(status: Status) -> dict[str, object]:
    """Encode a status for the API server."""
    made: dict[str, object] = msgspec.to_builtins(status)
    return made


# --- changes ----------------------------------------------------------------------------------------------------------


def list_changed_models(before: World, after: World) -> set[ModelName]:
    """The Models whose status may differ between two Worlds."""
    models = list_changed_keys(before.models, after.models) | list_changed_keys(before.loads, after.loads)
    models |= list_changed_keys(before.learned.histories, after.learned.histories) | list_changed_keys(
        before.learned.obstacles, after.learned.obstacles
    )
    models |= list_changed_keys(before.learned.faults, after.learned.faults)
    if before.replicas is not after.replicas:
        for id in list_changed_keys(before.replicas, after.replicas):
            models |= {world.replicas[id].model for world in (before, after) if id in world.replicas}
    return models


def list_changed_keys(before: Mapping[K, V], after: Mapping[K, V]) -> set[K]:
    """The keys whose value is not the identical object, including added and removed keys."""
    if before is after:
        return set()
    return {key for key, value in after.items() if before.get(key) is not value} | (before.keys() - after.keys())
