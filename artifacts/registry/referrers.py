"""Lists and adds the referrers of a manifest, such as signatures and chunk sums. I/O.

Uses the referrers API or its fallback, an index under the tag `sha256-HEX`. The list is only the registry's claim: a
missing entry proves nothing, and fetched content is verified by its digest.
"""

from __future__ import annotations

from typing import Any

import msgspec
from yarl import URL

from artifacts.digest import BadDigestError, Digest, get_algorithm, get_hex, parse_digest
from artifacts.http.transport import CompleteResponse
from artifacts.http.url_policy import find_next_page
from artifacts.oci.manifest import MANIFEST_BYTES_MAX, OCI_INDEX
from artifacts.registry.client import Client
from artifacts.registry.manifests import ACCEPTED, fetch_manifest
from artifacts.registry_errors import AbsentError, MismatchError

REFERRERS_MAX = 1000
PAGES_MAX = 100


class Referrer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A descriptor in the list."""

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: dict[str, str] = {}


class _Index(msgspec.Struct, frozen=True):
    manifests: list[Referrer] = []


async def list_referrers(client: Client, repository: str, subject: Digest, artifact_type: str = "") -> list[Referrer]:
    """List at most REFERRERS_MAX referrers, of all types or of `artifact_type`. Raises as `fetch_manifest`."""
    query = str(URL.build(query={"artifactType": artifact_type}).raw_query_string) if artifact_type else ""
    url: URL | None = client.url(f"{repository}/referrers/{parse_digest(subject)}", query)
    what, found_all = f"list of referrers of {subject} of {repository}", list[Referrer]()
    for page in range(PAGES_MAX):
        if url is None or len(found_all) >= REFERRERS_MAX:
            break
        found = await client.whole(
            "GET", url, repository, headers={"Accept": OCI_INDEX}, bytes_max=MANIFEST_BYTES_MAX, what=what
        )
        if page == 0 and not _speaks(found):
            found_all = await _tagged(client, repository, subject)
            break
        if found.status != 200:
            raise client.refusal(found.status, found.body, what)
        found_all += _read(found.body, f"{client.said}: {what}")
        url = find_next_page(url, found.headers)
    kept = [one for one in found_all if not artifact_type or one.artifact_type == artifact_type]
    return kept[:REFERRERS_MAX]


def format_referrers_tag(subject: Digest) -> str:
    """Return the tag of the list in a registry without the referrers API."""
    return f"{get_algorithm(subject)}-{get_hex(subject)[:64]}"


def add_referrer(body: bytes | None, one: Referrer, said: str) -> bytes:
    """Add a referrer to the list (None: create it). Raises MismatchError if the body is not a list of referrers."""
    index: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    if body is not None:
        try:
            index = {**index, **msgspec.json.decode(body, type=dict[str, Any])}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise MismatchError(f"{said}: is not a list of referrers") from None
    others = index["manifests"]
    if not isinstance(others, list):
        raise MismatchError(f"{said}: is not a list of referrers")
    kept = [other for other in others if not (isinstance(other, dict) and other.get("digest") == one.digest)]
    index["manifests"] = [*kept, msgspec.to_builtins(one)]
    return msgspec.json.encode(index)


async def fetch_tagged_index(client: Client, repository: str, subject: Digest) -> bytes | None:
    """Fetch the list under the tag; None if there is none."""
    try:
        found = await fetch_manifest(client, repository, format_referrers_tag(subject))
    except AbsentError:
        return None
    return found.body if found.media_type == OCI_INDEX else None


async def _tagged(client: Client, repository: str, subject: Digest) -> list[Referrer]:
    body = await fetch_tagged_index(client, repository, subject)
    return [] if body is None else _read(body, f"{client.said}: tag {format_referrers_tag(subject)} of {repository}")


def _speaks(found: CompleteResponse) -> bool:
    """Whether the registry supports the API; others answer 404, or 200 with other content."""
    if found.status == 404:
        return False
    return found.status != 200 or found.headers.get("Content-Type", "").partition(";")[0].strip() in ACCEPTED


def _read(body: bytes, said: str) -> list[Referrer]:
    try:
        found = msgspec.json.decode(body, type=_Index).manifests
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MismatchError(f"{said}: cannot be read") from None
    try:
        for one in found:
            parse_digest(one.digest)
    except BadDigestError as error:
        raise MismatchError(f"{said}: {error}") from None
    return found
