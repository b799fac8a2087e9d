"""Stores learned delivery times and outcomes of offers for the next leader, in one ConfigMap. I/O.

The ConfigMap (`pilotlight-learnt`, in Pilotlight's namespace) survives pods, upgrades and leader changes. Only the
leader writes it, at most once in SAVE_S, and only after it has read it. Invalid content is logged and ignored; until
delivery times are learned again, `expectedSeconds` applies. Failures: see Reconciler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

import msgspec

from autoscaler.providers.kubernetes_access import CONFLICT, NOT_FOUND, AnswerError, ApiServer
from autoscaler.providers.reconciler import Reconciler
from autoscaler.providers.runner import Observe
from autoscaler.state.capacity import GAPS_MAX, STARTS_MAX, LeadTimeStats, LearntSeen, OfferKind
from autoscaler.state.world import World

NAME: Final = "pilotlight-learnt"
"""The ConfigMap. Each installation in the namespace has one key, named like its leader-election Lease."""
SAVE_S: Final = 60.0
"""Minimum seconds between writes."""
BYTES_MAX: Final = 900_000
"""Maximum bytes of the text; a ConfigMap holds 1 MiB. Above it, only the most recently updated kinds are saved."""
log = logging.getLogger("pilotlight.autoscaler.providers")


class _Kept(msgspec.Struct, frozen=True):
    """The stored statistics of one offer kind. A gap of null is infinite, which JSON cannot express."""

    kind: OfferKind
    took_s: tuple[float, ...]
    came: int
    failed: int
    gaps_s: tuple[float | None, ...]


class LeadTimeStore(Reconciler):
    """A listener of the controller (`look`). `leads`: whether this process may write."""

    def __init__(
        self, server: ApiServer, place: tuple[str, str], world: Callable[[], World], observe: Observe,
        leads: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`place`: Pilotlight's namespace and the name of the leader-election Lease."""
        super().__init__(self._save, "lead times of offers are not saved")
        self._server, self._all, self._key = server, f"/api/v1/namespaces/{place[0]}/configmaps", place[1]
        self._world, self._observe, self._leads = world, observe, leads
        self._epoch = 0
        """The epoch in which the ConfigMap was read."""
        self._there = False
        self._saved: Mapping[OfferKind, LeadTimeStats] = {}
        self._text = ""
        """The stored text."""

    def look(self) -> None:
        """Wake up if something was learned or this process has begun to lead."""
        if self._due(self._world()):
            super().look()

    def _due(self, world: World) -> bool:
        """Whether there is something to read or write."""
        if not (world.leadership.leads and self._leads()):
            self._epoch = 0
            return False
        new = self._epoch != world.epoch or world.capacity.learnt is not self._saved
        return bool(world.capacity.providers) and new

    async def _save(self) -> float:
        """Read the stored statistics once per epoch; then write new ones, at most once in SAVE_S."""
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
            log.warning("event=lead_times_invalid config_map=%s error=%s", NAME, error)
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
            if error.status in {NOT_FOUND, CONFLICT}:  # another client deleted or created it
                self._there = error.status == CONFLICT
            raise
        self._there = True


def encode_lead_times(learnt: Mapping[OfferKind, LeadTimeStats]) -> str:
    """Encode statistics as stored, newest last."""
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
    """Decode stored statistics. Raises msgspec's errors."""
    return {
        one.kind: LeadTimeStats(
            took_s=one.took_s[-STARTS_MAX:], came=one.came, failed=one.failed,
            gaps_s=tuple(inf if gap is None else gap for gap in one.gaps_s[-GAPS_MAX:]),
        )
        for one in msgspec.json.decode(text, type=list[_Kept])
    }  # fmt: skip
