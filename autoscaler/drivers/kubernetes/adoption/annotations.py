"""Annotations of a Deployment or StatefulSet -> the Model that it serves, and how far its scale is ours. Pure.

Owns the meaning of the annotations (interfaces, section 2): ours, and Lingo's for who comes from there, each with the
defaults of its own house. The first name is the Model's, the others are its aliases, and its engine knows each by that
very name. Whoever scaled it by hand is obeyed for a while; where another autoscaler scales it, only zero or not zero is
decided here. Each wrong annotation is one line that names the object and the annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.objects import LINGO, WorkloadSeen
from autoscaler.spec.decode import WrongKeyError, suggest_nearest
from autoscaler.spec.model import Adopted, Auto, EngineName, Gpu, Model, ModelSpec, ReplicaRange
from autoscaler.spec.names import check_name
from autoscaler.spec.ownership import INSTALLATION, TITLE, TITLE_WANTED
from autoscaler.spec.pod import OURS
from autoscaler.text import format_rfc3339

ENGINE: EngineName = "command"
"""What it runs is its owner's business: no dialect is ruled out."""
MODELS, LOW, HIGH = OURS + "models", OURS + "replicas-min", OURS + "replicas-max"
SLOTS, IDLE, PORT = OURS + "slots", OURS + "idle-seconds", OURS + "port"
KNOWN = (MODELS, LOW, HIGH, SLOTS, IDLE, PORT, INSTALLATION)
"""INSTALLATION: which one serves it, where several read its namespace."""
LINGO_MODELS, LINGO_LOW, LINGO_HIGH = LINGO + "models", LINGO + "min-replicas", LINGO + "max-replicas"
SLOTS_DEFAULT = 4
"""As of any Model of that engine."""
LINGO_MAX, LINGO_SLOTS = 3, 100
"""Lingo's own defaults: `max-replicas`, and its CONCURRENCY."""
ALIASES_MAX = 64
WRONG = "WrongAnnotation"
USUAL, BY_ANOTHER, BY_HAND = "Adopted", "ScaledByAnother", "ScaledByHand"
"""Why it is scaled as it is: the scale is ours, another autoscaler's but for zero, or a person's for a while."""
REPLICAS_MAX, SLOTS_MAX, SECONDS_MAX, PORT_MAX = 1000, 100_000, 31_536_000, 65_535
NO_PERSONS = frozenset({"kube-controller-manager"})
"""Who scales for somebody else, and never of its own accord: an HPA's hand is no person's."""


class AnnotationError(Exception):
    """An annotation is wrong; the text is one line: OBJECT: annotation NAME: what was expected."""


class Hand(NamedTuple):
    """A person's own scale."""

    replicas: int
    by: str
    at_unix_s: float
    """When we saw it; at first sight, when it is written to have been."""


class Others(NamedTuple):
    """Who else has a say about its scale now."""

    scaler: str = ""
    """Another autoscaler: its kind and name."""
    hand: Hand | None = None
    """A person whose scale holds, until:"""
    until_unix_s: float = 0.0


NOBODY = Others()


def find_manual_scaling(
    before: WorkloadSeen | None, now: WorkloadSeen, known: Hand | None, now_unix_s: float
) -> Hand | None:
    """Who scaled it by hand, after it was seen so. `known`: who was known to have.

    At first sight only the scale subresource, and only since it was annotated, tells of a person: else it is what the
    workload came to us with. What is written of the time counts only then: who wrote it may have another clock.
    """
    if before is not None and before.replicas == now.replicas:
        return known
    if now.ours or now.scaled_by in NO_PERSONS or (before is None and not now.since_adopted):
        return None
    written_s = now.scaled_unix_s
    at_unix_s = now_unix_s if before is not None or written_s is None else min(written_s, now_unix_s)
    return Hand(now.replicas, now.scaled_by, at_unix_s)


def set_naming_time(before: WorkloadSeen | None, now: WorkloadSeen, now_unix_s: float) -> WorkloadSeen:
    """With its age as a Model: as old as its names, not as the object, or an old one that is annotated would take a
    name that another has. managedFields tell when its writer last wrote anything: what was seen first counts.
    """
    if before is not None and _named(before) == _named(now):
        return now._replace(named_unix_s=before.named_unix_s)
    return now if now.named_unix_s else now._replace(named_unix_s=int(now_unix_s))


def _named(seen: WorkloadSeen) -> tuple[str | None, str | None]:
    notes = dict(seen.notes)
    return notes.get(MODELS), notes.get(LINGO_MODELS)


def read_port(seen: WorkloadSeen) -> int | None:
    """The port of the annotation; None: the container's. Raises AnnotationError."""
    return _whole(seen, PORT, 1, PORT_MAX)


def read_model(seen: WorkloadSeen, others: Others = NOBODY) -> Model:
    """What it serves. Raises AnnotationError."""
    notes, key = dict(seen.notes), seen.key
    for name in notes:
        if name.startswith(OURS) and name not in KNOWN:
            raise AnnotationError(f"{key}: annotation {name}: unknown{suggest_nearest(name, KNOWN)}")
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
    adopted = Adopted(kind=key.kind, namespace=key.namespace, name=key.name, reason=USUAL, message=f"{key} is scaled")
    model = Model(
        name=ModelName(first), spec=spec, namespace=key.namespace, slots=slots, created_unix_s=seen.named_unix_s,
        adopted=adopted,
    )  # fmt: skip
    return _for_others(model, adopted, others)


def _for_others(model: Model, adopted: Adopted, others: Others) -> Model:
    """The Model as far as the others leave it to us."""
    if others.scaler:
        said = f"{others.scaler} scales it, too: only zero or not zero is decided here"
        return replace(model, adopted=replace(adopted, toggled=True, reason=BY_ANOTHER, message=said))
    if others.hand is None:
        return model
    replicas, by = others.hand.replicas, others.hand.by
    message = f"scaled to {replicas} by {by or 'somebody'}, which holds until {format_rfc3339(others.until_unix_s)}"
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
        raise AnnotationError(f"{seen.key}: annotation {at}: expected at most {high}, which is its maximum")
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
    """A whole number, of `name` or else of the annotation `otherwise`; None where neither is there."""
    notes = dict(seen.notes)
    at = name if name in notes else otherwise
    if at not in notes:
        return None
    written = notes[at].strip()
    number = int(written) if written.isascii() and written.isdecimal() else -1
    if not low <= number <= high:
        raise AnnotationError(f"{seen.key}: annotation {at}: expected a whole number from {low} to {high}")
    return number
