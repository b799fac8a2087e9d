"""Container images with a model in them: ramalama raw and car images, KServe modelcars, image volumes. Pure.

Sources: https://github.com/containers/ramalama, docs/ramalama-oci.5.md; KServe modelcars (weights below /models); the
OCI image specification. Layers are archives of a whole file system: only the model's folder is extracted, so that the
software of a car image never reaches a node.
"""

from __future__ import annotations

import re
from typing import cast

from artifacts.dialects.base import Dialect, Encoding, Reading, Said, config_object
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Manifest

MODELS = "models"
_CONFIGS = frozenset({"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"})
_LAYER = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.v1\.tar|docker\.image\.rootfs\.diff\.tar)(?:[+.](gzip|zstd))?"
)
_LABEL = "org.containers.type"
_LABELS = {"ai.image.model.raw": "ramalama image, raw", "ai.image.model.car": "ramalama image, car"}


def _knows(of: Manifest) -> bool:
    return of.config.media_type in _CONFIGS and any(_LAYER.fullmatch(one.media_type) for one in of.layers)


def _read(of: Manifest, config: bytes | None) -> Reading:
    label = _labels(config).get(_LABEL) if config is not None else None
    layers = [_layer(one) for one in of.layers]
    if isinstance(label, str) and label in _LABELS:
        return Reading(_LABELS[label], layers, (MODELS,))
    return Reading("image (modelcar or image volume)", layers, (MODELS, ""))


def _layer(one: Descriptor) -> Said:
    found = _LAYER.fullmatch(one.media_type)
    if found is None:
        return Said(refusal=f"{one.media_type} is not a layer type of images in a registry")
    return Said("mixed", cast("Encoding", f"tar+{found[1]}" if found[1] else "tar"))


def _labels(config: bytes) -> dict[str, object]:
    inside = config_object(config).get("config")
    labels = inside.get("Labels") if isinstance(inside, dict) else None
    return cast("dict[str, object]", labels) if isinstance(labels, dict) else {}


DIALECT = Dialect(_knows, _read)
