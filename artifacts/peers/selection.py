"""Other nodes that may have what a registry has: whom of them to ask for which bytes, and when nobody. Pure.

Owns the choice and what it is made from: who runs how much, who is left alone until when, who lacks what. Promises: a
peer is asked again only after the time that its answer is worth; one that lied about a digest is never asked for that
digest again; a wait for somebody who is fetching it just now has an end, and where nobody is to be asked it is the
registry's turn. What a peer gives is believed no more than what a registry gives: it is summed. Time is an argument.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from artifacts.digest import Digest

PEERS_MAX = 16
"""So many are asked by one pull; of more each node takes others."""
BUSY_S, BUSY_S_MAX = 1.0, 30.0
"""Left alone when it says that it is busy, and does not say for how long; however long it says."""
FAILED_S = 30.0
"""Left alone when it broke off, stalled or refused us."""
LACKS_S = 5.0
"""Not asked again for a digest that it did not have."""
COMING_EVERY_S, COMING_S_MAX = 0.25, 5.0
"""Looked again whether one that fetches it has it; so long that is waited for, for each digest."""
WINDOW = 64
"""Nodes that pull at the same time begin with different ones of so many blobs, or parts of one, and give them to each
other; not of all, for what came is summed from the front."""


class Peer(NamedTuple):
    """A node that gives blobs to others."""

    name: str
    """As the log may show it: a node's name, never an address."""
    url: str
    """`https://HOST:PORT`, or http."""
    holds: frozenset[Digest] = frozenset()
    """What it is known to have, artifacts or blobs; it is asked first for these, and may have more."""


class Wait(NamedTuple):
    """Somebody will have it soon."""

    wait_s: float


class Board:
    """What one pull knows of its peers. `seed`: the node's own name, in which nodes differ."""

    def __init__(self, peers: Sequence[Peer], seed: str) -> None:
        by_name = {one.name: one for one in peers if one.name != seed}
        chosen = sorted(by_name.values(), key=lambda one: (not one.holds, hash_words(seed, one.name)))[:PEERS_MAX]
        self.peers = tuple(chosen)
        self._seed = seed
        self._running = Counter[str]()
        self._left: dict[str, float] = {}
        """Peer -> until when it is left alone."""
        self._lacks: dict[tuple[str, Digest], float] = {}
        self._coming: dict[Digest, float] = {}
        """-> since when somebody is known to fetch it."""
        self._gave: dict[Digest, set[str]] = {}
        self._lied = set[tuple[str, Digest]]()

    def choose(
        self, digest: Digest, artifact: Digest | None, now_s: float, without: frozenset[str] = frozenset()
    ) -> Peer | Wait | None:
        """Whom to ask for bytes of a blob; None: the registry. `without`: who was asked for these bytes already."""
        free = [one for one in self.peers if one.name not in without and self._may(one.name, digest, now_s)]
        if free:
            known = {digest} if artifact is None else {digest, artifact}
            return min(
                free,
                key=lambda one: (
                    not known & one.holds,
                    self._running[one.name],
                    hash_words(self._seed, digest, one.name),
                ),
            )
        since_s = self._coming.get(digest)
        if since_s is not None and now_s - since_s < COMING_S_MAX and self._someone_fetches(digest, now_s):
            return Wait(COMING_EVERY_S)
        return None

    def began(self, name: str) -> None:
        """A request to it runs."""
        self._running[name] += 1

    def ended(self, name: str) -> None:
        """It does not any more."""
        self._running[name] -= 1

    def busy(self, name: str, asked_s: float | None, now_s: float) -> None:
        """It says so, and for how long."""
        self._left[name] = now_s + min(BUSY_S if asked_s is None else max(asked_s, BUSY_S), BUSY_S_MAX)

    def failed(self, name: str, now_s: float) -> None:
        """It broke off, stalled or refused us."""
        self._left[name] = now_s + FAILED_S

    def lacks(self, name: str, digest: Digest, now_s: float) -> None:
        """It does not have it."""
        self._lacks[name, digest] = now_s + LACKS_S

    def coming(self, name: str, digest: Digest, now_s: float) -> None:
        """It fetches it itself just now."""
        self._coming.setdefault(digest, now_s)
        self._lacks[name, digest] = now_s + COMING_EVERY_S

    def gave(self, name: str, digest: Digest) -> None:
        """Bytes of it came from there."""
        self._gave.setdefault(digest, set()).add(name)

    def lied(self, digest: Digest) -> list[str]:
        """The sum of the digest did not hold: who gave bytes of it is not asked for it again; their names."""
        names = sorted(self._gave.pop(digest, set()))
        self._lied |= {(name, digest) for name in names}
        return names

    def _may(self, name: str, digest: Digest, now_s: float) -> bool:
        until_s = max(self._left.get(name, 0.0), self._lacks.get((name, digest), 0.0))
        return now_s >= until_s and (name, digest) not in self._lied

    def _someone_fetches(self, digest: Digest, now_s: float) -> bool:
        """Who said so is still to be asked, and said it last."""
        soon_s = now_s + COMING_EVERY_S
        return any(
            self._left.get(one.name, 0.0) <= soon_s and now_s < self._lacks.get((one.name, digest), 0.0) <= soon_s
            for one in self.peers
        )


def order_requests(seed: str, what: str, count: int) -> list[int]:
    """In which order a node asks for so many: within each window its own."""
    return sorted(range(count), key=lambda number: (number // WINDOW, hash_words(seed, what, str(number))))


def hash_words(*words: str) -> bytes:
    """The same for the same words, and as good as drawn: it spreads, and keeps no secret."""
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest()
