"""What a change of leadership does to the World: what was ordered and granted before counts for nothing any more.

Owns that one step. Who begins to lead has the World of a process that starts: no Replica is known until the driver says
(again) what there is, no gateway has reported in this epoch, and holds stand still until all have. Demand, documents,
histories and who the gateways are stay: every autoscaler folds them, whoever leads. Who ends to lead only ends.

How what operators order, and what agents of nodes say, gets into the World.

Owns those observations and the end of a stop. Orders about Places are levels: all that there are, each time. A wake is
a Call refused because it is cold, held for the idle window. A node's report that is older than the one that is known
changes nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.agent_contract import WeightsRequest, collect_weights_requests, read_weights_request
from autoscaler.contract import ModelName, NodeReport, PodDevices, WeightsReport
from autoscaler.demand import history as histories
from autoscaler.demand.desired_replicas import idle_window_s
from autoscaler.fold import capacity, faults, mig
from autoscaler.fold.draft import Draft
from autoscaler.fold.memory import apply_reported_memory
from autoscaler.queries.cordons import STILL_THERE
from autoscaler.queries.device_health import list_unhealthy_devices
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
    """We lead, in `epoch`."""
    for replica in tuple(draft.replicas.now.values()):
        draft.drop_replica(replica)
    for gateway in tuple(draft.gateways.now.values()):
        draft.gateways.put(gateway.id, replace(gateway, in_epoch=False, grants={}))
    mig.clear_repartition_orders(draft)
    capacity.clear_unlisted_leases(draft)
    draft.change(epoch=epoch, leads=True, leading_since_s=draft.now_s, synced=False, handed_over=False)
    draft.news = True


def stop_leading(draft: Draft) -> None:
    """Another leads, or nobody."""
    mig.clear_repartition_orders(draft)
    draft.change(leads=False)
    draft.news = True


def list_reported_epochs(world: World) -> frozenset[int]:
    """The epochs that gateways and agents of nodes say that they have heard of: a lower one is nothing to them.

    Where there are several agents the highest of their words is not believed unless another says as much: one of a node
    that was broken into could have leaders deposed again and again, until no epoch is left.
    """
    gateways = {one.report.epoch for one in world.gateways.values() if one.report is not None}
    agents = sorted((one.report.epoch for one in world.nodes.values()), reverse=True)
    return frozenset(gateways.union(agents[1:] or agents))


NODES_MAX = 10_000
"""Nodes whose reports are kept; of more, those beyond are not heard."""
FORGET_S = 600.0
"""A node that nobody has heard of for so long is forgotten: its report ended to count long ago; nodes come and go."""
BOOTS_MAX = 8
PODS_BEFORE_MAX = 256
"""Pods that left a node and are remembered: more than a node runs at once, and their memory is back in seconds."""

Ordered = CordonsSeen | ModelWoken | ModelStopped | NodeReported


def apply_operator_observation(draft: Draft, observation: Ordered) -> None:
    """Takes one of them."""
    match observation:
        case CordonsSeen():
            taken = {place: one for place, one in draft.world.cordons.items() if one.why}
            cordons = {**taken, **{cordon.place: cordon for cordon in observation.cordons}}
            if cordons != draft.world.cordons:
                draft.change(cordons=cordons)
        case ModelWoken():
            _woken(draft, observation.model)
        case ModelStopped():
            _stopped(draft, observation)
        case NodeReported():
            _node(draft, observation)


def _woken(draft: Draft, name: ModelName) -> None:
    """Demand for one start now: no failure of before stands in its way, and it stays for an idle window."""
    model = draft.world.models.get(name)
    if model is None:
        return
    before = draft.history(name)
    held = histories.record_cold_refusal(
        histories.clear_failures(before), draft.now_s, idle_window_s(model, before) / 2.0
    )
    draft.put_history(name, replace(held, woken_s=draft.now_s))
    draft.news = draft.news or before.refused_until_s > 0.0
    faults.end_quarantine(draft, name)
    if name in draft.world.stops:
        draft.change(stops={other: stop for other, stop in draft.world.stops.items() if other != name})


def _stopped(draft: Draft, order: ModelStopped) -> None:
    """Nothing of before keeps it: neither a wake, nor Calls that were refused. What is forced stays forced."""
    known = draft.world.stops.get(order.model)
    force = order.force or (known is not None and known.force)
    stop = StopOrder(since_s=draft.now_s, force=force)
    draft.change(stops={**draft.world.stops, order.model: stop})
    history = draft.history(order.model)
    draft.put_history(order.model, replace(history, refused_cold_s=None, woken_s=None, hold_until_s=0.0))


def end_completed_stops(draft: Draft) -> None:
    """A stop ends with the last Replica that was there: whoever calls then starts a new one."""
    stops = draft.world.stops
    if not stops:
        return
    left = {name: stop for name, stop in stops.items() if _goes_on(draft, name, stop)}
    if len(left) < len(stops):
        draft.change(stops=left)


def forget_silent_nodes(draft: Draft) -> None:
    """Drops nodes that are long silent."""
    for name in [name for name, node in draft.nodes.now.items() if draft.now_s >= node.seen_s + FORGET_S]:
        if draft.nodes.now[name].report.copies:
            _copies(draft, name, draft.nodes.now[name].report, None)
        draft.nodes.drop(name)
        put_images(draft, images.update_agent_images(draft.world.images, name, ()))


def _goes_on(draft: Draft, name: ModelName, stop: StopOrder) -> bool:
    return any(one.state in STILL_THERE and one.created_s <= stop.since_s for one in draft.replicas_of(name))


def _node(draft: Draft, seen: NodeReported) -> None:
    report, name = seen.report, seen.report.node
    known = draft.nodes.now.get(name)
    before: tuple[str, ...] = ()
    left: tuple[PodDevices, ...] = ()
    if known is not None:
        last, before = known.report, known.boots_before
        if report.boot in before or (report.boot == last.boot and report.sequence <= last.sequence):
            return
        if report.boot != last.boot:
            before = (*before, last.boot)[-BOOTS_MAX:]
        left = _left(known, report)
    elif len(draft.nodes.now) >= NODES_MAX:
        return
    if report.copies != (() if known is None else known.report.copies):
        _copies(draft, name, None if known is None else known.report, report)
    draft.nodes.put(name, NodeAgentStatus(
        report=report, seen_s=draft.now_s, boots_before=before, looked_s=draft.now_s - max(0.0, report.age_s),
        pods_before=left, unhealthy=list_unhealthy_devices(report),
    ))  # fmt: skip
    if known is None or known.report.weights != report.weights:
        _looks(draft, report, () if known is None else known.report.weights)
    if known is None or known.report.images != report.images:
        put_images(draft, images.update_agent_images(draft.world.images, name, report.images))
    apply_reported_memory(draft, report)


def refresh_weights_reports(draft: Draft) -> None:
    """Models are others: what no Model asks for is forgotten; what agents said of what one asks for now is heard."""
    world = draft.world
    wishes = _asked(draft, None)
    artifacts = {one for model in world.models.values() for one in model.artifacts()}
    looked = {wish: one for wish, one in world.looked.items() if wish in wishes}
    unbrought = {artifact: why for artifact, why in world.unbrought.items() if artifact in artifacts}
    if (len(looked), len(unbrought)) != (len(world.looked), len(world.unbrought)):
        draft.change(looked=looked, unbrought=unbrought)
    new = wishes - looked.keys()
    for node in draft.nodes.now.values() if new else ():
        if any(one.look and read_weights_request(one) in new for one in node.report.weights):
            _looks(draft, node.report, ())


def _looks(draft: Draft, report: NodeReport, before: tuple[WeightsReport, ...]) -> None:
    """What artifacts are that Models name, and why that could not be seen, as long as the agent tries. What no Model
    asks for is not kept.
    """
    world, said = draft.world, {read_weights_request(one): one for one in report.weights if one.look}
    over = {one.artifact for one in before if one.look and one.failed} - {wish.artifact for wish in said}
    if not said and not over:
        return
    asked = _asked(draft, frozenset(wish.artifact for wish in said))
    found = {wish: _seen(one, world.looked.get(wish)) for wish, one in said.items() if one.digest and wish in asked}
    failed = {wish.artifact: one.failed for wish, one in said.items() if one.failed and wish in asked}
    known = over | {wish.artifact for wish in found}
    unbrought = {artifact: why for artifact, why in (world.unbrought | failed).items() if artifact not in known}
    looked = world.looked | found
    if (looked, unbrought) != (world.looked, world.unbrought):
        draft.change(looked=looked, unbrought=unbrought)


def _asked(draft: Draft, artifacts: frozenset[str] | None) -> set[WeightsRequest]:
    """What Models ask for, as agents look at it; of these artifacts, which are few, or of all."""
    models = draft.world.models.values()
    some = (one for one in models if artifacts is None or not artifacts.isdisjoint(one.artifacts()))
    return {wish._replace(look=True) for model in some for wish in collect_weights_requests(model).values()}


def _seen(said: WeightsReport, before: WeightsReport | None) -> WeightsReport:
    """A look for a start reads no header: of the same artifact it is what it was."""
    if before is None or said.header or said.no_header or before.digest != said.digest:
        return replace(said, replicas=())
    return replace(said, replicas=(), header=before.header, no_header=before.no_header, bytes=before.bytes)


def put_images(draft: Draft, now: dict[str, NodeImages]) -> None:
    """What nodes have of images now, where that is news."""
    if now is not draft.world.images:
        draft.change(images=now)


def _copies(draft: Draft, name: str, before: NodeReport | None, now: NodeReport | None) -> None:
    """What is complete on the node: only that is looked at, for there are many nodes."""
    gone, come = (frozenset(_copy(one, name) for one in of.copies) if of else frozenset() for of in (before, now))
    draft.change(copies=draft.world.copies - (gone - come) | come)


def _copy(artifact: str, name: str) -> Copy:
    return Copy(artifact=artifact, node=NodeId(name))


def _left(known: NodeAgentStatus, report: NodeReport) -> tuple[PodDevices, ...]:
    """What pods had that are not there any more."""
    if report.pods == known.report.pods:
        return known.pods_before
    now = {_pod(one) for one in report.pods}
    gone = {_pod(one): one for one in (*known.pods_before, *known.report.pods) if _pod(one) not in now}
    return tuple(gone.values())[-PODS_BEFORE_MAX:]


def _pod(one: PodDevices) -> tuple[str, str, str]:
    return one.pod_uid, one.namespace, one.name
