"""Layers that only have titles: generic ORAS artifacts, including OMLMD's. Pure.

Sources: https://oras.land (titles, and folders as archives marked for unpacking), https://github.com/containers/omlmd.
The title is the path, and only the name determines the type of a file.
"""

from __future__ import annotations

from artifacts.dialects.base import Dialect, Encoding, Reading, Said, read_layer_path
from artifacts.file_kinds import Role
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Manifest

OMLMD, ORAS = "OMLMD", "ORAS (files by their titles)"
UNPACK = "io.deis.oras.content.unpack"
_OMLMD: dict[str, Role | None] = {
    "application/x-mlmodel": None,
    "application/x-artifact": None,
    "application/x-config": "config",
}
_ARCHIVES: dict[str, Encoding] = {
    "application/vnd.oci.image.layer.v1.tar": "tar",
    "application/vnd.oci.image.layer.v1.tar+gzip": "tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "tar+zstd",
}
_FOLDERS = frozenset(_ARCHIVES) - {"application/vnd.oci.image.layer.v1.tar"}
"""Media types that oras-py gives to folders without a mark. It labels every file as plain tar, which is wrong."""


def _knows(of: Manifest) -> bool:
    """Match if any layer has a name; this dialect is tried last."""
    return any(read_layer_path(one)[0] for one in of.layers)


def _read(of: Manifest, _: bytes | None) -> Reading:
    omlmd = any(one.media_type == "application/x-mlmodel" for one in of.layers) or (
        of.config.media_type == "application/x-config"
    )
    return Reading(OMLMD if omlmd else ORAS, [_layer(one) for one in of.layers])


def _layer(one: Descriptor) -> Said:
    path, note = read_layer_path(one)
    if not path:
        return Said(refusal="it has no title, so its purpose is unknown")
    marked = one.annotations.get(UNPACK) == "true"
    file_like = path.casefold().endswith((".tar", ".tar.gz", ".tgz", ".tar.zst"))
    if marked or (one.media_type in _FOLDERS and not file_like and "." not in path.rpartition("/")[2]):
        return Said("mixed", _ARCHIVES.get(one.media_type, "tar+gzip"), path, note=note)
    return Said(_OMLMD.get(one.media_type), path=path, note=note)


DIALECT = Dialect(_knows, _read)
