"""Other nodes before a registry, the Hub or a bucket: blobs come from nodes that have them, the rest from there. I/O.

Owns the asking of peers; whom is decided in `peers`. Promises: the registry itself says what a reference means and
whether this login may have it, for its manifest is asked there, and a peer's only while the registry is away; no login
for the registry is shown to a peer, and the peers' token to nobody else; peers' bytes go the way of the registry's,
into the same sum; a peer that is busy, breaks off, stalls or lies costs one try, and what came before is kept. The
log names peers, and shows no addresses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.credentials.keychain import Chain
from artifacts.digest import Digest
from artifacts.errors import (
    AbsentError,
    BrokenError,
    DeniedError,
    MismatchError,
    PolicyError,
    RegistryError,
    UnreachableError,
)
from artifacts.http import retry
from artifacts.http.retry import Once, Pace
from artifacts.http.transport import DetachedBody, Limits, Site
from artifacts.oci import spans
from artifacts.oci.manifest import MANIFEST_BYTES_MAX
from artifacts.peers.selection import Board, Peer, Wait, order_requests
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob, Moved, Sink
from artifacts.registry.client import Client
from artifacts.registry.manifests import RawManifest
from artifacts.registry.mirrors import Mirror, Mirrored
from artifacts.sources.http_files import FileHost, Lone

LIMITS = Limits(connect_s=2.0, head_s=5.0, read_s=5.0, whole_s=10.0, pace_s=10.0, pace_bytes=1 << 20)
"""A peer that is slower than this is no help: the registry is there."""
BUSY, COMING = 429, 503
"""What a peer answers that serves as many as it may, and one that fetches what it is asked for just now."""

FILES = "files"
"""Stands for the repository of what lies in none."""

log = logging.getLogger("pilotlight.peers")


@dataclass(frozen=True, slots=True)
class Peering:
    """Who the peers are, and how they are reached."""

    peers: Callable[[], Sequence[Peer]]
    """Asked anew for each pull; who is named as we are is left out."""
    own: str = ""
    """What this node is called among them."""
    token: Callable[[], str] | None = field(default=None, repr=False)
    """What nodes show each other."""
    ca: Path | None = None
    """Authorities of the peers' certificates, beside the system's."""
    certificate: tuple[Path, Path] | None = field(default=None, repr=False)
    """Our own, and its key."""
    certified: str | None = None
    """As `Site.certified`: nodes that come and go have one name in their certificates."""
    limits: Limits = LIMITS
    given: Counter[str] = field(default_factory=Counter)
    """Bytes that each peer gave, by its name, in all pulls."""

    def site(self, peer: Peer) -> Site:
        """Raises PolicyError where its URL is none."""
        scheme, _, host = peer.url.rstrip("/").partition("://")
        if scheme not in {"http", "https"}:
            raise PolicyError(f"peer {peer.name}: expected https://HOST:PORT")
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token()}"}
        return Site(
            host,
            plain_http=scheme == "http",
            ca=self.ca,
            certificate=self.certificate,
            headers=headers,
            redirects=False,
            certified=self.certified,
        )


Rest = Callable[[Blob, int, int, Sink | None], AsyncGenerator[bytes, None]]
"""(blob, first, end, sink) -> what no peer gives, from where it lies."""


class _Peers:
    """Those who are asked before a place. `room`: of it in stores (`Key.room`); a peer gives nothing of another."""

    def __init__(self, peering: Peering, room: str, pace: Pace, stack: AsyncExitStack) -> None:
        self.artifact: Digest | None = None
        """Whose blobs are asked for from now on."""
        self._pace = pace
        self._board = Board(peering.peers(), peering.own)
        self._peering, self._room, self._stack = peering, room, stack
        self._clients: dict[str, Client] = {}
        self._said = set[str]()

    def __bool__(self) -> bool:
        """There are any."""
        return bool(self._board.peers)

    def lied(self, blob: Blob) -> None:
        """Its bytes were not its own: who gave of them is not asked for it again."""
        for name in self._board.lied(blob.digest):
            log.warning("event=peer_lied peer=%s digest=%s", name, blob.digest)

    def order(self, what: str, count: int) -> list[int]:
        """Another for each node."""
        return order_requests(self._peering.own, what, count)

    async def manifest(self, repository: str, asked: str, size: int | None) -> RawManifest | None:
        """Of a digest; None: nobody gives it."""
        for peer in self._board.peers if ":" in asked else ():
            try:
                client = await self._dialled(peer)
                return await manifests.fetch_manifest(client, f"{self._room}/{repository}", asked, size)
            except RegistryError as error:
                self._tell(peer, error)
        return None

    async def read(
        self, blob: Blob, first: int, end: int, sink: Sink | None, rest: Rest
    ) -> AsyncGenerator[bytes, None]:
        """Without a sink nothing is summed by the caller: then only what is summed here comes from peers, a small blob
        as a whole.
        """
        at = first
        if sink is None:
            small = first == 0 and end == blob.size <= MANIFEST_BYTES_MAX
            kept = await self._whole(blob) if small else None
            if kept is not None:
                yield kept
                return
        else:
            counted = _Counted(sink)
            async with aclosing(self._shared(blob, at, end, counted)) as pieces:
                async for piece in pieces:
                    at += len(piece)
                    yield piece
            at += counted.count
        if at < end:
            async with aclosing(rest(blob, at, end, sink)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _whole(self, blob: Blob) -> bytes | None:
        """A small blob, summed; None: no peer has it."""
        tried = set[str]()
        while isinstance(peer := self._choose(blob, tried), Peer):
            tried.add(peer.name)
            try:
                async with aclosing(self._asked(peer, blob, 0, blob.size, None)) as pieces:
                    return b"".join([piece async for piece in pieces])
            except RegistryError as error:
                self._heard(peer, blob, error)
        return None

    async def _shared(self, blob: Blob, at: int, end: int, sink: _Counted) -> AsyncGenerator[bytes, None]:
        """As much of it, from `at` on, as peers give."""
        came, tried = 0, set[str]()
        while at + came + sink.count < end:
            peer = self._choose(blob, tried)
            if isinstance(peer, Wait):
                await self._pace.wait(peer.wait_s)
                continue
            if peer is None:
                return
            try:
                async with aclosing(self._asked(peer, blob, at + came + sink.count, end, sink)) as pieces:
                    async for piece in pieces:
                        came += len(piece)
                        self._board.gave(peer.name, blob.digest)
                        yield piece
            except RegistryError as error:
                if self._heard(peer, blob, error):
                    tried.add(peer.name)
            finally:
                if sink.moved:
                    self._board.gave(peer.name, blob.digest)

    def _choose(self, blob: Blob, tried: set[str]) -> Peer | Wait | None:
        return self._board.choose(blob.digest, self.artifact, self._pace.monotonic_s(), frozenset(tried))

    async def _asked(
        self, peer: Peer, blob: Blob, at: int, end: int, sink: _Counted | None
    ) -> AsyncGenerator[bytes, None]:
        named = blob._replace(repository=f"{self._room}/{blob.repository}")
        before = 0 if sink is None else sink.count
        if sink is not None:
            sink.moved = False
        self._board.began(peer.name)
        try:
            client = await self._dialled(peer)
            async with aclosing(blobs.stream_blob(client, named, at, end, sink)) as pieces:
                async for piece in pieces:
                    self._peering.given[peer.name] += len(piece)
                    yield piece
            self._said.discard(peer.name)
        except asyncio.CancelledError:
            self._board.failed(peer.name, self._pace.monotonic_s())  # it stalled: the next try goes elsewhere
            raise
        finally:
            self._board.ended(peer.name)
            if sink is not None:
                self._peering.given[peer.name] += sink.count - before

    def _heard(self, peer: Peer, blob: Blob, error: RegistryError) -> bool:
        """What an error of a peer means for the next; whether it lacks only these bytes."""
        now_s, last = self._pace.monotonic_s(), error.last if isinstance(error, UnreachableError) else None
        status = None if last is None else last.status
        if isinstance(error, AbsentError):
            self._board.lacks(peer.name, blob.digest, now_s)
        elif last is not None and status == BUSY:
            self._board.busy(peer.name, retry.retry_after_s(last.retry_after, self._pace.unix_s()), now_s)
        elif status == COMING:
            if blob.size > spans.WHOLE_BYTES_MAX:
                return True  # the next part of it may be there
            self._board.coming(peer.name, blob.digest, now_s)
        elif isinstance(error, MismatchError):
            self._board.gave(peer.name, blob.digest)
            self._board.lied(blob.digest)
            log.warning("event=peer_lied peer=%s digest=%s", peer.name, blob.digest)
        else:
            self._board.failed(peer.name, now_s)
            self._tell(peer, error)
        return False

    def _tell(self, peer: Peer, error: RegistryError) -> None:
        """Once, until it gives something again."""
        if peer.name not in self._said and not isinstance(error, AbsentError):
            self._said.add(peer.name)
            log.warning("event=peer_left peer=%s reason=%r", peer.name, _why(error))

    async def _dialled(self, peer: Peer) -> Client:
        """Made when it is first asked; closed with the source. Raises PolicyError."""
        if peer.name not in self._clients:
            made = Client(self._peering.site(peer), Chain(), limits=self._peering.limits, pace=Once(self._pace))
            self._clients[peer.name] = await self._stack.enter_async_context(made)
        return self._clients[peer.name]


class Swarm(Mirrored):
    """As Mirrored, with peers before it."""

    def __init__(
        self, client: Client, mirrors: Sequence[Mirror], peering: Peering, room: str, stack: AsyncExitStack
    ) -> None:
        super().__init__(client, mirrors)
        self._peers = _Peers(peering, room, client.pace, stack)

    def wants(self, artifact: Digest) -> None:
        """As Mirrored."""
        self._peers.artifact = artifact

    @property
    def lonely(self) -> bool:
        """As Mirrored."""
        return super().lonely and not self._peers

    def doubted(self, blob: Blob) -> Mirrored:
        """As Mirrored; who gave bytes of it is not asked for it again."""
        self._peers.lied(blob)
        return super().doubted(blob)

    def order(self, what: str, count: int) -> list[int]:
        """As Mirrored."""
        return self._peers.order(what, count) if self._peers else super().order(what, count)

    async def manifest(self, repository: str, asked: str, size: int | None = None) -> RawManifest:
        """As Mirrored; of a digest from a peer while the registry is away, unless the weights needed a login."""
        try:
            return await super().manifest(repository, asked, size)
        except UnreachableError:
            found = await self._peers.manifest(repository, asked, size)
            if found is None:
                raise
            return found

    async def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As Mirrored, and as _Peers."""
        to = blob.size if end is None else end
        async with aclosing(self._peers.read(blob, first, to, sink, super().read)) as pieces:
            async for piece in pieces:
                yield piece


class Neighboured(Lone):
    """As Lone, with peers before it: they are asked for files whose sum is known, under that sum. Whoever asks was let
    in by the place before, which is asked for the list of its files.
    """

    def __init__(
        self, place: FileHost, known: Collection[Digest], artifact: Digest, *, peering: Peering, room: str,
        stack: AsyncExitStack,
    ) -> None:  # fmt: skip
        super().__init__(place)
        self._known, self._peers = frozenset(known), _Peers(peering, room, place.pace, stack)
        self._peers.artifact = artifact

    @property
    def lonely(self) -> bool:
        """As Source."""
        return not self._peers

    def doubted(self, blob: Blob) -> Lone:
        """As Source; who gave bytes of it is not asked for it again."""
        self._peers.lied(blob)
        return Lone(self._place)

    def order(self, what: str, count: int) -> list[int]:
        """As Source."""
        return self._peers.order(what, count) if self._peers else super().order(what, count)

    async def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As Source."""
        to, lone = blob.size if end is None else end, super().read

        def rest(_: Blob, at: int, to: int, sink: Sink | None) -> AsyncGenerator[bytes, None]:
            return lone(blob, at, to, sink)

        asked = self._peers.read(blob._replace(repository=FILES), first, to, sink, rest)
        async with aclosing(asked if blob.digest in self._known else lone(blob, first, to, sink)) as pieces:
            async for piece in pieces:
                yield piece


class _Counted:
    """A sink, and how much went there. It does not hear of trouble with a peer, which is none of the registry's."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.count = 0
        self.moved = False
        """Bytes may have come since this was set."""

    async def move(self, at: int, body: DetachedBody) -> Moved:
        """As Sink."""
        self.moved = True
        moved = await self._sink.move(at, body)
        self.count += moved.came
        return moved

    def broke(self, error: BrokenError) -> None:
        """As Sink."""


def _why(error: RegistryError) -> str:
    """In our own words: those of the error may have an address in them."""
    if isinstance(error, UnreachableError) and error.last is not None and error.last.status is not None:
        return f"it answered {error.last.status}"
    if isinstance(error, UnreachableError):
        return "it does not answer, broke off, or is far too slow"
    if isinstance(error, DeniedError):
        return "it does not let us in: the peers' token or certificate is another"
    if isinstance(error, PolicyError):
        return "it cannot be asked: its URL, its certificate, or our own"
    return "it answers what no peer answers"
