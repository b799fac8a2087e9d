"""Provider for a fabric composed by Redfish: attaches and detaches GPUs by PATCH of a system's links. I/O.

One `Bay` per system makes all changes to it. A block is marked before it is attached, in its `Client` or, if the
service has no such property, in Notes. The mark is the order: the leader attaches marked blocks in `attend`. If the
outcome of an attach is unknown, the released block keeps a mark `gone` and is listed if it becomes attached. After
LATE_S the mark is removed.

An order is delivered (`here`) when its blocks are attached; slices show whether the node sees the devices. Devices in
use are not detached. A new process finds all orders by their marks and continues their attaches. The state in memory
saves time and shows which devices a person detached. A process that does not lead keeps no state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from autoscaler.capacity.attachable_nodes import AttachableNode
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.attach_detach import Around, Bay
from autoscaler.providers.redfish.client import NoAnswerError, StatusError
from autoscaler.providers.redfish.inventory import Reading
from autoscaler.providers.redfish.kubernetes_objects import RedfishCredentialsError
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
from autoscaler.state.capacity import AcquireOrder, Listed, Offer, ReleaseOrder

CLAIMS = 3
"""Maximum number of attempts to mark blocks for an order, which other clients may claim at the same time."""
LATE_S: Final = 900.0
"""Seconds after which a released block that is neither attached nor being composed is no longer expected to be
attached; longer than any request to a service takes."""
NOT_YET: Final = (
    "its systems still have devices of another entry of Settings `capacity` that is closing or was removed; those "
    "devices are detached first"
)
Sites = Callable[[Collection[str]], Awaitable[Mapping[str, AttachableNode]]]
"""Returns the given nodes that can have more devices, with their maximum."""
_OTHER = 412


class RedfishFabric:
    """Provider of one Redfish fabric; see the module docstring."""

    def __init__(self, reading: Reading, around: Around, terms: FabricContext, sites: Sites) -> None:
        self._reading, self._around, self._terms, self._sites = reading, around, terms, sites
        self._held: dict[str, LeaseProgress] = {}
        self._changed: Callable[[], None] = lambda: None
        self._bays = {node: Bay(node, reading, around, self._held, self._notify) for node in reading.systems}
        self._claiming = asyncio.Lock()
        self.lacks = ""
        """See `Lacking`."""
        self._late: dict[tuple[str, BlockMark], float] = {}
        """Released blocks that may still become attached -> since when they are not being composed; see LATE_S."""

    def _notify(self) -> None:
        self._changed()

    async def attend(self, changed: Callable[[], None]) -> None:
        """Run the writers of all systems."""
        self._changed = changed
        async with asyncio.TaskGroup() as tasks:
            for bay in self._bays.values():
                tasks.create_task(bay.work())

    async def offers(self) -> tuple[Offer, ...]:
        """Return one offer per node and product."""
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
        """Mark blocks for the order and start to attach them."""
        bay = self._bays.get(order.offer.node)
        if bay is None:
            raise RefusedError(f"node {order.offer.node} has no system in this fabric")
        async with self._claiming:
            own = set[str]()
            try:
                await self._claim(order, own)
            except RefusedError as error:
                if own:  # marked blocks are not attached
                    self._held.setdefault(order.id.name, LeaseProgress(failed=str(error)))
                raise
            except BaseException:
                bay.attach(order.id.name)  # if blocks are already marked, the order exists
                raise
            bay.attach(order.id.name)

    async def _claim(self, order: AcquireOrder, own: set[str]) -> None:
        """Mark blocks for the order and add them to `own`."""
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
                    raise RefusedError(f"the fabric rejected the mark of a block: {error}") from None
            else:
                self._held.pop(name, None)
                return
        raise RefusedError("other clients claimed the free blocks")

    async def release(self, order: ReleaseOrder) -> None:
        """Start to detach the order's blocks, unless they are in use."""
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
        sure = here or any(tried) or known.failed  # otherwise another process may be attaching them
        for node in there or {next(iter(found.values())).node: ()}:
            if node in self._bays:
                self._bays[node].doubt(name, [path for path, one in found.items() if one.gone or not sure])
                self._bays[node].detach(name, force=order.force)

    async def _unreached(self, fabric: Fabric, found: Mapping[str, BlockMark]) -> bool:
        """Return whether the order's system cannot be written and none of the order's blocks is attached; if so, set
        their marks to gone. Raises RefusedError if a block is attached, since it cannot be detached.
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
        """List all orders; resume interrupted attaches, and remove marks that have expired."""
        try:
            return await self._list()
        except (RedfishCredentialsError, StatusError, RedfishDocumentError) as error:
            raise RefusedError(str(error)) from None  # the messages of these errors contain no address

    async def _list(self) -> tuple[Listed, ...]:
        if not self._reading.service.may_write():
            self._held.clear()
            self._late.clear()
        # Copied before the read: an order that is delivered in the copy and missing in the read was detached.
        knew = dict(self._held)
        fabric = await self._reading.read()
        shown = list_leases(fabric, self._terms, knew)
        known = {one.name for one in shown} | {name for name, one in self._held.items() if one != knew.get(name)}
        for mark in fabric.marks.values():
            if not mark.gone and mark.name not in known and knew.get(mark.name, LeaseProgress()).arrived:
                self._bays[mark.node].doubt(mark.name, list_late_blocks(fabric).keys())
                self._bays[mark.node].detach(mark.name)  # a person detached it: remove its mark
        if self._reading.service.may_write() and not self._claiming.locked():
            self._resume_attaches(fabric, knew)
            await self._remove_expired_marks(fabric)
        return shown

    def _resume_attaches(self, fabric: Fabric, knew: Mapping[str, LeaseProgress]) -> None:
        """Continue unattached orders of processes that have terminated."""
        for name, node in list_unattached_leases(fabric).items():
            if name not in knew and name not in self._held and node in fabric.systems:
                self._bays[node].doubt(name, fabric.of(name))
                self._bays[node].attach(name)

    async def _remove_expired_marks(self, fabric: Fabric) -> None:
        """Remove the marks of released blocks that were not attached within LATE_S. The next call of `list` retries
        failed removals.
        """
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
        """Close the connection to the service."""
        await self._reading.service.close()
