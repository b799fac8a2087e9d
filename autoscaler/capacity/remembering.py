"""How long Offers took and what became of them, for whoever leads next: one ConfigMap in our own namespace. I/O.

Owns it (`pilotlight-learnt`), so that what was learnt outlives pods, upgrades and leaders. Promises: only who leads
writes it, at most once in SAVE_S, and not before it has read it; one that cannot be understood is told of in one line,
and what Offers take is learnt again: then `expectedSeconds` counts. A write that fails is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

import msgspec

from autoscaler.capacity.server import CONFLICT, NOT_FOUND, AnswerError, Server
from autoscaler.capacity.supplying import Observe
from autoscaler.leases import GAPS_MAX, STARTS_MAX, Kind, Learnt, LearntSeen
from autoscaler.world import World

NAME: Final = "pilotlight-learnt"
"""The ConfigMap: a key for each installation in its namespace, called as its Lease of leadership."""
SAVE_S, RETRY_S = 60.0, 30.0
"""Between two writes; after one that failed."""
BYTES_MAX: Final = 900_000
"""Of the text: a ConfigMap holds 1 MiB. Of more the kinds are kept that something was learnt of last."""
log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """Of one Kind. A gap of null is without end, for which JSON has no word."""

    kind: Kind
    took_s: tuple[float, ...]
    came: int
    failed: int
    gaps_s: tuple[float | None, ...]


class Remembering:
    """`leads`: whether this process may write. A listener of the loop (`look`)."""

    def __init__(
        self, server: Server, place: tuple[str, str], world: Callable[[], World], observe: Observe,
        leads: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`place`: our own namespace, and what the Lease of leadership is called."""
        self._server, self._all, self._key = server, f"/api/v1/namespaces/{place[0]}/configmaps", place[1]
        self._world, self._observe, self._leads = world, observe, leads
        self._epoch = 0
        """In which it was read."""
        self._there = False
        self._saved: Mapping[Kind, Learnt] = {}
        self._text = ""
        """As it is there."""
        self._told = ""
        """What went wrong last."""
        self._due = asyncio.Event()

    def look(self) -> None:
        """Something may be learnt by now, or we lead."""
        world = self._world()
        if not (world.leads and self._leads()):
            self._epoch = 0
        elif world.capacity.providers and (self._epoch != world.epoch or world.capacity.learnt is not self._saved):
            self._due.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._keep()
            except Exception as error:  # noqa: BLE001  a Server may raise anything that is no answer (`Server`): told, tried again
                said = str(error) if isinstance(error, AnswerError) else type(error).__name__  # it may have an address
                if said != self._told:
                    log.warning("what was learnt of providers cannot be kept: %s", said)
                self._told = said
                await asyncio.sleep(RETRY_S)
                self.look()

    async def _keep(self) -> None:
        world = self._world()
        if self._epoch != world.epoch:
            await self._read()
            self._epoch = world.epoch
            return
        learnt = world.capacity.learnt
        text = text_of(learnt)
        if text != self._text and (learnt or self._text):
            await self._write(text)
        self._saved, self._text, self._told = learnt, text, ""
        await asyncio.sleep(SAVE_S)
        self.look()

    async def _read(self) -> None:
        found = await self._server.find(f"{self._all}/{NAME}")
        self._there, self._saved = found is not None, {}
        self._text = text = str(((found or {}).get("data") or {}).get(self._key, ""))
        if not text:
            return
        try:
            self._saved = learnt_of(text)
        except msgspec.MsgspecError as error:
            log.warning("ConfigMap %s is none of ours (%s): what Offers take is learnt again", NAME, error)
        else:
            self._observe((LearntSeen(learnt=dict(self._saved)),))

    async def _write(self, text: str) -> None:
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {self._key: text}}
        try:
            if self._there:
                await self._server.patch(f"{self._all}/{NAME}", {"data": {self._key: text}})
            else:
                await self._server.create(self._all, made)
        except AnswerError as error:
            if error.status in {NOT_FOUND, CONFLICT}:  # somebody took it away, or made it
                self._there = error.status == CONFLICT
            raise
        self._there = True


def text_of(learnt: Mapping[Kind, Learnt]) -> str:
    """As it is kept, the newest last."""
    left, kept = BYTES_MAX, list[str]()
    for kind, one in reversed([*learnt.items()]):
        gaps = tuple(None if gap == inf else round(gap, 1) for gap in one.gaps_s)
        took_s = tuple(round(took, 3) for took in one.took_s)
        text = msgspec.json.encode(_Kept(kind, took_s, one.came, one.failed, gaps)).decode()
        left -= len(text.encode()) + 1
        if left < 0:
            break
        kept.append(text)
    return f"[{','.join(reversed(kept))}]"


def learnt_of(text: str) -> dict[Kind, Learnt]:
    """What is kept. Raises msgspec's errors."""
    return {
        one.kind: Learnt(
            took_s=one.took_s[-STARTS_MAX:], came=one.came, failed=one.failed,
            gaps_s=tuple(inf if gap is None else gap for gap in one.gaps_s[-GAPS_MAX:]),
        )
        for one in msgspec.json.decode(text, type=list[_Kept])
    }  # fmt: skip
