"""Explains decisions about one Model, in sentences.

Reads the `World` and the Plan of a decision and calls the same functions, so that explanations match decisions. Decides
nothing, and does not depend on terminals or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand import desired_replicas
from autoscaler.demand.desired_replicas import DesiredReplicas
from autoscaler.demand.idle_timeout import median_start_s
from autoscaler.explain.decision_log import Log, describe_decision
from autoscaler.explain.decision_log import Row as LogRow
from autoscaler.explain.scale_up_options import Step, explain_ladder
from autoscaler.explain.scale_up_options import describe_ladder as offered
from autoscaler.explain.status_rows import build_faulty_row, model_state, unplaceable_reason
from autoscaler.explain.weights import describe_weights
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.placement.learning.training import describe_training_input
from autoscaler.placement.model.bin_builder import build_bins, build_hosts
from autoscaler.placement.model.predicates import count_fitting_devices, group_occupants_by_domain, rejection_reason
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.planner.reconcile import choose_eviction_level, start_after_s
from autoscaler.provisioning.unplaceable_models import Fitting
from autoscaler.queries import granted_memory
from autoscaler.queries.gateway_reports import decide_stop, list_known_gateways, list_silent_gateways
from autoscaler.queries.operator_orders import explain_closed_slice
from autoscaler.queries.overcommitted_slices import explain_misplacement
from autoscaler.queries.unschedulable_replicas import list_avoided_nodes
from autoscaler.spec.model import Model
from autoscaler.state import StateRecord
from autoscaler.state.actions import Plan
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import BEGINNING
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, Replica, SliceId, World
from autoscaler.text import format_count, format_duration

QUIET_S = 5.0
"""An engine with running requests is mentioned after this time without output."""
CANDIDATES_LISTED_MAX = 8
"""Maximum number of slices in sentences; `Explanation.candidates` has all."""


class Candidate(StateRecord, frozen=True):
    """One slice, and why one more replica is not placed there; empty if nothing prevents it."""

    slice: SliceId
    ruled_out: str


class Explanation(StateRecord, frozen=True):
    """Why a Model runs, waits or is stopped."""

    model: ModelName
    state: str
    sentences: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    ladder: tuple[Step, ...] = ()
    """The options for one more replica: an eviction, then each capacity offer."""


def explain_model(world: World, plan: Plan, log: Log, model: ModelName, now_s: float) -> Explanation:
    """Explain the state of `model`, which must be in the `World`."""
    if model in list_quarantined_models(world):
        row = build_faulty_row(world, model, now_s)
        return Explanation(model=model, state=row.state, sentences=(f"{row.why[:1].upper()}{row.why[1:]}.",))
    world = mask_quarantined(world)
    document = world.models[model]
    answer = desired_replicas.compute_desired_replicas(world, document, now_s)
    never = unplaceable_reason(world, document, Fitting(world))
    sentences = [_wanted(document, answer, now_s), *_soonest(world, model, now_s)]
    sentences += [f"It fits on no device: {never}. Its requests are rejected with no_capacity."] if never else []
    adopted = document.adopted
    sentences += [f"{adopted.message}."] if adopted is not None and adopted.message != answer.reason else []
    sentences += [*_obstacle(world, model), *describe_weights(world, document)]
    for id in world.by_model.get(model, ()):
        sentences += [_replica(world, world.replicas[id], now_s), *_quiet(world, id, now_s)]
    sentences += _failures(world, model, now_s)
    sentences += [f"Not placed: {unmet.reason}." for unmet in plan.unmet if unmet.model == model and not never]
    sentences += _starts(world, model)
    sentences += _unknown(world, now_s)
    lacks = answer.count > len(desired_replicas.list_live_replicas(world, model))
    begins = any(world.replicas[id].state in BEGINNING for id in world.by_model.get(model, ()))
    sentences += _lesson(world, document) if lacks or begins else []
    rows = log.of_model(model)
    sentences += [
        *_stopped(world, model, rows, now_s),
        *(f"Last: {describe_decision(row, now_s)}." for row in rows[-1:]),
    ]
    candidates = _candidates(world, document, now_s) if lacks or never else ()
    sentences += [
        f"{c.slice}: {c.ruled_out or 'nothing prevents a placement'}." for c in candidates[:CANDIDATES_LISTED_MAX]
    ]
    force = (
        choose_eviction_level(answer, len(desired_replicas.list_live_replicas(world, model)))
        if lacks
        else EvictionLevel.BUSY
    )
    steps = explain_ladder(world, plan, document, force, now_s) if lacks or never else ()
    sentences += offered(world, document, now_s, steps)
    state = model_state(world, model, now_s)
    return Explanation(model=model, state=state, sentences=tuple(sentences), candidates=candidates, ladder=steps)


def _wanted(model: Model, answer: DesiredReplicas, now_s: float) -> str:
    """Describe how many replicas are needed and why, and how long requests have waited."""
    needed = f"{format_count(answer.count, 'replica')} {'is' if answer.count == 1 else 'are'} needed"
    if not answer.count:
        needed = "No replica is needed now"
    elif model.spec.replicas.max > 1:
        needed += f" (of at most {model.spec.replicas.max})"
    waited = f", for {format_duration(now_s - answer.since_s)}" if answer.urgent and answer.since_s is not None else ""
    return f"{needed}: {answer.reason}{waited}."


def _obstacle(world: World, name: ModelName) -> list[str]:
    """Describe an obstacle that prevents every start, if one is known."""
    obstacle = world.learned.obstacles.get(name)
    if obstacle is None:
        return []
    if world.by_model.get(name):
        return [f"Another replica cannot start: {obstacle}."]
    return [f"It cannot start: {obstacle}. Its requests are rejected with model_start_failed."]


def _soonest(world: World, model: ModelName, now_s: float) -> list[str]:
    """Describe the remaining time of the queued request with the earliest deadline."""
    left_s = [
        level.soonest_deadline_s - (now_s - gateway.seen_s)
        for gateway in world.gateways.values()
        for level in gateway.levels.get(model, ())
        if level.waiting and level.soonest_deadline_s is not None
    ]
    if not left_s:
        return []
    queued = format_count(world.loads[model].waiting, "queued request")
    return [f"The earliest deadline of {queued} is in {format_duration(min(left_s))}."]


def _quiet(world: World, id: ReplicaId, now_s: float) -> list[str]:
    """Report an engine with running requests that has sent no output for QUIET_S; not one that never sent any."""
    ages_s = [
        use.last_byte_age_s + now_s - gateway.seen_s
        for gateway in list_known_gateways(world)
        if gateway.report is not None
        for use in gateway.report.replicas
        if use.replica == id and use.in_use and use.last_byte_age_s is not None
    ]
    if not ages_s or min(ages_s) <= QUIET_S:
        return []
    return [f"Requests run on {id}, but its engine has sent no output for {format_duration(min(ages_s))}."]


def _replica(world: World, replica: Replica, now_s: float) -> str:
    """Describe one replica: its state, for how long, its slices and the reason."""
    where = ", ".join(replica.resources.slices) or "no device"
    where += "".join(
        f" ({why})" for why in [*_closed(world, replica)[:1], *filter(None, [explain_misplacement(replica)])]
    )
    model = world.models.get(replica.model)
    granted = "" if model is None else granted_memory.describe_granted_memory(model, replica)
    where += f", {granted}" if granted else ""
    head = f"{replica.id} has been {replica.state} for {format_duration(now_s - replica.since_s)} on {where}"
    drain = replica.drain
    if replica.state is S.DRAINING and drain is not None:
        return f"{head}: {drain.reason}; {decide_stop(world, replica, now_s).reason}."
    if replica.state is S.FAILED:
        return f"{head}: {replica.failure or 'no reason was reported'}."
    if replica.runtime.waits and replica.state in BEGINNING:
        return f"{head}: {replica.reason}; its engine is not started yet: {replica.runtime.waits}."
    others = any(len(world.by_slice.get(id, ())) > 1 for id in replica.resources.slices)
    if others and replica.state in BEGINNING:
        return f"{head}: {replica.reason}; no other replica starts on this device meanwhile."
    return f"{head}: {replica.reason}." if replica.reason else f"{head}."


def _closed(world: World, replica: Replica) -> list[str]:
    """Return why its slices are closed to new replicas, for those that are."""
    slices = (world.nodes.slices[id] for id in replica.resources.slices if id in world.nodes.slices)
    return [why for slice_ in slices if (why := explain_closed_slice(world, slice_))]


def _failures(world: World, name: ModelName, now_s: float) -> list[str]:
    history = world.learned.histories.get(name, NO_HISTORY)
    due_s = start_after_s(history)
    if not history.failure:
        return []
    refused = (
        f"Its requests are rejected and no start is attempted for {format_duration(history.refused_until_s - now_s)}."
    )
    if history.failure == world.learned.obstacles.get(name):
        return [refused] if now_s < history.refused_until_s else []
    sentence = f"Its last start failed: {history.failure}."
    if history.episodes:
        sentence += f" {history.episodes} starts failed in a row." if history.episodes > 1 else ""
    if now_s < history.refused_until_s:
        return [f"{sentence} {refused}"]
    return [
        f"{sentence} The next attempt is due " + (f"in {format_duration(due_s - now_s)}." if now_s < due_s else "now.")
    ]


def _starts(world: World, name: ModelName) -> list[str]:
    history = world.learned.histories.get(name, NO_HISTORY)
    median_s = median_start_s(history)
    if median_s is None:
        return []
    return [f"Its last start took {format_duration(history.starts_s[-1])}, the median is {format_duration(median_s)}."]


def _unknown(world: World, now_s: float) -> list[str]:
    silent = list_silent_gateways(world, now_s)
    return [f"Nothing is scaled down until these gateways report: {', '.join(silent)}."] if silent else []


def _lesson(world: World, model: Model) -> list[str]:
    """Name the data from which the choice among equal slices was learned; empty: none, or there is no choice."""
    lesson = world.learned.lesson
    if lesson is None or not lesson.learnt or not model.spec.gpu.count or len(world.nodes.slices) < 2:
        return []
    source = describe_training_input(lesson.exercise)
    chosen = "Among slices of equal price and size, the one with the best value is chosen"
    return [f"{chosen}; the values were learned from {source}."]


def _stopped(world: World, name: ModelName, rows: Sequence[LogRow], now_s: float) -> list[str]:
    """Describe why a Model without a serving replica stopped, unless the last row, which is shown anyway, says why."""
    ends = (row for row in reversed(rows) if isinstance(row, Transition) and row.after in _ENDED)
    row = next(ends, None)
    serves = any(world.replicas[id].state in {S.READY, S.UNREADY} for id in world.by_model.get(name, ()))
    if row is None or row is rows[-1] or serves:
        return []
    return [f"It {_ENDED[row.after]} {format_duration(now_s - row.at_s)} ago: {row.reason}."]


_ENDED = {S.DRAINING: "stopped", S.FAILED: "failed"}


def _candidates(world: World, model: Model, now_s: float) -> tuple[Candidate, ...]:
    """Return every slice, and why one more replica is not placed there."""
    want = build_placement_request(
        model, 0, now_s, EvictionLevel.BUSY, "", world.settings.pod, list_avoided_nodes(world, model.name, now_s)
    )
    want, found = want.least, build_bins(world, now_s)
    occupants = group_occupants_by_domain(found)
    hosts, teams = build_hosts(world, now_s), count_fitting_devices(want, found)
    reasons = (
        (shelf.slice.id, rejection_reason(want, shelf, now_s, occupants, hosts.get(shelf.slice.node), teams=teams))
        for shelf in found
    )
    return tuple(Candidate(slice=id, ruled_out=reason) for id, reason in reasons)
