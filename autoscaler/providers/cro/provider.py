"""Provider for a fabric's GPUs through the composable resource operator (CRO), by ComposabilityRequests. I/O.

A detach is forced only if the order sets `force`, and only for the order's own devices. If other clients share a
request, only Pilotlight's part is changed, by a write that conflicts with a concurrent change. The operator polls every
30 s, so its results are watched. It does not report free devices: while a request fails because no device of a model is
free, that model is not offered; while one fails for another reason, nothing is offered on its node. No state is kept:
each call reads everything.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Never

from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import (
    GPU_COUNT,
    AttachableNode,
    count_devices_on_node,
    find_device_memory,
    has_device_limit,
    list_attachable_nodes,
    list_node_selectors,
    read_group_limits,
)
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.placement.model.prices import Prices
from autoscaler.providers.cro import objects
from autoscaler.providers.cro.objects import REQUESTS, RESOURCES, LeaseNote, Request, Resource
from autoscaler.providers.kubernetes_access import (
    AT_HAND,
    CONFLICT,
    NOT_FOUND,
    REFUSALS,
    AnswerError,
    ApiServer,
    Object,
    gather_or_cancel,
    raise_refusal,
)
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.release_checks import find_device_user
from autoscaler.state.capacity import OFFERS_MAX, AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.state.world import World
from autoscaler.text import format_rfc3339

_log = logging.getLogger("pilotlight.autoscaler.providers")


class NodeLock:
    """One lock per node, shared by all providers of a process.

    The maximum number of devices of a node applies to all providers together, and the API server does not enforce it.
    So each provider reads only after the previous one has written.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[asyncio.Lock, set[str]]] = {}

    @asynccontextmanager
    async def at(self, node: str, provider: str) -> AsyncIterator[bool]:
        """Lock a node. Yields whether no other provider has ever locked it; only then are cached lists up to date."""
        lock, had = self._nodes.setdefault(node, (asyncio.Lock(), set()))
        async with lock:
            had.add(provider)
            yield had == {provider}


NODES = "/api/v1/nodes"
EXPECTED_S = 90.0
"""Default seconds from an order until its devices are seen: attach time, and two operator polls, 30 s apart."""
NO_MOST = (
    "no node has a known maximum number of devices: set `devicesMax` in an entry of Settings `nodes` whose `selector` "
    f"matches a node, or set the annotation `{GPU_COUNT}` on the nodes or their MachineSet"
)
TRIES = 5
"""Maximum attempts to write after a conflict, or to order while an earlier request is being deleted."""
GOING_S = 0.5
"""Seconds between attempts during a deletion, which is not immediate even for a request without resources."""
REST_S = 1.0
"""Minimum seconds between reports of a change."""
FRESH_S = 60.0
"""Maximum age in seconds of LAST_USED on our devices; other clients consider a device idle after 600 s.

A removal mark sets LAST_USED, too, and no release takes longer than this: an older mark is a leftover.
"""
PARTIAL_S = 90.0
"""Seconds to wait for the rest of a partly delivered order whose other resources report errors."""


NEWEST: Mapping[str, str] = MappingProxyType({})
"""Query for current lists, unlike AT_HAND."""


class _GoingError(RefusedError):
    """The node's request is being deleted: retry later."""


class _Seen(NamedTuple):
    """One snapshot of all requests and resources."""

    requests: tuple[Request, ...]
    resources: tuple[Resource, ...]

    def noted(self, lease: str) -> Request | None:
        """The request that has an annotation of that order."""
        return next((one for one in self.requests if lease in one.notes), None)

    def on(self, model: str, node: str) -> Request | None:
        """The request of that model for that node."""
        return next((one for one in self.requests if (one.model, one.node) == (model, node)), None)


class CroFabric:
    """Provider of one GPU model; `model`: the operator's name for it. `turns`: shared by all providers."""

    def __init__(
        self, name: str, model: str, server: ApiServer, world: Callable[[], World], expected_s: float | None = None,
        *, turns: NodeLock | None = None,
    ) -> None:  # fmt: skip
        self._name, self._model, self._server, self._world = name, model, server, world
        self._expected_s = EXPECTED_S if expected_s is None else expected_s
        self._turns = turns or NodeLock()

    # --- Provider -----------------------------------------------------------------------------------------------------

    async def offers(self) -> tuple[Offer, ...]:
        """Return one offer per node that can have more devices; at most OFFERS_MAX, those with the most room."""
        if find_device_memory(self._model, self._world()) is None:
            raise RefusedError(f"the memory of {self._model} is unknown: add it to Settings `nodes`")
        seen = await self._seen()
        vain = objects.list_stuck_resources(seen.resources, self._model)
        if objects.find_starved_resource(vain) is not None:
            return ()
        shut = {one.node for one in vain}
        there = [site for node, site in sorted((await self._sites()).items()) if node not in shut]
        found = [one for site in there if (one := self._offer(site, self._room(site, seen))) is not None]
        return tuple(sorted(found, key=lambda one: -one.devices_max)[:OFFERS_MAX])

    async def acquire(self, order: AcquireOrder) -> None:
        """Attach devices. Try with cached lists first if no other provider has written for the node."""
        try:
            async with self._turns.at(order.offer.node, self._name) as alone:
                if not (alone and await self._at_once(order)):
                    await _again(lambda: self._acquire(order))
        except AnswerError as error:
            raise_refusal(error)

    async def release(self, order: ReleaseOrder) -> None:
        """Detach the order's devices, unless they are in use."""
        await _again(lambda: self._release(order))

    async def list(self) -> tuple[Listed, ...]:
        """List the orders and update labels and annotations; the next list retries failed updates."""
        seen = await self._seen()
        found: list[Listed] = []
        for request in seen.requests:
            shares = objects.assign_resources(request, seen.resources)
            mine = {name for name, note in request.notes.items() if self._is_ours(note)}
            lost = objects.list_undeliverable_leases(request, shares)
            listed = [self._listed(request, name, shares[name], lost=name in lost) for name in sorted(mine)]
            found += [one for one in listed if one is not None]
            if mine or not request.notes:
                try:
                    await self._tidy(request, {name: shares[name] for name in mine})
                except Exception as error:  # noqa: BLE001  without leadership writes fail; the next list retries
                    reraise_memory_error(error)
                    kind = type(error).__name__
                    _log.debug("event=composability_request_update_failed request=%s error=%s", request.name, kind)
        return tuple(found)

    async def attend(self, changed: Callable[[], None]) -> None:
        """Watch Pilotlight's objects; report changes at most once in REST_S, since each causes a full read."""
        news, follow = asyncio.Event(), self._server.follow
        ours = functools.partial(
            objects.watched_request_state, provider=self._name, installation=self._server.owner.installation
        )
        mine = functools.partial(objects.watched_resource_state, model=self._model)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(REQUESTS, ours, news.set))
            tasks.create_task(follow(RESOURCES, mine, news.set))
            while True:
                await news.wait()
                news.clear()
                changed()
                await asyncio.sleep(REST_S)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def _at_once(self, order: AcquireOrder) -> bool:
        """Try an order with cached lists, if its node has no request; return whether that succeeded.

        All other cases need current lists, which may take the API server 0.1 s.
        """
        try:
            await self._acquire(order, AT_HAND)
        except RefusedError:
            return False
        except AnswerError as error:
            if error.status not in {CONFLICT, *REFUSALS}:
                raise
            return False
        return True

    async def _acquire(self, order: AcquireOrder, how: Mapping[str, str] = NEWEST) -> None:
        node, name = order.offer.node, order.id.name
        read: list[Any] = await gather_or_cancel([self._seen(how), self._find(node)])
        seen: _Seen = read[0]
        found: Object | None = read[1]
        known = seen.noted(name)
        if how is AT_HAND and (known is not None or any(one.node == node for one in seen.requests)):
            raise RefusedError("the node has a request already")
        if known is not None:
            if not self._is_ours(known.notes[name]):
                raise RefusedError(f"{name} belongs to another owner")
            if known.notes[name].leaving:
                await self._forget(known, name, seen)
            return
        vain = objects.list_stuck_resources(seen.resources, self._model)
        waits = objects.find_starved_resource(vain)
        if waits is not None:
            raise RefusedError(f"the fabric has no free {self._model}: {waits.name} waits for one")
        waits = next((one for one in vain if one.node == node), None)
        if waits is not None:
            raise RefusedError(f"node {node}: {waits.name} waits for a device and reports an error")
        site = None if found is None else self._of([found]).get(node)
        if site is None or order.devices > self._room(site, seen):
            raise RefusedError(f"node {node} has no room for {order.devices} more")
        request = seen.on(self._model, node)
        if request is not None and request.going:
            raise _GoingError(f"its request {request.name} is being deleted")
        note = LeaseNote(
            provider=self._name, owner=order.owner, epoch=order.epoch, devices=order.devices,
            asked_unix_s=self._server.unix_s(), before=self._before(node, seen),
            installation=self._server.owner.installation,
        )  # fmt: skip
        if request is None:
            await self._server.create(
                REQUESTS, objects.build_composability_request(self._model, node, order.devices, {name: note})
            )
        else:
            change = objects.build_resize_patch(request.version, request.size + order.devices, {name: note})
            await self._server.patch(f"{REQUESTS}/{request.name}", change)

    async def _forget(self, request: Request, name: str, seen: _Seen) -> Never:
        """Remove the annotation of a released order without resources, so that its name can be ordered again.

        Raises RefusedError while it still has resources, else _GoingError, so that the caller retries.
        """
        if objects.assign_resources(request, seen.resources)[name]:
            raise RefusedError("an order of this name is still being released")
        if not request.going:
            await self._tidy(request, {name: ()})
        raise _GoingError(f"its request {request.name} is being deleted")

    async def _release(self, order: ReleaseOrder) -> None:
        seen, name = await self._seen(), order.id.name
        request = seen.noted(name)
        if request is None or not self._is_ours(request.notes[name]):
            return
        if request.notes[name].leaving and not order.force:
            return
        shares = objects.assign_resources(request, seen.resources)
        mine = shares.pop(name)
        if await self._stays(order, request.node, mine):
            await self._unmark(request, {**shares, name: mine})
            return
        for one in mine if order.force else ():
            await self._server.patch(f"{RESOURCES}/{one.name}", {"spec": {"force_detach": True}})
        if request.notes[name].leaving:
            return
        await self._unmark(request, shares)
        for one in mine:
            marked = {objects.VICTIM: "true", objects.LAST_USED: format_rfc3339(self._server.unix_s())}
            change = {"labels": {objects.LEASE: name}, "annotations": marked}
            await self._server.patch(f"{RESOURCES}/{one.name}", {"metadata": change})
        after = {name: replace(request.notes[name], leaving=True) if mine else None}
        change = objects.build_resize_patch(request.version, objects.size_without_lease(request, name), after)
        await self._server.patch(f"{REQUESTS}/{request.name}", change)

    async def _stays(self, order: ReleaseOrder, node: str, mine: Sequence[Resource]) -> bool:
        """Whether the release has no effect: the devices are in use or, if it sets `uncommitted`, already assigned."""
        uuids = {one.device_id for one in mine if one.device_id}
        if not uuids or order.uncommitted:
            return bool(uuids)
        return not order.force and bool(await find_device_user(self._server, node, uuids))

    async def _unmark(self, request: Request, shares: Mapping[str, Sequence[Resource]]) -> None:
        """Remove leftover removal marks from resources that stay.
        Orders are processed one at a time, so no order in progress needs the marks.
        """
        ours = {name for name in request.live if self._is_ours(request.notes[name])}
        for one in (one for name in sorted(ours & shares.keys()) for one in shares[name] if one.victim):
            change = {"resourceVersion": one.version, "annotations": {objects.VICTIM: None}}
            await self._server.patch(f"{RESOURCES}/{one.name}", {"metadata": change})

    def _is_ours(self, note: LeaseNote) -> bool:
        """Whether it is an order of this provider of this installation (`autoscaler.providers.unlabelled_orders`)."""
        own = objects.is_from_provider(note, self._name, self._server.owner.installation)
        return own and (bool(note.installation) or not self._server.is_foreign(note.owner))

    # --- state --------------------------------------------------------------------------------------------------------

    async def _seen(self, how: Mapping[str, str] = NEWEST) -> _Seen:
        """Read requests before resources, so that the resources are never older."""
        requests = await self._server.items(REQUESTS, **how)
        resources = await self._server.items(RESOURCES, **how)
        read = (objects.read_request(one) for one in requests)
        return _Seen(tuple(one for one in read if one is not None), tuple(map(objects.read_resource, resources)))

    async def _find(self, node: str) -> Object | None:
        return await self._server.find(f"{NODES}/{node}")

    async def _sites(self) -> Mapping[str, AttachableNode]:
        """Return nodes that can have more devices. Raises RefusedError if no node has a known maximum."""
        settings, found = self._world().settings, dict[str, Object]()
        for selector in list_node_selectors(settings):
            query = {"labelSelector": selector} if selector else {}
            found |= {one["metadata"]["name"]: one for one in await self._server.items(NODES, **query)}
        if not has_device_limit([*found.values()], settings, read_group_limits(self._world())):
            raise RefusedError(NO_MOST)
        return self._of([*found.values()])

    def _of(self, nodes: Sequence[Object]) -> Mapping[str, AttachableNode]:
        return list_attachable_nodes(nodes, self._world().settings, groups=read_group_limits(self._world()))

    def _before(self, node: str, seen: _Seen) -> int:
        """Number of devices of a node that Pilotlight did not attach."""
        noted = [note.before for one in seen.requests if one.node == node for note in one.notes.values()]
        if noted:
            return min(noted)
        online = sum(one.node == node and one.state == objects.ONLINE for one in seen.resources)
        asked = sum(one.ours for one in seen.requests if one.node == node)
        return max(0, count_devices_on_node(self._world(), node) - min(online, asked))

    def _room(self, site: AttachableNode, seen: _Seen) -> int:
        """How many more devices can be attached to the node. Also counts devices of other clients."""
        here = [one for one in seen.requests if one.node == site.node]
        there, ours = count_devices_on_node(self._world(), site.node), sum(one.ours for one in here)
        before = self._before(site.node, seen)
        coming = max(0, sum(one.size for one in here) - self._arrived(site.node, seen, there - before))
        return site.most - max(there + coming, before + ours)

    def _arrived(self, node: str, seen: _Seen, more: int) -> int:
        """Number of the fabric's devices that a node has and reports.

        The operator reports each at its next poll, up to 30 s later. Until then they are recognized by their UUIDs or,
        on a node that only counts devices, by the number of devices (`more`) beyond those that it had before.
        """
        given = [one for one in seen.resources if one.node == node and (one.device_id or one.state == objects.ONLINE)]
        shown = {one.device for one in self._world().nodes.slices.values()}
        online = sum(one.state == objects.ONLINE or one.device_id in shown for one in given)
        return max(online, min(len(given), more))

    def _offer(self, site: AttachableNode, room: int) -> Offer | None:
        world = self._world()
        memory_bytes = find_device_memory(self._model, world)
        if room <= 0 or memory_bytes is None:
            return None
        return Offer(
            provider=self._name, name=site.node, node=site.node, product=self._model, memory_bytes=memory_bytes,
            devices_max=room, parts=site.parts, labels=dict(site.labels), taints=site.taints,
            bought="fabric", expected_s=self._expected_s,
            price_per_hour=Prices(world.settings.prices).at(self._model, "fabric"),
        )  # fmt: skip

    def _listed(self, request: Request, name: str, mine: Sequence[Resource], *, lost: bool) -> Listed | None:
        note = request.notes[name]
        leaving = note.leaving or request.going
        if leaving and not mine:
            return None
        online = [one for one in mine if one.state == objects.ONLINE]
        wrong = [one for one in (*(one.error for one in mine), request.error) if one] or [""]
        there = [one for one in mine if one.device_id] if leaving else online
        ids = tuple(f"{request.node}/{one.device_id}" for one in there)
        offer = self._offer(AttachableNode(request.node, 0), note.devices)
        number = sum(request.notes[one].devices for one in request.live[: (*request.live, name).index(name)])
        return Listed(
            name=name, devices=note.devices, owner=note.owner, epoch=note.epoch,
            node=request.node if there else "",
            offer=offer or Offer(provider=self._name, name=request.node, node=request.node, product=self._model,
                                 memory_bytes=0),
            phase="leaving" if leaving else "failed" if lost else "here" if self._all_of(note, mine) else "coming",
            committed=any(one.device_id for one in mine),
            device_ids=ids,
            counted_from=note.before + number,
            alone=not any(one.device in ids for one in self._world().nodes.slices.values()),
            says="another client reduced the size of its request" if lost else wrong[0],
        )  # fmt: skip

    def _all_of(self, note: LeaseNote, mine: Sequence[Resource]) -> bool:
        """Whether delivery is complete. Resources that still report errors after PARTIAL_S are not waited for."""
        online = [one for one in mine if one.state == objects.ONLINE]
        rest = [one for one in mine if one.state != objects.ONLINE]
        late = self._server.unix_s() >= note.asked_unix_s + PARTIAL_S
        stuck = bool(rest) and late and all(one.error for one in rest)
        return bool(online) and (len(online) >= note.devices or stuck)

    # --- housekeeping -------------------------------------------------------------------------------------------------

    async def _tidy(self, request: Request, shares: Mapping[str, Sequence[Resource]]) -> None:
        """Label resources and orders, refresh LAST_USED, remove old marks, and delete finished orders and requests."""
        now_s = self._server.unix_s()
        for name, mine in shares.items():
            for one in mine if not request.notes[name].leaving else ():
                change: Object = {"labels": {objects.LEASE: name}} if one.lease != name else {}
                if (one.state == objects.ONLINE or one.victim) and one.last_used < format_rfc3339(now_s - FRESH_S):
                    change["annotations"] = {objects.LAST_USED: format_rfc3339(now_s)}
                    if one.victim:  # a leftover of an earlier release that did not change the size
                        change["annotations"][objects.VICTIM] = None
                        change["resourceVersion"] = one.version
                if change:
                    await self._server.patch(f"{RESOURCES}/{one.name}", {"metadata": change})
        over = {name: None for name, mine in shares.items() if request.notes[name].leaving and not mine}
        at = f"{REQUESTS}/{request.name}"
        if request.made and not request.size and not request.going and over.keys() == request.notes.keys():
            await self._server.delete(at, version=request.version)
            return
        me = self._server.owner.installation
        old = {
            name: replace(note, installation=me) for name in shares if not (note := request.notes[name]).installation
        }
        changes: dict[str, LeaseNote | None] = {**(old if me else {}), **over}
        if changes:
            await self._server.patch(at, objects.build_resize_patch(request.version, request.size, changes))


async def _again(write: Callable[[], Awaitable[None]]) -> None:
    """Retry a write that conflicts, or whose object was or is being deleted."""
    for _ in range(TRIES - 1):
        try:
            return await write()
        except _GoingError:
            await asyncio.sleep(GOING_S)
        except AnswerError as error:
            if error.status not in {CONFLICT, NOT_FOUND}:
                raise
    return await write()
