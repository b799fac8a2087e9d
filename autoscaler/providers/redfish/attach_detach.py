"""The only writer of one system: attaches and detaches blocks, one change after the other. I/O.

Each step reads the current state, so it recovers from lost responses and from changes by other clients. If the service
rejects several changes together, they are tried one by one. A change that it accepts but does not make is requested
again, at growing intervals up to a limit, which does not apply while the service reports that it is composing. An
attach that was given up may still happen unless it was rejected, so the block keeps a mark (`gone`). Devices in use are
detached only by force. `provider` decides which orders to attach and detach. After a loss of leadership the next leader
continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, NamedTuple

from autoscaler.exception_handling import reraise_memory_error
from autoscaler.providers.redfish.client import NoAnswerError, Sleep, StatusError, pause_s
from autoscaler.providers.redfish.inventory import Reading
from autoscaler.providers.redfish.planning import (
    COMPOSING,
    Fabric,
    LeaseProgress,
    is_settled,
    list_attached_uuids,
    plan_links,
)
from autoscaler.providers.redfish.schema import RedfishDocumentError

TRIES_S: Final = (0.1, 5.0)
"""Seconds of pause after a step without progress: the first value, doubled each time up to the second."""
NOTHING_S: Final = 30.0
"""Seconds for which a change is retried that was accepted but not made, or that a busy service rejected."""
GIVEN_UP_S: Final = 900.0
"""After this many seconds an attach is given up; its order is usually released long before."""
_BUSY = frozenset({409, 412, 423, 429})
"""Another client writes, or the service is busy."""

_log = logging.getLogger("pilotlight.autoscaler.providers")


class Around(NamedTuple):
    """Dependencies that all systems of a fabric share."""

    in_use: Callable[[str, tuple[str, ...]], Awaitable[str]]
    """(node, UUIDs of GPUs there) -> the pod or claim that uses, or may use, one of them; empty: none."""
    clock: Callable[[], float]
    sleep: Sleep


class Bay:
    """Writer of one system. `held`: progress by order, updated here. `changed`: called when an order is finished."""

    def __init__(
        self, node: str, reading: Reading, around: Around, held: dict[str, LeaseProgress], changed: Callable[[], None]
    ) -> None:
        self._node, self._reading, self._around = node, reading, around
        self._held, self._changed = held, changed
        self._attach: dict[str, float] = {}
        """Orders to attach, by name, and since when."""
        self._detach: dict[str, None] = {}
        """Orders to detach, by name, in the sequence of their release."""
        self._unsure: set[str] = set()
        """Blocks that may still become attached: an attach may have been requested and was not observed yet."""
        self._asked: tuple[tuple[str, ...], float] = (), 0.0
        """The requested links of the system, and since when."""
        self._woken = asyncio.Event()
        self._forced: set[str] = set()
        """Orders that are detached even if they are in use."""
        self._alone = False
        """The service rejected several changes at once: they are tried one by one."""

    def doubt(self, name: str, blocks: Collection[str]) -> None:
        """Add blocks whose attach another process may have requested, since they had a mark before this call."""
        if name not in self._attach:
            self._unsure.update(blocks)

    def attach(self, name: str) -> None:
        """Start to attach the order's marked blocks."""
        self._attach.setdefault(name, self._around.clock())
        self._woken.set()

    def cancel(self, name: str) -> bool:
        """Stop attaching the order; return whether an attach was pending."""
        return self._attach.pop(name, None) is not None

    def detach(self, name: str, *, force: bool = False) -> None:
        """Start to detach the order's blocks and remove their marks. `force`: also blocks in use."""
        self.cancel(name)
        if force:
            self._forced.add(name)
        self._detach[name] = None
        self._woken.set()

    async def work(self) -> None:
        """Run until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            tries = 0
            while self._attach or self._detach:
                if not self._reading.service.may_write():
                    self._leave()
                    break
                try:
                    moved = await self._step()
                except Exception as error:  # noqa: BLE001  the outcome is unknown: the next step reads it
                    reraise_memory_error(error)
                    _log.debug("event=composition_step_failed node=%s error=%s", self._node, type(error).__name__)
                    moved = False
                tries = 0 if moved else tries + 1
                if tries:
                    self._give_up_late_attaches()
                    await self._around.sleep(min(TRIES_S[0] * 2.0 ** min(tries - 1, 10), TRIES_S[1]))

    def _leave(self) -> None:
        """Drop all work. The next leader finds attaches by their marks, and its planner repeats the releases."""
        for names in (self._attach, self._detach, self._forced):
            names.clear()
        self._asked, self._alone = ((), 0.0), False

    async def _step(self) -> bool:
        """Read once and make at most one change; return whether there was progress. Raises errors of `Reading`."""
        attach, detach = dict(self._attach), {*self._detach}
        fabric = await self._reading.read([self._node])
        self._unsure -= {path for path in fabric.blocks if fabric.attached(path)}
        await self._cancel_needless(fabric, attach)
        on, off = self._blocks(fabric)
        wanted = plan_links(fabric, self._node, on, off)
        if wanted != fabric.systems[self._node].blocks:
            return await self._change(fabric, wanted)
        for name in [one for one in self._detach if one in detach]:
            await self._unmark(fabric, name)
        for name in self._read_of(attach):
            await self._arrive(fabric, name)
        if self._attach:  # attached, but still composing
            await self._around.sleep(pause_s(self._around.clock() - min(self._attach.values())))
            self._give_up_late_attaches()
        return True

    def _read_of(self, attach: Mapping[str, float]) -> list[str]:
        """Pending attaches that began before the read. The read may lack the marks of later ones."""
        return [one for one, since_s in self._attach.items() if attach.get(one) == since_s]

    async def _cancel_needless(self, fabric: Fabric, attach: Mapping[str, float]) -> None:
        """Cancel detaches of devices in use, and attaches of orders without marked blocks."""
        for name in [one for one in self._detach if one not in self._forced]:
            there = list_attached_uuids(fabric, name)
            if self._node in there and await self._around.in_use(self._node, there[self._node]):
                self._held[name] = LeaseProgress(arrived=True)
                self._done(name)
        for name in [one for one in self._read_of(attach) if not fabric.of(one)]:
            self.cancel(name)

    def _blocks(self, fabric: Fabric) -> tuple[set[str], set[str]]:
        """Return the blocks to attach now, and those to detach."""
        names = [*self._detach, *self._attach][: 1 if self._alone else None]
        on = {path for name in names if name in self._attach for path in fabric.of(name) if not fabric.attached(path)}
        off = {path for path, one in fabric.marks.items() if one.name in names and one.name in self._detach}
        return on, off

    async def _change(self, fabric: Fabric, wanted: tuple[str, ...]) -> bool:
        now_s, system = self._around.clock(), fabric.systems[self._node]
        new = {*wanted} - {*system.blocks}
        fresh = wanted != self._asked[0]
        if fresh or any(fabric.blocks[path].state == COMPOSING for path in new):
            self._asked = wanted, now_s
        names = {fabric.marks[path].name for path in {*wanted} ^ {*system.blocks} if path in fabric.marks}
        coming = names & self._attach.keys()
        try:
            answer = await self._reading.link(system, wanted)
            await self._reading.service.through(answer, self._around.clock, lambda: coming <= self._attach.keys())
        except StatusError as error:
            if error.status in _BUSY:
                self._unsure |= new  # the other client may attach them
            if len(names) > 1 or error.status not in _BUSY:
                await self._refused(fabric, names, str(error))
                return False
            why = str(error)
        except (NoAnswerError, RedfishDocumentError):
            self._unsure |= new
            raise
        else:
            self._unsure |= new  # until they are observed
            why = "the fabric accepted the change and did not make it"
        if now_s >= self._asked[1] + NOTHING_S:
            await self._refused(fabric, names, why)
        return fresh

    async def _refused(self, fabric: Fabric, names: Collection[str], why: str) -> None:
        """Handle a rejected change: retry several orders one by one; a single order is finished as it is."""
        if len(names) > 1:
            self._alone = True
            return
        for name in names:
            if self.cancel(name):
                there = [path for path in fabric.of(name) if fabric.at(path)]
                for path in fabric.of(name):
                    if there and path not in there:
                        await self._clear_mark(fabric, path)
                self._held[name] = LeaseProgress(arrived=True) if there else LeaseProgress(failed=why)
            self._done(name)  # blocks that are still attached are released again by the planner

    async def _unmark(self, fabric: Fabric, name: str) -> None:
        """Remove the marks of a detached order, except those of blocks that may still be attached."""
        ours = {*self._reading.systems.values()}
        for path, mark in fabric.marks.items():
            if mark.name == name and ours.isdisjoint(fabric.blocks[path].systems):
                await self._clear_mark(fabric, path)
        self._unsure -= {path for path, mark in fabric.marks.items() if mark.name == name}  # recorded in their marks
        self._held.pop(name, None)
        self._done(name)

    async def _clear_mark(self, fabric: Fabric, path: str) -> None:
        """Remove the mark of a block that is not attached here, or record that it may still be attached."""
        mark, block = fabric.marks[path], fabric.blocks[path]
        kept = mark._replace(gone=True) if path in self._unsure and not block.systems else None
        if kept != mark:
            await self._reading.keep(block, kept)

    async def _arrive(self, fabric: Fabric, name: str) -> None:
        """Finish an order without blocks left to attach; blocks that other clients attached are lost."""
        ours = {*self._reading.systems.values()}
        there = [
            path for path in fabric.of(name) if not ours.isdisjoint(fabric.blocks[path].systems) or fabric.at(path)
        ]
        if not is_settled(fabric, there):
            return
        for path in fabric.of(name):
            if there and path not in there:
                await self._reading.keep(fabric.blocks[path], None)
        self.cancel(name)
        self._held[name] = (
            LeaseProgress(arrived=True) if there else LeaseProgress(failed="other clients attached the claimed blocks")
        )
        self._done(name)

    def _done(self, name: str) -> None:
        self._alone = self._alone and len(self._attach) + len(self._detach) > 1
        self._detach.pop(name, None)
        self._forced.discard(name)
        self._asked = (), 0.0
        self._changed()

    def _give_up_late_attaches(self) -> None:
        """Give up attaches that have taken too long."""
        late_s = self._around.clock() - GIVEN_UP_S
        for name in [one for one, since_s in self._attach.items() if since_s <= late_s]:
            self.cancel(name)
            self._held[name] = LeaseProgress(failed="the fabric did not attach it in time")
            self._changed()
