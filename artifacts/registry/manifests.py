"""Fetches manifests from a registry (OCI distribution 1.1), bounded and verified. I/O.

A manifest requested by digest has that digest, whatever the headers say; its size matches the expected one, if given;
its media type equals the Content-Type (CVE-2021-41190).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from yarl import URL

from artifacts.digest import Digest, compute_digest, is_digest_of, parse_digest
from artifacts.http.transport import CompleteResponse
from artifacts.oci.manifest import DOCKER_INDEX, DOCKER_MANIFEST, MANIFEST_BYTES_MAX, OCI_INDEX, OCI_MANIFEST
from artifacts.registry.client import Client
from artifacts.registry_errors import MismatchError

GREETING_BYTES_MAX = 64 << 10
ACCEPTED = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX)


class RawManifest(NamedTuple):
    """A manifest or an index, as received."""

    digest: Digest
    media_type: str
    body: bytes


class _Typed(msgspec.Struct, frozen=True):
    media_type: str | None = msgspec.field(name="mediaType", default=None)


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


def _digest(found: CompleteResponse, asked: str, said: str) -> Digest:
    """Return the digest of the body. Raises MismatchError if it differs from the requested one."""
    if ":" not in asked:
        return compute_digest(found.body)
    wanted = parse_digest(asked)
    if not is_digest_of(wanted, found.body):
        raise MismatchError(f"{said}: its bytes do not match its digest")
    return wanted


def _media_type(found: CompleteResponse, said: str) -> str:
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
    url = client.url(f"{repository}/manifests/{parse_digest(digest)}")
    found = await client.whole(
        "HEAD", url, repository, headers={"Accept": ", ".join(ACCEPTED)}, bytes_max=0, what="a manifest"
    )
    if found.status in {401, 403, 404}:
        return False
    if found.status != 200:
        raise client.refusal(found.status, b"", f"manifest {digest} of {repository}")
    return True
