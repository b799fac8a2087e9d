"""Folds changes of leadership, operator orders and reports of node agents into the `World`.

A new leader starts with the `World` of a new process: no replica is known until the driver lists them, no gateway has
reported in this epoch, and slot allocations do not change until all have. Demand, documents, histories and the set of
gateways stay, because every autoscaler folds them, leader or not. Losing leadership only clears `leads` and MIG orders.

Cordons are levels: each observation contains all of them. A wake counts as a rejected cold request that is held for the
idle window. A node report that is older than the known one changes nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.agent_contract import WeightsRequest, collect_weights_requests, read_weights_request
from autoscaler.contract import ModelName, NodeReport, PodDevices, WeightsReport
from autoscaler.demand import history_updates as histories
from autoscaler.demand.desired_replicas import idle_window_s
from autoscaler.fold import capacity, mig, model_quarantine
from autoscaler.fold.draft import Draft
from autoscaler.fold.memory import apply_reported_memory
from autoscaler.queries.device_health import list_unhealthy_devices
from autoscaler.queries.operator_orders import STILL_THERE
from autoscaler.state import images
from autoscaler.state.images import NodeImages
from autoscaler.state.operator_orders import (
    CordonsSeen,
    ModelStopped,
    ModelWoken,
    NodeAgentStatus,
    NodeReported,
    StopOrder,
)
from autoscaler.state.world import Copy, NodeId, World


def begin_leading(draft: Draft, epoch: int) -> None:
    """Start to lead in `epoch`."""
    for replica in tuple(draft.replicas.now.values()):
        draft.drop_replica(replica)
    for gateway in tuple(draft.gateways.now.values()):
        draft.gateways.put(gateway.id, replace(gateway, in_epoch=False, grants={}))
    mig.clear_repartition_orders(draft)
    capacity.clear_unlisted_leases(draft)
    draft.change(epoch=epoch)
    draft.change_leadership(leads=True, leading_since_s=draft.now_s, synced=False, handed_over=False)
    draft.news = True


def stop_leading(draft: Draft) -> None:
    """Stop leading: another process leads, or none."""
    mig.clear_repartition_orders(draft)
    draft.change_leadership(leads=False)
    draft.news = True


def list_reported_epochs(world: World) -> frozenset[int]:
    """The epochs that gateways and node agents reported; they ignore a leader with a lower one.

    With several agents, the highest epoch counts only if a second agent reports it, too: otherwise the agent of one
    compromised node could depose leaders again and again, until the epochs are used up.
    """
    gateways = {one.report.epoch for one in world.gateways.values() if one.report is not None}
    agents = sorted((one.report.epoch for one in world.nodes.agents.values()), reverse=True)
    return frozenset(gateways.union(agents[1:] or agents))


NODES_MAX = 10_000
"""Maximum number of nodes whose reports are kept; reports of other nodes are ignored."""
FORGET_S = 600.0
"""A node that is silent for this long is forgotten: its report expired long ago, and nodes are replaced."""
BOOTS_MAX = 8
PODS_BEFORE_MAX = 256
"""Maximum removed pods remembered per node: more than a node runs at once; their memory is free within seconds."""

Ordered = CordonsSeen | ModelWoken | ModelStopped | NodeReported


def apply_operator_observation(draft: Draft, observation: Ordered) -> None:
    """Fold an operator order or a node report."""
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
        case NodeReported():
            _node(draft, observation)


def _woken(draft: Draft, name: ModelName) -> None:
    """Create demand for one immediate start: clear earlier failures, and hold the replica for an idle window."""
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


def forget_silent_nodes(draft: Draft) -> None:
    """Forget nodes that have been silent for FORGET_S."""
    for name in [name for name, node in draft.agents.now.items() if draft.now_s >= node.seen_s + FORGET_S]:
        if draft.agents.now[name].report.copies:
            _copies(draft, name, draft.agents.now[name].report, None)
        draft.agents.drop(name)
        put_images(draft, images.update_agent_images(draft.world.nodes.images, name, ()))


def _goes_on(draft: Draft, name: ModelName, stop: StopOrder) -> bool:
    return any(one.state in STILL_THERE and one.times.created_s <= stop.since_s for one in draft.replicas_of(name))


def _node(draft: Draft, seen: NodeReported) -> None:
    report, name = seen.report, seen.report.node
    known = draft.agents.now.get(name)
    before: tuple[str, ...] = ()
    left: tuple[PodDevices, ...] = ()
    if known is not None:
        last, before = known.report, known.boots_before
        if report.boot in before or (report.boot == last.boot and report.sequence <= last.sequence):
            return
        if report.boot != last.boot:
            before = (*before, last.boot)[-BOOTS_MAX:]
        left = _left(known, report)
    elif len(draft.agents.now) >= NODES_MAX:
        return
    if report.copies != (() if known is None else known.report.copies):
        _copies(draft, name, None if known is None else known.report, report)
    draft.agents.put(name, NodeAgentStatus(
        report=report, seen_s=draft.now_s, boots_before=before, looked_s=draft.now_s - max(0.0, report.age_s),
        pods_before=left, unhealthy=list_unhealthy_devices(report),
    ))  # fmt: skip
    if known is None or known.report.weights != report.weights:
        _looks(draft, report, () if known is None else known.report.weights)
    if known is None or known.report.images != report.images:
        put_images(draft, images.update_agent_images(draft.world.nodes.images, name, report.images))
    apply_reported_memory(draft, report)


def refresh_weights_reports(draft: Draft) -> None:
    """After a change of Models, forget weights reports that no Model needs and take those that one needs now."""
    world = draft.world
    requests = _asked(draft, None)
    artifacts = {one for model in world.models.values() for one in model.artifacts()}
    looked = {request: one for request, one in world.learned.looked.items() if request in requests}
    unbrought = {artifact: why for artifact, why in world.learned.unbrought.items() if artifact in artifacts}
    if (len(looked), len(unbrought)) != (len(world.learned.looked), len(world.learned.unbrought)):
        draft.change_learned(looked=looked, unbrought=unbrought)
    new = requests - looked.keys()
    for node in draft.agents.now.values() if new else ():
        if any(one.look and read_weights_request(one) in new for one in node.report.weights):
            _looks(draft, node.report, ())


def _looks(draft: Draft, report: NodeReport, before: tuple[WeightsReport, ...]) -> None:
    """Record the inspection results of artifacts that Models name, and failures while the agent retries. Results that
    no Model needs are not kept.
    """
    world, said = draft.world, {read_weights_request(one): one for one in report.weights if one.look}
    over = {one.artifact for one in before if one.look and one.failed} - {request.artifact for request in said}
    if not said and not over:
        return
    asked = _asked(draft, frozenset(request.artifact for request in said))
    learned = world.learned
    found = {
        request: _seen(one, learned.looked.get(request))
        for request, one in said.items()
        if one.digest and request in asked
    }
    failed = {request.artifact: one.failed for request, one in said.items() if one.failed and request in asked}
    known = over | {request.artifact for request in found}
    unbrought = {artifact: why for artifact, why in (learned.unbrought | failed).items() if artifact not in known}
    looked = learned.looked | found
    if (looked, unbrought) != (learned.looked, learned.unbrought):
        draft.change_learned(looked=looked, unbrought=unbrought)


def _asked(draft: Draft, artifacts: frozenset[str] | None) -> set[WeightsRequest]:
    """The inspections that Models need, of the given artifacts or of all."""
    models = draft.world.models.values()
    some = (one for one in models if artifacts is None or not artifacts.isdisjoint(one.artifacts()))
    return {request._replace(look=True) for model in some for request in collect_weights_requests(model).values()}


def _seen(said: WeightsReport, before: WeightsReport | None) -> WeightsReport:
    """Merge a report with the earlier one: an inspection for a start reads no header, so the known one is kept."""
    if before is None or said.header or said.no_header or before.digest != said.digest:
        return replace(said, replicas=())
    return replace(said, replicas=(), header=before.header, no_header=before.no_header, bytes=before.bytes)


def put_images(draft: Draft, now: dict[str, NodeImages]) -> None:
    """Replace the images of nodes, if they changed."""
    if now is not draft.world.nodes.images:
        draft.change_nodes(images=now)


def _copies(draft: Draft, name: str, before: NodeReport | None, now: NodeReport | None) -> None:
    """Update the artifacts complete on one node; other nodes are not examined, since there are many."""
    gone, come = (frozenset(_copy(one, name) for one in of.copies) if of else frozenset() for of in (before, now))
    draft.change_nodes(copies=draft.world.nodes.copies - (gone - come) | come)


def _copy(artifact: str, name: str) -> Copy:
    return Copy(artifact=artifact, node=NodeId(name))


def _left(known: NodeAgentStatus, report: NodeReport) -> tuple[PodDevices, ...]:
    """The devices of pods that have left the node."""
    if report.pods == known.report.pods:
        return known.pods_before
    now = {_pod(one) for one in report.pods}
    gone = {_pod(one): one for one in (*known.pods_before, *known.report.pods) if _pod(one) not in now}
    return tuple(gone.values())[-PODS_BEFORE_MAX:]


def _pod(one: PodDevices) -> tuple[str, str, str]:
    return one.pod_uid, one.namespace, one.name
