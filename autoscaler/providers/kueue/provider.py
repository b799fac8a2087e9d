"""Provider that queues with Kueue: a placeholder pod in a LocalQueue is replaced by a replica's pod. I/O.

Each order is one placeholder pod. Kueue admits it within the quota, possibly by preemption, or after an admission check
has added nodes. The node of the placeholder has room for a replica, whose pod is in the same queue and replaces the
placeholder. The release of an unused order also releases its quota, so a model with zero replicas holds none.
`objects` defines the contents of the pod and interprets its Workload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from autoscaler.providers.future_nodes import NO_NODE_ENTRY, OfferTerms, build_node_kind_offers
from autoscaler.providers.kubernetes_access import (
    CONFLICT,
    AnswerError,
    ApiServer,
    Object,
    choose_served_version,
    raise_refusal,
)
from autoscaler.providers.kueue import objects as places
from autoscaler.providers.kueue.objects import QueuePlace
from autoscaler.providers.order_annotations import LEASE, provider_label_value
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.provisioning_request.provider import WAIT_MAX, Template
from autoscaler.providers.unlabelled_orders import is_own_order, label_orders
from autoscaler.spec.capacity import ProviderSettings
from autoscaler.state.capacity import AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.state.world import World

LATE: Final = 3
"""Maximum attempts to delete a pod that other clients also write."""


class KueuePlaces:
    """Provider of one LocalQueue. `namespace`: that of engines' pods and of the LocalQueue."""

    def __init__(
        self, named: ProviderSettings, server: ApiServer, namespace: str, world: Callable[[], World], pod: Template
    ) -> None:
        if named.kueue is None:
            raise ValueError(f"{named.name} is not a kueue provider")
        self._named, self._queue = named, named.kueue.local_queue
        self._server, self._world, self._pod = server, world, pod
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._namespace = namespace

    async def offers(self) -> tuple[Offer, ...]:
        """Return one offer per node kind while fewer than WAIT_MAX places wait."""
        closed = await self._closed()
        if closed:
            raise RefusedError(closed)
        left = WAIT_MAX - sum(one.kept and not one.node for one in await self._places())
        terms = OfferTerms(left, self._named.expected_seconds, whole=False, queued=True)
        some = tuple(map(_of_one, build_node_kind_offers(self._named.name, {}, terms, self._world().settings)))
        if not some:
            raise RefusedError(f"{NO_NODE_ENTRY} its nodes' `selector` and `device`")
        return some if left > 0 else ()

    async def acquire(self, order: AcquireOrder) -> None:
        """Create the order's placeholder pod."""
        template = self._pod(order.owner)
        if template is None:
            raise RefusedError(f"Model {order.owner} does not exist any more")
        if order.id.name in {one.name for one in await self._places()}:
            return
        closed = await self._closed()
        if closed:
            raise RefusedError(closed)
        try:
            await self._server.create(self._pods, places.build_placeholder_pod(order, self._queue, template))
        except AnswerError as error:
            if error.status != CONFLICT:
                raise_refusal(error)
            found = await self._server.find(f"{self._pods}/{order.id.name}")
            there = None if found is None else self._read(found)
            if there is None or there.leaving:
                raise TimeoutError from error  # being deleted: retry later
            if there.provider != self._named.name:
                raise RefusedError(f"{order.id.name} belongs to another owner") from error

    async def release(self, order: ReleaseOrder) -> None:
        """Delete the placeholder pod, unless a replica's pod has replaced it."""
        for left in range(LATE - 1, -1, -1):
            found = await self._server.find(f"{self._pods}/{order.id.name}")
            there = None if found is None else self._read(found)
            taken = any(one.name == order.id.name and not one.kept for one in await self._places())
            mine = there is None or there.wrong or there.provider == self._named.name
            if found is None or taken or not mine or (order.uncommitted and there is not None and there.node):
                return
            try:
                version = found["metadata"]["resourceVersion"]
                await self._server.delete(f"{self._pods}/{order.id.name}", version=version)
            except AnswerError as error:
                if error.status != CONFLICT or not left:
                    raise
            else:
                return

    async def list(self) -> tuple[Listed, ...]:
        """List the orders: places held by placeholder pods and by replicas' pods. Label the placeholder pods."""
        pods = await self._found()
        there = [one for _, one in pods]
        await label_orders(self._server, self._pods, [pod for pod, one in pods if one.kept])
        taken = {one.name for one in there if not one.kept}
        found: dict[str, Listed] = {}
        for one in there:
            if one.kept and one.name not in taken:
                workload = await self._find("workloads", one.name)
                found[one.name] = places.place_to_lease(one, workload, self._queue)
            elif not one.kept:
                found.setdefault(one.name, places.place_to_lease(one, None, self._queue))
        return tuple(found.values())

    async def _places(self) -> Sequence[QueuePlace]:
        return [one for _, one in await self._found()]

    async def _found(self) -> Sequence[tuple[Object, QueuePlace]]:
        """The pods of this provider's orders, and what they say."""
        label = f"{LEASE}={provider_label_value(self._named.name)}"
        there = [(pod, self._read(pod)) for pod in await self._server.items(self._pods, labelSelector=label)]
        return [(pod, one) for pod, one in there if one and (one.provider == self._named.name or one.wrong)]

    def _read(self, found: Object) -> QueuePlace | None:
        """Read a pod. If another installation owns it, `provider` is empty in the result."""
        one = places.read_place(found)
        return one if one is None or is_own_order(self._server, found) else one._replace(provider="", wrong="")

    async def _closed(self) -> str:
        """Why the queue accepts no order; empty: it accepts orders."""
        if not await self._version():
            return "Kueue is not installed: its API kueue.x-k8s.io is not served"
        return places.queue_closed_reason(await self._find("localqueues", self._queue))

    async def _find(self, plural: str, name: str) -> Object | None:
        path = f"/apis/{places.API}/{await self._version()}/namespaces/{self._namespace}"
        return await self._server.find(f"{path}/{plural}/{name}")

    async def _version(self) -> str:
        """The served version of Kueue's API."""
        return choose_served_version(await self._server.find(f"/apis/{places.API}"), places.VERSIONS)


def _of_one(offer: Offer) -> Offer:
    """Convert an offer of a device with several slices to one slice, since a place is for one replica."""
    if offer.parts == 1:
        return replace(offer, shared=False)
    return replace(
        offer, memory_bytes=offer.memory_bytes // offer.parts, device_bytes=offer.memory_bytes, parts=1, shared=False,
        price_per_hour=offer.price_per_hour / offer.parts,
    )  # fmt: skip
