"""Fetches blobs from peer nodes before the registry, the Hub or a bucket is used for the rest. I/O.

`artifacts.peers.selection` chooses the peer. The registry itself decides what a reference means and whether this login
has access: its manifest is requested there, and from a peer only while the registry is down. Registry logins are never
sent to peers, and the peers' token only to peers. Peers' bytes are verified like the registry's. A peer that is busy,
fails, stalls or returns wrong bytes costs one attempt, and bytes received before are kept. The log names peers but
shows no addresses.
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
from artifacts.http.retry import Once, Pace, retry_after_s
from artifacts.http.transport import DetachedBody, Limits, Site
from artifacts.oci import blob_progress
from artifacts.oci.manifest import MANIFEST_BYTES_MAX
from artifacts.peers.selection import Board, Peer, Wait, order_requests
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob, Moved, Sink
from artifacts.registry.client import Client
from artifacts.registry.manifests import RawManifest
from artifacts.registry.mirrored_registry import Mirror, Mirrored
from artifacts.registry_errors import (
    AbsentError,
    BrokenError,
    DeniedError,
    MismatchError,
    PolicyError,
    RegistryError,
    UnreachableError,
)
from artifacts.sources.file_host_client import FileHost, Lone

LIMITS = Limits(connect_s=2.0, head_s=5.0, read_s=5.0, whole_s=10.0, pace_s=10.0, pace_bytes=1 << 20)
"""A peer slower than this does not help: the registry is used instead."""
BUSY, COMING = 429, 503
"""Statuses of a peer that serves its maximum of requests, and of one that is still fetching the blob itself."""

FILES = "files"
"""Placeholder for the repository of files that have none."""

log = logging.getLogger("pilotlight.artifacts.peers")


@dataclass(frozen=True, slots=True)
class Peering:
    """The peers, and how to connect to them."""

    peers: Callable[[], Sequence[Peer]]
    """Called for each pull; a peer with this node's own name is ignored."""
    own: str = ""
    """This node's name among the peers."""
    token: Callable[[], str] | None = field(default=None, repr=False)
    """Token that nodes present to each other."""
    ca: Path | None = None
    """CA certificates of the peers, trusted in addition to the system's."""
    certificate: tuple[Path, Path] | None = field(default=None, repr=False)
    """This node's client certificate and its key."""
    certified: str | None = None
    """As `Site.certified`: nodes that come and go share one name in their certificates."""
    limits: Limits = LIMITS
    given: Counter[str] = field(default_factory=Counter)
    """Bytes received from each peer, by name, over all pulls."""

    def site(self, peer: Peer) -> Site:
        """Return the address and TLS settings of a peer. Raises PolicyError if its URL is invalid."""
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
"""(blob, first, end, sink) -> the bytes that no peer provides, from the original source."""


class _Peers:
    """The peers that are tried before a source. `room`: the source's folder in stores (`CopyKey.room`); peers serve
    only from it.
    """

    def __init__(self, peering: Peering, room: str, pace: Pace, stack: AsyncExitStack) -> None:
        self.artifact: Digest | None = None
        """The artifact whose blobs are requested next."""
        self._pace = pace
        self._board = Board(peering.peers(), peering.own)
        self._peering, self._room, self._stack = peering, room, stack
        self._clients: dict[str, Client] = {}
        self._said = set[str]()

    def __bool__(self) -> bool:
        """Whether there are any peers."""
        return bool(self._board.peers)

    def lied(self, blob: Blob) -> None:
        """After a digest mismatch stop requesting the blob from all peers that provided bytes of it."""
        for name in self._board.lied(blob.digest):
            log.warning("event=peer_lied peer=%s digest=%s", name, blob.digest)

    def order(self, what: str, count: int) -> list[int]:
        """Return the request order, which differs per node."""
        return order_requests(self._peering.own, what, count)

    async def manifest(self, repository: str, asked: str, size: int | None) -> RawManifest | None:
        """Fetch a manifest by digest; None if no peer provides it."""
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
        """Yield the bytes from peers, then from `rest`. Without a sink the caller does not verify the bytes. Peers are
        then used only for a small blob, which is verified here.
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
        """Fetch and verify a small blob; None if no peer has it."""
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
        """Yield as many bytes as peers provide, from `at` on."""
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
            self._board.failed(peer.name, self._pace.monotonic_s())  # it stalled: the next attempt uses another peer
            raise
        finally:
            self._board.ended(peer.name)
            if sink is not None:
                self._peering.given[peer.name] += sink.count - before

    def _heard(self, peer: Peer, blob: Blob, error: RegistryError) -> bool:
        """Record a peer's error; return whether the peer only lacks these bytes of the blob."""
        now_s, last = self._pace.monotonic_s(), error.last if isinstance(error, UnreachableError) else None
        status = None if last is None else last.status
        if isinstance(error, AbsentError):
            self._board.lacks(peer.name, blob.digest, now_s)
        elif last is not None and status == BUSY:
            self._board.busy(peer.name, retry_after_s(last.retry_after, self._pace.unix_s()), now_s)
        elif status == COMING:
            if blob.size > blob_progress.WHOLE_BYTES_MAX:
                return True  # it may have the next part
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
        """Log a failing peer once until it succeeds again."""
        if peer.name not in self._said and not isinstance(error, AbsentError):
            self._said.add(peer.name)
            log.warning("event=peer_failed peer=%s reason=%r", peer.name, _why(error))

    async def _dialled(self, peer: Peer) -> Client:
        """Return the peer's client, created on first use and closed with the source. Raises PolicyError."""
        if peer.name not in self._clients:
            made = Client(self._peering.site(peer), Chain(), limits=self._peering.limits, pace=Once(self._pace))
            self._clients[peer.name] = await self._stack.enter_async_context(made)
        return self._clients[peer.name]


class Swarm(Mirrored):
    """A `Mirrored` registry preceded by peers."""

    def __init__(
        self, client: Client, mirrors: Sequence[Mirror], peering: Peering, room: str, stack: AsyncExitStack
    ) -> None:
        super().__init__(client, mirrors)
        self._peers = _Peers(peering, room, client.pace, stack)

    def wants(self, artifact: Digest) -> None:
        """See `Mirrored.wants`."""
        self._peers.artifact = artifact

    @property
    def lonely(self) -> bool:
        """See `Mirrored.lonely`."""
        return super().lonely and not self._peers

    def doubted(self, blob: Blob) -> Mirrored:
        """See `Mirrored.doubted`; peers that provided bytes of the blob are not used for it again."""
        self._peers.lied(blob)
        return super().doubted(blob)

    def order(self, what: str, count: int) -> list[int]:
        """See `Mirrored.order`."""
        return self._peers.order(what, count) if self._peers else super().order(what, count)

    async def manifest(self, repository: str, asked: str, size: int | None = None) -> RawManifest:
        """See `Mirrored.manifest`. While the registry is down, a manifest that is requested by digest may come from a
        peer. Peers serve only manifests of public weights.
        """
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
        """See `Mirrored.read` and `_Peers.read`."""
        to = blob.size if end is None else end
        async with aclosing(self._peers.read(blob, first, to, sink, super().read)) as pieces:
            async for piece in pieces:
                yield piece


class Neighboured(Lone):
    """A `Lone` source preceded by peers, which are used for files with a known digest. The source, which lists the
    files, has already authorized the caller.
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
        """See `BlobSource.lonely`."""
        return not self._peers

    def doubted(self, blob: Blob) -> Lone:
        """See `BlobSource.doubted`; peers that provided bytes of the blob are not used for it again."""
        self._peers.lied(blob)
        return Lone(self._place)

    def order(self, what: str, count: int) -> list[int]:
        """See `BlobSource.order`."""
        return self._peers.order(what, count) if self._peers else super().order(what, count)

    async def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """See `BlobSource.read`."""
        to, lone = blob.size if end is None else end, super().read

        def rest(_: Blob, at: int, to: int, sink: Sink | None) -> AsyncGenerator[bytes, None]:
            return lone(blob, at, to, sink)

        asked = self._peers.read(blob._replace(repository=FILES), first, to, sink, rest)
        async with aclosing(asked if blob.digest in self._known else lone(blob, first, to, sink)) as pieces:
            async for piece in pieces:
                yield piece


class _Counted:
    """Counts the bytes passed to a sink. Peer failures are not reported to it: they say nothing of the registry."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.count = 0
        self.moved = False
        """Whether bytes may have arrived since this was reset."""

    async def move(self, at: int, body: DetachedBody) -> Moved:
        """See `Sink.move`."""
        self.moved = True
        moved = await self._sink.move(at, body)
        self.count += moved.came
        return moved

    def broke(self, error: BrokenError) -> None:
        """See `Sink.broke`."""


def _why(error: RegistryError) -> str:
    """Describe an error without its message, which may contain an address."""
    if isinstance(error, UnreachableError) and error.last is not None and error.last.status is not None:
        return f"it responded with {error.last.status}"
    if isinstance(error, UnreachableError):
        return "it does not respond, broke the connection, or is too slow"
    if isinstance(error, DeniedError):
        return "it denied access: the peers' token or certificate differs"
    if isinstance(error, PolicyError):
        return "it cannot be used: check its URL, its certificate, and our own certificate"
    return "its response is invalid"
