"""Resolves a reference to its Copy in the node's store, also while its registry is down. I/O.

Selects the registry, mirrors, peers and login, remembers what a reference meant at the last pull, and reports progress.
A Copy that was fetched with a login is returned only to callers for whom its registry has permitted access. Logins are
not stored, only an HMAC of them with a key of the store. Content named by `oci://` is only stored, never executed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Chain, Keychain
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.digest import Digest
from artifacts.disk.thread_wait import run_in_thread
from artifacts.fetch import verify_signatures
from artifacts.fetch.registry_files import fetch_artifact_files
from artifacts.file_policy import ALLOW
from artifacts.http.retry import Pace
from artifacts.http.transport import Limits, Site
from artifacts.pack import chunk_sums
from artifacts.peers.client import Peering, Swarm
from artifacts.reference import Reference
from artifacts.registry import manifests, resolve
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirror, Mirrored
from artifacts.registry_errors import PolicyError
from artifacts.signatures.policy import Policy
from artifacts.store.copies import Copy
from artifacts.store.file_names import CopyKey, origin_folder_name
from artifacts.store.pull import CopySpec, Job
from artifacts.store.store import Caller, Store
from artifacts.store.tag_cache import Meanings

log = logging.getLogger("pilotlight.artifacts.fetch")


class Came(NamedTuple):
    """Progress of a pull."""

    bytes: int
    """Bytes received or already partially present, verified or not."""
    total_bytes: int
    bytes_per_s: float
    """Since the start of this pull, excluding bytes from earlier attempts."""


OnProgress = Callable[[Came], None]


class MirrorSite(NamedTuple):
    """A mirror of a registry."""

    host: str
    prefix: str = ""
    """As in `Mirror.prefix`."""


@dataclass(frozen=True, slots=True)
class Registries:
    """How registries are accessed."""

    keychain: Keychain = field(default_factory=Chain)
    plain_http: bool | None = None
    """As in `Site.plain_http`."""
    ca: Path | None = None
    mirrors: Mapping[str, Sequence[MirrorSite]] = field(default_factory=dict)
    """By `Reference.host`; those under "" apply to every registry."""
    peering: Peering | None = None
    """Peer nodes, which are tried before any registry."""
    limits: Limits = field(default_factory=Limits)
    pace: Pace = field(default_factory=Pace)
    signatures: Policy = field(default_factory=Policy)
    """Which signatures weights must have before use."""
    held_good: set[tuple[str, Digest]] = field(default_factory=set)
    """(host, digest) pairs whose signature this process has verified; they are not verified again."""

    @asynccontextmanager
    async def opened(self, host: str) -> AsyncIterator[Mirrored]:
        """Open the registry with its mirrors and peers, which are tried first. Raises PolicyError."""
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(self.client(host))
            mirrors = [
                Mirror(await stack.enter_async_context(self.client(one.host)), one.prefix)
                for one in (*self.mirrors.get(host, ()), *self.mirrors.get("", ()))
            ]
            if self.peering is None:
                yield Mirrored(own, mirrors)
            else:
                yield Swarm(own, mirrors, self.peering, origin_folder_name(host), stack)

    def client(self, host: str) -> Client:
        """Create a client for one host; takes tens of ms, since CA certificates are loaded. Raises PolicyError."""
        site = Site(host, plain_http=self.plain_http, ca=self.ca)
        return Client(site, self.keychain, limits=self.limits, pace=self.pace)


async def fetch_from_registry(
    of: Reference,
    store: Store,
    registries: Registries,
    on_progress: OnProgress = lambda _: None,
    *,
    allow_unsafe: bool = False,
) -> Copy:
    """Return the Copy of what the reference means now, locked. `allow_unsafe`: accept code and pickled weights.

    Raises RegistryError, BadManifestError, StoreError, DiskError.
    """
    copy = None
    try:
        async with registries.opened(of.host) as source:
            found = await resolve.resolve_reference(source, of, resolve.detect_platform(), allow_unsafe=allow_unsafe)
            key, files = CopyKey(of.host, found.digest), found.contents.files()
            source.wants(found.digest)

            async def fetch(job: Job) -> None:
                sizes = {one.digest: one.size for one in job.files}
                telling = Telling(sum(sizes.values()), on_progress)
                await fetch_artifact_files(job, found.contents, of.repository, source, telling.came, sums=sums)

            async def sums(digest: Digest, size: int) -> Sequence[str]:
                async with registries.client(of.host) as client:
                    return await chunk_sums.fetch_chunk_sums(client, of.repository, found.digest, digest, size)

            await _judged(of, found.digest, registries)
            caller = await _caller(of, found.digest, store, registries)
            caller = None if caller is None else caller._replace(vouched=source.vouched)
            wanted = CopySpec(
                f"oci://{of}", key, files, allow_unsafe=allow_unsafe, unsafe=found.unsafe, documents=found.documents
            )
            copy = await store.ensure(wanted, fetch, caller)
            check_safe(f"oci://{of}", copy, allow_unsafe=allow_unsafe)
            await run_in_thread(lambda: Meanings(store).remember(of, key))
            return copy
    except BaseException:  # also on cancellation while the connections are closed
        if copy is not None:
            copy.close()
        raise


async def find_stored_copy(
    of: Reference, store: Store, registries: Registries, *, allow_unsafe: bool = False
) -> Copy | None:
    """Return the Copy of what the reference meant at the last pull, locked; None if it is no longer stored.

    The registry is contacted only for weights that need a login, or a signature that this process has not verified: the
    earlier pull may have required none. Raises RegistryError, StoreError, RefusedError.
    """
    key = await run_in_thread(lambda: Meanings(store).recall(of))
    if key is None:
        return None
    if registries.signatures.policy == "enforce":
        await _judged(of, key.digest, registries)
    copy = await store.admit(key, await _caller(of, key.digest, store, registries))
    if copy is not None:
        try:
            check_safe(f"oci://{of}", copy, allow_unsafe=allow_unsafe)
        except RefusedError:
            copy.close()
            raise
    return copy


def check_safe(of: str, copy: Copy, *, allow_unsafe: bool) -> None:
    """Raise RefusedError for a Copy that was stored with `allow_unsafe` if the caller does not allow that."""
    if copy.record.unsafe and not allow_unsafe:
        raise RefusedError(f"{of} contains code or pickled weights, and was stored for Models that allow them; {ALLOW}")


async def _judged(of: Reference, digest: Digest, registries: Registries) -> None:
    """Verify the signatures at the registry itself, never at a mirror. Raises PolicyError if the policy forbids use."""
    if registries.signatures.policy == "off" or (of.host, digest) in registries.held_good:
        return
    async with registries.client(of.host) as client:
        verdict = await verify_signatures.verify_manifest(client, of.repository, digest, registries.signatures)
    if not verdict.publish:
        raise PolicyError("; ".join(verdict.lines))
    if verdict.signed_by:
        registries.held_good.add((of.host, digest))
    else:
        log.warning("event=signature_check_failed artifact=%s reason=%r", of, "; ".join(verdict.lines))


async def _caller(of: Reference, digest: Digest, store: Store, registries: Registries) -> Caller | None:
    """Return the caller if a login exists for the registry, even if the registry did not ask for it; else None."""
    login = await registries.keychain.login(of.host, of.repository)
    if login is None or login.anonymous:
        return None

    async def permitted() -> bool:
        async with registries.client(of.host) as client:
            return await manifests.can_pull_manifest(client, of.repository, digest)

    return Caller(fingerprint_login(login, await run_in_thread(store.permits.key)), permitted)


def fingerprint_login(login: Login, key: bytes) -> str:
    """Return an HMAC of a login; without the store's key, guesses of the login cannot be tested against it."""
    secret = () if login.whose else (login.user, login.password, login.identity_token, login.registry_token)
    parts = (login.whose, *secret)
    text = b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in parts)
    return hmac.new(key, text, hashlib.sha256).hexdigest()


class Telling:
    """Aggregates the progress of all blobs."""

    def __init__(self, total_bytes: int, on_progress: OnProgress) -> None:
        self._total_bytes, self._on_progress = total_bytes, on_progress
        self._came: dict[Digest, int] = {}
        self._first: tuple[float, int] | None = None

    def came(self, digest: Digest, bytes_: int) -> None:
        """Implements `blob_download.Progress`."""
        self._came[digest] = bytes_
        total, now_s = sum(self._came.values()), time.monotonic()
        since_s, before = self._first = self._first or (now_s, total)
        took_s = now_s - since_s
        self._on_progress(Came(total, self._total_bytes, max(total - before, 0) / took_s if took_s > 0 else 0.0))
