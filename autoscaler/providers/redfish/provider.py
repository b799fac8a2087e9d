"""A fabric that is composed by Redfish: GPUs are attached to a node by PATCH of its system's links, and detached so.

Owns who writes: one `Bay` for each system. What is ours is marked before it is attached, in the block's `Client`, or
in Notes beside a service that has no such place; with its Mark an order stands, and its attach goes on in `attend`,
whoever leads by then. A block that may come after it was given back, since nobody saw what came of its attach, keeps a
Mark that says so, and is shown then; after LATE_S it does not come any more.

Attached is here: whether the node sees it is what its Slices tell. It never detaches what is used. What it remembers
only makes it quicker, and tells what a person detached by hand: a new one finds all of ours by its Marks, and attaches
what is not attached. Who does not lead remembers nothing: others change it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from autoscaler.capacity.attachable_nodes import AttachableNode
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.client import NoAnswerError, StatusError
from autoscaler.providers.redfish.cluster import RedfishCredentialsError
from autoscaler.providers.redfish.inventory import Reading
from autoscaler.providers.redfish.planning import (
    COMPOSING,
    Fabric,
    FabricContext,
    LeaseProgress,
    build_offers,
    count_foreign_devices,
    describe_missing_systems,
    list_attached_uuids,
    list_late_blocks,
    list_leases,
    list_unattached_leases,
    plan_claim,
)
from autoscaler.providers.redfish.schema import BlockMark, RedfishDocumentError
from autoscaler.providers.redfish.system_writer import Around, Bay
from autoscaler.state.capacity_orders import AcquireOrder, Listed, Offer, ReleaseOrder

CLAIMS = 3
"""Tries of an order whose blocks are others' in the moment that they are marked."""
LATE_S: Final = 900.0
"""So long what was given back may come, since this process saw it neither attached nor under way; longer than the
service works on anything that it was asked.
"""
NOT_YET: Final = "where it could attach is something of an entry that closes or was taken out, which goes first"
Sites = Callable[[Collection[str]], Awaitable[Mapping[str, AttachableNode]]]
"""Of these nodes those that may have more Devices, and how many at most."""
_OTHER = 412


class RedfishFabric:
    """See the module, and Provider."""

    def __init__(self, reading: Reading, around: Around, terms: FabricContext, sites: Sites) -> None:
        self._reading, self._around, self._terms, self._sites = reading, around, terms, sites
        self._held: dict[str, LeaseProgress] = {}
        self._changed: Callable[[], None] = lambda: None
        self._bays = {node: Bay(node, reading, around, self._held, self._tell) for node in reading.systems}
        self._claiming = asyncio.Lock()
        self.lacks = ""
        """See Lacking."""
        self._late: dict[tuple[str, BlockMark], float] = {}
        """Blocks that may come though they were given back: since when, see LATE_S."""

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
        if not self._reading.systems:
            raise RefusedError(NOT_YET)
        there = await self._sites(tuple(self._reading.systems))
        try:
            fabric = await self._reading.read()
        except RedfishCredentialsError as error:
            raise RefusedError(str(error)) from None
        self.lacks = describe_missing_systems(fabric)
        return build_offers(fabric, self._terms, there)

    async def acquire(self, order: AcquireOrder) -> None:
        """See Provider."""
        bay = self._bays.get(order.offer.node)
        if bay is None:
            raise RefusedError(f"node {order.offer.node} is no system of this fabric")
        async with self._claiming:
            own = set[str]()
            try:
                await self._claim(order, own)
            except RefusedError as error:
                if own:  # it is not attached for that
                    self._held.setdefault(order.id.name, LeaseProgress(failed=str(error)))
                raise
            except BaseException:
                bay.attach(order.id.name)  # its Marks may stand: then it is ordered
                raise
            bay.attach(order.id.name)

    async def _claim(self, order: AcquireOrder, own: set[str]) -> None:
        """`own`: the blocks that it marked."""
        name, node = order.id.name, order.offer.node
        site = (await self._sites((node,))).get(node)
        for _ in range(CLAIMS):
            fabric = await self._reading.read([node])
            by, had = self._terms.provider, count_foreign_devices(fabric, node, self._terms)
            mark = BlockMark(name, order.owner, order.epoch, order.devices, node, by, had)
            taken = plan_claim(fabric, order, self._terms, site)
            if taken.refused:
                raise RefusedError(taken.refused)
            self._bays[node].doubt(name, fabric.marks.keys() & {*fabric.of(name), *taken.blocks} - own)
            try:
                for path in taken.blocks:
                    await self._reading.keep(fabric.blocks[path], mark)
                    own.add(path)
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
        tried, knew = [bay.cancel(name) for bay in self._bays.values()], dict(self._held)
        fabric = await self._reading.read()
        found = {path: one for path, one in fabric.marks.items() if one.name == name}
        if not any(not one.gone or fabric.at(path) for path, one in found.items()):
            self._held.pop(name, None)
            return
        if await self._unreached(fabric, found):
            return
        known, there = knew.get(name, LeaseProgress()), list_attached_uuids(fabric, name)
        here = any(one.name == name and one.committed for one in list_leases(fabric, self._terms, knew))
        if (order.uncommitted and here) or (not order.force and await self._used(there)):
            self._held[name] = known._replace(arrived=True)
            return
        self._held[name] = known._replace(leaving=True)
        sure = here or any(tried) or known.failed  # else another may be attaching it
        for node in there or {next(iter(found.values())).node: ()}:
            if node in self._bays:
                self._bays[node].doubt(name, [path for path, one in found.items() if one.gone or not sure])
                self._bays[node].detach(name, force=order.force)

    async def _unreached(self, fabric: Fabric, found: Mapping[str, BlockMark]) -> bool:
        """Whether it was to be at a node whose system cannot be written. What is attached nobody detaches; what is not
        is given back. Raises RefusedError.
        """
        unread = next((why for one in found.values() if (why := fabric.unread(one.node))), "")
        if not unread or any(fabric.at(path) for path in found):
            return False
        if any(fabric.attached(path) for path in found):
            raise RefusedError(unread)
        for path, one in found.items():
            if not one.gone:
                await self._reading.keep(fabric.blocks[path], one._replace(gone=True))
        return True

    async def _used(self, there: Mapping[str, tuple[str, ...]]) -> bool:
        return any([await self._around.in_use(*one) for one in there.items()])

    async def list(self) -> tuple[Listed, ...]:
        """See Provider."""
        try:
            return await self._list()
        except (
            RedfishCredentialsError,
            StatusError,
            RedfishDocumentError,
        ) as error:  # these say what is wrong without an address
            raise RefusedError(str(error)) from None

    async def _list(self) -> tuple[Listed, ...]:
        if not self._reading.service.may_write():
            self._held.clear()
            self._late.clear()
        knew = dict(self._held)  # what had arrived by then is in what is read now, or somebody took it
        fabric = await self._reading.read()
        shown = list_leases(fabric, self._terms, knew)
        known = {one.name for one in shown} | {name for name, one in self._held.items() if one != knew.get(name)}
        for mark in fabric.marks.values():
            if not mark.gone and mark.name not in known and knew.get(mark.name, LeaseProgress()).arrived:
                self._bays[mark.node].doubt(mark.name, list_late_blocks(fabric).keys())
                self._bays[mark.node].detach(mark.name)  # by hand: the Mark goes, too
        if self._reading.service.may_write() and not self._claiming.locked():
            self._go_on(fabric, knew)
            await self._forget(fabric)
        return shown

    def _go_on(self, fabric: Fabric, knew: Mapping[str, LeaseProgress]) -> None:
        """What was ordered, and is not attached, is: who ordered it may be gone."""
        for name, node in list_unattached_leases(fabric).items():
            if name not in knew and name not in self._held and node in fabric.systems:
                self._bays[node].doubt(name, fabric.of(name))
                self._bays[node].attach(name)

    async def _forget(self, fabric: Fabric) -> None:
        """What was given back and did not come is nobody's. What fails is tried again at the next list."""
        now_s, knew = self._around.clock(), self._late
        self._late = {
            one: knew.get(one, now_s) if fabric.blocks[one[0]].state != COMPOSING else now_s
            for one in list_late_blocks(fabric).items()
        }
        over = {path for (path, _), since_s in self._late.items() if since_s <= now_s - LATE_S}
        if not over:
            return
        async with self._claiming:
            with contextlib.suppress(NoAnswerError, StatusError, RedfishDocumentError):
                fabric = await self._reading.read()
                for path in over & list_late_blocks(fabric).keys():
                    await self._reading.keep(fabric.blocks[path], None)

    async def close(self) -> None:
        """Asks nothing any more."""
        await self._reading.service.close()
