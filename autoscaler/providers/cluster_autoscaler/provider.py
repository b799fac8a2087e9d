"""Provider for nodes that Cluster Autoscaler adds for pending pods: one node group, and two pods per order. I/O.

The pods are in the engines' namespace. Cluster Autoscaler does not report the capacity that it could add, so a group's
devices are derived from its labels and the Settings' `nodes`, and its maximum number of nodes from the Settings. If it
can add none, it writes the event `NotTriggerScaleUp`; the order then fails, with a back-off. A release deletes the
pods; Cluster Autoscaler removes the node when nothing else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from autoscaler.providers.cluster_autoscaler import placeholder_pods
from autoscaler.providers.cluster_autoscaler.placeholder_pods import KEEPS
from autoscaler.providers.future_nodes import (
    EXPECTED_S,
    OfferTerms,
    Shape,
    build_offer,
    infer_node_shape,
    resolve_node_requirements,
)
from autoscaler.providers.karpenter.provider import NODES, PODS
from autoscaler.providers.kubernetes_access import CONFLICT, AnswerError, ApiServer, Object, raise_refusal
from autoscaler.providers.order_annotations import PROVIDER
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.release_checks import is_blocking_node_removal, is_live_engine_pod
from autoscaler.providers.unlabelled_orders import is_own_order, label_orders
from autoscaler.spec.capacity import ClusterAutoscaler
from autoscaler.spec.pod import PLACE
from autoscaler.spec.settings import kind_of
from autoscaler.state.capacity import AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.state.world import World
from autoscaler.text import unix_seconds


class NodeGroup:
    """Provider of one node group. `namespace`: that of engines' pods. `expected_s`: delivery time from the Settings."""

    def __init__(  # noqa: PLR0917  all dependencies, passed once
        self, name: str, group: ClusterAutoscaler, server: ApiServer, namespace: str, world: Callable[[], World],
        expected_s: float | None = None,
    ) -> None:  # fmt: skip
        self._name, self._group, self._server, self._world = name, group, server, world
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._events = f"/api/v1/namespaces/{namespace}/events"
        self._expected_s = EXPECTED_S if expected_s is None else expected_s

    async def offers(self) -> tuple[Offer, ...]:
        """Return one offer for the nodes that the group may still add."""
        settings, of = self._world().settings, self._shape()
        if of is None:
            raise RefusedError("the devices of its nodes are unknown: add its nodeLabels to Settings `nodes`")
        there = await self._ours(f",{KEEPS}")
        many, labels = self._group.nodes_max - len(there), self._group.node_labels
        if many <= 0:
            return ()
        return (build_offer(self._name, "node", of, labels, OfferTerms(many, self._expected_s), settings),)

    def _shape(self) -> Shape | None:
        labels = self._group.node_labels
        of = infer_node_shape(labels, kind_of(labels, self._world().settings.nodes))
        return of if of is not None and of.counted else None

    async def acquire(self, order: AcquireOrder) -> None:
        """Create the order's two pods, unless they exist."""
        there = await self._ours(f",{KEEPS}")
        names = {one["metadata"]["labels"][KEEPS] for one in there}
        if order.id.name not in names and len(there) >= self._group.nodes_max:
            raise RefusedError(f"{self._name} has {len(there)} nodes, which is its nodesMax")
        world = self._world()
        tolerated = world.settings.pod.tolerations
        for pod in placeholder_pods.build_pods(
            order, self._group, tolerated, resolve_node_requirements(world, order.owner)
        ):
            await self._make(pod)

    async def _ours(self, more: str = "") -> Sequence[Object]:
        found = await self._server.items(self._pods, labelSelector=f"{PROVIDER}={self._name}{more}")
        return [one for one in found if is_own_order(self._server, one)]

    def _is_ours(self, pod: Object) -> bool:
        labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
        return labels.get(PROVIDER) == self._name and is_own_order(self._server, pod)

    async def _make(self, pod: Object) -> None:
        """Create a pod. An existing one must be this provider's; one that is being deleted raises TimeoutError."""
        path = f"{self._pods}/{pod['metadata']['name']}"
        try:
            await self._server.create(self._pods, pod)
        except AnswerError as error:
            if error.status != CONFLICT:
                raise_refusal(error)
            there = await self._server.find(path)
            if there is None or "deletionTimestamp" in there["metadata"]:
                raise TimeoutError from None
            if not self._is_ours(there):
                raise RefusedError(f"pod {pod['metadata']['name']} belongs to another owner") from None

    async def release(self, order: ReleaseOrder) -> None:
        """Delete the order's pods unless its node is in use."""
        listed = next((one for one in await self.list() if one.name == order.id.name), None)
        if listed is not None and order.uncommitted and listed.committed:
            return
        if listed is not None and listed.node and await self._used(listed.node):
            return
        for name in (order.id.name, placeholder_pods.keeper_name(order.id.name)):
            found = await self._server.find(f"{self._pods}/{name}")
            if found is not None and self._is_ours(found):
                await self._server.delete(f"{self._pods}/{name}")

    async def _used(self, node: str) -> bool:
        """Whether others use the node. If a pod arrives later, Cluster Autoscaler does not remove the node."""
        pods = await self._server.items(PODS, fieldSelector=f"spec.nodeName={node}")
        return any(
            is_blocking_node_removal(one)
            for one in pods
            if not {PLACE, KEEPS} & (one["metadata"].get("labels") or {}).keys()
        )

    async def list(self) -> tuple[Listed, ...]:
        """List the orders by their pods, and label these."""
        found = await self._ours()
        await label_orders(self._server, self._pods, found)
        labelled = [(one["metadata"]["labels"], one) for one in found]
        places = {labels[PLACE]: one for labels, one in labelled if PLACE in labels}
        listed: list[Listed] = []
        for keeper in (one for labels, one in labelled if KEEPS in labels):
            name = keeper["metadata"]["labels"][KEEPS]
            place = places.get(name)
            events = () if place is None or keeper["spec"].get("nodeName") else await self._scale_up_events(place)
            one = placeholder_pods.read_lease(keeper, place, events, self._server.unix_s())
            if one is not None and one.committed and not one.node and await self._overtaken(keeper):
                one = replace(one, committed=False)
            listed += [one] if one is not None else []
        return tuple(listed)

    async def _overtaken(self, keeper: Object) -> bool:
        """Whether a replica was scheduled to the new node before the placeholder, a race of some seconds.
        The pending placeholder would cause another node, so its order must remain cancellable.
        """
        asked = keeper["metadata"]["creationTimestamp"]
        labels = ",".join(f"{key}={value}" for key, value in self._group.node_labels.items())
        for node in await self._server.items(NODES, labelSelector=labels):
            if unix_seconds(node["metadata"]["creationTimestamp"]) < unix_seconds(asked):
                continue
            there = await self._server.items(PODS, fieldSelector=f"spec.nodeName={node['metadata']['name']}")
            kept = any({PLACE, KEEPS} & (one["metadata"].get("labels") or {}).keys() for one in there)
            if not kept and any(is_live_engine_pod(one) and self._server.owner.owns(one) for one in there):
                return True
        return False

    async def _scale_up_events(self, pod: Object) -> Sequence[Object]:
        """Events of this pod by its UID: names are reused, and events outlive their pod by an hour."""
        about = f"involvedObject.uid={pod['metadata']['uid']}"
        events = await self._server.items(self._events, fieldSelector=about)
        return [one for one in events if placeholder_pods.is_scale_up_event(one)]
