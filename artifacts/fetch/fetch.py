"""Fetches an artifact into the node's store: from a registry, the Hub or a bucket.

`artifacts.fetch.registry` handles registries; its guarantees hold for the other sources, too: a Copy that needed a
login is returned only to a caller that the source accepts again, and a stored Copy is used while its source is down.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from artifacts import reference, source_uri
from artifacts.credentials.aws_keys import AwsKeys, Own
from artifacts.credentials.docker_config import Login
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.digest import Digest
from artifacts.disk.thread_wait import run_in_thread
from artifacts.fetch import file_host_files, registry, remote_header
from artifacts.fetch.registry import OnProgress, Registries
from artifacts.peers.client import Neighboured
from artifacts.reference import Reference
from artifacts.registry.blobs import BlobSource
from artifacts.registry_errors import DeniedError, PolicyError, RegistryError
from artifacts.source_uri import Bucket, Hub, Local
from artifacts.sources import huggingface as hub
from artifacts.sources import s3
from artifacts.sources.digest_cache import Sums
from artifacts.sources.file_host_client import FileHost, Lone, Rules
from artifacts.sources.file_selection import Listing
from artifacts.sources.huggingface import HubAccess
from artifacts.sources.s3 import BucketAccess
from artifacts.store.copies import Copy
from artifacts.store.copy_record import Record
from artifacts.store.file_names import CopyKey
from artifacts.store.pull import CopySpec, Job
from artifacts.store.store import Caller, Store
from artifacts.store.tag_cache import Meanings

log = logging.getLogger("pilotlight.artifacts.fetch")

Elsewhere = Hub | Bucket
Lies = Reference | Hub | Bucket
"""All remote sources that the store can fetch from."""
Left = Callable[[str, str], None]
"""Called with the path of an omitted file and the reason."""


class Named(NamedTuple):
    """A source as `tag_cache.Meant`, so that the cache can record which Copy the source last referred to."""

    host: str
    """As `CopyKey.origin`; never equal to the name of a registry."""
    text: str
    digest: Digest | None = None

    def __str__(self) -> str:
        """Include the origin: another Hub may have another model of the same name."""
        return f"{self.host} {self.text}"


@dataclass(frozen=True, slots=True)
class Ways:
    """Access to all sources. Keep the instance: it caches keys of assumed roles."""

    registries: Registries = field(default_factory=Registries)
    env: Mapping[str, str] = field(default_factory=dict)
    home: Path = Path("/nonexistent")
    aws: BucketAccess = field(init=False)

    def __post_init__(self) -> None:
        """Take the AWS keys from the environment."""
        own = Own(self.env.get("AWS_ENDPOINT_URL"), self.registries.ca)  # a private endpoint is used for STS, too
        keys = AwsKeys(self.env, self.home, self.registries.pace, self.registries.limits, own=own)
        object.__setattr__(self, "aws", BucketAccess(self.env, keys))

    @property
    def hub(self) -> HubAccess:
        """The Hub as configured by the same environment."""
        return HubAccess(self.env, self.home)


class SourceListing(NamedTuple):
    """The current content of a source."""

    listing: Listing
    revision: str
    """Commit hash; empty if the source has none."""
    open: bool
    """Whether it is publicly readable."""


@dataclass(frozen=True, slots=True)
class SourceSession:
    """An open connection to a source."""

    place: FileHost
    of: Elsewhere
    origin: str
    login: str | None = field(repr=False)
    """Secret of the caller (a token or keys); None for anonymous access."""

    async def look(self, *, allow_unsafe: bool = False) -> SourceListing:
        """List the source's files. Raises RegistryError, RefusedError."""
        if isinstance(self.of, Hub):
            found = await hub.list_repository(self.place, self.of, allow_unsafe=allow_unsafe)
            return SourceListing(found.listing, found.commit, found.open)
        return SourceListing(
            await s3.list_bucket(self.place, self.of, allow_unsafe=allow_unsafe), "", open=self.login is None
        )

    async def barred(self, paths: Sequence[str]) -> RegistryError | None:
        """Return why this login may not read the files, or None; at the Hub only the first file is checked. Raises
        RegistryError.
        """
        if isinstance(self.of, Hub):
            return await hub.find_access_error(self.place, self.of, paths[0])
        return await s3.find_access_error(self.place, [s3.object_key(self.of, path) for path in paths])


@asynccontextmanager
async def open_source(of: Elsewhere, ways: Ways) -> AsyncIterator[SourceSession]:
    """Open a source with the caller's credentials. Raises PolicyError, DeniedError."""
    rules = Rules(ways.registries.limits, ways.registries.pace, ways.registries.ca)
    login = await _login(of, ways)
    if isinstance(of, Hub):
        place = ways.hub.place(login, rules)
    else:
        place = await ways.aws.place(of.bucket, rules, signed=login is not None)
    async with place:
        yield SourceSession(place, of, format_source_origin(of, ways), login)


async def _login(of: Elsewhere, ways: Ways) -> str | None:
    """Return the caller's secret, or None; never log it. Raises PolicyError, DeniedError."""
    if isinstance(of, Hub):
        return await ways.hub.token()
    keys = await ways.aws.keys.keys()
    return None if keys is None else f"{keys.access} {keys.secret}"


def parse_remote_source(text: str) -> Lies:
    """Parse a source, with or without `oci://`. Raises BadReferenceError, also for a local path."""
    found = source_uri.parse_source_uri(text) if "://" in text else reference.parse_reference(text)
    if isinstance(found, Local):
        raise reference.build_reference_error(text, "it is a local path; expected oci://, hf:// or s3://")
    return found


def format_source_origin(of: Elsewhere, ways: Ways) -> str:
    """Return the `CopyKey.origin` of a source, which differs from every registry name. Raises PolicyError."""
    if isinstance(of, Hub):
        return f"hf {str(ways.hub.endpoint()).partition('://')[2]}"
    endpoint = ways.aws.endpoint() or "https://amazonaws.com"
    return f"s3 {endpoint.partition('://')[2].rstrip('/')} {of.bucket}"


async def fetch_artifact(
    of: Lies,
    store: Store,
    ways: Ways,
    on_progress: OnProgress = lambda _: None,
    left: Left = lambda _path, _why: None,
    *,
    allow_unsafe: bool = False,
) -> Copy:
    """Return the Copy of what the source refers to now, locked. `left`: called for each omitted file.
    `allow_unsafe`: as in `registry.fetch_from_registry`. Raises RegistryError, BadManifestError, StoreError, DiskError.
    """
    if isinstance(of, Reference):
        return await registry.fetch_from_registry(of, store, ways.registries, on_progress, allow_unsafe=allow_unsafe)
    _judge(ways.registries)
    copy = None
    try:
        async with open_source(of, ways) as there:
            try:
                found = await there.look(allow_unsafe=allow_unsafe)
            except DeniedError:
                known = await run_in_thread(lambda: find_cached_key(of, store, ways, allow_unsafe=allow_unsafe))
                await _forbid(there, store, known)
                raise
            key = CopyKey(there.origin, found.listing.digest)
            for path, why in found.listing.left:
                left(path, why)
            taken = await run_in_thread(lambda: Sums(store).known(key, found.listing))
            for was, now in zip(found.listing.taken, taken.taken, strict=True):
                there.place.also(was.entry.name, now.entry.name)
            unknown = [one.entry.size for one in file_host_files.list_unhashed_files(taken)]

            async def fetch(job: Job) -> None:
                sizes = {one.digest: one.size for one in job.files}
                telling = registry.Telling(sum(sizes.values()) + sum(unknown), on_progress)
                async with AsyncExitStack() as stack:
                    await file_host_files.fetch_listed_files(
                        job, taken, _before(there, key, sizes, ways, stack), telling.came
                    )

            more = sum(unknown) + len(unknown)  # at least one byte per file, even if it is empty
            wanted = CopySpec(
                str(of), key, file_host_files.list_hashed_files(taken), more, allow_unsafe, found.listing.unsafe
            )
            record = await run_in_thread(lambda: store.layout.record(key))
            paths = [one.entry.path for one in taken.taken]
            is_open = found.open and not (record is not None and record.private)  # it may have become public
            caller = None if is_open else await _let_in(there, paths, store, key)
            copy = await store.ensure(wanted, fetch, caller)
        record = copy.record
        registry.check_safe(str(of), copy, allow_unsafe=allow_unsafe)
        await run_in_thread(lambda: _remember(store, of, record, allow_unsafe=allow_unsafe))
    except BaseException:  # also on cancellation while the connections are closed
        if copy is not None:
            copy.close()
        raise
    return copy


async def find_stored_copy(of: Lies, store: Store, ways: Ways, *, allow_unsafe: bool = False) -> Copy | None:
    """Return the Copy of what the source referred to at the last pull, locked; None if it is no longer stored. The
    source is contacted only for a Copy that needed a login. Raises RegistryError, StoreError.
    """
    if isinstance(of, Reference):
        return await registry.find_stored_copy(of, store, ways.registries, allow_unsafe=allow_unsafe)
    _judge(ways.registries)
    key = await run_in_thread(lambda: find_cached_key(of, store, ways, allow_unsafe=allow_unsafe))
    record = None if key is None else await run_in_thread(lambda: store.layout.record(key))
    if key is None or record is None:
        return None
    login = await _login(of, ways) if record.private else None
    copy = await store.admit(key, await _caller(store, login, _permitted(of, ways, [one.path for one in record.laid])))
    if copy is not None:
        try:
            registry.check_safe(str(of), copy, allow_unsafe=allow_unsafe)
        except RefusedError:
            copy.close()
            raise
    return copy


async def fetch_headers(of: Lies, ways: Ways, folder: Path, *, allow_unsafe: bool = False) -> list[str]:
    """See `remote_header.fetch_artifact_headers`."""
    if isinstance(of, Reference):
        return await remote_header.fetch_artifact_headers(of, ways.registries, folder, allow_unsafe=allow_unsafe)
    async with open_source(of, ways) as there:
        found = (await there.look(allow_unsafe=allow_unsafe)).listing
        return await remote_header.fetch_gguf_headers(
            file_host_files.list_all_files(found), found.place, Lone(there.place), folder
        )


def find_cached_key(of: Lies, store: Store, ways: Ways, *, allow_unsafe: bool = False) -> CopyKey | None:
    """Return the key of the last pulled Copy without contacting the source. Blocks. Raises PolicyError."""
    if isinstance(of, Reference):
        return Meanings(store).recall(of)
    return Meanings(store).recall(_named(of, format_source_origin(of, ways), allow_unsafe=allow_unsafe))


def _named(of: Elsewhere, origin: str, *, allow_unsafe: bool) -> Named:
    """Return the source's name for the cache. It contains `allow_unsafe`, which changes the selected files and so the
    Copy.
    """
    return Named(origin, f"{of} and what is unsafe of it" if allow_unsafe else str(of))


def _judge(registries: Registries) -> None:
    """Apply the signature policy; only registries hold signatures. Raises PolicyError."""
    if registries.signatures.policy == "enforce":
        raise PolicyError(
            "weights.signatures.policy is enforce, and only weights in a registry have signatures: "
            "`pilotlight weights push hf://... oci://...`, sign it there, and use that artifact"
        )
    if registries.signatures.policy == "warn":
        log.warning("event=weights_unsigned reason='only weights in a registry have signatures'")


def _before(
    there: SourceSession, key: CopyKey, known: Collection[Digest], ways: Ways, stack: AsyncExitStack
) -> BlobSource:  # fmt: skip
    """Return the source, preceded by peers if peering is configured."""
    peering = ways.registries.peering
    if peering is None:
        return Lone(there.place)
    return Neighboured(there.place, known, key.digest, peering=peering, room=key.room, stack=stack)


def _remember(store: Store, of: Elsewhere, record: Record, *, allow_unsafe: bool) -> None:
    Meanings(store).remember(_named(of, record.origin, allow_unsafe=allow_unsafe), record.key)
    if record.unpacked:
        Sums(store).remember(record.key, {one.path: one.digest for one in record.unpacked})


async def _let_in(there: SourceSession, paths: Sequence[str], store: Store, key: CopyKey) -> Caller:
    """Check that the caller may read these files, and return the caller. A caller who can list files may be unable to
    read them, and if another pull has stored them all, no download fails. Raises RegistryError, StoreError.
    """
    why = await there.barred(paths)

    async def said() -> bool:
        return why is None

    caller = await _caller(store, there.login, said)
    if why is not None:
        await store.forbid(key, caller)
        raise why
    return caller


async def _forbid(there: SourceSession, store: Store, key: CopyKey | None) -> None:
    """Revoke a cached permission after the source denied access. Raises StoreError."""
    if key is not None:

        async def said() -> bool:
            return False

        await store.forbid(key, await _caller(store, there.login, said))


async def _caller(store: Store, login: str | None, permitted: Callable[[], Awaitable[bool]]) -> Caller:
    """Return the `Caller` for the store's access check. An anonymous caller is checked, too: content that was fetched
    with a login may be public by now.
    """
    key = await run_in_thread(store.permits.key)
    return Caller(registry.fingerprint_login(Login(registry_token=login or ""), key), permitted)


def _permitted(of: Elsewhere, ways: Ways, paths: Sequence[str]) -> Callable[[], Awaitable[bool]]:
    async def permitted() -> bool:
        async with open_source(of, ways) as there:
            return await there.barred(paths) is None

    return permitted
