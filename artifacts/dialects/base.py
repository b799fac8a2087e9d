"""What a dialect is: it knows its manifests, and says of each of their layers what it is meant to be. Pure.

Owns the seam. A dialect only translates: nothing that it says is checked yet, and it lets nothing in. That is
`artifacts.dialects.contents`' and `artifacts.file_policy`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from artifacts.files import Role
from artifacts.oci import manifest, strict_json
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import Manifest

Encoding = Literal["raw", "tar", "tar+gzip", "tar+zstd"]
"""How a layer holds what it holds: as it is, or as an archive."""
TITLE = "org.opencontainers.image.title"
FILEPATH, FILEPATH_LEGACY = "org.cncf.model.filepath", "org.cnai.model.filepath"


class Said(NamedTuple):
    """What a layer is meant to be."""

    role: Role | None = None
    """None: its name decides."""
    encoding: Encoding = "raw"
    path: str = ""
    """As it was written. Of an archive: the file or folder in it; empty where only the archive knows."""
    form: str = ""
    """Of weights, where the media type says it: `gguf`, `safetensors`."""
    under: str = ""
    """Of an archive: the folder that its names are laid under."""
    note: str = ""
    """What a person should know of this reading."""
    refusal: str = ""
    """Why this dialect has no meaning for it."""


class Reading(NamedTuple):
    """A whole manifest, as a dialect has it."""

    dialect: str
    layers: Sequence[Said]
    """One for each layer."""
    roots: Sequence[str] = ("",)
    """Folders in the archives; the first that is there is the model's, and what lies beside it is passed by."""
    problem: str = ""
    """Why the whole is no model that can be taken."""


class Dialect(NamedTuple):
    """One way to write models into manifests."""

    knows: Callable[[Manifest], bool]
    read: Callable[[Manifest, bytes | None], Reading]
    """The second: the bytes of the manifest's config, where they are at hand."""


def read_layer_path(layer: Descriptor) -> tuple[str, str]:
    """The path that annotations give, and a note where they disagree: the model's own one goes before the title."""
    given = [layer.annotations[name] for name in (FILEPATH, FILEPATH_LEGACY, TITLE) if name in layer.annotations]
    others = [one for one in given[1:] if one not in {given[0], given[0].rpartition("/")[2]}]
    note = f"its filepath goes before {others[0][:80]!r}, which it is called elsewhere" if others else ""
    return (given[0] if given else ""), note


def config_object(config: bytes) -> dict[str, object]:
    """The config as a JSON object. Raises BadManifestError."""
    try:
        return strict_json.decode_object(config, manifest.CONFIG_BYTES_MAX)
    except strict_json.BadJsonError as error:
        raise BadManifestError(f"the config is {error}") from None


def number_duplicate_names(names: Iterable[str]) -> list[str]:
    """Names of files that have none of their own: the second `LICENSE` is `LICENSE-2`, of weights as llama.cpp splits.

    Empty names stay so.
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
