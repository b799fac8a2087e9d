"""Fetches manifests and tags from a registry (OCI distribution 1.1), bounded and verified. I/O.

A manifest requested by digest has that digest, whatever the headers say; its size matches the expected one, if given;
its media type equals the Content-Type (CVE-2021-41190).
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

import msgspec
from yarl import URL

from artifacts import digest as digests
from artifacts.digest import Digest
from artifacts.http.request_targets import get_origin, resolve_location
from artifacts.oci.manifest import MANIFEST_BYTES_MAX
from artifacts.registry.client import Client, RegistryResponse
from artifacts.registry_errors import MismatchError, PolicyError, RegistryError

GREETING_BYTES_MAX = 64 << 10
TAGS_MAX = 10_000
PAGE = 1000
PAGES_MAX = 100
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ACCEPTED = (
    MANIFEST,
    INDEX,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_NEXT = re.compile(r"<([^<>]{1,4096})>\s*;[^,]*\brel=\"?next\"?")


class RawManifest(NamedTuple):
    """A manifest or an index, as received."""

    digest: Digest
    media_type: str
    body: bytes


class _Typed(msgspec.Struct, frozen=True):
    media_type: str | None = msgspec.field(name="mediaType", default=None)


class _Tags(msgspec.Struct, frozen=True):
    tags: list[str] | None = None


async def fetch_manifest(client: Client, repository: str, asked: str, size: int | None = None) -> RawManifest:
    """Fetch by tag or digest (`Reference.asked`). `size`: as stated by a descriptor.

    Raises AbsentError, DeniedError, MismatchError, PolicyError, UnreachableError.
    """
    url = client.url(f"{repository}/manifests/{asked}")
    what = f"manifest {asked} of {repository}"
    found = await client.whole(
        "GET", url, repository, headers={"Accept": ", ".join(ACCEPTED)}, bytes_max=MANIFEST_BYTES_MAX, what=what
    )
    if found.status != 200:
        raise client.refusal(found.status, found.body, what)
    said = f"{client.said}: {what}"
    if size is not None and len(found.body) != size:
        raise MismatchError(f"{said}: has {len(found.body)} bytes, expected {size}")
    return RawManifest(_digest(found, asked, said), _media_type(found, said), found.body)


def _digest(found: RegistryResponse, asked: str, said: str) -> Digest:
    """Return the digest of the body. Raises MismatchError if it differs from the requested one."""
    if ":" not in asked:
        return digests.compute_digest(found.body)
    wanted = digests.parse_digest(asked)
    if not has_digest(found.body, wanted):
        raise MismatchError(f"{said}: its bytes do not match its digest")
    return wanted


def has_digest(body: bytes, wanted: Digest) -> bool:
    """Whether the body has this digest."""
    return hashlib.new(digests.get_algorithm(wanted), body).hexdigest() == digests.get_hex(wanted)


def _media_type(found: RegistryResponse, said: str) -> str:
    """Return the media type on which the header and the manifest agree. Raises MismatchError."""
    header = found.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    try:
        inside = msgspec.json.decode(found.body, type=_Typed).media_type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MismatchError(f"{said}: is not a JSON object") from None
    if header not in ACCEPTED:
        raise MismatchError(f"{said}: has an unknown type: {header[:80]!r}")
    if inside is not None and inside != header:
        raise MismatchError(f"{said}: its Content-Type and its mediaType differ")
    return header


async def is_login_accepted(client: Client) -> bool:
    """Whether the registry asked for the login and accepted it; False if it needs none. Raises DeniedError."""
    url, nothing = URL(f"{client.transport.base}v2/", encoded=True), frozenset[str]()
    what = "greeting"
    found = await client.whole("GET", url, "", scopes=nothing, bytes_max=GREETING_BYTES_MAX, what=what)
    if found.status != 200:
        raise client.refusal(found.status, found.body, what)
    return client.tokens.header(nothing) is not None


async def can_pull_manifest(client: Client, repository: str, digest: Digest) -> bool:
    """Whether this client's login may pull the manifest; always asks the registry, with a HEAD request."""
    url = client.url(f"{repository}/manifests/{digests.parse_digest(digest)}")
    found = await client.whole(
        "HEAD", url, repository, headers={"Accept": ", ".join(ACCEPTED)}, bytes_max=0, what="a manifest"
    )
    if found.status in {401, 403, 404}:
        return False
    if found.status != 200:
        raise client.refusal(found.status, b"", f"manifest {digest} of {repository}")
    return True


async def list_tags(client: Client, repository: str) -> list[str]:
    """Return a repository's tags in the registry's order, at most TAGS_MAX."""
    url: URL | None = client.url(f"{repository}/tags/list", f"n={PAGE}")
    what, names = f"list of tags of {repository}", list[str]()
    for _ in range(PAGES_MAX):
        if url is None or len(names) >= TAGS_MAX:
            break
        found = await client.whole("GET", url, repository, bytes_max=MANIFEST_BYTES_MAX, what=what)
        if found.status != 200:
            raise client.refusal(found.status, found.body, what)
        try:
            names += msgspec.json.decode(found.body, type=_Tags).tags or []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise RegistryError(f"{client.said}: its {what} is invalid") from None
        url = find_next_page(client, url, found)
    return names[:TAGS_MAX]


def find_next_page(client: Client, url: URL, found: RegistryResponse) -> URL | None:
    """Return the URL of the next page, which must be at the registry itself, or None. Raises PolicyError."""
    link = _NEXT.search(found.headers.get("Link", ""))
    if link is None:
        return None
    page = resolve_location(url, link[1])
    if get_origin(page) != client.transport.own:
        raise PolicyError(f"{client.said}: its next page is on another host")
    return page
