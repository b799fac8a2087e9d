"""Docker Model Runner's native models (`vnd.docker.ai`). Pure.

Source: https://github.com/docker/model-runner, pkg/distribution/types/config.go. Two config versions are supported; in
the first, layers may have no names, and weights are in the order of their parts.
"""

from __future__ import annotations

import re

from artifacts.dialects import modelpack
from artifacts.dialects.base import Dialect, Reading, Said, number_duplicate_names, read_layer_path
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Manifest

NAME = "Docker Model Runner"
_CONFIG = re.compile(r"application/vnd\.docker\.ai\.model\.config\.(v[^+]*)\+json")
_VERSIONS = frozenset({"v0.1", "v0.2"})
_AI = "application/vnd.docker.ai."
_LAYERS = {
    "gguf.v3": Said("weight", path="model.gguf", form="gguf"),
    "gguf.v3.lora": Said("adapter", path="adapter.gguf", form="gguf"),
    "gguf.v3.mmproj": Said("projector", path="mmproj.gguf", form="gguf"),
    "mmproj": Said("projector", path="mmproj.gguf", form="gguf"),
    "safetensors": Said("weight", path="model.safetensors", form="safetensors"),
    "dduf": Said("weight", path="model.dduf", form="dduf"),
    "license": Said("license", path="LICENSE"),
    "chat.template.jinja": Said("template", path="chat_template.jinja"),
    "vllm.config.tar": Said("config", "tar"),
    "dir.tar": Said("mixed", "tar"),
    "model.file": Said(),
}
"""Interpretations by the media type after the common prefix. The path is used for layers that state none."""


def _knows(of: Manifest) -> bool:
    return bool(_CONFIG.fullmatch(of.config.media_type))


def _read(of: Manifest, _: bytes | None) -> Reading:
    found = _CONFIG.fullmatch(of.config.media_type)
    version = found[1] if found is not None else ""
    problem = "" if version in _VERSIONS else f"its config has version {version}; supported are v0.1 and v0.2"
    said = [_layer(one) for one in of.layers]
    paths = number_duplicate_names(
        "" if read_layer_path(one)[0] else each.path for one, each in zip(of.layers, said, strict=True)
    )
    layers = [
        each._replace(path=path or read_layer_path(one)[0], note=read_layer_path(one)[1])
        for one, each, path in zip(of.layers, said, paths, strict=True)
    ]
    return Reading(NAME, layers, problem=problem)


def _layer(one: Descriptor) -> Said:
    if one.media_type.startswith("application/vnd.cncf.model."):
        return modelpack.read_layer(one)
    known = _LAYERS.get(one.media_type.removeprefix(_AI)) if one.media_type.startswith(_AI) else None
    return known or Said(refusal=f"{one.media_type} is not a layer type of Docker's models")


DIALECT = Dialect(_knows, _read)
