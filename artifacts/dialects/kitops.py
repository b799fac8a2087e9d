"""KitOps ModelKits (`vnd.kitops.modelkit`). Pure.

Source: https://github.com/kitops-ml/kitops, pkg/lib/constants/mediaType.go and pkg/cmd/unpack/unpack.go. Every layer is
an archive, and the config is the Kitfile as JSON. If an entry has a digest, the names in its archive are relative to
the kit's root; in older kits they are relative to the folder of the entry's path.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import cast

from artifacts.dialects.base import Dialect, Encoding, Reading, Said, config_object
from artifacts.file_kinds import Role
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Manifest

NAME = "KitOps ModelKit"
CONFIG = "application/vnd.kitops.modelkit.config.v1+json"
_LAYER = re.compile(
    r"application/vnd\.kitops\.modelkit\.(model|modelpart|dataset|code|docs)\.v1\.(tar(?:\+(?:gzip|zstd))?)"
)
_ROLES: dict[str, Role] = {"model": "mixed", "modelpart": "mixed", "dataset": "dataset", "code": "code", "docs": "doc"}
"""The `model` of a kit may be a folder with files of all kinds."""

Keys = dict[str, object]


def _knows(of: Manifest) -> bool:
    return of.config.media_type == CONFIG


def _read(of: Manifest, config: bytes | None) -> Reading:
    kitfile = config_object(config) if config is not None else {}
    entries = _entries(kitfile)
    layers = [_layer(one, entries) for one in of.layers]
    model = kitfile.get("model")
    elsewhere = model.get("path") if isinstance(model, dict) else None
    kinds = {found[1] for one in of.layers if (found := _LAYER.fullmatch(one.media_type)) is not None}
    problem = ""
    if elsewhere and "model" not in kinds:
        problem = f"its Kitfile refers to a model in another place ({str(elsewhere)[:120]!r}); use that ModelKit itself"
    return Reading(NAME, layers, problem=problem)


def _layer(one: Descriptor, entries: dict[str, list[Keys]]) -> Said:
    found = _LAYER.fullmatch(one.media_type)
    if found is None:
        return Said(refusal=f"{one.media_type} is not a layer type of ModelKits")
    kind, encoding = found[1], cast("Encoding", found[2])
    entry = entries[kind].pop(0) if entries[kind] else {}
    written = entry.get("path")
    path = _plain(written) if isinstance(written, str) else ""
    said = Said(_ROLES[kind], encoding, path)
    if "digest" not in entry:
        return said._replace(under=path.rpartition("/")[0])
    other = entry["digest"] != one.digest
    return said._replace(refusal="its Kitfile states another digest for it") if other else said


def _entries(kitfile: Keys) -> dict[str, list[Keys]]:
    """Return the Kitfile's entries by layer kind, in order."""
    found: dict[str, list[Keys]] = defaultdict(list)
    model = kitfile.get("model")
    if isinstance(model, dict):
        found["model"] = [model]
        found["modelpart"] = _objects(model.get("parts"))
    for kind, key in (("dataset", "datasets"), ("code", "code"), ("docs", "docs")):
        found[kind] = _objects(kitfile.get(key))
    return found


def _objects(found: object) -> list[Keys]:
    return [cast("Keys", one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _plain(path: str) -> str:
    """Normalize a Kitfile path such as `./models/` or `.`."""
    return "" if path in {".", "./"} else path.removeprefix("./").removesuffix("/")


DIALECT = Dialect(_knows, _read)
