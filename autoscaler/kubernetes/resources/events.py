"""Derives Kubernetes Events (interfaces, section 7) and aggregates and rate-limits them. Pure.

The reasons Woken, Started, StartFailed, Misplaced, Drained, Stopped and Evicted are transitions of replicas;
CapacityRequested, CapacityArrived, CapacityForced and CapacityStuck are those of capacity orders; Unreadable is an
object that is skipped. `Book` holds the pending Events. Each object causes at most MINUTE_MAX API requests a minute;
further occurrences are counted into the next Event. At most PENDING_MAX Events wait; further ones are dropped and
counted. Occurrences of a reason within SERIES_S are one Event object with a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.exception_handling import FaultReport, attempt_for, raise_fault
from autoscaler.kubernetes.constants import WRITER
from autoscaler.kubernetes.unreadable_objects import Unreadable
from autoscaler.provisioning.release import STUCK_S
from autoscaler.queries.start_phases import phases_s
from autoscaler.spec.model import Model
from autoscaler.spec.pod import API_VERSION
from autoscaler.state.actions import Action, FailStart
from autoscaler.state.capacity import Lease
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, World
from autoscaler.text import format_duration

NORMAL, WARNING = "Normal", "Warning"
UNREADABLE, SKIPS = "Unreadable", "Pilotlight skips this object: "
"""The reason of Events about unreadable objects, and how their messages begin."""
MINUTE_MAX = 10
"""Maximum API requests per minute for the Events of one object; also the burst."""
WAIT_S_MIN = 0.01
"""Minimum wait for the budget of an object: by rounding, a shorter wait may end just before the budget is available."""
PENDING_MAX = 1000
"""Maximum pending Events: about half a megabyte."""
SERIES_S = 600.0
FAILURES_MAX = 30
"""Transient errors of the API server after which an Event is dropped: about five minutes."""
SERIES_MAX = 4096
"""Maximum series remembered; the oldest is forgotten, and its next occurrence begins a new Event."""
NOTE_MAX = 1000
"""Maximum bytes of a note; the API server rejects more than 1,024."""
FORCED = "an operator ordered a forced drain, and the normal release did not end"
BEGINNING = frozenset({S.PENDING, S.STARTING, S.WAKING})


class Regarding(NamedTuple):
    """The object that an Event refers to."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


class ModelEvent(NamedTuple):
    """One occurrence that concerns a Model."""

    model: ModelName
    reason: str
    note: str
    type: str = NORMAL


class Due(NamedTuple):
    """An Event to send: `times` occurrences since the last one sent, with the newest note."""

    regarding: Regarding
    happening: ModelEvent
    times: int
    first_s: float
    last_s: float
    failures: int = 0
    """Number of attempts that failed with a transient error of the API server."""


class Series(NamedTuple):
    """An Event object that exists in the API server."""

    name: str
    times: int
    last_s: float


def find_involved_object(model: Model) -> Regarding | None:
    """The Model's own object; None: the Model is from a file, or is adopted."""
    if not model.uid or model.adopted is not None:
        return None
    return Regarding(API_VERSION, "Model", model.namespace, model.served(), model.uid)


def build_unreadable_event(found: Unreadable) -> tuple[Regarding, ModelEvent] | None:
    """The Event for an object that is skipped, with the reason; None if the name of the object is not readable."""
    if not found.kind or not found.name:
        return None
    about = Regarding(found.api_version, found.kind, found.namespace, found.name, found.uid)
    return about, ModelEvent(ModelName(""), UNREADABLE, SKIPS + found.reason, WARNING)


def event_namespace(about: Regarding) -> str:
    """The namespace of Events about an object. The API server expects `default` for cluster-scoped objects."""
    return about.namespace or "default"


def derive_step_events(
    moves: Iterable[Transition], actions: Iterable[Action], before: World, after: World,
    fault: FaultReport = raise_fault,
) -> Iterable[ModelEvent]:  # fmt: skip
    """The Events of one step of the loop, in order. `fault` receives Models that raised an exception."""
    failed: set[ReplicaId] = set()
    for move in moves:
        replica = after.replicas.get(move.replica) or before.replicas.get(move.replica)
        if move.after is S.FAILED or (replica is not None and replica.failure):
            failed.add(move.replica)
        event = attempt_for(move.model, "events", fault, partial(_transition_event, move, replica))
        if event is not None and not (move.after is S.GONE and move.replica in failed):
            yield event
    for action in actions:
        if isinstance(action, FailStart):
            yield ModelEvent(action.model, "StartFailed", f"cannot start: {action.reason}", WARNING)
    yield from _capacity(before, after)


def _capacity(before: World, after: World) -> Iterable[ModelEvent]:
    """The Events of capacity orders that this leader placed for a Model."""
    if before.capacity.leases is after.capacity.leases:
        return
    for id, lease in after.capacity.leases.items():
        was = before.capacity.leases.get(id)
        what = _what(lease)
        if lease.forced and (was is None or not was.forced):
            yield ModelEvent(
                lease.owner, "CapacityForced", f"{what} of {id.provider} is detached by force: {FORCED}", WARNING
            )
        if lease.found:
            continue  # ordered by an earlier leader
        if was is None:
            yield ModelEvent(lease.owner, "CapacityRequested", f"{what} was ordered from {id.provider}")
        if lease.here_s is not None and (was is None or was.here_s is None):
            took = format_duration(lease.here_s - lease.asked_s)
            yield ModelEvent(lease.owner, "CapacityArrived", f"{id.provider} delivered {what} after {took}")


def build_stuck_capacity_event(lease: Lease) -> ModelEvent:
    """The Event for capacity whose release is overdue. Time alone causes it, not a step of the loop."""
    reported = "" if lease.listed is None else lease.listed.says
    why = reported or lease.why or "its provider gives no reason"
    note = f"{_what(lease)} of {lease.id.provider} is not released after {format_duration(STUCK_S)}: {why}"
    return ModelEvent(lease.owner, "CapacityStuck", note, WARNING)


def _what(lease: Lease) -> str:
    """Describe an order, as in `1 x A100 on w1`."""
    where = f" on {lease.offer.node}" if lease.offer.node else ""
    return f"{lease.devices} x {lease.offer.product}{where}"


def _transition_event(move: Transition, replica: Replica | None) -> ModelEvent | None:
    model, name = move.model, move.replica
    if move.verb == "place":
        return ModelEvent(model, "Woken", f"{name}: {move.reason}")
    if move.after is S.READY and move.before in BEGINNING:
        if replica is not None and replica.runtime.found:
            return None  # it was ready before this process led
        took_s = sum(phases_s(replica).values()) if replica is not None else 0.0
        return ModelEvent(
            model, "Started", f"{name} is ready" + (f" after {format_duration(took_s)}" if took_s else "")
        )
    if move.after is S.FAILED and move.before is not None:
        if move.before in BEGINNING:
            return ModelEvent(model, "StartFailed", f"{name}: {move.reason}", WARNING)
        return ModelEvent(model, "Stopped", f"{name} failed: {move.reason}", WARNING)
    if move.verb == "misplaced":
        return ModelEvent(model, "Misplaced", f"{name}: {move.reason}", WARNING)
    drain = None if replica is None else replica.drain
    if move.verb == "drain" and drain is not None and (drain.victim_of or drain.crowded):
        return ModelEvent(model, "Evicted", f"{name}: {move.reason}")
    if move.verb == "acknowledged":
        return ModelEvent(model, "Drained", f"{name}: {move.reason}")
    if move.after is S.GONE:
        return ModelEvent(model, "Stopped", f"{name}: {move.reason if drain is None else drain.reason}")
    return None


class Book:
    """The pending Events. All times are of one monotonic clock."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Regarding, str], Due] = {}
        """Pending Events by object and reason, longest waiting first."""
        self._series: dict[tuple[Regarding, str], Series] = {}
        self._tokens: dict[Regarding, tuple[float, float]] = {}
        """Object -> (requests left, time of that count); objects with a full budget are left out."""
        self.dropped = 0
        """Number of occurrences that were never sent."""

    def __len__(self) -> int:
        return len(self._pending)

    def note(self, about: Regarding, happening: ModelEvent, now_s: float) -> None:
        """Add an occurrence."""
        key = (about, happening.reason)
        known = self._pending.get(key)
        if known is None and len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        if known is None:
            self._pending[key] = Due(about, happening, 1, now_s, now_s)
        else:
            self._pending[key] = known._replace(happening=happening, times=known.times + 1, last_s=now_s)

    def put_back(self, due: Due) -> None:
        """Return an Event that was taken and could not be sent; later occurrences are merged into it."""
        key = (due.regarding, due.happening.reason)
        newer = self._pending.pop(key, due._replace(times=0))
        merged = newer._replace(times=newer.times + due.times, first_s=due.first_s, failures=due.failures)
        self._pending = {key: merged} | self._pending

    def postpone(self, due: Due, now_s: float, wait_s: float) -> None:
        """Return an Event after a transient error. Its object gets no request for `wait_s`, and other objects go first:
        the error may concern only this object, for example if a webhook is unavailable. Drop it after FAILURES_MAX.
        """
        self._tokens[due.regarding] = (1 - wait_s * MINUTE_MAX / 60, now_s)
        if due.failures + 1 < FAILURES_MAX:
            self.put_back(due._replace(failures=due.failures + 1))
        else:
            self.drop(due)

    def drop(self, due: Due) -> None:
        """Discard an Event that cannot be sent, and count its occurrences as dropped."""
        self.dropped += due.times

    def clear(self) -> None:
        """Discard all Events: another process leads now and reports them."""
        self.dropped += sum(due.times for due in self._pending.values())
        self._pending.clear()
        self._series.clear()

    def take(self, now_s: float) -> Due | None:
        """Take the next Event to send; None: none is pending, or all objects have used their budget."""
        for key, due in self._pending.items():
            left = self._left(due.regarding, now_s)
            if left >= 1:
                self._tokens[due.regarding] = (left - 1, now_s)
                del self._pending[key]
                return due
        self._tokens = {one: kept for one, kept in self._tokens.items() if self._left(one, now_s) < MINUTE_MAX}
        return None

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until `take` returns a pending Event; None: none is pending."""
        short = [max(0.0, 1 - self._left(due.regarding, now_s)) for due in self._pending.values()]
        return max(min(short) * 60 / MINUTE_MAX, WAIT_S_MIN) if short else None

    def series(self, due: Due) -> Series | None:
        """The existing Event that `due` continues; None: it begins a new one."""
        known = self._series.get((due.regarding, due.happening.reason))
        return known if known is not None and due.last_s - known.last_s < SERIES_S else None

    def sent(self, due: Due, name: str, times: int) -> None:
        """Record that the Event `name` exists, with `times` occurrences in all."""
        key = (due.regarding, due.happening.reason)
        self._series.pop(key, None)
        self._series[key] = Series(name, times, due.last_s)
        while len(self._series) > SERIES_MAX:
            del self._series[next(iter(self._series))]

    def forget(self, due: Due) -> None:
        """Forget the existing Event, which was deleted."""
        self._series.pop((due.regarding, due.happening.reason), None)

    def _left(self, about: Regarding, now_s: float) -> float:
        left, at_s = self._tokens.get(about, (float(MINUTE_MAX), now_s))
        return min(MINUTE_MAX, left + (now_s - at_s) * MINUTE_MAX / 60)


def build_event_manifest(due: Due, name: str, reporter: str, unix: Callable[[float], str]) -> Mapping[str, object]:
    """A new core/v1 Event. `unix` formats a time of the monotonic clock as RFC 3339; `reporter` is our pod."""
    about, happening = due.regarding, due.happening
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": event_namespace(about)},
        "involvedObject": {
            "apiVersion": about.api_version, "kind": about.kind, "namespace": about.namespace, "name": about.name,
            "uid": about.uid,
        },
        "reason": happening.reason, "type": happening.type, "message": truncate_note(happening.note),
        "count": due.times, "firstTimestamp": unix(due.first_s), "lastTimestamp": unix(due.last_s),
        "source": {"component": WRITER}, "reportingComponent": WRITER, "reportingInstance": reporter,
    }  # fmt: skip


def build_event_patch(due: Due, times: int, unix: Callable[[float], str]) -> Mapping[str, object]:
    """The patch of an existing Event that now has `times` occurrences in all."""
    return {"count": times, "lastTimestamp": unix(due.last_s), "message": truncate_note(due.happening.note)}


def truncate_note(text: str) -> str:
    """Truncate the text to at most NOTE_MAX bytes of UTF-8."""
    return text.encode()[:NOTE_MAX].decode(errors="ignore")
