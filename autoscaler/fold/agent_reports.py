"""Folds reports of node agents and of kubelets' images into the `World`.

Owns each agent's last report (`NodeAgentStatus`) and what follows from it: inspected weights, images, complete copies,
and the devices of pods that have left. A report that is older than the known one changes nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.agent_contract import (
    NodeReport,
    PodDevices,
    WeightsReport,
    WeightsRequest,
    collect_weights_requests,
    read_weights_request,
)
from autoscaler.fold.draft import Draft
from autoscaler.fold.memory import apply_reported_memory
from autoscaler.queries.device_health import list_unhealthy_devices
from autoscaler.state import images
from autoscaler.state.events import ImagesSeen, NodeReported
from autoscaler.state.images import NodeImages
from autoscaler.state.world import Copy, NodeAgentStatus, NodeId

NODES_MAX = 10_000
"""Maximum number of nodes whose reports are kept; reports of other nodes are ignored."""
FORGET_S = 600.0
"""A node that is silent for this long is forgotten: its report expired long ago, and nodes are replaced."""
BOOTS_MAX = 8
PODS_BEFORE_MAX = 256
"""Maximum removed pods remembered per node: more than a node runs at once; their memory is free within seconds."""


def apply_agent_report(draft: Draft, seen: NodeReported) -> None:
    """Fold one report of a node's agent."""
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
        _put_images(draft, images.update_agent_images(draft.world.nodes.images, name, report.images))
    apply_reported_memory(draft, report)


def forget_silent_nodes(draft: Draft) -> None:
    """Forget nodes that have been silent for FORGET_S."""
    for name in [name for name, node in draft.agents.now.items() if draft.now_s >= node.seen_s + FORGET_S]:
        if draft.agents.now[name].report.copies:
            _copies(draft, name, draft.agents.now[name].report, None)
        draft.agents.drop(name)
        _put_images(draft, images.update_agent_images(draft.world.nodes.images, name, ()))


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


def apply_kubelet_images(draft: Draft, seen: ImagesSeen) -> None:
    """Fold the images that kubelets report."""
    _put_images(draft, images.update_kubelet_images(draft.world.nodes.images, seen.images))


def _put_images(draft: Draft, now: dict[str, NodeImages]) -> None:
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
