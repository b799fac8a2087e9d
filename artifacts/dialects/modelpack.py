"""CNCF ModelPack (`vnd.cncf.model`), its older name (`vnd.cnai.model`), and Docker's extensions. Pure.

Specification: https://github.com/modelpack/model-spec (docs/spec.md, docs/annotations.md). Docker Model Runner uses
media types of weights that the specification does not have (`weight.v1.gguf`); they are accepted by their prefix.
Artifacts of ramalama have this artifact type, but podman guesses their layer types; there the file name decides.
"""

from __future__ import annotations

import re

from artifacts.dialects.base import Dialect, Encoding, Reading, Said, read_layer_path
from artifacts.file_kinds import Role
from artifacts.oci import strict_json
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Manifest

CURRENT, LEGACY = "ModelPack", "ModelPack by its older name (cnai)"
_MANIFEST = re.compile(r"application/vnd\.(cncf|cnai)\.model\.(?:manifest|config)\.v1\+json")
_LAYER = re.compile(
    r"application/vnd\.(?:cncf|cnai)\.model\.(weight|weight\.config|doc|code|dataset|layer)\.v1\.([a-z0-9]+(?:\+[a-z0-9]+)?)"
)
_ROLES: dict[str, Role] = {
    "weight": "weight",
    "weight.config": "config",
    "doc": "doc",
    "code": "code",
    "dataset": "dataset",
    "layer": "mixed",
}
_ENCODINGS: dict[str, Encoding] = {"raw": "raw", "tar": "tar", "tar+gzip": "tar+gzip", "tar+zstd": "tar+zstd"}
_METADATA = ("org.cncf.model.file.metadata+json", "org.cnai.model.file.metadata+json")
_REGULAR, _FOLDER = frozenset({0, ord("0")}), frozenset({ord("5")})
_METADATA_BYTES_MAX = 16 << 10


def _knows(of: Manifest) -> bool:
    """Match by artifactType, or, since old registries drop it, by the media type of the config or a layer."""
    said = (of.artifact_type, of.config.media_type)
    return any(_MANIFEST.fullmatch(one) for one in said) or any(_LAYER.fullmatch(one.media_type) for one in of.layers)


def _read(of: Manifest, _: bytes | None) -> Reading:
    said = (of.artifact_type, of.config.media_type, *(one.media_type for one in of.layers))
    legacy = any(one.startswith("application/vnd.cnai.") for one in said)
    return Reading(LEGACY if legacy else CURRENT, [read_layer(one) for one in of.layers])


def read_layer(one: Descriptor) -> Said:
    """Interpret one layer."""
    found = _LAYER.fullmatch(one.media_type)
    path, note = read_layer_path(one)
    if found is None and path and not one.media_type.startswith("application/vnd."):
        said = Said(path=path, note=note or "its media type is generic, so its role is derived from its file name")
        return said._replace(refusal=_metadata_refusal(one, said.encoding))
    if found is None:
        return Said(refusal=f"{one.media_type} is not a layer type of ModelPack")
    kind, ending = found.groups()
    if ending in _ENCODINGS:
        said = Said(_ROLES[kind], _ENCODINGS[ending], path, note=note)
        return said._replace(refusal=_metadata_refusal(one, said.encoding))
    if kind == "weight" and "+" not in ending:
        said = Said("weight", "raw", path or f"model.{ending}", form=ending, note=note)
        return said._replace(refusal=_metadata_refusal(one, said.encoding))
    return Said(refusal=f"{ending} is not a known encoding")


def _metadata_refusal(one: Descriptor, encoding: Encoding) -> str:
    """Return why the layer's file metadata contradict the layer; empty if they do not or are absent."""
    text = next((one.annotations[name] for name in _METADATA if name in one.annotations), None)
    if text is None:
        return ""
    try:
        found = strict_json.decode_object(text.encode(errors="surrogatepass"), _METADATA_BYTES_MAX)
    except strict_json.BadJsonError as error:
        return f"its file's metadata are {error}"
    flag, size = found.get("typeflag", 0), found.get("size")
    kinds = _REGULAR if encoding == "raw" else _REGULAR | _FOLDER
    if not isinstance(flag, int) or flag not in kinds:
        return "its metadata describe no regular file"
    if encoding == "raw" and size is not None and (not isinstance(size, int) or size != one.size):
        return "its metadata state another size than the layer's"
    return ""


DIALECT = Dialect(_knows, _read)
