"""Ollama models (`vnd.ollama.image`). Pure.

Source: https://github.com/ollama/ollama, server/images.go and manifest/layer.go. Layers have no paths; the file names
are chosen here. Newer models have one layer per tensor, each with a `name`.
"""

from __future__ import annotations

from artifacts.dialects.base import Dialect, Reading, Said, number_duplicate_names
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Manifest

NAME = "Ollama"
_BEGIN = "application/vnd.ollama.image."
_LAYERS = {
    "model": Said("weight", path="model.gguf", form="gguf"),
    "projector": Said("projector", path="mmproj.gguf", form="gguf"),
    "adapter": Said("adapter", path="adapter.gguf", form="gguf"),
    "draft": Said("draft", path="draft.gguf", form="gguf"),
    "template": Said("template", path="template"),
    "prompt": Said("template", path="template"),
    "system": Said("template", path="system"),
    "params": Said("config", path="params.json"),
    "messages": Said("config", path="messages.json"),
    "license": Said("license", path="LICENSE"),
}
_NAMED = {"json": "config", "tensor": "weight"}


def _knows(of: Manifest) -> bool:
    """Match by the layers, since the config is a Docker image config."""
    return any(one.media_type.startswith(_BEGIN) for one in of.layers)


def _read(of: Manifest, _: bytes | None) -> Reading:
    said = [_layer(one) for one in of.layers]
    paths = number_duplicate_names("" if one.name else each.path for one, each in zip(of.layers, said, strict=True))
    return Reading(NAME, [each._replace(path=path or each.path) for each, path in zip(said, paths, strict=True)])


def _layer(one: Descriptor) -> Said:
    kind = one.media_type.removeprefix(_BEGIN) if one.media_type.startswith(_BEGIN) else ""
    if kind == "json" and one.name:
        return Said("config", path=one.name)
    if kind == "tensor" and one.name:
        return Said("weight", path=f"{one.name}.safetensors", form="safetensors")
    if kind in _NAMED:
        return Said(refusal=f"a layer {one.media_type} needs a name, and has none")
    if kind == "embed":
        return Said(refusal="embedded vectors have a format that Ollama no longer supports")
    return _LAYERS.get(kind) or Said(refusal=f"{one.media_type} is not a layer type of Ollama's models")


DIALECT = Dialect(_knows, _read)
