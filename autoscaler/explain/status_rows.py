"""Rows for `pilotlight status`: the state of each Model, its replicas and the reason. Pure.

Reads the `World` and the Plan of a decision and calls the same functions, so that reasons match decisions.
"""

from __future__ import annotations

from collections import Counter

from autoscaler.contract import ModelName
from autoscaler.demand import desired_replicas
from autoscaler.explain.weights import weights_state
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.planner.reconcile import model_absence_reason
from autoscaler.provisioning.unplaceable_models import Fitting
from autoscaler.queries.gateway_reports import STALLED
from autoscaler.queries.response_types import Row
from autoscaler.spec.model import Model
from autoscaler.state import lifecycle
from autoscaler.state.actions import Plan
from autoscaler.state.lifecycle import BEGINNING
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, NO_LOAD, World
from autoscaler.text import format_duration


def model_state(world: World, name: ModelName, now_s: float) -> str:
    """Return one word: ready, starting, unready, draining, stopping, failed, waiting, paused or zero. (Not faulty.)"""
    states = {world.replicas[id].state for id in world.by_model.get(name, ())}
    if S.READY in states:
        return "ready"
    for state, word in _WORDS:
        if state in states:
            return word
    model = world.models.get(name)
    if model is not None and model.spec.paused:
        return "paused"
    if now_s < world.learned.histories.get(name, NO_HISTORY).refused_until_s:
        return "failed"
    return "waiting" if world.loads.get(name, NO_LOAD).waiting else "zero"


_WORDS = (
    (S.WAKING, "starting"),
    (S.STARTING, "starting"),
    (S.PENDING, "starting"),
    (S.UNREADY, "unready"),
    (S.DRAINING, "draining"),
    (S.FAILED, "failed"),
    (S.STOPPING, "stopping"),
    (S.SCRUBBING, "stopping"),
)


def list_status_rows(world: World, plan: Plan, now_s: float) -> tuple[Row, ...]:
    """Return one row per Model that is in the documents or has replicas, ordered by name."""
    unmet = {missing.model: missing.reason for missing in plan.unmet}
    out, rest = list_quarantined_models(world), mask_quarantined(world)
    fitting = Fitting(rest)
    return tuple(
        build_faulty_row(world, name, now_s) if name in out else _row(rest, name, unmet.get(name, ""), fitting, now_s)
        for name in sorted(world.models.keys() | world.by_model.keys())
    )


def unplaceable_reason(world: World, model: Model, fitting: Fitting) -> str:
    """Return why a Model without replicas fits no device. Empty: it fits, or it has replicas."""
    return "" if model.name in world.by_model else fitting.never(model)


def build_faulty_row(world: World, name: ModelName, now_s: float) -> Row:
    """Return the row of a quarantined Model. Does not read its document or history, which may cause the error."""
    fault, replicas = world.learned.faults[name], [world.replicas[id] for id in world.by_model.get(name, ())]
    load = world.loads.get(name, NO_LOAD)
    held = (world.nodes.slices.get(id) for replica in replicas for id in replica.resources.slices)
    serves = any(replica.state is S.READY for replica in replicas)
    return Row(
        model=name,
        state="ready" if serves else "faulty",
        replicas=dict(Counter(replica.state.value for replica in replicas)),
        waiting=load.waiting,
        running=load.running,
        devices=tuple(sorted({slice_.device for slice_ in held if slice_ is not None})),
        since_s=now_s - fault.seen_s,
        why=f"quarantined because of an internal error ({fault.reason}); the next attempt is in "
        f"{format_duration(fault.until_s - now_s)}, when its document changes, or on `pilotlight wake {name}`",
    )


def _row(world: World, name: ModelName, unmet: str, fitting: Fitting, now_s: float) -> Row:
    load, replicas = world.loads.get(name, NO_LOAD), [world.replicas[id] for id in world.by_model.get(name, ())]
    counts: dict[str, int] = {}
    for replica in replicas:
        counts[replica.state.value] = counts.get(replica.state.value, 0) + 1
    held = (world.nodes.slices.get(id) for replica in replicas for id in replica.resources.slices)
    state = model_state(world, name, now_s)
    entered = [r.since_s for r in replicas if r.state.value == state] or [r.since_s for r in replicas]
    began_s = min(entered, default=world.learned.histories.get(name, NO_HISTORY).served_until_s)
    document = world.models.get(name)
    if document is None:
        why = model_absence_reason(replicas[0])
    else:
        never = unplaceable_reason(world, document, fitting)
        why = f"fits on no device: {never}" if never else _why(world, document, unmet, now_s)
        if not never and not replicas and name in world.learned.obstacles:
            why = f"cannot start: {world.learned.obstacles[name]}"
    return Row(
        model=name,
        state=state,
        replicas=counts,
        waiting=load.waiting,
        running=load.running,
        devices=tuple(sorted({slice_.device for slice_ in held if slice_ is not None})),
        since_s=None if began_s is None else now_s - began_s,
        why=why,
        adapters=() if document is None else tuple(adapter.name for adapter in document.spec.adapters),
        weights="" if document is None else weights_state(world, document),
    )


def _why(world: World, model: Model, unmet: str, now_s: float) -> str:
    history = world.learned.histories.get(model.name, NO_HISTORY)
    if now_s < history.refused_until_s:
        return f"{history.failure}; the next attempt is in {format_duration(history.refused_until_s - now_s)}"
    if unmet:
        return unmet
    replicas = [world.replicas[id] for id in world.by_model.get(model.name, ())]
    waits = [replica.runtime.waits for replica in replicas if replica.runtime.waits and replica.state in BEGINNING]
    has_live = any(replica.state in lifecycle.LIVE for replica in replicas)
    reasons = [replica.drain.reason for replica in replicas if replica.drain is not None and not has_live]
    stalled = [STALLED for replica in replicas if replica.drain is not None and replica.drain.reason == STALLED]
    return (stalled or waits or reasons or [desired_replicas.compute_desired_replicas(world, model, now_s).reason])[0]
