"""Descriptors: a manifest's or index's entry for one blob, validated before use. Pure.

Checks the types and limits of all members: a size is a bounded integer, a digest passes `artifacts.digest`. `urls` and
`data` are ignored: content comes only from the registry that was asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, cast

from artifacts.digest import BadDigestError, Digest, parse_digest

BLOB_BYTES_MAX = 1 << 44
"""16 TiB: more than any model, and small enough that sums of sizes are safe."""
ANNOTATIONS_MAX = 256
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}")
_PLATFORM = re.compile(r"[A-Za-z0-9._-]{0,64}")


class BadManifestError(ValueError):
    """The manifest or index is rejected; the message is one line that names the member and the fault."""


class Platform(NamedTuple):
    """Platform of an image."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


class Descriptor(NamedTuple):
    """One blob."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str]
    artifact_type: str = ""
    platform: Platform | None = None
    name: str = ""
    """Layer name; only in Ollama's manifests."""


def read_descriptor(found: object, at: str) -> Descriptor:
    """Parse the descriptor; `at` is its path in the document, for errors. Raises BadManifestError."""
    if not isinstance(found, dict):
        raise BadManifestError(f"{at} is not an object")
    keys = cast("dict[str, object]", found)
    try:
        digest = parse_digest(keys.get("digest"))
    except BadDigestError as error:
        raise BadManifestError(f"{at}.digest: {error}") from None
    return Descriptor(
        media_type=read_media_type(keys.get("mediaType"), f"{at}.mediaType"),
        digest=digest,
        size=_size(keys.get("size"), f"{at}.size"),
        annotations=read_annotations(keys.get("annotations"), f"{at}.annotations"),
        artifact_type=read_artifact_type(keys, f"{at}."),
        platform=_platform(keys.get("platform"), f"{at}.platform"),
        name=_text(keys.get("name", ""), f"{at}.name"),
    )


def read_media_type(found: object, at: str) -> str:
    """Parse a media type without parameters. Raises BadManifestError."""
    if not isinstance(found, str) or not _MEDIA_TYPE.fullmatch(found):
        raise BadManifestError(f"{at} is missing or not a media type")
    return found


def read_artifact_type(keys: Mapping[str, object], at: str = "") -> str:
    """Return the artifactType; empty if it is absent."""
    said = keys.get("artifactType", "")
    return "" if said == "" else read_media_type(said, f"{at}artifactType")


def read_annotations(found: object, at: str) -> Mapping[str, str]:
    """Parse annotations; empty if they are absent. Raises BadManifestError."""
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadManifestError(f"{at} is not an object of texts")
    if len(found) > ANNOTATIONS_MAX:
        raise BadManifestError(f"{at} has more than {ANNOTATIONS_MAX} entries")
    return cast("dict[str, str]", found)


def _size(found: object, at: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= BLOB_BYTES_MAX:
        raise BadManifestError(f"{at} is not a whole number of bytes from 0 to {BLOB_BYTES_MAX}")
    return found


def _platform(found: object, at: str) -> Platform | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise BadManifestError(f"{at} is not an object")
    of = [_text(found.get(key, ""), f"{at}.{key}") for key in Platform._fields]
    if not all(_PLATFORM.fullmatch(each) for each in of):
        raise BadManifestError(f"{at} may only have short words of letters, digits, . _ and -")
    return Platform(*of)


def _text(found: object, at: str) -> str:
    if not isinstance(found, str):
        raise BadManifestError(f"{at} is not a text")
    return found
