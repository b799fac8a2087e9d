"""All dialects in matching order: the first that recognizes a manifest interprets it. Pure.

First the dialects recognized by the config, then those recognized by the layers (Docker's models may have ModelPack
layers, Ollama's config is that of an image), then images, then layers that only have titles.
"""

from __future__ import annotations

from artifacts.dialects import docker, images, kitops, modelpack, ollama, oras
from artifacts.dialects.base import Dialect

DIALECTS: tuple[Dialect, ...] = (
    docker.DIALECT,
    kitops.DIALECT,
    modelpack.DIALECT,
    ollama.DIALECT,
    images.DIALECT,
    oras.DIALECT,
)
