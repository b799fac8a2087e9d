"""Computes the status conditions of a Model, each with a one-word reason and a message. Pure.

These are the seven conditions of interfaces section 2. If several reasons apply, the first rule of RULES that matches
is reported. The result depends on the `World` and the last plan, not on a clock: it stays the same while nothing
changes, so that the status of an idle Model is never written. Messages are truncated to MESSAGE_MAX characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autoscaler.kubernetes import constants
from autoscaler.spec.model import Model
from autoscaler.state.actions import Unmet
from autoscaler.state.lifecycle import BEGINNING, HOLDS_SLICE
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, ModelLoad, Replica
from autoscaler.text import format_count

MESSAGE_MAX = 1024
"""Maximum characters of a message; Kubernetes itself allows 32,768."""
WORDS = {
    "ErrImagePull": "ImagePullBackOff", "InvalidImageName": "ImagePullBackOff", "ErrImageNeverPull": "ImagePullBackOff",
    "ImageInspectError": "ImagePullBackOff", "RegistryUnavailable": "ImagePullBackOff",
    "SignatureValidationFailed": "ImagePullBackOff", constants.CRASHES: "CrashLoop", "SchedulingGated": "Unschedulable",
}  # fmt: skip
"""Reason from a kubelet or scheduler -> the reason that we report; other reasons are passed on unchanged."""
UNSCHEDULABLE = "Unschedulable"
NO_TROUBLE = frozenset({UNSCHEDULABLE, "Starting"})
"""Reasons of a waiting start that do not make the Model degraded."""
ERROR = "InternalError"
ELSEWHERE = "ServedElsewhere"
"""Type of the condition that an installation sets on a Model that another one serves."""
INVALID, NAME_TAKEN = "Invalid", "NameTaken"
CRASHES = ("ended with status", "was killed by")
"""Phrases in the failure text of an engine that ended although no stop was ordered."""


class SpecProblem(NamedTuple):
    """Why a Model object is not in force as written: Invalid or NameTaken, and a one-line message."""

    reason: str
    message: str


class StatusInput(NamedTuple):
    """The facts about one Model from which its status is computed."""

    generation: int
    model: Model | None
    """None: the Model is not in force."""
    replicas: Sequence[Replica]
    load: ModelLoad
    history: History
    unmet: Unmet | None = None
    obstacle: str = ""
    problem: SpecProblem | None = None
    fault: str = ""
    """The exception that quarantined the Model; empty: it is not quarantined."""


class ConditionValue(NamedTuple):
    """One condition. `status` is `True`, `False` or `Unknown`."""

    type: str
    status: str
    reason: str
    message: str


ADOPTED = ConditionValue("Adopted", "False", "Managed", "Pilotlight creates its pods")
"""Constant, because adopted workloads have no Model object; `explain` and Events report on them."""


SOUND = ConditionValue("Faulty", "False", "NoFault", "it caused no internal error")


def build_conditions(case: StatusInput) -> tuple[ConditionValue, ...]:
    """All seven conditions, in the order of interfaces section 2. For a quarantined Model most are `Unknown`."""
    if case.fault:
        types, message = ("Placed", "WeightsReady", "Starting", "Degraded"), _fault_message(case)
        unknown = (ConditionValue(type, "Unknown", "Quarantined", "") for type in types)
        return (
            _serves(case) or _no("Faulty", message),
            *unknown,
            ADOPTED,
            ConditionValue("Faulty", "True", ERROR, message),
        )
    ready = next(said for rule in RULES if (said := rule(case)) is not None)
    return ready, _placed(case), _weights(case), _starting(case), _degraded(case), ADOPTED, SOUND


def _fault_message(case: StatusInput) -> str:
    retried = "it is retried later, when its spec changes and on `pilotlight wake`; report the error"
    return f"an internal error quarantined this Model: {case.fault}; {retried}"[:MESSAGE_MAX]


def classify_failure(failure: str, history: History) -> str:
    """Map a failure's text to a reason."""
    if "OOMKilled" in failure:
        return "OOMKilled"
    if head := _head(failure):
        return head
    again = history.tries > 1 or history.episodes > 0
    return "CrashLoop" if again and any(crash in failure for crash in CRASHES) else "StartFailed"


def _head(text: str) -> str:
    """The leading Kubernetes reason of a text such as `ErrImagePull: not found`; empty if it has none."""
    head, colon, _ = text.partition(":")
    is_reason = head.isalnum() and head.isascii() and head[:1].isupper() and (colon or head == text)
    return WORDS.get(head, head) if is_reason else ""


# --- Ready ------------------------------------------------------------------------------------------------------------


def _not_in_force(case: StatusInput) -> ConditionValue | None:
    if case.problem is not None:
        return _no(*case.problem)
    unprocessed = "the autoscaler has not processed it yet; if this lasts, read the log of the autoscaler"
    return _no("NotInForce", unprocessed) if case.model is None else None


def _paused(case: StatusInput) -> ConditionValue | None:
    paused = case.model is not None and case.model.spec.paused
    return _no("Paused", "spec.paused is true; set it to false to serve requests") if paused else None


def _serves(case: StatusInput) -> ConditionValue | None:
    many = len(_in(case, S.READY))
    if not many:
        return None
    return ConditionValue(
        "Ready", "True", "Serving", f"{format_count(many, 'replica')} {'serves' if many == 1 else 'serve'} requests"
    )


def _cannot(case: StatusInput) -> ConditionValue | None:
    return _no("CannotStart", case.obstacle) if case.obstacle and not _in(case, *BEGINNING) else None


def _nowhere(case: StatusInput) -> ConditionValue | None:
    return _no("NoDeviceFits", case.unmet.reason) if case.unmet is not None and case.unmet.never else None


def _waits(case: StatusInput) -> ConditionValue | None:
    """A pod that cannot start yet, and why. Waiting for capacity is not a failure."""
    waits = next((one.runtime.waits for one in _in(case, *BEGINNING) if one.runtime.waits), "")
    if not waits:
        return None
    reason = _head(waits) or "Starting"
    return _no(reason, f"waiting for capacity: {waits}" if reason == UNSCHEDULABLE else waits)


def _failed(case: StatusInput) -> ConditionValue | None:
    """The last start failed, and no start is in progress."""
    failure = case.history.failure
    if not failure or _in(case, *BEGINNING):
        return None
    refused = "requests are rejected until status.learned.refusedUntil, or `pilotlight wake`"
    then = refused if case.history.refused_until_s else "the next request starts it again"
    return _no(classify_failure(failure, case.history), f"{failure}; {then}")


def _begins(case: StatusInput) -> ConditionValue | None:
    begins = _in(case, *BEGINNING)
    return _no("Starting", begins[0].reason or "a replica is starting") if begins else None


def _unready(case: StatusInput) -> ConditionValue | None:
    unready = "its engine fails its readiness probes; read the log of the engine, and check spec.readinessPath"
    return _no("Unready", unready) if _in(case, S.UNREADY) else None


def _broken(case: StatusInput) -> ConditionValue | None:
    broken = _in(case, S.FAILED)
    failure = broken[0].failure if broken else ""
    return _no(classify_failure(failure, case.history), failure or "its replica failed") if broken else None


def _draining(case: StatusInput) -> ConditionValue | None:
    drains = [one.drain for one in case.replicas if one.state is S.DRAINING]
    return _no("Draining", drains[0].reason if drains[0] is not None else "its replica drains") if drains else None


def _unplaced(case: StatusInput) -> ConditionValue | None:
    return _no("WaitingForRoom", case.unmet.reason) if case.unmet is not None else None


def _waited_for(case: StatusInput) -> ConditionValue | None:
    return _no("Starting", "requests are queued; the next plan decides on a start") if case.load.waiting else None


def _idle(case: StatusInput) -> ConditionValue:
    del case
    return ConditionValue("Ready", "True", "Idle", "scaled to zero; a request starts it")


RULES: tuple[Callable[[StatusInput], ConditionValue | None], ...] = (
    _not_in_force, _paused, _serves, _cannot, _nowhere, _waits, _failed, _begins, _unready, _broken, _unplaced,
    _draining, _waited_for, _idle,
)  # fmt: skip
"""The rules of condition Ready, in order of precedence; the last one always matches."""


# --- the other conditions ---------------------------------------------------------------------------------------------


def _placed(case: StatusInput) -> ConditionValue:
    there = _in(case, *HOLDS_SLICE)
    waits = next((one.runtime.waits for one in there if _head(one.runtime.waits) == UNSCHEDULABLE), "")
    if waits:
        return ConditionValue("Placed", "False", UNSCHEDULABLE, f"waiting for capacity: {waits}"[:MESSAGE_MAX])
    if there:
        where = sorted({id for one in there for id in one.resources.slices})
        return ConditionValue(
            "Placed", "True", "Placed", f"on {', '.join(where)}"[:MESSAGE_MAX] if where else "by the scheduler"
        )
    if case.unmet is not None:
        reason = "NoDeviceFits" if case.unmet.never else "WaitingForRoom"
        return ConditionValue("Placed", "False", reason, case.unmet.reason[:MESSAGE_MAX])
    return ConditionValue("Placed", "False", "Idle", "no replica is needed")


def _weights(case: StatusInput) -> ConditionValue:
    del case
    return ConditionValue("WeightsReady", "Unknown", "EngineLoads", "the engine fetches its weights itself")


def _starting(case: StatusInput) -> ConditionValue:
    begins = _waits(case) or _begins(case)
    if begins is None:
        return ConditionValue("Starting", "False", "NothingStarts", "")
    return begins._replace(type="Starting", status="True")


def _degraded(case: StatusInput) -> ConditionValue:
    waits = _waits(case)
    if waits is not None and waits.reason in NO_TROUBLE:
        waits = None
    broken = waits or _failed(case) or _cannot(case) or _unready(case) or _broken(case)
    if broken is None and case.history.failure:
        broken = _no(classify_failure(case.history.failure, case.history), case.history.failure)
    if broken is None:
        return ConditionValue("Degraded", "False", "AsExpected", "")
    return broken._replace(type="Degraded", status="True")


def _in(case: StatusInput, *states: S) -> list[Replica]:
    return [replica for replica in case.replicas if replica.state in states]


def _no(reason: str, message: str) -> ConditionValue:
    return ConditionValue("Ready", "False", reason, message[:MESSAGE_MAX])
