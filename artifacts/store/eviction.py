"""Which Copies go, so that so many bytes come free: least use lost for each byte, and never one that is held. Pure.

Owns the choice. Promises: nothing goes that is pinned or in use; what goes frees enough, or nothing goes and it is said
what lacks; none of what goes could have stayed; the same candidates give the same choice, in whatever order they come.
What a pull left that nobody goes on with goes before any Copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

AGE_S_MIN = 60.0
"""Whoever was used so lately counts as used just now: a difference of seconds says nothing."""
COST_S_MIN = 1.0
"""What a fetch costs at least: its questions to the registry."""


class Candidate(NamedTuple):
    """A Copy, or what is left of a pull."""

    name: str
    """Unique among the candidates."""
    blobs: Mapping[str, int]
    """Files that others may have as well, by a name that is theirs alone -> bytes: free when nobody has them more."""
    own_bytes: int = 0
    """Free as soon as it goes."""
    age_s: float = 0.0
    """Since it was used last."""
    cost_s: float = 0.0
    """What it took to fetch."""
    left: bool = False
    """What a pull left, and nobody goes on with."""
    pinned: bool = False
    in_use: bool = False
    """Somebody holds its lease."""

    @property
    def held(self) -> bool:
        """It must stay."""
        return self.pinned or self.in_use

    @property
    def bytes(self) -> int:
        """Of all that it has, shared or not."""
        return self.own_bytes + sum(self.blobs.values())


class Choice(NamedTuple):
    """What goes."""

    gone: tuple[str, ...] = ()
    freed_bytes: int = 0
    """At least as much as was needed, where anything goes."""
    lacking_bytes: int = 0
    """What could not be freed with everything gone that may go."""
    pinned_bytes: int = 0
    in_use_bytes: int = 0
    """What is held, where something lacks; what is pinned and in use counts as in use."""


def select_victims(candidates: Iterable[Candidate], needed_bytes: int) -> Choice:
    """The Copies that go for `needed_bytes`."""
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
    for one in reversed(chosen.copy()):  # the dearest first: it stays, where the others are enough
        room.give_back(one)
        if room.freed_bytes >= needed_bytes:
            chosen.remove(one)
        else:
            room.take(one)
    return Choice(tuple(one.name for one in chosen), room.freed_bytes)


def _order(one: Candidate) -> tuple[bool, float, str]:
    """First who goes first. A Copy unused for long is as unlikely to be used soon, so what its going is expected to
    cost falls with its age; for each byte, since bytes are what is wanted.
    """
    worth = max(one.cost_s, COST_S_MIN) / (max(one.age_s, AGE_S_MIN) * max(one.bytes, 1))
    return not one.left, worth, one.name


class _Room:
    """What is free when some of them are gone: a shared file only with the last that has it."""

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
