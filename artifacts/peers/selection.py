"""Selects the peer to ask for bytes of a blob, or none. Pure.

Tracks running requests, back-off times, and missing blobs per peer. A peer is asked again only after the back-off that
its response implies; one that returned wrong bytes of a digest is never asked for that digest again. Waiting for a peer
that is still fetching a blob is bounded; if no peer qualifies, the registry is used. Bytes from peers are verified like
a registry's. Time is an argument.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from artifacts.digest import Digest

PEERS_MAX = 16
"""Maximum number of peers per pull; if there are more, each node uses a different selection."""
BUSY_S, BUSY_S_MAX = 1.0, 30.0
"""Back-off of a busy peer if it states none, and the maximum."""
FAILED_S = 30.0
"""Back-off of a peer that failed, stalled or rejected the request."""
LACKS_S = 5.0
"""Time until a peer is asked again for a digest that it lacked."""
COMING_EVERY_S, COMING_S_MAX = 0.25, 5.0
"""Poll interval for a blob that a peer is still fetching, and the maximum wait per digest."""
WINDOW = 64
"""Nodes that pull at the same time request a window of this many blobs or parts in different orders and exchange them;
the window is limited, since blobs are hashed from the front."""


class Peer(NamedTuple):
    """A node that serves blobs to others."""

    name: str
    """Safe for the log: a node name, never an address."""
    url: str
    """`https://HOST:PORT`, or http."""
    holds: frozenset[Digest] = frozenset()
    """Digests of artifacts or blobs that it is known to have, which gives it priority for them; it may have more."""


class Wait(NamedTuple):
    """A peer will have the blob soon."""

    wait_s: float


class Board:
    """State of the peers within one pull. `seed`: the node's own name, which makes choices differ between nodes."""

    def __init__(self, peers: Sequence[Peer], seed: str) -> None:
        by_name = {one.name: one for one in peers if one.name != seed}
        chosen = sorted(by_name.values(), key=lambda one: (not one.holds, hash_words(seed, one.name)))[:PEERS_MAX]
        self.peers = tuple(chosen)
        self._seed = seed
        self._running = Counter[str]()
        self._left: dict[str, float] = {}
        """Peer -> end of its back-off."""
        self._lacks: dict[tuple[str, Digest], float] = {}
        self._coming: dict[Digest, float] = {}
        """Digest -> time since when a peer is known to fetch it."""
        self._gave: dict[Digest, set[str]] = {}
        self._lied = set[tuple[str, Digest]]()

    def choose(
        self, digest: Digest, artifact: Digest | None, now_s: float, without: frozenset[str] = frozenset()
    ) -> Peer | Wait | None:
        """Choose a peer for bytes of a blob; None: use the registry. `without`: peers already tried for these bytes."""
        free = [one for one in self.peers if one.name not in without and self._may(one.name, digest, now_s)]
        if free:
            known = {digest} if artifact is None else {digest, artifact}

            def rank(one: Peer) -> tuple[bool, int, bytes]:
                return not known & one.holds, self._running[one.name], hash_words(self._seed, digest, one.name)

            return min(free, key=rank)
        since_s = self._coming.get(digest)
        if since_s is not None and now_s - since_s < COMING_S_MAX and self._someone_fetches(digest, now_s):
            return Wait(COMING_EVERY_S)
        return None

    def began(self, name: str) -> None:
        """A request to the peer has started."""
        self._running[name] += 1

    def ended(self, name: str) -> None:
        """A request to the peer has ended."""
        self._running[name] -= 1

    def busy(self, name: str, asked_s: float | None, now_s: float) -> None:
        """The peer reported that it is busy, optionally for how long."""
        self._left[name] = now_s + min(BUSY_S if asked_s is None else max(asked_s, BUSY_S), BUSY_S_MAX)

    def failed(self, name: str, now_s: float) -> None:
        """The peer failed, stalled or rejected the request."""
        self._left[name] = now_s + FAILED_S

    def lacks(self, name: str, digest: Digest, now_s: float) -> None:
        """The peer does not have the blob."""
        self._lacks[name, digest] = now_s + LACKS_S

    def coming(self, name: str, digest: Digest, now_s: float) -> None:
        """The peer is still fetching the blob itself."""
        self._coming.setdefault(digest, now_s)
        self._lacks[name, digest] = now_s + COMING_EVERY_S

    def gave(self, name: str, digest: Digest) -> None:
        """The peer provided bytes of the blob."""
        self._gave.setdefault(digest, set()).add(name)

    def lied(self, digest: Digest) -> list[str]:
        """The digest did not match: exclude all peers that provided bytes of the blob; return their names."""
        names = sorted(self._gave.pop(digest, set()))
        self._lied |= {(name, digest) for name in names}
        return names

    def _may(self, name: str, digest: Digest, now_s: float) -> bool:
        until_s = max(self._left.get(name, 0.0), self._lacks.get((name, digest), 0.0))
        return now_s >= until_s and (name, digest) not in self._lied

    def _someone_fetches(self, digest: Digest, now_s: float) -> bool:
        """Whether a peer that reported fetching the blob is still usable."""
        soon_s = now_s + COMING_EVERY_S
        return any(
            self._left.get(one.name, 0.0) <= soon_s and now_s < self._lacks.get((one.name, digest), 0.0) <= soon_s
            for one in self.peers
        )


def order_requests(seed: str, what: str, count: int) -> list[int]:
    """Return the order of requests. Within each window of `WINDOW` requests it differs from node to node."""
    return sorted(range(count), key=lambda number: (number // WINDOW, hash_words(seed, what, str(number))))


def hash_words(*words: str) -> bytes:
    """Return a deterministic pseudorandom value for the words; spreads load, not for secrets."""
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest()
