"""The one writer of one system: what is to be attached there and detached, one change after the other.

Owns that order. Each step reads what there is now, so it goes on from wherever a lost answer, another writer or a
person left it; what the service refuses together is tried one by one; what it takes and does not do is asked again,
ever more rarely, and given up in the end, but not while it says that it is at it. What was asked for and is given up
may come all the same, unless it was rejected: its Mark stays and says so. Nothing is detached that is used, unless that
is forced. What is to be done `fabric_redfish` says; whoever leads no more leaves it to who does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, NamedTuple

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
"""After a step that led nowhere: the first pause, then twice as long each time, up to the last."""
NOTHING_S: Final = 30.0
"""So long what was taken, and not done, is asked for again; so, too, what the service is too busy for."""
GIVEN_UP_S: Final = 900.0
"""So long an attach is tried at all; a Lease is given back long before."""
_BUSY = frozenset({409, 412, 423, 429})
"""Another writes, or works on it."""


class Around(NamedTuple):
    """What is the same for all systems of a fabric."""

    in_use: Callable[[str, tuple[str, ...]], Awaitable[str]]
    """(node, UUIDs of GPUs there) -> who uses one of them, or might, in words; empty: nobody."""
    clock: Callable[[], float]
    sleep: Sleep


class Bay:
    """See the module. `held`: what is known of each Lease, by name; written here. `changed`: something is through."""

    def __init__(
        self, node: str, reading: Reading, around: Around, held: dict[str, LeaseProgress], changed: Callable[[], None]
    ) -> None:
        self._node, self._reading, self._around = node, reading, around
        self._held, self._changed = held, changed
        self._attach: dict[str, float] = {}
        """Since when, by name."""
        self._detach: dict[str, None] = {}
        """By name, in the order in which they were given back."""
        self._unsure: set[str] = set()
        """Blocks that an attach may still bring: it was asked for, or may have been, and they were not seen since."""
        self._asked: tuple[tuple[str, ...], float] = (), 0.0
        """What the system was to be linked to, and since when it is asked for."""
        self._woken = asyncio.Event()
        self._forced: set[str] = set()
        """Names that are detached though somebody uses them."""
        self._alone = False
        """The service refused several at once: they are tried one by one."""

    def doubt(self, name: str, blocks: Collection[str]) -> None:
        """These had a Mark before they are attached or detached by that name: somebody else may have asked for them."""
        if name not in self._attach:
            self._unsure.update(blocks)

    def attach(self, name: str) -> None:
        """Its blocks, as they are marked then."""
        self._attach.setdefault(name, self._around.clock())
        self._woken.set()

    def cancel(self, name: str) -> bool:
        """Attaches it no more. Whether it was to be."""
        return self._attach.pop(name, None) is not None

    def detach(self, name: str, *, force: bool = False) -> None:
        """Its blocks; then their Marks go. `force`: though somebody uses them."""
        self.cancel(name)
        if force:
            self._forced.add(name)
        self._detach[name] = None
        self._woken.set()

    async def work(self) -> None:
        """Until cancelled."""
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
                except Exception:  # noqa: BLE001  whatever it was, nobody knows what came of it: it is read again
                    moved = False
                tries = 0 if moved else tries + 1
                if tries:
                    self._tire()
                    await self._around.sleep(min(TRIES_S[0] * 2.0 ** min(tries - 1, 10), TRIES_S[1]))

    def _leave(self) -> None:
        """Who leads finds by its Marks what is to come, and is told again what is to go."""
        for names in (self._attach, self._detach, self._forced):
            names.clear()
        self._asked, self._alone = ((), 0.0), False

    async def _step(self) -> bool:
        """One look, and one change at most; whether it led somewhere. Raises what reading does."""
        attach, detach = dict(self._attach), {*self._detach}
        fabric = await self._reading.read([self._node])
        self._unsure -= {path for path in fabric.blocks if fabric.attached(path)}
        await self._spare(fabric, attach)
        on, off = self._blocks(fabric)
        wanted = plan_links(fabric, self._node, on, off)
        if wanted != fabric.systems[self._node].blocks:
            return await self._change(fabric, wanted)
        for name in [one for one in self._detach if one in detach]:
            await self._unmark(fabric, name)
        for name in self._read_of(attach):
            await self._arrive(fabric, name)
        if self._attach:  # it is attached, and not settled
            await self._around.sleep(pause_s(self._around.clock() - min(self._attach.values())))
            self._tire()
        return True

    def _read_of(self, attach: Mapping[str, float]) -> list[str]:
        """Names that were to be attached before it was read, and are: of later ones it does not show the Marks."""
        return [one for one, since_s in self._attach.items() if attach.get(one) == since_s]

    async def _spare(self, fabric: Fabric, attach: Mapping[str, float]) -> None:
        """What is used stays; what nobody marked any more, or somebody gave back, is not attached."""
        for name in [one for one in self._detach if one not in self._forced]:
            there = list_attached_uuids(fabric, name)
            if self._node in there and await self._around.in_use(self._node, there[self._node]):
                self._held[name] = LeaseProgress(arrived=True)
                self._done(name)
        for name in [one for one in self._read_of(attach) if not fabric.of(one)]:
            self.cancel(name)

    def _blocks(self, fabric: Fabric) -> tuple[set[str], set[str]]:
        """What is to be attached now, and detached."""
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
                self._unsure |= new  # by whoever keeps it busy
            if len(names) > 1 or error.status not in _BUSY:
                await self._refused(fabric, names, str(error))
                return False
            why = str(error)
        except (NoAnswerError, RedfishDocumentError):
            self._unsure |= new
            raise
        else:
            self._unsure |= new  # until it is seen
            why = "the fabric takes the order and does nothing"
        if now_s >= self._asked[1] + NOTHING_S:
            await self._refused(fabric, names, why)
        return fresh

    async def _refused(self, fabric: Fabric, names: Collection[str], why: str) -> None:
        """One of several may be at fault; of one alone what has come is all that comes."""
        if len(names) > 1:
            self._alone = True
            return
        for name in names:
            if self.cancel(name):
                there = [path for path in fabric.of(name) if fabric.at(path)]
                for path in fabric.of(name):
                    if there and path not in there:
                        await self._let_go(fabric, path)
                self._held[name] = LeaseProgress(arrived=True) if there else LeaseProgress(failed=why)
            self._done(name)  # what was to be detached is there still, and is asked for again

    async def _unmark(self, fabric: Fabric, name: str) -> None:
        """It is detached here: it is ours no more, unless it may come all the same."""
        ours = {*self._reading.systems.values()}
        for path, mark in fabric.marks.items():
            if mark.name == name and ours.isdisjoint(fabric.blocks[path].systems):
                await self._let_go(fabric, path)
        self._unsure -= {path for path, mark in fabric.marks.items() if mark.name == name}  # their Marks say it
        self._held.pop(name, None)
        self._done(name)

    async def _let_go(self, fabric: Fabric, path: str) -> None:
        """It is not attached here: its Mark goes, or says that it may come all the same."""
        mark, block = fabric.marks[path], fabric.blocks[path]
        kept = mark._replace(gone=True) if path in self._unsure and not block.systems else None
        if kept != mark:
            await self._reading.keep(block, kept)

    async def _arrive(self, fabric: Fabric, name: str) -> None:
        """Nothing of it is left to be attached here; what others have by now does not come."""
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
            LeaseProgress(arrived=True) if there else LeaseProgress(failed="others have what was claimed by now")
        )
        self._done(name)

    def _done(self, name: str) -> None:
        self._alone = self._alone and len(self._attach) + len(self._detach) > 1
        self._detach.pop(name, None)
        self._forced.discard(name)
        self._asked = (), 0.0
        self._changed()

    def _tire(self) -> None:
        """What was tried for too long is tried no more."""
        late_s = self._around.clock() - GIVEN_UP_S
        for name in [one for one, since_s in self._attach.items() if since_s <= late_s]:
            self.cancel(name)
            self._held[name] = LeaseProgress(failed="the fabric does not bring it")
            self._changed()
