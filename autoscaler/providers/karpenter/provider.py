"""Provider for nodes that Karpenter adds: one NodePool, and one NodeClaim per order. I/O.

Makes no decisions and keeps no state. Creates NodeClaims with the annotation against disruption, and removes the
annotation when a replica runs on the node: replicas' pods have their own while they start and drain
(`disruption_guard`). Right before a release the node is checked; a node in use is not released. A replica's pod that
arrives after the check is safe, since Karpenter waits for pods that must not be disrupted. A pod without devices whose
controller can restart it elsewhere does not prevent a release.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from autoscaler.exception_handling import reraise_memory_error
from autoscaler.providers import order_annotations
from autoscaler.providers.future_nodes import EXPECTED_S, OfferTerms, build_offer, resolve_node_requirements
from autoscaler.providers.karpenter import nodeclaim, nodepool
from autoscaler.providers.karpenter.nodepool import GROUP, POOL_LABEL, VERSIONS, NodePool
from autoscaler.providers.kubernetes_access import (
    CONFLICT,
    AnswerError,
    ApiServer,
    Object,
    choose_served_version,
    raise_refusal,
)
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.release_checks import is_blocking_node_removal, is_live_engine_pod
from autoscaler.providers.unlabelled_orders import is_own_order, label_orders
from autoscaler.spec.pod import DO_NOT_DISRUPT
from autoscaler.state.capacity import OFFERS_MAX, AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.state.world import World

NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
LOOK_S = (1.0, 10.0)
"""Seconds between polls: while a node is being added or removed, and otherwise."""
TRIES = 5
"""Attempts of a deletion, since Karpenter also writes to the NodeClaim."""

_log = logging.getLogger("pilotlight.autoscaler.providers")


class KarpenterNodes:
    """Provider of one NodePool. `clock`: the `World`'s. `expected_s`: delivery time from the Settings."""

    def __init__(  # noqa: PLR0917  all dependencies, passed once
        self, name: str, pool: str, server: ApiServer, world: Callable[[], World],
        clock: Callable[[], float] = time.monotonic, expected_s: float | None = None,
    ) -> None:  # fmt: skip
        self._name, self._pool_name = name, pool
        self._server, self._world, self._clock = server, world, clock
        self._expected_s = EXPECTED_S if expected_s is None else expected_s

    async def offers(self) -> tuple[Offer, ...]:
        """Return one offer per node variant that the pool's limits still allow."""
        pool, settings = await self._pool(), self._world().settings
        variants = nodepool.list_variants(pool, settings.nodes)
        if pool.closed:
            raise RefusedError(f"NodePool {pool.name} {pool.closed}")
        if not variants:
            raise RefusedError(
                f"the devices of NodePool {pool.name} are unknown: add an entry for its nodes to Settings `nodes`"
            )
        claims = await self._claims(pool.version)
        found: list[Offer] = []
        for one in variants:
            many = nodepool.count_remaining_nodes(pool, one.shape, claims)
            if many:
                lasts_s = nodeclaim.parse_duration_s(pool.expire_after)
                terms = OfferTerms(many, self._expected_s, lasts_s, taints=pool.taints)
                found.append(build_offer(self._name, one.name, one.shape, one.labels, terms, settings))
        return tuple(found[:OFFERS_MAX])

    async def acquire(self, order: AcquireOrder) -> None:
        """Create the NodeClaim, with the labels and requests that the order's owner needs."""
        pool = await self._pool()
        there = await self._server.find(nodeclaim.nodeclaim_path(pool.version, order.id.name))
        if there is not None:
            self._mine(there)
            return
        world = self._world()
        need = resolve_node_requirements(world, order.owner)
        variants = nodepool.list_variants(pool, world.settings.nodes)
        variant = next((one for one in variants if one.name == order.offer.name), None)
        if variant is None:
            raise RefusedError(f"NodePool {pool.name} no longer offers {order.offer.name}")
        if not nodepool.count_remaining_nodes(pool, variant.shape, await self._claims(pool.version)):
            raise RefusedError(
                f"NodePool {pool.name} {pool.closed or 'has reached its limits, including NodeClaims in progress'}"
            )
        variant = nodepool.narrow_variant(pool, variant, need.where)
        if variant is None:
            raise RefusedError(f"NodePool {pool.name} adds no node with {', '.join(map('='.join, need.where.items()))}")
        try:
            await self._server.create(
                nodeclaim.nodeclaim_path(pool.version), nodeclaim.build_nodeclaim(order, pool, variant, need.requests)
            )
        except AnswerError as error:
            if error.status != CONFLICT:
                raise_refusal(error)
            there = await self._server.find(nodeclaim.nodeclaim_path(pool.version, order.id.name))
            if there is not None:
                self._mine(there)

    async def release(self, order: ReleaseOrder) -> None:
        """Delete the NodeClaim unless its node is in use. Retries conflicts."""
        version = await self._version()
        for left in range(TRIES - 1, -1, -1):
            try:
                await self._release(order, version)
            except AnswerError as error:
                if error.status != CONFLICT or not left:
                    raise
            else:
                return

    async def _release(self, order: ReleaseOrder, version: str) -> None:
        """Delete the NodeClaim in the version that was checked. Raises AnswerError (CONFLICT) if it has changed."""
        claim = await self._server.find(nodeclaim.nodeclaim_path(version, order.id.name))
        if claim is None or not self._is_ours(claim) or "deletionTimestamp" in claim["metadata"]:
            return
        listed = nodeclaim.read_lease(claim, self._name, self._server.unix_s(), self._clock())
        if order.uncommitted and listed.committed:
            return
        if listed.node and any(map(is_blocking_node_removal, await self._pods(listed.node))):
            return
        at = claim["metadata"]["resourceVersion"]
        await self._server.delete(nodeclaim.nodeclaim_path(version, order.id.name), version=at)

    async def list(self) -> tuple[Listed, ...]:
        """List and label the NodeClaims, and remove the disruption annotation of nodes that run a replica."""
        version = await self._version()
        pool = await self._server.find(f"/apis/{GROUP}/{version}/nodepools/{self._pool_name}")
        expire_after = "Never" if pool is None else nodepool.read_nodepool(pool).expire_after
        claims = await self._ours(version)
        found = self._read(claims, expire_after)
        for claim, listed in zip(claims, found, strict=True):
            if listed.phase == "here" and nodeclaim.has_do_not_disrupt(claim):
                await self._unguard(version, listed)
        await label_orders(self._server, nodeclaim.nodeclaim_path(version), claims)
        return found

    async def attend(self, changed: Callable[[], None]) -> None:
        """Poll for changes, at the intervals of LOOK_S."""
        known: object = None
        while True:
            pace_s = LOOK_S[1]
            try:
                found = self._read(await self._ours(await self._version()), "Never")
            except Exception as error:  # noqa: BLE001  the next poll may succeed
                reraise_memory_error(error)
                _log.debug("event=nodeclaim_poll_failed pool=%s error=%s", self._pool_name, type(error).__name__)
            else:
                now = [(one.name, one.phase, one.committed, one.node, one.says) for one in found]
                if known not in (None, now):
                    changed()
                known = now
                pace_s = LOOK_S[0] if any(one.phase != "here" for one in found) else LOOK_S[1]
            await asyncio.sleep(pace_s)

    def _read(self, claims: Sequence[Object], expire_after: str) -> tuple[Listed, ...]:
        now_s, unix_s = self._clock(), self._server.unix_s()
        return tuple(nodeclaim.read_lease(one, self._name, unix_s, now_s, expire_after) for one in claims)

    async def _ours(self, version: str) -> tuple[Object, ...]:
        selector = f"{order_annotations.PROVIDER}={self._name}"
        found = await self._server.items(nodeclaim.nodeclaim_path(version), labelSelector=selector)
        return tuple(one for one in found if self._is_ours(one))

    def _is_ours(self, claim: Object) -> bool:
        return order_annotations.is_from_provider(claim, self._name) and is_own_order(self._server, claim)

    async def _unguard(self, version: str, listed: Listed) -> None:
        """Remove the disruption annotation once a replica runs on the node; its pod has its own when needed.
        So a node is not kept forever if Pilotlight is removed. Without leadership the write fails, which is harmless.
        """
        pods = await self._pods(listed.node)
        if not any(is_live_engine_pod(one) and self._server.owner.owns(one) for one in pods):
            return
        off = {"metadata": {"annotations": {DO_NOT_DISRUPT: None}}}
        try:
            await self._server.patch(f"{NODES}/{listed.node}", off)
            await self._server.patch(nodeclaim.nodeclaim_path(version, listed.name), off)
        except Exception as error:  # noqa: BLE001  the next list retries; this one must not fail
            reraise_memory_error(error)
            _log.debug("event=disruption_guard_removal_failed node=%s error=%s", listed.node, type(error).__name__)

    async def _pods(self, node: str) -> Sequence[Object]:
        return await self._server.items(PODS, fieldSelector=f"spec.nodeName={node}")

    async def _claims(self, version: str) -> Sequence[Object]:
        """All NodeClaims of the pool, including those that Pilotlight did not create."""
        return await self._server.items(
            nodeclaim.nodeclaim_path(version), labelSelector=f"{POOL_LABEL}={self._pool_name}"
        )

    async def _pool(self) -> NodePool:
        version = await self._version()
        found = await self._server.find(f"/apis/{GROUP}/{version}/nodepools/{self._pool_name}")
        if found is None:
            raise RefusedError(f"NodePool {self._pool_name} does not exist: fix Settings `capacity`")
        return nodepool.read_nodepool(found)

    async def _version(self) -> str:
        """The served version of Karpenter's API."""
        version = choose_served_version(await self._server.find(f"/apis/{GROUP}"), VERSIONS)
        if not version:
            raise RefusedError("Karpenter is not installed: its API karpenter.sh is not served")
        return version

    def _mine(self, claim: Object) -> None:
        """Raise RefusedError if the claim belongs to another client, TimeoutError while it is being deleted."""
        if not self._is_ours(claim):
            raise RefusedError(f"NodeClaim {claim['metadata']['name']} belongs to another owner")
        if "deletionTimestamp" in claim["metadata"]:
            raise TimeoutError
