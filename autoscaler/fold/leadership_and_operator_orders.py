"""Folds changes of leadership and operator orders into the `World`.

A new leader starts with the `World` of a new process: no replica is known until the driver lists them, no gateway has
reported in this epoch, and slot allocations do not change until all have. Demand, documents, histories and the set of
gateways stay, because every autoscaler folds them, leader or not. Losing leadership only clears `leads` and MIG orders.

Cordons are levels: each observation contains all of them. A wake counts as a rejected cold request that is held for the
idle timeout.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.demand import model_history as histories
from autoscaler.demand.idle_timeout import idle_window_s
from autoscaler.fold import capacity, mig, model_quarantine
from autoscaler.fold.draft import Draft
from autoscaler.queries.operator_orders import STILL_THERE
from autoscaler.state.events import CordonsSeen, FollowingSeen, LeadingSeen, ModelStopped, ModelWoken, Synced
from autoscaler.state.world import StopOrder, World


def apply_leadership_observation(draft: Draft, observation: LeadingSeen | FollowingSeen | Synced) -> None:
    """Fold a change of leadership, or the news that the drivers of a leader have listed their replicas."""
    match observation:
        case LeadingSeen():
            _begin_leading(draft, observation.epoch)
        case FollowingSeen():
            mig.clear_repartition_orders(draft)
            draft.change_leadership(leads=False)
            draft.news = True
        case Synced() if not draft.world.leadership.synced:
            draft.change_leadership(synced=True)
            draft.news = True
        case Synced():
            pass  # unchanged


def _begin_leading(draft: Draft, epoch: int) -> None:
    for replica in tuple(draft.replicas.now.values()):
        draft.drop_replica(replica)
    for gateway in tuple(draft.gateways.now.values()):
        draft.gateways.put(gateway.id, replace(gateway, in_epoch=False, grants={}))
    mig.clear_repartition_orders(draft)
    capacity.clear_unlisted_leases(draft)
    draft.change(epoch=epoch)
    draft.change_leadership(leads=True, leading_since_s=draft.now_s, synced=False, handed_over=False)
    draft.news = True


def list_reported_epochs(world: World) -> frozenset[int]:
    """The epochs that gateways and node agents reported; they ignore a leader with a lower one.

    With several agents, the highest epoch counts only if a second agent reports it, too: otherwise the agent of one
    compromised node could depose leaders again and again, until the epochs are used up.
    """
    gateways = {one.report.epoch for one in world.gateways.values() if one.report is not None}
    agents = sorted((one.report.epoch for one in world.nodes.agents.values()), reverse=True)
    return frozenset(gateways.union(agents[1:] or agents))


Ordered = CordonsSeen | ModelWoken | ModelStopped


def apply_operator_observation(draft: Draft, observation: Ordered) -> None:
    """Fold an operator order."""
    match observation:
        case CordonsSeen():
            taken = {place: one for place, one in draft.world.nodes.cordons.items() if one.why}
            cordons = {**taken, **{cordon.place: cordon for cordon in observation.cordons}}
            if cordons != draft.world.nodes.cordons:
                draft.change_nodes(cordons=cordons)
        case ModelWoken():
            _woken(draft, observation.model)
        case ModelStopped():
            _stopped(draft, observation)


def _woken(draft: Draft, name: ModelName) -> None:
    """Create demand for one immediate start: clear earlier failures, and hold the replica for its idle timeout."""
    model = draft.world.models.get(name)
    if model is None:
        return
    before = draft.history(name)
    held = histories.record_cold_refusal(
        histories.clear_failures(before), draft.now_s, idle_window_s(model, before) / 2.0
    )
    draft.put_history(name, replace(held, woken_s=draft.now_s))
    draft.news = draft.news or before.refused_until_s > 0.0
    model_quarantine.end_quarantine(draft, name)
    if name in draft.world.stops:
        draft.change(stops={other: stop for other, stop in draft.world.stops.items() if other != name})


def _stopped(draft: Draft, order: ModelStopped) -> None:
    """Stop a Model: clear earlier wakes and rejected cold requests. A forced stop stays forced."""
    known = draft.world.stops.get(order.model)
    force = order.force or (known is not None and known.force)
    stop = StopOrder(since_s=draft.now_s, force=force)
    draft.change(stops={**draft.world.stops, order.model: stop})
    history = draft.history(order.model)
    draft.put_history(order.model, replace(history, refused_cold_s=None, woken_s=None, hold_until_s=0.0))


def end_completed_stops(draft: Draft) -> None:
    """End a stop when the last replica that existed at its time is gone: the next request starts a new one."""
    stops = draft.world.stops
    if not stops:
        return
    left = {name: stop for name, stop in stops.items() if _goes_on(draft, name, stop)}
    if len(left) < len(stops):
        draft.change(stops=left)


def _goes_on(draft: Draft, name: ModelName, stop: StopOrder) -> bool:
    return any(one.state in STILL_THERE and one.times.created_s <= stop.since_s for one in draft.replicas_of(name))
