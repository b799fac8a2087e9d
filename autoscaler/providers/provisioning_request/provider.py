"""Provider that requests nodes by ProvisioningRequests (autoscaling.x-k8s.io/v1). I/O.

Each order is one PodTemplate and one ProvisioningRequest of its name, created in that sequence and deleted in reverse,
so that `list` finds incomplete orders. A node is recorded on its request as soon as it is known. `objects` defines
their contents. Nothing is deleted while its node has a pod with devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from autoscaler.contract import ModelName
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.providers import order_annotations
from autoscaler.providers.future_nodes import NO_NODE_ENTRY, OfferTerms, build_node_kind_offers
from autoscaler.providers.kubernetes_access import CONFLICT, REFUSALS, AnswerError, ApiServer, Object, raise_refusal
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.provisioning_request import objects
from autoscaler.providers.provisioning_request.objects import Booking, CandidateNode
from autoscaler.providers.release_checks import find_device_user
from autoscaler.providers.unlabelled_orders import is_own_order, label_orders
from autoscaler.spec.capacity import ProviderSettings, Provisioning
from autoscaler.spec.pod import CONSUMES, MANAGED_BY
from autoscaler.spec.quantity import read_milli
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import AcquireOrder, Bought, Listed, Offer, ReleaseOrder
from autoscaler.state.world import World

WAIT_MAX: Final = 8
"""Maximum number of waiting requests of one provider; a ResourceQuota may allow fewer."""
HALF_S: Final = 60.0
"""After this many seconds a PodTemplate without a request belongs to a failed order."""
EXPECTED_S: Final[Mapping[str, float]] = {objects.CHECK: 30.0, objects.ATOMIC: 300.0}
"""Default delivery time in seconds, until one is learned; other classes have none."""
BOUGHT: Final[Mapping[str, Bought]] = {objects.CHECK: "owned", objects.GKE: "flex"}
COUNTED: Final = "count/provisioningrequests.autoscaling.x-k8s.io"
"""The key by which a ResourceQuota limits the number of requests."""
OFFSET_S: Final = 5.0
"""Smaller changes of the clock offset (seconds) are ignored, so that the end times of orders do not jitter."""
Template = Callable[[ModelName], Object | None]
"""Returns the pod template of a model's replicas without devices; None if the model does not exist."""

_log = logging.getLogger("pilotlight.autoscaler.providers")


class ProvisioningProvider:
    """Provider of one ProvisioningRequest class. `namespace`: that of engines' pods. `clock`: the `World`'s."""

    def __init__(  # noqa: PLR0917  constructed once
        self, named: ProviderSettings, server: ApiServer, namespace: str, world: Callable[[], World],
        pod: Template, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        if named.provisioning_request is None:
            raise ValueError(f"{named.name} is not a provisioningRequest provider")
        self._named, self._of = named, named.provisioning_request
        self._server, self._world, self._pod, self._clock = server, world, pod, clock
        self._namespace = namespace
        self._requests = f"/apis/{objects.API}/namespaces/{namespace}/provisioningrequests"
        self._templates = f"/api/v1/namespaces/{namespace}/podtemplates"
        self._offset_s: float | None = None

    async def offers(self) -> tuple[Offer, ...]:
        """Return one offer per matching node kind, unless its cloud quota is used up."""
        every = [self._read(one) for one in await self._all()]
        wait = sum(one.provider == self._named.name and not one.node for one in every)
        left = min(await self._left(), WAIT_MAX - wait)
        some = _offers(self._world().settings, self._named, self._of, left)
        if not some:
            raise RefusedError(f"{NO_NODE_ENTRY} `device` and a `selector` that matches `provisioningRequest.selector`")
        dry = {one.offer.name for one in every if objects.is_quota_exhausted(one)}
        return tuple(one for one in some if one.name not in dry) if left > 0 else ()

    async def acquire(self, order: AcquireOrder) -> None:
        """Create the order's PodTemplate and ProvisioningRequest."""
        pod = self._pod(order.owner)
        if pod is None:
            raise RefusedError(f"Model {order.owner} does not exist any more")
        asked = await self._is_ours(f"{self._requests}/{order.id.name}", order)
        if asked and await self._is_ours(f"{self._templates}/{order.id.name}", order):
            return
        made = objects.build_pod_template(order, pod)
        try:
            await self._create_template(made, order)
            if not asked:
                await self._create_request(
                    objects.build_provisioning_request(order, self._of.class_name, self._of.max_run_seconds), order
                )
        except AnswerError as error:
            if error.status in REFUSALS and not asked:
                with suppress(AnswerError):  # if this fails, `list` reports it, and it is released
                    await self._server.delete(f"{self._templates}/{order.id.name}")
            raise_refusal(error)

    async def release(self, order: ReleaseOrder) -> None:
        """Delete the request, then its template, unless the node is in use."""
        at = f"{self._requests}/{order.id.name}"
        found = await self._server.find(at)
        if found is not None and self._read(found).provider == self._named.name:
            shown = next((one for one in await self.list() if one.name == order.id.name), None)
            if shown is not None and await self._stays(shown, order):
                return
            await self._server.delete(at)
        elif found is not None:
            return
        left = await self._server.find(f"{self._templates}/{order.id.name}")
        if left is not None and self._read(left).provider == self._named.name:
            await self._server.delete(f"{self._templates}/{order.id.name}")

    async def list(self) -> tuple[Listed, ...]:
        """List and label requests and leftover templates, and record the nodes of requests."""
        requests = await self._all()
        every = [self._read(one) for one in requests]
        mine = [one for one in every if one.provider == self._named.name]
        halves = await self._halves({one.name for one in every})
        nodes = await self._nodes(every)
        bound = await self._bound(mine)
        found = objects.assign_nodes(every, nodes, bound)
        await self._note(mine, found)
        await self._label(self._requests, requests)
        shown = [
            objects.booking_to_lease(
                one, nodes.get(found.get(one.name, "")), found.get(one.name, ""), self._ends_s(one)
            )
            for one in mine
        ]
        return (*shown, *halves)

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _all(self) -> Sequence[Object]:
        """Requests of all providers, since a node belongs to only one request."""
        return await self._server.items(self._requests, labelSelector=order_annotations.LEASE)

    async def _label(self, path: str, found: Sequence[Object]) -> None:
        own = [one for one in found if self._read(one).provider == self._named.name]
        await label_orders(self._server, path, own)

    def _read(self, found: Object) -> Booking:
        """Read a request. If another installation owns it, `provider` is empty in the result."""
        one = objects.read_booking(found)
        return one if is_own_order(self._server, found) else one._replace(provider="")

    async def _left(self) -> int:
        """How many more requests may be created."""
        quotas = await self._server.items(f"/api/v1/namespaces/{self._namespace}/resourcequotas")
        left = [WAIT_MAX]
        for one in quotas:
            hard = one["spec"].get("hard", {}).get(COUNTED)
            if hard is not None:
                used = one.get("status", {}).get("used", {}).get(COUNTED, "0")
                left.append((read_milli(hard) - read_milli(used)) // 1000)  # a quantity: 1000 is written as `1k`
        return min(left)

    async def _is_ours(self, path: str, order: AcquireOrder) -> bool:
        """Whether our object exists. Raises RefusedError if another client owns it, TimeoutError if it terminates."""
        found = await self._server.find(path)
        if found is None:
            return False
        there = self._read(found)
        if there.provider != self._named.name:
            raise RefusedError(f"{order.id.name} belongs to another owner")
        if there.leaving:
            raise TimeoutError  # retried later
        return True

    async def _create_template(self, made: Object, order: AcquireOrder) -> None:
        """Create the template; replace one of an earlier order, which may be for another model."""
        try:
            await self._server.create(self._templates, made)
        except AnswerError as error:
            at = f"{self._templates}/{order.id.name}"
            if error.status != CONFLICT or not await self._is_ours(at, order):
                raise
            await self._server.delete(at)
            await self._server.create(self._templates, made)

    async def _create_request(self, body: Object, order: AcquireOrder) -> None:
        try:
            await self._server.create(self._requests, body)
        except AnswerError as error:
            if error.status != CONFLICT or not await self._is_ours(f"{self._requests}/{order.id.name}", order):
                raise

    async def _stays(self, shown: Listed, order: ReleaseOrder) -> bool:
        """Whether the release has no effect: the node is in use or, if `uncommitted` is set, already granted."""
        if order.uncommitted and shown.committed:
            return True
        return bool(shown.node) and bool(await find_device_user(self._server, shown.node, ()))

    async def _halves(self, requested: set[str]) -> Sequence[Listed]:
        """Failed orders: PodTemplates that still have no request after HALF_S."""
        there = await self._server.items(self._templates, labelSelector=order_annotations.LEASE)
        await self._label(self._templates, there)
        alone = [one for one in map(self._read, there) if one.provider == self._named.name]
        old_s = self._server.unix_s() - HALF_S
        return [
            objects.template_to_lease(one) for one in alone if one.name not in requested and one.created_unix_s < old_s
        ]

    async def _nodes(self, every: Sequence[Booking]) -> Mapping[str, CandidateNode]:
        """Nodes that may belong to one of the requests."""
        wanted = {objects.node_label_selector(one) for one in every if one.node or one.holds("Provisioned")}
        found: dict[str, CandidateNode] = {}
        for selector in sorted(wanted):
            query = {"labelSelector": selector} if selector else {}
            found |= {
                one.name: one for one in map(objects.read_node, await self._server.items("/api/v1/nodes", **query))
            }
        return found

    async def _bound(self, mine: Sequence[Booking]) -> Mapping[str, str]:
        """Nodes of the pods that consume a request whose own node is unknown."""
        if all(one.node or not one.holds("Provisioned") for one in mine):
            return {}
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        there = await self._server.items(path, labelSelector=f"{MANAGED_BY}={order_annotations.WRITER}")
        ours = [one for one in there if self._server.owner.owns(one)]
        said = ((one["metadata"].get("annotations") or {}, one["spec"].get("nodeName", "")) for one in ours)
        return {notes[CONSUMES[0]]: node for notes, node in said if node and CONSUMES[0] in notes}

    async def _note(self, mine: Sequence[Booking], found: Mapping[str, str]) -> None:
        """Record each request's node on the request; the next list retries failed writes."""
        for one in mine:
            node = found.get(one.name)
            if node is not None and node != one.node:
                note = {"metadata": {"resourceVersion": one.version, "annotations": {order_annotations.NODE: node}}}
                try:
                    await self._server.patch(f"{self._requests}/{one.name}", note)
                except Exception as error:  # noqa: BLE001  the next list retries
                    reraise_memory_error(error)
                    _log.debug("event=node_annotation_failed request=%s error=%s", one.name, type(error).__name__)

    def _ends_s(self, one: Booking) -> float | None:
        ends_unix_s = objects.ends_unix_s(one)
        offset_s = self._clock() - self._server.unix_s()
        if self._offset_s is None or abs(offset_s - self._offset_s) > OFFSET_S:
            self._offset_s = offset_s
        return None if ends_unix_s is None else ends_unix_s + self._offset_s


def _offers(settings: Settings, named: ProviderSettings, of: Provisioning, many: int) -> Sequence[Offer]:
    whole = of.class_name != objects.CHECK
    terms = OfferTerms(
        many, named.expected_seconds or EXPECTED_S.get(of.class_name),
        of.max_run_seconds if whole else None,  # a booking ends when it is used, not at a time
        whole=whole, queued=of.class_name not in EXPECTED_S, bought=BOUGHT.get(of.class_name),
    )  # fmt: skip
    return [*build_node_kind_offers(named.name, of.selector, terms, settings)]
