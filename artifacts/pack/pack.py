"""Packs models into artifacts: selects the files and builds the documents that describe them. Pure.

Each file is packed or left out with a reason; files that a pull would refuse are not packed. The documents are a
ModelPack manifest (https://github.com/modelpack/model-spec), an image manifest per platform over the same blobs (an
uncompressed archive is a valid layer of both), and their index. The same files give the same digests, since no times
and owners are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from artifacts import file_kinds, file_policy, safe_paths
from artifacts.archives.single_file_tar import MODE
from artifacts.dialects.base import FILEPATH, TITLE
from artifacts.digest import Digest, compute_digest
from artifacts.file_kinds import Role
from artifacts.oci.descriptor import Platform
from artifacts.oci.manifest import LAYERS_MAX, OCI_INDEX, OCI_MANIFEST

Kind = Literal["weight", "weight.config", "doc", "code", "dataset"]
"""Layer kinds of ModelPack."""
Form = Literal["modelpack", "modelpack-raw"]
"""`modelpack`: one archive per file, plus images over them; `modelpack-raw`: the files themselves."""
MODEL_MANIFEST = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG = "application/vnd.cncf.model.config.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar"
PLATFORMS = (Platform("linux", "amd64"), Platform("linux", "arm64"))
_METADATA, _UNTESTED = "org.cncf.model.file.metadata+json", "org.cncf.model.file.mediatype.untested"
_KINDS: Mapping[Role, Kind] = {
    "license": "doc",
    "doc": "doc",
    "code": "code",
    "dataset": "dataset",
    "config": "weight.config",
    "tokenizer": "weight.config",
    "template": "weight.config",
}


class PackError(ValueError):
    """The input makes no valid artifact; the message is one line that names the file and the fix."""


class Offered(NamedTuple):
    """A file that may be packed."""

    path: str
    """Path in the artifact."""
    size: int
    at: str = ""
    """Path of the file on disk; empty if `content` holds the bytes."""
    content: bytes = b""
    kind: Kind | None = None
    """The kind that the user stated. If a file with a stated kind cannot be packed, the whole artifact is rejected."""


class PackedFile(NamedTuple):
    """A file to pack."""

    path: str
    size: int
    at: str
    content: bytes
    kind: Kind


class About(NamedTuple):
    """Model metadata in the artifact; empty values are omitted."""

    name: str = ""
    family: str = ""
    architecture: str = ""
    format: str = ""
    param_size: str = ""
    precision: str = ""
    quantization: str = ""


class Plan(NamedTuple):
    """The files to pack, and those left out with a reason."""

    pieces: tuple[PackedFile, ...]
    about: About
    left: tuple[tuple[str, str], ...]


class PackedBlob(NamedTuple):
    """A blob that is or will be written."""

    digest: Digest
    size: int


class Document(NamedTuple):
    """A JSON document of the artifact."""

    media_type: str
    content: bytes

    @property
    def blob(self) -> PackedBlob:
        """Digest and size of the document."""
        return PackedBlob(compute_digest(self.content), len(self.content))


def build_plan(offered: Iterable[Offered], about: About, *, allow_unsafe: bool = False) -> Plan:
    """Select the files to pack, sorted by path. Raises PackError."""
    tree, pieces, left = safe_paths.Tree(), list[PackedFile](), list[tuple[str, str]]()
    weights, forms = False, set[str]()
    apart = {(one.path, one.at): one for one in sorted(offered, key=lambda one: one.kind is not None)}
    for _, one in sorted(apart.items()):
        named = file_kinds.classify_file(one.path)
        verdict = file_policy.evaluate_file(one.path, "code" if one.kind == "code" else None, allow_unsafe=allow_unsafe)
        if verdict.refusal:
            why = verdict.refusal.replace(file_policy.ALLOW, "--allow-unsafe packs it anyway")
            if one.kind is not None:
                raise PackError(f"{one.path}: {why}")
            left.append((one.path, why))
            continue
        try:
            tree.add(safe_paths.check_path(one.path))
        except safe_paths.BadPathError as error:
            raise PackError(f"{error}; rename it") from None
        if verdict.role in file_kinds.WEIGHTS and named is not None:
            weights = True
            forms.add(named.form)
        pieces.append(
            PackedFile(one.path, one.size, one.at, one.content, one.kind or _KINDS.get(verdict.role, "weight"))
        )
    if not weights:
        more = f"; left out: {left[0][0]}: {left[0][1]}" if left else ""
        raise PackError(f"there are no weights (safetensors or GGUF) to pack{more}")
    if len(pieces) > LAYERS_MAX:
        raise PackError(f"there are more than {LAYERS_MAX} files")
    return Plan(tuple(pieces), about._replace(format=about.format or "+".join(sorted(forms))), tuple(left))


def build_documents(of: Plan, blobs: Sequence[PackedBlob], form: Form) -> list[Document]:
    """Build all documents over these blobs, one per file; the last document names the artifact."""
    model_config = _document(MODEL_CONFIG, _model_config(of.about, blobs))
    layers = [_layer(piece, blob, form) for piece, blob in zip(of.pieces, blobs, strict=True)]
    model = _document(OCI_MANIFEST, _manifest(model_config, layers, MODEL_MANIFEST))
    if form == "modelpack-raw":
        return [model_config, model]
    found, entries = list[Document](), list[dict[str, object]]()
    for platform in PLATFORMS:
        config = _document(IMAGE_CONFIG, _image_config(platform, blobs))
        bare = [{"mediaType": IMAGE_LAYER, **_named(blob)} for blob in blobs]
        image = _document(OCI_MANIFEST, _manifest(config, bare))
        found += [config, image]
        shown = {"architecture": platform.architecture, "os": platform.os}
        entries.append(_descriptor(image) | {"platform": shown})
    entries.append(_descriptor(model) | {"artifactType": MODEL_MANIFEST})
    body = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    return [model_config, model, *found, _document(OCI_INDEX, body)]


def layout_index(top: Document, tag: str) -> bytes:
    """Build `index.json` of a layout with this single artifact."""
    note = {"annotations": {"org.opencontainers.image.ref.name": tag}} if tag else {}
    entry = _descriptor(top) | ({"artifactType": MODEL_MANIFEST} if top.media_type == OCI_MANIFEST else {}) | note
    return _document(OCI_INDEX, {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}).content


def _layer(piece: PackedFile, blob: PackedBlob, form: Form) -> dict[str, object]:
    raw = form == "modelpack-raw"
    metadata = {
        "name": piece.path, "mode": MODE, "uid": 0, "gid": 0, "size": piece.size,
        "mtime": "1970-01-01T00:00:00Z", "typeflag": ord("0"),
    }  # fmt: skip
    notes = {FILEPATH: piece.path, _METADATA: _json(metadata).decode(), _UNTESTED: "false"}
    notes |= {TITLE: piece.path} if raw else {}
    kind = f"application/vnd.cncf.model.{piece.kind}.v1.{'raw' if raw else 'tar'}"
    return {"mediaType": kind, **_named(blob), "annotations": notes}


def _model_config(about: About, blobs: Sequence[PackedBlob]) -> dict[str, object]:
    descriptor = {"name": about.name, "family": about.family}
    config = {
        "architecture": about.architecture, "format": about.format, "paramSize": about.param_size,
        "precision": about.precision, "quantization": about.quantization,
    }  # fmt: skip
    return {
        "descriptor": {key: value for key, value in descriptor.items() if value},
        "config": {key: value for key, value in config.items() if value},
        "modelfs": {"type": "layers", "diffIds": [blob.digest for blob in blobs]},
    }


def _image_config(platform: Platform, blobs: Sequence[PackedBlob]) -> dict[str, object]:
    return {
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [blob.digest for blob in blobs]},
    }


def _manifest(config: Document, layers: Sequence[object], artifact_type: str = "") -> dict[str, object]:
    kind = {"artifactType": artifact_type} if artifact_type else {}
    head = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, **kind}
    return {**head, "config": _descriptor(config), "layers": layers}


def _descriptor(of: Document) -> dict[str, object]:
    return {"mediaType": of.media_type, **_named(of.blob)}


def _named(blob: PackedBlob) -> dict[str, object]:
    return {"digest": blob.digest, "size": blob.size}


def _document(media_type: str, keys: Mapping[str, object]) -> Document:
    return Document(media_type, _json(keys))


def _json(keys: Mapping[str, object]) -> bytes:
    return json.dumps(keys, separators=(",", ":"), ensure_ascii=False).encode()
