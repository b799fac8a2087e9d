"""Parses manifests and indexes (OCI image specification 1.1, Docker schema 2), and selects a manifest of an index.

A document has at most 4 MiB, matches the requested digest, and is either a manifest or an index, never both, whatever
its Content-Type says (CVE-2021-41190). `artifacts.dialects.artifact_contents` interprets the layers.

An index may list a model artifact and an image over the same blobs, images for several platforms, and attestations. The
model artifact is preferred, then the image for this platform; attestations are ignored. Nesting is limited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from artifacts.digest import Digest, is_digest_of
from artifacts.oci import descriptor, strict_json
from artifacts.oci.descriptor import BadManifestError, Descriptor, Platform

MANIFEST_BYTES_MAX = 4 << 20
CONFIG_BYTES_MAX = 4 << 20
LAYERS_MAX = 16_384
"""Ollama has one layer per tensor; a 4 MiB manifest holds not many more."""
ENTRIES_MAX = 1024
"""Maximum entries of an index."""

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFESTS, INDEXES = frozenset({OCI_MANIFEST, DOCKER_MANIFEST}), frozenset({OCI_INDEX, DOCKER_INDEX})


class Manifest(NamedTuple):
    """One artifact or image."""

    media_type: str
    artifact_type: str
    """Empty if it is absent: old registries drop it."""
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]
    subject: Descriptor | None = None


class Index(NamedTuple):
    """A list of manifests, of which `select_manifest` selects one."""

    media_type: str
    artifact_type: str
    entries: tuple[Descriptor, ...]
    annotations: Mapping[str, str]


def parse_manifest(content: bytes, *, content_type: str = "", digest: Digest | None = None) -> Manifest | Index:
    """Parse a manifest or index. `digest`: expected; `content_type`: as sent. Raises BadManifestError."""
    if len(content) > MANIFEST_BYTES_MAX:
        raise BadManifestError(f"the manifest is larger than {MANIFEST_BYTES_MAX >> 20} MiB")
    if digest is not None and not is_digest_of(digest, content):
        raise BadManifestError(f"the manifest is not the requested one: its bytes do not match {digest}")
    try:
        keys = strict_json.decode_object(content, MANIFEST_BYTES_MAX)
    except strict_json.BadJsonError as error:
        raise BadManifestError(f"the manifest is {error}") from None
    version = keys.get("schemaVersion")
    if version != 2 or not isinstance(version, int):
        raise BadManifestError("the manifest's schemaVersion is not 2")
    kind = _kind(keys, content_type)
    artifact_type = descriptor.read_artifact_type(keys)
    notes = descriptor.read_annotations(keys.get("annotations"), "annotations")
    if kind in INDEXES:
        return Index(kind, artifact_type, _list(keys, "manifests", ENTRIES_MAX), notes)
    config = descriptor.read_descriptor(keys.get("config"), "config")
    if config.size > CONFIG_BYTES_MAX:
        raise BadManifestError(f"config.size is above {CONFIG_BYTES_MAX >> 20} MiB")
    subject = descriptor.read_descriptor(keys["subject"], "subject") if keys.get("subject") is not None else None
    return Manifest(kind, artifact_type, config, _list(keys, "layers", LAYERS_MAX), notes, subject)


def _kind(keys: Mapping[str, object], content_type: str) -> str:
    """Return the media type if the document, the Content-Type and the members agree. Raises BadManifestError."""
    declared = content_type.partition(";")[0].strip()
    said = keys.get("mediaType", declared)
    if not isinstance(said, str):
        raise BadManifestError("the manifest's mediaType is not a text")
    if said and declared and declared not in {said, "application/json", "application/octet-stream", "text/plain"}:
        raise BadManifestError(f"the manifest's mediaType is {said[:127]!r}, its Content-Type {declared[:127]!r}")
    has = {key for key in ("layers", "manifests", "config", "fsLayers", "blobs") if key in keys}
    if "manifests" in has and len(has) > 1:
        raise BadManifestError(
            "the manifest is both a manifest and an index: it has manifests and " + min(has - {"manifests"})
        )
    if has & {"fsLayers", "blobs"}:
        raise BadManifestError("the manifest has an obsolete format; push it with a current tool")
    shape = INDEXES if "manifests" in has else MANIFESTS
    if said in MANIFESTS | INDEXES:
        if said not in shape:
            raise BadManifestError(f"the manifest's mediaType is {said}, but its content is not")
        return said
    if "mediaType" in keys:
        raise BadManifestError(f"{said[:127]!r} is not a media type of a manifest or an index")
    return OCI_INDEX if shape is INDEXES else OCI_MANIFEST


def _list(keys: Mapping[str, object], name: str, most: int) -> tuple[Descriptor, ...]:
    found = keys.get(name)
    if not isinstance(found, list):
        raise BadManifestError(f"{name} is missing or not a list")
    if len(found) > most:
        raise BadManifestError(f"{name} has more than {most} entries")
    return tuple(descriptor.read_descriptor(one, f"{name}[{position}]") for position, one in enumerate(found))


INDEX_DEPTH_MAX = 3
MODEL_TYPES = frozenset({"application/vnd.cncf.model.manifest.v1+json", "application/vnd.cnai.model.manifest.v1+json"})
MODEL_ANNOTATIONS = ("org.cncf.model.model", "org.cnai.model.model")
"""ramalama's annotations of the index entry that is the model."""
_ATTESTATION = ("vnd.docker.reference.type", "attestation-manifest")


def select_manifest(
    index: Index, platform: Platform, way: Sequence[Digest] = (), *, images: bool = False
) -> Descriptor:
    """Select the entry to follow. `way`: digests of the indexes that led here. `images`: prefer an image, as container
    runtimes do. Raises BadManifestError.
    """
    if len(way) >= INDEX_DEPTH_MAX:
        raise BadManifestError(f"indexes are nested deeper than {INDEX_DEPTH_MAX}")
    entries = [one for one in index.entries if one.annotations.get(_ATTESTATION[0]) != _ATTESTATION[1]]
    models = [one for one in entries if _is_model(one)]
    if images and len(models) < len(entries):
        entries, models = [one for one in entries if one not in models], []
    fitting = [one for one in models or entries if _fits(one.platform, platform)]
    exact = [one for one in fitting if one.platform is not None and one.platform.variant == platform.variant]
    found = next(iter(exact or fitting), None)
    if found is None and len(models) == 1:
        found = models[0]  # weights are independent of the platform, whatever their image says
    if found is None:
        there = sorted({str(one.platform) for one in entries if one.platform is not None})[:8]
        raise BadManifestError(f"the index has no entry for {platform}; it has {', '.join(there) or 'none'}"[:400])
    if found.media_type in INDEXES and found.digest in way:
        raise BadManifestError(f"the index contains itself: {found.digest}")
    return found


def _is_model(entry: Descriptor) -> bool:
    marked = any(entry.annotations.get(name) == "true" for name in MODEL_ANNOTATIONS)
    return marked or entry.artifact_type in MODEL_TYPES


def _fits(of: Platform | None, wanted: Platform) -> bool:
    """Whether an entry fits the platform; one without a platform always does."""
    return of is None or not of.os or (of.os, of.architecture) == (wanted.os, wanted.architecture)
