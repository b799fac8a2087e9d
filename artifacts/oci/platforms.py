"""Which manifest of an index is the model's: a model artifact first, else the image for this platform. Pure.

Owns that choice, and how deep indexes may lie in each other. An index may hold a model artifact and an image over the
same blobs, images for several platforms, and attestations, which are no images at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from artifacts.digest import Digest
from artifacts.oci.descriptor import BadManifestError, Descriptor, Platform
from artifacts.oci.manifest import INDEXES, Index

INDEX_DEPTH_MAX = 3
MODEL_TYPES = frozenset({"application/vnd.cncf.model.manifest.v1+json", "application/vnd.cnai.model.manifest.v1+json"})
MODEL_ANNOTATIONS = ("org.cncf.model.model", "org.cnai.model.model")
"""ramalama's, at the entry that is the model."""
_ATTESTATION = ("vnd.docker.reference.type", "attestation-manifest")


def choose(index: Index, platform: Platform, way: Sequence[Digest] = (), *, images: bool = False) -> Descriptor:
    """The entry to go on with. `way`: the digests of the indexes that led here. `images`: an image is liked better, as
    a container runtime takes it. Raises BadManifestError.
    """
    if len(way) >= INDEX_DEPTH_MAX:
        raise BadManifestError(f"indexes lie in indexes deeper than {INDEX_DEPTH_MAX}")
    entries = [one for one in index.entries if one.annotations.get(_ATTESTATION[0]) != _ATTESTATION[1]]
    models = [one for one in entries if _is_model(one)]
    if images and len(models) < len(entries):
        entries, models = [one for one in entries if one not in models], []
    fitting = [one for one in models or entries if _fits(one.platform, platform)]
    exact = [one for one in fitting if one.platform is not None and one.platform.variant == platform.variant]
    found = next(iter(exact or fitting), None)
    if found is None and len(models) == 1:
        found = models[0]  # weights are for every platform, whatever their image says
    if found is None:
        there = sorted({str(one.platform) for one in entries if one.platform is not None})[:8]
        raise BadManifestError(f"the index has nothing for {platform}; it has {', '.join(there) or 'no entries'}"[:400])
    if found.media_type in INDEXES and found.digest in way:
        raise BadManifestError(f"the index contains itself: {found.digest}")
    return found


def _is_model(entry: Descriptor) -> bool:
    marked = any(entry.annotations.get(name) == "true" for name in MODEL_ANNOTATIONS)
    return marked or entry.artifact_type in MODEL_TYPES


def _fits(of: Platform | None, wanted: Platform) -> bool:
    """One that names none is for all."""
    return of is None or not of.os or (of.os, of.architecture) == (wanted.os, wanted.architecture)
