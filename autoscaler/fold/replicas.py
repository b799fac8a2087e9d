"""Folds state changes of replicas: our Actions, by the table of `autoscaler.state.lifecycle`, and driver observations.

An Action that the table does not allow raises IllegalIntentError. An observation never raises: the replica jumps to the
implied state, and the transition is recorded with the verb "seen". An unknown replica is adopted as it is, wanted or
not; the planner decides what happens to it.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.demand import model_history as histories
from autoscaler.demand.residency import residency_s
from autoscaler.fold.draft import Draft
from autoscaler.fold.memory import apply_memory_use
from autoscaler.queries import mps_server_failures, overcommitted_slices, unschedulable_replicas
from autoscaler.queries.device_health import is_lost
from autoscaler.queries.operator_orders import is_stop_ordered
from autoscaler.spec.model import Model
from autoscaler.state.actions import (
    Action,
    DrainReplica,
    FailReplica,
    FailStart,
    ReviveReplica,
    StartReplica,
    StopReplica,
)
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.lifecycle import IllegalIntentError, next_state
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import NOTHING
from autoscaler.state.world import Drain, Placing, Replica, ReplicaResources, ReplicaRuntime, ReplicaTimes

LIVE = {Seen.STARTING: S.STARTING, Seen.READY: S.READY, Seen.UNREADY: S.UNREADY}
"""The state of a replica with a process, as the driver observes it."""
FOUND = {**LIVE, Seen.TAKEN: S.UNREADY, Seen.LEAVING: S.STOPPING}
"""The initial state of an adopted replica."""
UNDECIDED = frozenset({S.PENDING, S.STARTING, S.READY, S.UNREADY})
"""States that follow the observation. In all others an order of ours is in progress, and a seen process is ignored."""

NOT_SEEN = Placing()
DOWN = frozenset({S.STOPPING, S.SCRUBBING, S.FAILED})
"""A Model whose replicas are all in these states is at zero, or soon will be."""


def apply_replica_action(draft: Draft, action: Action) -> None:
    """Fold one of our Actions. Raises IllegalIntentError if the table does not allow it."""
    match action:
        case StartReplica():
            _start(draft, action)
        case DrainReplica():
            _drain(draft, action)
        case ReviveReplica():
            _revive(draft, action)
        case StopReplica():
            _stop(draft, action)
        case FailReplica():
            before = _known(draft, action.replica)
            next_state(before.state, "broke")
            _break(draft, before, "broke", action.reason)
        case FailStart():
            history = histories.record_impossible_start(draft.history(action.model), draft.now_s, action.reason)
            model = draft.world.models.get(action.model)
            draft.put_history(action.model, replace(history, failed_hash="" if model is None else model.spec_hash()))
            draft.news = True


def _known(draft: Draft, id: ReplicaId) -> Replica:
    replica = draft.replicas.now.get(id)
    if replica is None:
        raise IllegalIntentError(f"replica {id} does not exist")
    return replica


def _start(draft: Draft, action: StartReplica) -> None:
    pending = action.replica
    if pending.id in draft.replicas.now:
        raise IllegalIntentError(f"replica {pending.id} already exists")
    model = draft.world.models.get(pending.model)
    if model is not None and all(other.state in DOWN for other in draft.replicas_of(pending.model)):
        history = draft.history(pending.model)
        draft.put_history(pending.model, histories.record_start_decision(history, model, draft.now_s))
    after = replace(
        pending,
        state=next_state(pending.state, "place"),
        since_s=draft.now_s,
        reason=pending.reason or action.reason,
        times=replace(pending.times, created_s=pending.times.created_s or draft.now_s),
    )
    if after.move is not None and after.move.room_for:
        draft.change(moved_s=draft.now_s)
    draft.put_replica(after)
    draft.record(pending, after, "place", action.reason)


def _drain(draft: Draft, action: DrainReplica) -> None:
    before = _known(draft, action.replica)
    drain = Drain(
        since_s=draft.now_s,
        reason=action.reason,
        came_from=before.state,
        epoch=draft.world.epoch,
        version=draft.version,
        victim_of=action.victim_of,
        stranded=action.stranded,
        crowded=action.crowded,
    )
    if action.stranded or (action.crowded and before.resources.chosen):
        draft.change_nodes(backoffs=unschedulable_replicas.add_node_backoffs(draft.world, before, draft.now_s))
    after = replace(before, state=next_state(before.state, "drain"), drain=drain)
    if before.times.ready_s is not None:
        draft.put_history(before.model, histories.clear_failures(draft.history(before.model)))
    _move(draft, before, after, "drain", action.reason)


def _revive(draft: Draft, action: ReviveReplica) -> None:
    before = _known(draft, action.replica)
    if before.drain is None:
        raise IllegalIntentError(f"replica {before.id} is {before.state}, not draining")
    verb = f"revive-{before.drain.came_from}"
    _move(draft, before, replace(before, state=next_state(before.state, verb), drain=None), verb, action.reason)


def _stop(draft: Draft, action: StopReplica) -> None:
    before = _known(draft, action.replica)
    verb = "acknowledged" if before.state is S.DRAINING else "drop"
    _move(draft, before, replace(before, state=next_state(before.state, verb)), verb, action.reason)
    drain = before.drain
    drained_idle = (
        drain is not None and not drain.taken and drain.victim_of is None and before.times.ready_s is not None
    )
    model = draft.world.models.get(before.model)
    load = draft.world.loads.get(before.model)
    if not drained_idle or model is None or model.spec.paused or (load is not None and load.waiting):
        return
    if is_stop_ordered(draft.world, before) or is_lost(draft.world, before, draft.now_s):
        return
    if before.model in draft.world.rented.idlers:
        return  # its idle timeout was shortened for others: a start soon after is no regret
    if all(other.state in DOWN for other in draft.replicas_of(before.model)):
        draft.put_history(before.model, histories.record_idle_stop(draft.history(before.model), draft.now_s))


def apply_replica_observation(draft: Draft, seen: ReplicaSeen) -> None:
    """Fold a driver's observation of one replica. One that names another Model than the known replica's is ignored: no
    process can take over the address of another Model's replica.
    """
    before = draft.replicas.now.get(seen.id)
    if before is not None and before.model != seen.model:
        return
    if before is None:
        if seen.seen is not Seen.CLEAN:
            _adopt(draft, seen)
            if seen.seen is Seen.TAKEN:
                _is_taken(draft, draft.replicas.now[seen.id], seen.reason)
        return
    before = _facts(draft, before, seen)
    apply_memory_use(draft, before, seen.used_bytes)
    state = LIVE.get(seen.seen)
    if state is not None:
        _live(draft, before, state, seen.reason)
    elif seen.seen is Seen.EXITED:
        _exited(draft, before, seen.reason)
    elif seen.seen is Seen.LEAVING:
        _leaving(draft, before, seen.reason)
    elif seen.seen is Seen.TAKEN:
        _is_taken(draft, before, seen.reason)
    else:
        _exited(draft, before, seen.reason or "it vanished")
        _clean(draft, draft.replicas.now[seen.id], seen)


def _adopt(draft: Draft, seen: ReplicaSeen) -> None:
    """Adopt a running engine that this leader did not start."""
    ready = seen.seen in {Seen.READY, Seen.UNREADY, Seen.TAKEN}
    started_s = _started_s(draft, seen)
    after = Replica(
        id=seen.id,
        model=seen.model,
        spec_hash=seen.spec_hash,
        intent=seen.intent,
        slots=seen.slots,
        state=FOUND.get(seen.seen, S.FAILED),
        since_s=draft.now_s,
        reason="found running",
        failure=seen.reason or "it ended" if seen.seen is Seen.EXITED else "",
        resources=ReplicaResources(
            slices=seen.actual or seen.slices,
            memory_bytes=seen.memory_bytes,
            compute_percent=seen.compute_percent,
            host_request=seen.host_request or NOTHING,
            chosen=seen.slices if seen.actual else (),
        ),
        times=ReplicaTimes(
            created_s=draft.now_s if started_s is None else started_s,
            started_s=started_s,
            ready_s=draft.now_s if ready else None,
            grown_s=draft.now_s if seen.grew else None,
            placing=seen.placing,
        ),
        runtime=ReplicaRuntime(
            address=seen.address,
            found=True,
            pod=seen.pod,
            waits=seen.waits,
            stranded_s=draft.now_s if unschedulable_replicas.is_unschedulable(seen.waits) else None,
            rank=seen.rank,
            weights=seen.weights,
        ),
    )
    draft.put_replica(after)
    draft.record(None, after, "seen", after.failure or after.reason)


def _facts(draft: Draft, before: Replica, seen: ReplicaSeen) -> Replica:
    """Update facts that do not depend on the state, such as the slices and start time. The driver is authoritative."""
    started_s = _started_s(draft, seen)
    had, dates, was = before.resources, before.times, before.runtime
    resources: dict[str, object] = {}
    times: dict[str, object] = {}
    runtime: dict[str, object] = {}
    if started_s is not None and dates.started_s is None:
        times["started_s"] = started_s
        if draft.world.nodes.backoffs and not seen.actual:
            draft.change_nodes(backoffs=unschedulable_replicas.clear_node_backoffs(draft.world, before))
    if seen.waits != was.waits:
        runtime["waits"] = seen.waits
        if unschedulable_replicas.is_unschedulable(seen.waits) != (was.stranded_s is not None):
            runtime["stranded_s"] = draft.now_s if unschedulable_replicas.is_unschedulable(seen.waits) else None
    if seen.grew:
        times["grown_s"] = draft.now_s
    if seen.address and seen.address != was.address:
        runtime["address"] = seen.address
    if seen.host_request is not None and seen.host_request != had.host_request:
        resources["host_request"] = seen.host_request
    there = seen.actual or seen.slices  # the scheduler's actual placement counts, whatever was chosen
    if there and there != had.slices:
        resources["slices"], resources["chosen"] = there, seen.slices if seen.actual else ()
    if seen.rank != was.rank:
        runtime["rank"] = seen.rank
    if seen.weights and seen.weights != was.weights:
        runtime["weights"] = seen.weights
    if seen.placing not in (dates.placing, NOT_SEEN):
        times["placing"] = seen.placing
    if seen.pod is not None and seen.pod != was.pod:
        runtime["pod"] = seen.pod
    if not (resources or times or runtime):
        return before
    after = replace(
        before,
        resources=replace(had, **resources) if resources else had,
        times=replace(dates, **times) if times else dates,
        runtime=replace(was, **runtime) if runtime else was,
    )
    draft.put_replica(after)
    if (
        after.resources.chosen
        and after.resources.slices != before.resources.slices
        and not overcommitted_slices.is_on_chosen_devices(draft.world, after)
    ):
        draft.record(before, after, "misplaced", overcommitted_slices.explain_misplacement(after))
    return after


def _started_s(draft: Draft, seen: ReplicaSeen) -> float | None:
    """When its first process started; now, if it has one and the driver does not know the time."""
    started = seen.seen in LIVE and not seen.waits
    return draft.now_s if seen.started_s is None and started else seen.started_s


def _live(draft: Draft, before: Replica, state: S, reason: str) -> None:
    if before.state is S.DRAINING and before.drain is not None:
        if before.drain.came_from is not state:
            after = replace(before, drain=replace(before.drain, came_from=state))
            draft.put_replica(_ready(draft, after) if state is S.READY else after)
        return
    if before.state is state or before.state not in UNDECIDED:
        return
    after = replace(before, state=state)
    if state is S.READY:
        after = _ready(draft, after)
    _move(draft, before, after, "seen", reason or f"seen {state}")


def _ready(draft: Draft, replica: Replica) -> Replica:
    """Return `replica` with the time at which it first became ready, and record the duration of the start.

    The duration is not recorded for an adopted replica, or one with a process that already ran: it may have been ready
    for hours.
    """
    if replica.times.ready_s is not None:
        return replica
    if draft.world.nodes.mps_failures:
        draft.change_nodes(mps_failures=mps_server_failures.record_replica_ready(draft.world, replica))
    began_s = replica.times.started_s
    took_s = (
        None if began_s is None or replica.runtime.found or began_s < replica.times.created_s else draft.now_s - began_s
    )
    draft.put_history(replica.model, histories.record_start(draft.history(replica.model), took_s))
    return replace(replica, times=replace(replica.times, ready_s=draft.now_s))


def _leaving(draft: Draft, before: Replica, reason: str) -> None:
    """Another party stops the replica: treat it as an ordered stop, not as a failure."""
    if before.state in UNDECIDED or before.state is S.DRAINING:
        _move(draft, before, replace(before, state=S.STOPPING), "seen", reason or "another program is stopping it")


def _is_taken(draft: Draft, before: Replica, reason: str) -> None:
    """Another party terminates the replica after a grace period: drain it, without the option to revive it."""
    reason = reason or "another program is terminating it and lets it finish its requests"
    if before.state is S.DRAINING and before.drain is not None:
        draft.put_replica(replace(before, drain=replace(before.drain, taken=True)))
    elif before.state in UNDECIDED:
        drain = Drain(
            since_s=draft.now_s, reason=reason, came_from=before.state, epoch=draft.world.epoch, version=draft.version,
            taken=True,
        )  # fmt: skip
        _move(draft, before, replace(before, state=S.DRAINING, drain=drain), "seen", reason)


def _exited(draft: Draft, before: Replica, reason: str) -> None:
    if before.state is S.STOPPING or (before.drain is not None and before.drain.taken and before.state is S.DRAINING):
        _move(draft, before, replace(before, state=S.SCRUBBING), "seen", reason or "its process ended")
    elif before.state not in {S.SCRUBBING, S.FAILED}:
        _break(draft, before, "seen", reason or "its process ended")


def _break(draft: Draft, before: Replica, verb: str, reason: str) -> None:
    """Mark a replica as failed. If it was not ready for its minimum residency, that is a failed start of its spec."""
    _move(draft, before, replace(before, state=S.FAILED, failure=reason), verb, reason)
    if falls := mps_server_failures.record_replica_failure(
        draft.world, draft.replicas.now.values(), before, draft.now_s
    ):
        draft.change_nodes(mps_failures=falls)
    model = draft.world.models.get(before.model)
    if model is None:
        return
    history = draft.history(before.model)
    if any(_stayed(draft, model, one) for one in (before, *draft.replicas_of(before.model))):
        history = histories.clear_failures(history)
    counts = before.spec_hash == model.spec_hash() and not _stayed(draft, model, before)  # irrelevant to another spec
    if counts and not _taken(draft, before):
        tried_s = before.times.created_s if before.times.started_s is None else before.times.started_s
        history = histories.record_failure(history, model.spec.start, tried_s, draft.now_s, reason)
        history = replace(history, failed_hash=model.spec_hash())
        draft.news = draft.news or history.refused_until_s > 0.0
    draft.put_history(before.model, history)


def _taken(draft: Draft, replica: Replica) -> bool:
    """Whether its node was or will be removed, which does not count as a failure of the Model."""
    slices = draft.world.nodes.slices
    gone = bool(replica.resources.slices) and not any(id in slices for id in replica.resources.slices)
    return gone or is_stop_ordered(draft.world, replica)


def _stayed(draft: Draft, model: Model, replica: Replica) -> bool:
    """Whether it was ready for at least its minimum residency."""
    ready_s = replica.times.ready_s
    return ready_s is not None and draft.now_s - ready_s >= residency_s(model, draft.history(model.name))


def _clean(draft: Draft, before: Replica, seen: ReplicaSeen) -> None:
    """Remove a replica of which nothing is left: its slices are free."""
    if before.state is not S.SCRUBBING:
        scrubbing = replace(before, state=S.SCRUBBING)
        _move(draft, before, scrubbing, "seen", "its process ended")
        before = scrubbing
    gone = replace(before, state=S.GONE, runtime=replace(before.runtime, proof=seen.proof))
    draft.drop_replica(before)
    draft.record(before, gone, "seen", f"clean: {seen.proof}" if seen.proof else "clean")


def _move(draft: Draft, before: Replica, after: Replica, verb: str, reason: str) -> None:
    after = replace(after, since_s=draft.now_s)
    draft.put_replica(after)
    draft.record(before, after, verb, reason)
    if before.state is not S.READY or any(r.state is S.READY for r in draft.replicas_of(after.model)):
        return
    draft.put_history(after.model, histories.record_serving_end(draft.history(after.model), draft.now_s))
