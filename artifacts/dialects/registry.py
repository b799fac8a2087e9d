"""All dialects, in the order in which a manifest is shown to them: the first that knows it reads it. Pure.

Owns the order only: those whose config tells, then those whose layers do (Docker's models may have ModelPack's layers,
Ollama's config is an image's), then images, then what has nothing but titles.
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
