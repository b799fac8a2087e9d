"""Annotations of a Deployment or StatefulSet -> the model that it serves, and how far we control its scale. Pure.

Defines the meaning of the annotations (interfaces, section 2): ours, and Lingo's for migrated workloads, each with its
own defaults. The first name is the model's; the others are its aliases. The engine serves each under exactly that name.
A manual scale holds for a limited time. If another autoscaler scales the workload, we decide only between zero and not
zero. Each invalid annotation is reported in one line with the object and the annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.objects import LINGO, WorkloadSeen
from autoscaler.exception_handling import Failure, attempt
from autoscaler.spec.decode import WrongKeyError, suggest_nearest
from autoscaler.spec.document_names import check_name
from autoscaler.spec.installation_ownership import INSTALLATION, TITLE, TITLE_WANTED
from autoscaler.spec.model import Adopted, Auto, EngineName, Gpu, Model, ModelSpec, ReplicaRange
from autoscaler.spec.pod import OURS
from autoscaler.spec.quantity import whole_number
from autoscaler.text import format_rfc3339

ENGINE: EngineName = "command"
"""The owner of the workload chooses the engine, so no API dialect is excluded."""
MODELS, LOW, HIGH = OURS + "models", OURS + "replicas-min", OURS + "replicas-max"
SLOTS, IDLE, PORT = OURS + "slots", OURS + "idle-seconds", OURS + "port"
KNOWN = (MODELS, LOW, HIGH, SLOTS, IDLE, PORT, INSTALLATION)
"""`INSTALLATION`: the installation that serves the workload, if several watch its namespace."""
LINGO_MODELS, LINGO_LOW, LINGO_HIGH = LINGO + "models", LINGO + "min-replicas", LINGO + "max-replicas"
SLOTS_DEFAULT = 4
"""The default for every model with engine `command`."""
LINGO_MAX, LINGO_SLOTS = 3, 100
"""Lingo's own defaults: `max-replicas` and its CONCURRENCY."""
ALIASES_MAX = 64
WRONG = "WrongAnnotation"
USUAL, BY_ANOTHER, BY_HAND = "Adopted", "ScaledByAnother", "ScaledByHand"
"""Reasons for the scaling mode: we set the scale, another autoscaler does except for zero, or a person set it."""
REPLICAS_MAX, SLOTS_MAX, SECONDS_MAX, PORT_MAX = 1000, 100_000, 31_536_000, 65_535
NO_PERSONS = frozenset({"kube-controller-manager"})
"""Field managers that only execute the decisions of an HPA: their writes are not manual scaling."""


class AnnotationError(Exception):
    """An annotation is invalid; the text is one line: OBJECT: annotation NAME: what was expected."""


class Hand(NamedTuple):
    """A scale that a person has set."""

    replicas: int
    by: str
    at_unix_s: float
    """When we observed it; for a scale that existed before our first observation, the recorded time of the write."""


class Others(NamedTuple):
    """Other controllers of the workload's scale."""

    scaler: str = ""
    """Another autoscaler: its kind and name."""
    hand: Hand | None = None
    """A manual scale that holds until `until_unix_s`."""
    until_unix_s: float = 0.0


NOBODY = Others()


def find_manual_scaling(
    before: WorkloadSeen | None, now: WorkloadSeen, known: Hand | None, now_unix_s: float
) -> Hand | None:
    """Return the manual scale of the workload; None if the scale is not manual. `known`: the previous result.

    At the first observation, only a write to the scale subresource after the annotation counts as manual. Only then the
    recorded time is used, because the writer's clock may differ from ours.
    """
    if before is not None and before.replicas == now.replicas:
        return known
    if now.ours or now.scaled_by in NO_PERSONS or (before is None and not now.since_adopted):
        return None
    written_s = now.scaled_unix_s
    at_unix_s = now_unix_s if before is not None or written_s is None else min(written_s, now_unix_s)
    return Hand(now.replicas, now.scaled_by, at_unix_s)


def set_naming_time(before: WorkloadSeen | None, now: WorkloadSeen, now_unix_s: float) -> WorkloadSeen:
    """Set the creation time of the workload's model to the time at which the names were annotated.

    With the creation time of the object, an old object would take a name from an existing model as soon as the object
    is annotated. The time of the first observation is kept, because managedFields contain only a manager's last write.
    """
    if before is not None and _named(before) == _named(now):
        return now._replace(named_unix_s=before.named_unix_s)
    return now if now.named_unix_s else now._replace(named_unix_s=int(now_unix_s))


def _named(seen: WorkloadSeen) -> tuple[str | None, str | None]:
    notes = dict(seen.notes)
    return notes.get(MODELS), notes.get(LINGO_MODELS)


def read_port(seen: WorkloadSeen) -> int | None:
    """Return the port of the annotation; None: the container's port is used. Raises `AnnotationError`."""
    return _whole(seen, PORT, 1, PORT_MAX)


def read_model(seen: WorkloadSeen, others: Others = NOBODY) -> Model:
    """Return the model that the workload serves. Raises `AnnotationError`."""
    notes, key = dict(seen.notes), seen.key
    for name in notes:
        if name.startswith(OURS) and name not in KNOWN:
            raise AnnotationError(f"{key}: annotation {name}: unknown{suggest_nearest(name, KNOWN)}")
    for name in seen.template_marks:
        raise AnnotationError(f"{key}: annotation {name}: remove it from spec.template; only the autoscaler sets it")
    read_port(seen)
    first, *aliases = _names(seen, notes)
    from_lingo = MODELS not in notes
    slots = _whole(seen, SLOTS, 1, SLOTS_MAX) or (LINGO_SLOTS if from_lingo else SLOTS_DEFAULT)
    spec = ModelSpec(
        engine=ENGINE,
        aliases=tuple(aliases),
        gpu=Gpu(count=0),
        replicas=_replicas(seen, LINGO_MAX if from_lingo else ReplicaRange().max),
        slots=slots,
        idle_seconds=_idle(seen, notes),
        installation=_installation(seen, notes),
    )
    adopted = Adopted(
        kind=key.kind, namespace=key.namespace, name=key.name, reason=USUAL, message=f"Pilotlight scales {key}"
    )
    model = Model(
        name=ModelName(first), spec=spec, namespace=key.namespace, slots=slots, created_unix_s=seen.named_unix_s,
        adopted=adopted,
    )  # fmt: skip
    return _for_others(model, adopted, others)


def build_stand_in(seen: WorkloadSeen) -> Model:
    """Return the Model that is in force if evaluating a workload raises an exception and it never had a valid Model.

    It never starts a replica. It has the workload's names, so that their requests are rejected as those of a
    quarantined Model.
    """
    notes, key = dict(seen.notes), seen.key
    names = attempt(lambda: _names(seen, notes))
    first, *aliases = [key.name] if isinstance(names, Failure) else names
    spec = ModelSpec(
        engine=ENGINE, aliases=tuple(aliases), gpu=Gpu(count=0), paused=True, installation=notes.get(INSTALLATION)
    )
    adopted = Adopted(kind=key.kind, namespace=key.namespace, name=key.name, reason=USUAL, message="")
    return Model(
        name=ModelName(first), spec=spec, namespace=key.namespace, created_unix_s=seen.named_unix_s, adopted=adopted
    )


def _for_others(model: Model, adopted: Adopted, others: Others) -> Model:
    """Restrict the scaling of the model according to the other controllers of its scale."""
    if others.scaler:
        message = f"{others.scaler} also scales it: Pilotlight decides only between zero and not zero"
        return replace(model, adopted=replace(adopted, toggled=True, reason=BY_ANOTHER, message=message))
    if others.hand is None:
        return model
    replicas, by = others.hand.replicas, others.hand.by
    message = f"scaled to {replicas} by {by or 'an unknown user'}; holds until {format_rfc3339(others.until_unix_s)}"
    adopted = replace(adopted, held=True, reason=BY_HAND, message=message)
    if not replicas:
        return replace(model, spec=replace(model.spec, paused=True), adopted=adopted)
    held = ReplicaRange(min=replicas, max=replicas)
    return replace(model, spec=replace(model.spec, replicas=held), adopted=adopted)


# --- values -----------------------------------------------------------------------------------------------------------


def _names(seen: WorkloadSeen, notes: Mapping[str, str]) -> list[str]:
    at = MODELS if MODELS in notes else LINGO_MODELS
    names = list(dict.fromkeys(stripped for part in notes[at].split(",") if (stripped := part.strip())))
    if not 1 <= len(names) <= ALIASES_MAX + 1:
        raise AnnotationError(f"{seen.key}: annotation {at}: expected 1 to {ALIASES_MAX + 1} names, comma separated")
    for name in names:
        try:
            check_name(name, ())
        except WrongKeyError as error:
            raise AnnotationError(f"{seen.key}: annotation {at}: {error.message} in each name") from error
    return names


def _installation(seen: WorkloadSeen, notes: Mapping[str, str]) -> str | None:
    named = notes.get(INSTALLATION)
    if named is not None and not TITLE.fullmatch(named):
        raise AnnotationError(f"{seen.key}: annotation {INSTALLATION}: {TITLE_WANTED}")
    return named


def _replicas(seen: WorkloadSeen, high_default: int) -> ReplicaRange:
    low = _whole(seen, LOW, 0, REPLICAS_MAX, LINGO_LOW) or 0
    high = _whole(seen, HIGH, 1, REPLICAS_MAX, LINGO_HIGH)
    if high is not None and low > high:
        at = next(name for name in (LOW, LINGO_LOW) if name in dict(seen.notes))
        raise AnnotationError(f"{seen.key}: annotation {at}: expected at most {high}, its maximum")
    return ReplicaRange(min=low, max=max(low, high_default) if high is None else high)


def _idle(seen: WorkloadSeen, notes: Mapping[str, str]) -> float | Auto:
    written = notes.get(IDLE, "auto").strip()
    if written == "auto":
        return "auto"
    try:
        seconds = float(written)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= SECONDS_MAX:
        raise AnnotationError(f"{seen.key}: annotation {IDLE}: expected `auto` or seconds from 0 to {SECONDS_MAX}")
    return seconds


def _whole(seen: WorkloadSeen, name: str, low: int, high: int, otherwise: str = "") -> int | None:
    """Parse an integer from annotation `name`, or else `otherwise`; None if neither exists."""
    notes = dict(seen.notes)
    at = name if name in notes else otherwise
    if at not in notes:
        return None
    written = notes[at].strip()
    number = whole_number(written)
    if number is None or not low <= number <= high:
        raise AnnotationError(f"{seen.key}: annotation {at}: expected a whole number from {low} to {high}")
    return number
