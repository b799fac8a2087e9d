"""A fabric that is composed by Redfish: GPUs are attached to a node by PATCH of its system's links, and detached so.

Owns who writes: one `Bay` for each system. What is ours is marked before it is attached, in the block's `Client`, or
in Notes beside a service that has no such place; with its Mark an order stands, and its attach goes on in `attend`. A
block that may come after it was given back, since an answer was missing, keeps a Mark that says so, and is shown then.

Attached is here: whether the node sees it is what its Slices tell. It never detaches what is used. What it remembers
only makes it quicker, and tells what a person detached by hand: a new one finds all of ours by its Marks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from autoscaler.attached import Site
from autoscaler.capacity.base import RefusedError
from autoscaler.capacity.redfish_bay import Around, Bay
from autoscaler.capacity.redfish_documents import Mark
from autoscaler.capacity.redfish_http import StatusError
from autoscaler.capacity.redfish_reading import Reading
from autoscaler.capacity.redfish_steps import Held, Terms, before, claim, listed, offers, uuids
from autoscaler.leases import AcquireOrder, Listed, Offer, ReleaseOrder

CLAIMS = 3
"""Tries of an order whose blocks are others' in the moment that they are marked."""
Sites = Callable[[Collection[str]], Awaitable[Mapping[str, Site]]]
"""Of these nodes those that may have more Devices, and how many at most."""
_OTHER = 412


class RedfishFabric:
    """See the module, and Provider."""

    def __init__(self, reading: Reading, around: Around, terms: Terms, sites: Sites) -> None:
        self._reading, self._around, self._terms, self._sites = reading, around, terms, sites
        self._held: dict[str, Held] = {}
        self._changed: Callable[[], None] = lambda: None
        self._bays = {node: Bay(node, reading, around, self._held, self._tell) for node in reading.systems}
        self._claiming = asyncio.Lock()

    def _tell(self) -> None:
        self._changed()

    async def attend(self, changed: Callable[[], None]) -> None:
        """See Attended."""
        self._changed = changed
        async with asyncio.TaskGroup() as tasks:
            for bay in self._bays.values():
                tasks.create_task(bay.work())

    async def offers(self) -> tuple[Offer, ...]:
        """See Provider."""
        there = await self._sites(tuple(self._reading.systems))
        return offers(await self._reading.read(), self._terms, there)

    async def acquire(self, order: AcquireOrder) -> None:
        """See Provider."""
        bay = self._bays.get(order.offer.node)
        if bay is None:
            raise RefusedError(f"node {order.offer.node} is no system of this fabric")
        async with self._claiming:
            try:
                await self._claim(order)
            except RefusedError:
                raise
            except BaseException:
                bay.attach(order.id.name)  # its Marks may stand: then it is ordered
                raise
            bay.attach(order.id.name)

    async def _claim(self, order: AcquireOrder) -> None:
        name, node = order.id.name, order.offer.node
        site = (await self._sites((node,))).get(node)
        for _ in range(CLAIMS):
            fabric = await self._reading.read([node])
            mark = Mark(name, order.owner, order.epoch, order.devices, node, before(fabric, node, self._terms))
            taken = claim(fabric, order, self._terms, site)
            if taken.refused:
                raise RefusedError(taken.refused)
            try:
                for path in taken.blocks:
                    await self._reading.keep(fabric.blocks[path], mark)
            except StatusError as error:
                if error.status != _OTHER:
                    raise RefusedError(f"the fabric does not keep whose a block is: {error}") from None
            else:
                self._held.pop(name, None)
                return
        raise RefusedError("others take what is free")

    async def release(self, order: ReleaseOrder) -> None:
        """See Provider."""
        name = order.id.name
        begun, knew = [bay.cancel(name) for bay in self._bays.values()], dict(self._held)
        fabric = await self._reading.read()
        found = {path: one for path, one in fabric.marks.items() if one.name == name}
        if not any(not one.gone or fabric.at(path) for path, one in found.items()):
            self._held.pop(name, None)
            return
        known, there = knew.get(name, Held()), uuids(fabric, name)
        here = any(one.name == name and one.committed for one in listed(fabric, self._terms, knew))
        if (order.uncommitted and here) or (not order.force and await self._used(there)):
            self._held[name] = known._replace(arrived=True)
            return
        self._held[name] = known._replace(leaving=True)
        unsure = not (here or any(begun) or known.failed)  # another may be attaching it
        for node in there or {next(iter(found.values())).node: ()}:
            if node in self._bays:
                self._bays[node].detach(name, unsure=unsure, force=order.force)

    async def _used(self, there: Mapping[str, tuple[str, ...]]) -> bool:
        return any([await self._around.in_use(*one) for one in there.items()])

    async def list(self) -> tuple[Listed, ...]:
        """See Provider."""
        knew = dict(self._held)  # what had arrived by then is in what is read now, or somebody took it
        fabric = await self._reading.read()
        shown = listed(fabric, self._terms, knew)
        known = {one.name for one in shown} | {name for name, one in self._held.items() if one != knew.get(name)}
        for mark in fabric.marks.values():
            if not mark.gone and mark.name not in known and knew.get(mark.name, Held()).arrived:
                self._bays[mark.node].detach(mark.name)  # by hand: the Mark goes, too
        return shown

    async def close(self) -> None:
        """Asks nothing any more."""
        await self._reading.service.close()
