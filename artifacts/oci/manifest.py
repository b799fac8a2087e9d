"""Manifests and indexes as a registry sends them: bytes -> what they say, or one line why they are not taken. Pure.

Owns what a document of a registry must be before it means anything: at most 4 MiB, the bytes that its digest says, and
either a manifest or an index and never both, whatever its Content-Type says (CVE-2021-41190). What its layers mean is
`artifacts.dialects.contents`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from artifacts import digest as digests
from artifacts.digest import Digest
from artifacts.oci import descriptor, strict_json
from artifacts.oci.descriptor import BadManifestError, Descriptor

MANIFEST_BYTES_MAX = 4 << 20
CONFIG_BYTES_MAX = 4 << 20
LAYERS_MAX = 16_384
"""Ollama has one layer for each tensor; 4 MiB hold not many more."""
ENTRIES_MAX = 1024
"""Of an index."""

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFESTS, INDEXES = frozenset({OCI_MANIFEST, DOCKER_MANIFEST}), frozenset({OCI_INDEX, DOCKER_INDEX})
ACCEPTED = (OCI_MANIFEST, DOCKER_MANIFEST, OCI_INDEX, DOCKER_INDEX)
"""What is asked for, the liked first."""


class Manifest(NamedTuple):
    """One artifact or image."""

    media_type: str
    artifact_type: str
    """As it is said, else empty: old registries drop it."""
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]
    subject: Descriptor | None = None


class Index(NamedTuple):
    """Several of them, of which one is to be chosen (`artifacts.oci.platforms`)."""

    media_type: str
    artifact_type: str
    entries: tuple[Descriptor, ...]
    annotations: Mapping[str, str]


def parse(content: bytes, *, content_type: str = "", digest: Digest | None = None) -> Manifest | Index:
    """What the bytes are. `digest`: theirs; `content_type`: what the registry says. Raises BadManifestError."""
    if len(content) > MANIFEST_BYTES_MAX:
        raise BadManifestError(f"the manifest is larger than {MANIFEST_BYTES_MAX >> 20} MiB")
    if digest is not None and not digests.matches(digest, content):
        raise BadManifestError(f"the manifest is not the one that was asked for: its bytes are not {digest}")
    try:
        keys = strict_json.decode_object(content, MANIFEST_BYTES_MAX)
    except strict_json.BadJsonError as error:
        raise BadManifestError(f"the manifest is {error}") from None
    version = keys.get("schemaVersion")
    if version != 2 or not isinstance(version, int):
        raise BadManifestError("the manifest's schemaVersion is not 2")
    kind = _kind(keys, content_type)
    artifact_type = descriptor.artifact_type(keys)
    notes = descriptor.notes(keys.get("annotations"), "annotations")
    if kind in INDEXES:
        return Index(kind, artifact_type, _list(keys, "manifests", ENTRIES_MAX), notes)
    config = descriptor.read(keys.get("config"), "config")
    if config.size > CONFIG_BYTES_MAX:
        raise BadManifestError(f"config.size is above {CONFIG_BYTES_MAX >> 20} MiB")
    subject = descriptor.read(keys["subject"], "subject") if keys.get("subject") is not None else None
    return Manifest(kind, artifact_type, config, _list(keys, "layers", LAYERS_MAX), notes, subject)


def _kind(keys: Mapping[str, object], content_type: str) -> str:
    """Its media type, where what it says, what the registry says and what is in it agree."""
    declared = content_type.partition(";")[0].strip()
    said = keys.get("mediaType", declared)
    if not isinstance(said, str):
        raise BadManifestError("the manifest's mediaType is no text")
    if said and declared and declared not in {said, "application/json", "application/octet-stream", "text/plain"}:
        raise BadManifestError(f"the manifest says it is {said[:127]!r}, its Content-Type {declared[:127]!r}")
    has = {key for key in ("layers", "manifests", "config", "fsLayers", "blobs") if key in keys}
    if "manifests" in has and len(has) > 1:
        raise BadManifestError(
            "the manifest is both a manifest and an index: it has manifests and " + min(has - {"manifests"})
        )
    if has & {"fsLayers", "blobs"}:
        raise BadManifestError("the manifest is of a form that is no longer in use; push it with a current tool")
    shape = INDEXES if "manifests" in has else MANIFESTS
    if said in MANIFESTS | INDEXES:
        if said not in shape:
            raise BadManifestError(f"the manifest says it is {said}, and is not of that form")
        return said
    if "mediaType" in keys:
        raise BadManifestError(f"{said[:127]!r} is no media type of a manifest or an index")
    return OCI_INDEX if shape is INDEXES else OCI_MANIFEST


def _list(keys: Mapping[str, object], name: str, most: int) -> tuple[Descriptor, ...]:
    found = keys.get(name)
    if not isinstance(found, list):
        raise BadManifestError(f"{name} is missing or no list")
    if len(found) > most:
        raise BadManifestError(f"{name} has more than {most} entries")
    return tuple(descriptor.read(one, f"{name}[{position}]") for position, one in enumerate(found))
