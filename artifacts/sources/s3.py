"""Models in an S3-compatible store: lists the objects below a prefix, and reads them. I/O.

Uses ListObjectsV2, HEAD and GET, and determines the endpoint. Every request is signed if there are keys, and redirects
are not followed. An object is read in the version that was listed (If-Match), else an error is raised.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote_plus

from yarl import URL

from artifacts.credentials.aws_keys import AwsKeys
from artifacts.credentials.sigv4 import Asked, Scope, encode_uri, sign_request
from artifacts.http import xml
from artifacts.http.transport import CompleteResponse
from artifacts.http.url_policy import parse_untrusted_url
from artifacts.http.xml import BadXmlError, Element
from artifacts.registry_errors import PolicyError, RegistryError
from artifacts.source_uri import Bucket
from artifacts.sources.file_host_client import Explain, FileHost, Rules
from artifacts.sources.file_selection import FILES_MAX, ListedFile, Listing, select_files

PAGES_MAX = 50
AT_ONCE = 8
"""Maximum concurrent HEAD requests for checksums or access checks."""
T = TypeVar("T")
_ETAG = re.compile(r'"[!#-~]{1,256}"')
_SIZE = re.compile(r"[0-9]{1,15}")
_CODE = re.compile(r"[A-Za-z]{1,64}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_ENDED = "the session of the keys (AWS_SESSION_TOKEN) has expired, or is another key's: get new keys"
_MEANINGS = {
    "NoSuchBucket": "the bucket does not exist",
    "NoSuchKey": "to use all objects below it, end it with /",
    "InvalidObjectState": "it is archived: have it restored first",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "InvalidAccessKeyId": "the key id in AWS_ACCESS_KEY_ID (or ~/.aws/credentials) is unknown",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY (or ~/.aws/credentials) is not the secret of that key",
    "ExpiredToken": _ENDED,
    "InvalidToken": _ENDED,
    "InvalidTokenId": _ENDED,
}
"""Explanations and fixes of error codes that say more than their status."""


@dataclass(frozen=True, slots=True)
class BucketAccess:
    """Access to the store, configured by the environment variables of AWS's own tools."""

    env: Mapping[str, str]
    keys: AwsKeys

    def endpoint(self) -> str | None:
        """Return the endpoint of a private store (`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`); None for AWS."""
        return self.env.get("AWS_ENDPOINT_URL_S3") or self.env.get("AWS_ENDPOINT_URL") or None

    async def base(self, bucket: str) -> URL:
        """Return the bucket's URL. Raises PolicyError."""
        own, region = self.endpoint(), await self.keys.region()
        if own is not None:
            try:
                return parse_untrusted_url(f"{own.rstrip('/')}/{bucket}/")
            except PolicyError:
                raise PolicyError("AWS_ENDPOINT_URL is not a URL; expected e.g. https://minio.example:9000") from None
        end = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
        return parse_untrusted_url(f"https://{end}/{bucket}/" if "." in bucket else f"https://{bucket}.{end}/")

    async def place(self, bucket: str, rules: Rules, *, signed: bool) -> FileHost:
        """Return the bucket as a host, signed with the keys of that moment, or anonymous. Raises PolicyError."""
        region = await self.keys.region()
        scope = Scope(region, "s3")

        async def prove(method: str, url: URL, headers: Mapping[str, str]) -> Mapping[str, str]:
            current = await self.keys.keys() if signed else None  # keys of a role expire
            if current is None:
                return {}
            return sign_request(Asked(method, url, headers), current, scope, rules.pace.unix_s())

        place = FileHost(await self.base(bucket), prove, _explaining(region, signed=signed), rules)
        place.follow = False
        return place


async def list_bucket(place: FileHost, of: Bucket, *, allow_unsafe: bool = False) -> Listing:
    """List the selected files and register them with `place` for reading. Raises RegistryError, RefusedError."""
    folder = _folder(of)
    if of.key.endswith("/"):
        found = await _listed(place, of)
    else:
        found = {of.key: await _headed(place, of.key)}
    entries = {key.removeprefix(folder): one._replace(path=key.removeprefix(folder)) for key, one in found.items()}
    taken = select_files(
        str(of), [one._replace(claim=_claim(one)) for one in entries.values()], allow_unsafe=allow_unsafe
    )
    for one in taken.taken:
        etag = entries[one.entry.path].claim.partition("\0")[0]
        place.has(one.entry.name, _url(place, folder + one.entry.path), {"If-Match": etag})
    return taken


def object_key(of: Bucket, path: str) -> str:
    """Return the object key of a selected file."""
    return _folder(of) + path


def _folder(of: Bucket) -> str:
    return of.key[: of.key.rfind("/") + 1]


async def find_access_error(place: FileHost, keys: Sequence[str]) -> RegistryError | None:
    """Return why one of these objects may not be read, or None; a bucket grants access per object.
    Raises RegistryError.
    """
    return next(filter(None, await _each(keys, lambda key: _barred(place, key))), None)


async def _barred(place: FileHost, key: str) -> RegistryError | None:
    found = await place.whole("HEAD", _url(place, key), bytes_max=0, what=key)
    why = None if found.status == 200 else await _refusal(place, key, found)
    if why is not None and found.status not in {401, 403, 404}:
        raise why
    return why


async def _refusal(place: FileHost, key: str, found: CompleteResponse) -> RegistryError:
    """Build the error of a rejected HEAD by a GET, since only its response has a body. Raises RegistryError."""
    what = f"object {key}"
    async with await place.ask("GET", _url(place, key), "", headers={"Range": "bytes=0-0"}) as answer:
        same = answer.status == found.status
        return await place.refused(answer, what) if same else place.refusal(found, what)


def _claim(one: ListedFile) -> str:
    """Return the digest if the store states it, else the ETag."""
    etag, _, summed = one.claim.partition("\0")
    return summed or f"etag:{etag}"


async def _listed(place: FileHost, of: Bucket) -> dict[str, ListedFile]:
    """List all objects below the key."""
    found, summed, token, what = dict[str, ListedFile](), list[str](), "", f"list of objects below {of}"
    for _ in range(PAGES_MAX):
        rows = [("list-type", "2"), ("prefix", of.key), ("encoding-type", "url"), ("max-keys", "1000")]
        rows += [("continuation-token", token)] if token else []
        query = "&".join(f"{name}={encode_uri(value)}" for name, value in sorted(rows))
        answer = await place.whole(
            "GET", URL(f"{place.base}?{query}", encoded=True), bytes_max=xml.BYTES_MAX, what=what
        )
        if answer.status != 200:
            raise place.refusal(answer, what)
        try:
            page = xml.parse_xml(answer.body)
        except BadXmlError as error:
            raise RegistryError(f"{place.said}: {what} cannot be read: {error}") from None
        for row in page.all("Contents"):
            one = _row(row, place, what)
            if page.one("EncodingType") == "url":  # as requested; not all stores support it
                one = one._replace(path=unquote_plus(one.path))
            if not (one.path.endswith("/") and one.size == 0):  # a folder marker, as consoles create
                found[one.path] = one
                summed += [one.path] if _summed(row) else []
        if len(found) > FILES_MAX:
            raise RegistryError(f"{place.said}: {what}: more than {FILES_MAX}; name the folder of one model")
        token = page.one("NextContinuationToken") if page.one("IsTruncated") == "true" else ""
        if not token:
            heads = await _each(summed, lambda key: _headed(place, key))
            return found | dict(zip(summed, heads, strict=True))
    raise RegistryError(f"{place.said}: {what} does not end")


async def _each(keys: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> list[T]:
    """Request each object concurrently; return the results in order."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(key: str) -> T:
        async with free:
            return await ask(key)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(key)) for key in keys]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None  # the other tasks were cancelled because of this error
    return [task.result() for task in tasks]


def _row(row: Element, place: FileHost, what: str) -> ListedFile:
    key, etag, size = row.one("Key"), row.one("ETag"), row.one("Size")
    if not key or not _ETAG.fullmatch(etag) or not _SIZE.fullmatch(size):
        raise RegistryError(f"{place.said}: {what}: has an object without name, ETag or size")
    return ListedFile(key, int(size), etag)


def _summed(row: Element) -> bool:
    """Whether the object may have a full sha256; some lists (MinIO's) do not state the checksum algorithms."""
    kept = ["".join(one.texts) for one in row.all("ChecksumAlgorithm")]
    return not kept or ("SHA256" in kept and row.one("ChecksumType") != "COMPOSITE")


async def _headed(place: FileHost, key: str) -> ListedFile:
    """Return an object, with its sha256 if the store has one."""
    what = f"object {key}"
    found = await place.whole(
        "HEAD", _url(place, key), bytes_max=0, what=what, headers={"X-Amz-Checksum-Mode": "ENABLED"}
    )
    if found.status != 200:
        raise await _refusal(place, key, found)
    etag, size = found.headers.get("ETag", ""), found.headers.get("Content-Length", "")
    if not _ETAG.fullmatch(etag) or not _SIZE.fullmatch(size):
        raise RegistryError(f"{place.said}: {what}: states no ETag or no size")
    return ListedFile(key, int(size), f"{etag}\0{_sha256(found)}")


def _sha256(found: CompleteResponse) -> str:
    """Return the sha256 of the whole object; a multipart checksum of checksums is not usable."""
    if found.headers.get("X-Amz-Checksum-Type", "FULL_OBJECT") != "FULL_OBJECT":
        return ""
    try:
        digest = base64.b64decode(found.headers.get("X-Amz-Checksum-Sha256", ""), validate=True)
    except binascii.Error:
        return ""
    return f"sha256:{digest.hex()}" if len(digest) == 32 else ""


def _url(place: FileHost, key: str) -> URL:
    return place.url(encode_uri(key, path=True))


def _explaining(region: str, *, signed: bool) -> Explain:
    """Explain S3's error codes, which HEAD responses lack. `region`: the region used in requests."""

    def explained(status: int, headers: Mapping[str, str], body: bytes) -> str:
        try:
            error = xml.parse_xml(body) if body else Element("")
        except BadXmlError:
            error = Element("")
        said, lies = error.one("Code"), headers.get("X-Amz-Bucket-Region") or error.one("Region")
        code = said if _CODE.fullmatch(said) else ""
        # Some services state their region in every response, so the status is checked, too.
        if status in {301, 307, 400} and _REGION.fullmatch(lies) and lies != region:
            return f"the bucket is in another region: set AWS_REGION={lies}"
        if code in _MEANINGS:
            return f"{_MEANINGS[code]} ({code})"
        if status in {401, 403}:
            who = "the keys (AWS_ACCESS_KEY_ID, ~/.aws/credentials)" if signed else "a caller without keys"
            return f"{who} may not read it{f' ({code})' if code else ''}"
        return code

    return explained
