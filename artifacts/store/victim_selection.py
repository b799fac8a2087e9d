"""Selects the Copies to evict for a number of bytes: least lost value per byte, and never one that is held. Pure.

Pinned Copies and those in use are never selected. The selection frees enough, or is empty and reports how much is
missing. It is minimal, and independent of the order of candidates. Abandoned pulls are selected before any Copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

AGE_S_MIN = 60.0
"""Minimum age used for ranking: differences of seconds are meaningless."""
COST_S_MIN = 1.0
"""Minimum cost of a fetch: its registry requests."""


class Candidate(NamedTuple):
    """A Copy, or the remains of a pull."""

    name: str
    """Unique among the candidates."""
    blobs: Mapping[str, int]
    """Files that candidates may share, by unique name -> bytes: freed with the last candidate that has them."""
    own_bytes: int = 0
    """Freed as soon as it is removed."""
    age_s: float = 0.0
    """Time since the last use."""
    cost_s: float = 0.0
    """Duration of the fetch."""
    left: bool = False
    """Whether it is an abandoned pull."""
    pinned: bool = False
    in_use: bool = False
    """Whether a process holds its lock."""

    @property
    def held(self) -> bool:
        """Whether it must not be evicted."""
        return self.pinned or self.in_use

    @property
    def bytes(self) -> int:
        """Size of all its files, shared or not."""
        return self.own_bytes + sum(self.blobs.values())


class Choice(NamedTuple):
    """The selected candidates."""

    gone: tuple[str, ...] = ()
    freed_bytes: int = 0
    """At least the needed bytes, unless nothing is selected."""
    lacking_bytes: int = 0
    """Bytes that are missing even if everything evictable is removed."""
    pinned_bytes: int = 0
    in_use_bytes: int = 0
    """Size of the pinned Copies, and of those in use, if bytes are missing. A Copy that is both counts as in use."""


def select_victims(candidates: Iterable[Candidate], needed_bytes: int) -> Choice:
    """Select the candidates to remove for `needed_bytes`."""
    if needed_bytes <= 0:
        return Choice()
    ordered = sorted(candidates, key=_order)
    free = [one for one in ordered if not one.held]
    room = _Room(ordered)
    chosen: list[Candidate] = []
    for one in free:
        if room.freed_bytes >= needed_bytes:
            break
        room.take(one)
        chosen.append(one)
    if room.freed_bytes < needed_bytes:
        in_use = sum(one.bytes for one in ordered if one.in_use)
        pinned = sum(one.bytes for one in ordered if one.pinned and not one.in_use)
        return Choice((), 0, needed_bytes - room.freed_bytes, pinned, in_use)
    for one in reversed(chosen.copy()):  # the most valuable first: keep it if the others suffice
        room.give_back(one)
        if room.freed_bytes >= needed_bytes:
            chosen.remove(one)
        else:
            room.take(one)
    return Choice(tuple(one.name for one in chosen), room.freed_bytes)


def _order(one: Candidate) -> tuple[bool, float, str]:
    """Sort key, first to evict first. The chance of reuse falls with age, so the expected loss is cost divided by age;
    it is taken per byte, since bytes are needed.
    """
    worth = max(one.cost_s, COST_S_MIN) / (max(one.age_s, AGE_S_MIN) * max(one.bytes, 1))
    return not one.left, worth, one.name


class _Room:
    """Tracks the freed bytes: a shared file is freed with the last candidate that has it."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._sharers = Counter(blob for one in candidates for blob in one.blobs)
        self.freed_bytes = 0

    def take(self, one: Candidate) -> None:
        self.freed_bytes += one.own_bytes
        for blob, size in one.blobs.items():
            self._sharers[blob] -= 1
            self.freed_bytes += size * (not self._sharers[blob])

    def give_back(self, one: Candidate) -> None:
        self.freed_bytes -= one.own_bytes
        for blob, size in one.blobs.items():
            self.freed_bytes -= size * (not self._sharers[blob])
            self._sharers[blob] += 1
