"""Interface of a dialect: it recognizes its manifests and interprets each of their layers. Pure.

A dialect only translates; it neither checks nor accepts files. `artifacts.dialects.artifact_contents` and
`artifacts.file_policy` do the checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from artifacts.file_kinds import Role
from artifacts.oci import manifest, strict_json
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import Manifest

Encoding = Literal["raw", "tar", "tar+gzip", "tar+zstd"]
"""Encoding of a layer: a plain file or an archive."""
TITLE = "org.opencontainers.image.title"
FILEPATH, FILEPATH_LEGACY = "org.cncf.model.filepath", "org.cnai.model.filepath"


class Said(NamedTuple):
    """A dialect's interpretation of a layer."""

    role: Role | None = None
    """None: the file name decides."""
    encoding: Encoding = "raw"
    path: str = ""
    """As written in the manifest. For an archive: the file or folder in it, or empty if the manifest does not name it.
    """
    form: str = ""
    """Format of weights, if the media type names it: `gguf`, `safetensors`."""
    under: str = ""
    """For an archive: the folder below which its members are extracted."""
    note: str = ""
    """Remark on the interpretation for users."""
    refusal: str = ""
    """Why the dialect cannot interpret the layer."""


class Reading(NamedTuple):
    """A dialect's interpretation of a whole manifest."""

    dialect: str
    layers: Sequence[Said]
    """One entry per layer."""
    roots: Sequence[str] = ("",)
    """Candidate model folders in the archives; the first that exists is used, and content outside it is ignored."""
    problem: str = ""
    """Why the manifest as a whole is not an acceptable model."""


class Dialect(NamedTuple):
    """One way to represent models in manifests."""

    knows: Callable[[Manifest], bool]
    read: Callable[[Manifest, bytes | None], Reading]
    """The second argument is the manifest's config, or None if it is not available."""


def read_layer_path(layer: Descriptor) -> tuple[str, str]:
    """Return the path from the annotations (filepath before title), and a note if they disagree."""
    given = [layer.annotations[name] for name in (FILEPATH, FILEPATH_LEGACY, TITLE) if name in layer.annotations]
    others = [one for one in given[1:] if one not in {given[0], given[0].rpartition("/")[2]}]
    note = f"its filepath takes precedence over its other name {others[0][:80]!r}" if others else ""
    return (given[0] if given else ""), note


def config_object(config: bytes) -> dict[str, object]:
    """Decode the config as a JSON object. Raises BadManifestError."""
    try:
        return strict_json.decode_object(config, manifest.CONFIG_BYTES_MAX)
    except strict_json.BadJsonError as error:
        raise BadManifestError(f"the config is {error}") from None


def number_duplicate_names(names: Iterable[str]) -> list[str]:
    """Number repeated file names: the second `LICENSE` becomes `LICENSE-2`.

    Weights are numbered like the parts of a split model in llama.cpp. Empty names stay empty.
    """
    listed = list(names)
    many, seen = Counter(listed), Counter[str]()
    found = []
    for name in listed:
        seen[name] += 1
        stem, dot, suffix = name.rpartition(".")
        if not name or many[name] == 1:
            found.append(name)
        elif stem == "model" and suffix in {"gguf", "safetensors"}:
            found.append(f"{stem}-{seen[name]:05}-of-{many[name]:05}.{suffix}")
        else:
            first = seen[name] == 1
            found.append(name if first else f"{stem}-{seen[name]}.{suffix}" if dot else f"{name}-{seen[name]}")
    return found
