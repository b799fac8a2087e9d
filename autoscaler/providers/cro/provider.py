"""GPUs of a fabric by the composable resource operator (CRO): creates or enlarges ComposabilityRequests.

It fulfils `autoscaler.providers.provider.Provider`. A detach is forced only by an order that demands it, and only of
the order's own devices. If others use a request, too, only our part is changed, by a write that fails if they changed
it first. The operator checks every 30 s what it waits for, so its answers are received by watches. It cannot say what a
fabric has free: while a request is told that there is none of a model, none is offered; while one waits without success
for another reason, none is offered on that node. Nothing is kept here: each call reads everything.

`NodeLock`: where several providers of one process attach devices to a node, they order one at a time. The number of
devices that a node can have limits all of them together, and the API server does not refuse a write of one because of
what another wrote; so each looks only after the one before has written.
"""

from __future__ import annotations

import asyncio
import functools
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
)
from autoscaler.capacity.machine_groups import read_group_limits
from autoscaler.placement.model.prices import Prices
from autoscaler.providers.cro import objects
from autoscaler.providers.cro.objects import REQUESTS, RESOURCES, LeaseNote, Request, Resource
from autoscaler.providers.device_usage import find_device_user
from autoscaler.providers.kube import (
    AT_HAND,
    CONFLICT,
    NOT_FOUND,
    REFUSALS,
    AnswerError,
    Object,
    Server,
    gather_or_cancel,
    raise_refusal,
)
from autoscaler.providers.provider import RefusedError
from autoscaler.state.capacity_orders import OFFERS_MAX, AcquireOrder, Listed, Offer, ReleaseOrder
from autoscaler.state.world import World
from autoscaler.text import format_rfc3339


class NodeLock:
    """Of all nodes, for all such Providers of a process."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[asyncio.Lock, set[str]]] = {}

    @asynccontextmanager
    async def at(self, node: str, provider: str) -> AsyncIterator[bool]:
        """It is that provider's, until it is left. Yields whether no other has ever had one there: then nothing that it
        cannot see yet was written.
        """
        lock, had = self._nodes.setdefault(node, (asyncio.Lock(), set()))
        async with lock:
            had.add(provider)
            yield had == {provider}


NODES = "/api/v1/nodes"
EXPECTED_S = 90.0
"""From an order until a Device is seen: the fabric, and two of the operator's looks, 30 s apart."""
NO_MOST = (
    "nobody says of any node that is there how many Devices it can have: add `devicesMax` to an entry of Settings "
    f"`nodes` whose `selector` a node has, or annotation `{GPU_COUNT}` to the nodes or their MachineSet"
)
TRIES = 5
"""Of a write that another overtook, or of an order that comes while the request of one before is being deleted."""
GOING_S = 0.5
"""From one such try to the next while it is: the operator takes a moment for a request that has nothing any more."""
REST_S = 1.0
"""From one time that something is told to have changed to the next."""
FRESH_S = 60.0
"""So old what others read as the last use of a Device of ours may be; they take it for idle after 600 s. What is marked
to go was used last when it was marked: longer than this no order takes.
"""
PARTIAL_S = 90.0
"""When some of a Lease is there, the rest is waited for so long if the operator says that something is wrong."""


NEWEST: Mapping[str, str] = MappingProxyType({})
"""How lists are asked for: as they are now. See AT_HAND."""


class _GoingError(RefusedError):
    """Not yet: the request of that node is being deleted."""


class _Seen(NamedTuple):
    """What there is now."""

    requests: tuple[Request, ...]
    resources: tuple[Resource, ...]

    def noted(self, lease: str) -> Request | None:
        """The request that has a note of that Lease."""
        return next((one for one in self.requests if lease in one.notes), None)

    def on(self, model: str, node: str) -> Request | None:
        """The request of that model for that node."""
        return next((one for one in self.requests if (one.model, one.node) == (model, node)), None)


class CroFabric:
    """See Provider. `name`: of the provider; `model`: the operator's word for the GPUs. `world` gives it as it is;
    `turns`: of all that attach to the same nodes.
    """

    def __init__(
        self, name: str, model: str, server: Server, world: Callable[[], World], expected_s: float | None = None,
        *, turns: NodeLock | None = None,
    ) -> None:  # fmt: skip
        self._name, self._model, self._server, self._world = name, model, server, world
        self._expected_s = EXPECTED_S if expected_s is None else expected_s
        self._turns = turns or NodeLock()

    # --- Provider -----------------------------------------------------------------------------------------------------

    async def offers(self) -> tuple[Offer, ...]:
        """See Provider: of each node that may have more; of too many those with the most room."""
        if find_device_memory(self._model, self._world()) is None:
            raise RefusedError(f"nobody says how much memory a {self._model} has: add it to Settings `nodes`")
        seen = await self._seen()
        vain = objects.list_stuck_resources(seen.resources, self._model)
        if objects.find_starved_resource(vain) is not None:
            return ()
        shut = {one.node for one in vain}
        there = [site for node, site in sorted((await self._sites()).items()) if node not in shut]
        found = [one for site in there if (one := self._offer(site, self._room(site, seen))) is not None]
        return tuple(sorted(found, key=lambda one: -one.devices_max)[:OFFERS_MAX])

    async def acquire(self, order: AcquireOrder) -> None:
        """See Provider. What another provider ordered there is not at hand yet, it may be: the newest tells."""
        try:
            async with self._turns.at(order.offer.node, self._name) as alone:
                if not (alone and await self._at_once(order)):
                    await _again(lambda: self._acquire(order))
        except AnswerError as error:
            raise_refusal(error)

    async def release(self, order: ReleaseOrder) -> None:
        """See Provider."""
        await _again(lambda: self._release(order))

    async def list(self) -> tuple[Listed, ...]:
        """See Provider. What is kept tidy by the way is tried again at the next."""
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
                except Exception:  # noqa: BLE001, S110  whoever does not lead may not write, and the next list tries it
                    pass
        return tuple(found)

    async def attend(self, changed: Callable[[], None]) -> None:
        """See Attended: what the operator says of ours is heard when it says it. However much that is, it is told once
        in a while, since whoever is told asks for everything.
        """
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
        """By what is at hand, where nothing is asked for on that node: to be sure that a list is the newest the API
        server waits for up to a tenth of a second. Whether that went well; all else is judged by the newest.
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
            raise RefusedError("something is asked for there")
        if known is not None:
            if not self._is_ours(known.notes[name]):
                raise RefusedError(f"{name} is the name of what is not this provider's")
            if known.notes[name].leaving:
                await self._forget(known, name, seen)
            return
        vain = objects.list_stuck_resources(seen.resources, self._model)
        waits = objects.find_starved_resource(vain)
        if waits is not None:
            raise RefusedError(f"the fabric has no {self._model} free: {waits.name} waits for one")
        waits = next((one for one in vain if one.node == node), None)
        if waits is not None:
            raise RefusedError(f"something is wrong on node {node}: {waits.name} waits there in vain")
        site = None if found is None else self._of([found]).get(node)
        if site is None or order.devices > self._room(site, seen):
            raise RefusedError(f"node {node} has no place for {order.devices} more")
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
        """Removes the note of a Lease that has been given back and has no resources left, which `list` no longer shows.

        Raises RefusedError while it still has some, and _GoingError once the same order can be tried again.
        """
        if objects.assign_resources(request, seen.resources)[name]:
            raise RefusedError("the one of that name is still being given back")
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
        """Whether what was to be given back may not be."""
        uuids = {one.device_id for one in mine if one.device_id}
        if not uuids or order.uncommitted:
            return bool(uuids)
        return not order.force and bool(await find_device_user(self._server, node, uuids))

    async def _unmark(self, request: Request, shares: Mapping[str, Sequence[Resource]]) -> None:
        """Of what is not given back none is to go first: an order marked it, and the size was not changed after all.
        There is one order at a time, so it is none of now.
        """
        ours = {name for name in request.live if self._is_ours(request.notes[name])}
        for one in (one for name in sorted(ours & shares.keys()) for one in shares[name] if one.victim):
            change = {"resourceVersion": one.version, "annotations": {objects.VICTIM: None}}
            await self._server.patch(f"{RESOURCES}/{one.name}", {"metadata": change})

    def _is_ours(self, note: LeaseNote) -> bool:
        return objects.is_from_provider(note, self._name, self._server.owner.installation)

    # --- what there is ------------------------------------------------------------------------------------------------

    async def _seen(self, how: Mapping[str, str] = NEWEST) -> _Seen:
        """Requests first: what is in the resources may be newer, and never older."""
        requests = await self._server.items(REQUESTS, **how)
        resources = await self._server.items(RESOURCES, **how)
        read = (objects.read_request(one) for one in requests)
        return _Seen(tuple(one for one in read if one is not None), tuple(map(objects.read_resource, resources)))

    async def _find(self, node: str) -> Object | None:
        return await self._server.find(f"{NODES}/{node}")

    async def _sites(self) -> Mapping[str, AttachableNode]:
        """Raises RefusedError where nobody says of any node that it may have more."""
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
        """Devices that a node has without ours."""
        noted = [note.before for one in seen.requests if one.node == node for note in one.notes.values()]
        if noted:
            return min(noted)
        online = sum(one.node == node and one.state == objects.ONLINE for one in seen.resources)
        asked = sum(one.ours for one in seen.requests if one.node == node)
        return max(0, count_devices_on_node(self._world(), node) - min(online, asked))

    def _room(self, site: AttachableNode, seen: _Seen) -> int:
        """So many more may be attached there. What others attached is seen there, or on its way."""
        here = [one for one in seen.requests if one.node == site.node]
        there, ours = count_devices_on_node(self._world(), site.node), sum(one.ours for one in here)
        before = self._before(site.node, seen)
        coming = max(0, sum(one.size for one in here) - self._arrived(site.node, seen, there - before))
        return site.most - max(there + coming, before + ours)

    def _arrived(self, node: str, seen: _Seen, more: int) -> int:
        """Devices that the fabric gave to a node and that the node shows. The operator says so of each when it looks
        next, up to 30 s later; until then they are known by their UUIDs, or, on a node that only counts, since it has
        `more` than it had without ours.
        """
        given = [one for one in seen.resources if one.node == node and (one.device_id or one.state == objects.ONLINE)]
        shown = {one.device for one in self._world().slices.values()}
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
            counted_from=note.before + number, alone=not self._told(ids),
            says="somebody made its request smaller" if lost else wrong[0],
        )  # fmt: skip

    def _told(self, ids: Sequence[str]) -> bool:
        """Whether its node tells which Device is which."""
        return any(one.device in ids for one in self._world().slices.values())

    def _all_of(self, note: LeaseNote, mine: Sequence[Resource]) -> bool:
        """All that comes has come: of what is wrong for a while nobody knows when it comes."""
        online = [one for one in mine if one.state == objects.ONLINE]
        rest = [one for one in mine if one.state != objects.ONLINE]
        late = self._server.unix_s() >= note.asked_unix_s + PARTIAL_S
        stuck = bool(rest) and late and all(one.error for one in rest)
        return bool(online) and (len(online) >= note.devices or stuck)

    # --- what is kept tidy --------------------------------------------------------------------------------------------

    async def _tidy(self, request: Request, shares: Mapping[str, Sequence[Resource]]) -> None:
        """Labels resources, keeps others from taking ours for idle or marked, and takes away what is over: of what was
        given back before the operator made anything of it only the request is left.
        """
        now_s = self._server.unix_s()
        for name, mine in shares.items():
            for one in mine if not request.notes[name].leaving else ():
                change: Object = {"labels": {objects.LEASE: name}} if one.lease != name else {}
                if (one.state == objects.ONLINE or one.victim) and one.last_used < format_rfc3339(now_s - FRESH_S):
                    change["annotations"] = {objects.LAST_USED: format_rfc3339(now_s)}
                    if one.victim:  # so long ago that no order is under way: it changed no size after all
                        change["annotations"][objects.VICTIM] = None
                        change["resourceVersion"] = one.version
                if change:
                    await self._server.patch(f"{RESOURCES}/{one.name}", {"metadata": change})
        over = {name: None for name, mine in shares.items() if request.notes[name].leaving and not mine}
        at = f"{REQUESTS}/{request.name}"
        if request.made and not request.size and not request.going and over.keys() == request.notes.keys():
            await self._server.delete(at, version=request.version)
        elif over:
            await self._server.patch(at, objects.build_resize_patch(request.version, request.size, over))


async def _again(write: Callable[[], Awaitable[None]]) -> None:
    """Until nobody overtakes it, be it that what it changes is another by then or is gone or is just going."""
    for _ in range(TRIES - 1):
        try:
            return await write()
        except _GoingError:
            await asyncio.sleep(GOING_S)
        except AnswerError as error:
            if error.status not in {CONFLICT, NOT_FOUND}:
                raise
    return await write()
