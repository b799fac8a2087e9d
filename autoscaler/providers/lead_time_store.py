"""How long Offers took and what became of them, for whoever leads next: one ConfigMap in our own namespace. I/O.

Owns it (`pilotlight-learnt`), so that what was learnt outlives pods, upgrades and leaders. Promises: only who leads
writes it, at most once in SAVE_S, and not before it has read it; one that cannot be understood is told of in one line,
and what Offers take is learnt again: then `expectedSeconds` counts. What fails: see Reconciler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

import msgspec

from autoscaler.providers.kube import CONFLICT, NOT_FOUND, AnswerError, Server
from autoscaler.providers.reconciler import Reconciler
from autoscaler.providers.runner import Observe
from autoscaler.state.capacity_orders import GAPS_MAX, STARTS_MAX, LeadTimeStats, LearntSeen, OfferKind
from autoscaler.state.world import World

NAME: Final = "pilotlight-learnt"
"""The ConfigMap: a key for each installation in its namespace, called as its Lease of leadership."""
SAVE_S: Final = 60.0
"""Between two writes."""
BYTES_MAX: Final = 900_000
"""Of the text: a ConfigMap holds 1 MiB. Of more the kinds are kept that something was learnt of last."""
log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """Of one Kind. A gap of null is without end, for which JSON has no word."""

    kind: OfferKind
    took_s: tuple[float, ...]
    came: int
    failed: int
    gaps_s: tuple[float | None, ...]


class LeadTimeStore(Reconciler):
    """`leads`: whether this process may write. A listener of the loop (`look`)."""

    def __init__(
        self, server: Server, place: tuple[str, str], world: Callable[[], World], observe: Observe,
        leads: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`place`: our own namespace, and what the Lease of leadership is called."""
        super().__init__(self._save, "what was learnt of providers cannot be kept")
        self._server, self._all, self._key = server, f"/api/v1/namespaces/{place[0]}/configmaps", place[1]
        self._world, self._observe, self._leads = world, observe, leads
        self._epoch = 0
        """In which it was read."""
        self._there = False
        self._saved: Mapping[OfferKind, LeadTimeStats] = {}
        self._text = ""
        """As it is there."""

    def look(self) -> None:
        """Something may be learnt by now, or we lead."""
        if self._due(self._world()):
            super().look()

    def _due(self, world: World) -> bool:
        """Whether something is to be read or written."""
        if not (world.leads and self._leads()):
            self._epoch = 0
            return False
        new = self._epoch != world.epoch or world.capacity.learnt is not self._saved
        return bool(world.capacity.providers) and new

    async def _save(self) -> float:
        """What was learnt, when SAVE_S have passed since it was before; what is kept there is read first."""
        world = self._world()
        if not self._due(world):
            return inf
        if self._epoch != world.epoch:
            await self._read()
            self._epoch = world.epoch
            return inf
        learnt = world.capacity.learnt
        text = encode_lead_times(learnt)
        new = text != self._text and bool(learnt or self._text)
        if new:
            await self._write(text)
        self._saved, self._text = learnt, text
        await asyncio.sleep(SAVE_S if new else 0.0)
        return 0.0

    async def _read(self) -> None:
        found = await self._server.find(f"{self._all}/{NAME}")
        self._there, self._saved = found is not None, {}
        self._text = text = str(((found or {}).get("data") or {}).get(self._key, ""))
        if not text:
            return
        try:
            self._saved = parse_lead_times(text)
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


def encode_lead_times(learnt: Mapping[OfferKind, LeadTimeStats]) -> str:
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


def parse_lead_times(text: str) -> dict[OfferKind, LeadTimeStats]:
    """What is kept. Raises msgspec's errors."""
    return {
        one.kind: LeadTimeStats(
            took_s=one.took_s[-STARTS_MAX:], came=one.came, failed=one.failed,
            gaps_s=tuple(inf if gap is None else gap for gap in one.gaps_s[-GAPS_MAX:]),
        )
        for one in msgspec.json.decode(text, type=list[_Kept])
    }  # fmt: skip
