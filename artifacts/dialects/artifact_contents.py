"""Turns a manifest of any dialect into one list of files, each accepted or refused with a reason. Pure.

First the dialect translates the layers. Then each path must be safe and must not conflict with another one, and the
policy (`artifacts.file_policy`) must accept each file. No layer is omitted silently: each is a file or has a refusal,
which `explain_contents` lists. One refusal rejects the whole artifact, since a partial model is useless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from artifacts import file_kinds as kinds
from artifacts import file_policy, safe_paths
from artifacts.dialects.all_dialects import DIALECTS
from artifacts.dialects.base import Encoding, Reading, Said
from artifacts.digest import Digest, is_digest_of
from artifacts.file_kinds import Role
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import Manifest

BYTES_MAX = 1 << 45
"""Limit for all layers together."""
_SIGNATURE = re.compile(r"application/vnd\.(?:dev\.cosign\.|dev\.sigstore\.|cncf\.notary\.)")


class RefusedError(BadManifestError):
    """The artifact is valid but partly refused; the message names the first refused layer and the reason."""


class File(NamedTuple):
    """A file of the model, or an archive that contains some of them."""

    path: str
    """Safe relative path. For an archive: the file or folder in it, or empty if the manifest does not name it."""
    size: int
    """Blob size as transferred."""
    digest: Digest
    role: Role
    encoding: Encoding
    under: str = ""
    """For an archive: the folder below which its members are extracted."""


class ClassifiedLayer(NamedTuple):
    """A layer, either accepted as a file or refused."""

    media_type: str
    file: File
    """If the layer is refused: how the dialect interprets it. This file must not be written."""
    note: str = ""
    refusal: str = ""


class Contents(NamedTuple):
    """The interpreted artifact."""

    dialect: str
    layers: tuple[ClassifiedLayer, ...]
    roots: tuple[str, ...] = ("",)
    """Candidate model folders in the archives; the first that exists is used, and content outside it is ignored."""
    problem: str = ""
    """Why the artifact as a whole is refused, whatever its layers are."""
    allow_unsafe: bool = False
    """Whether code and executable weight formats are accepted, also in archives."""

    def files(self) -> tuple[File, ...]:
        """Return all files if every layer is accepted. Raises RefusedError."""
        if self.problem:
            raise RefusedError(f"{self.dialect}: {self.problem}")
        refused = [(number, one) for number, one in enumerate(self.layers, 1) if one.refusal]
        if refused:
            number, first = refused[0]
            more = f"; {len(refused) - 1} more layers are refused" if len(refused) > 1 else ""
            raise RefusedError(f"{self.dialect}: layer {number}: {first.refusal}{more}")
        return tuple(one.file for one in self.layers)


def read_contents(of: Manifest, config: bytes | None = None, *, allow_unsafe: bool = False) -> Contents:
    """Interpret an artifact. `config`: the bytes of its config, if available. Raises BadManifestError."""
    if config is not None and (len(config) != of.config.size or not is_digest_of(of.config.digest, config)):
        raise BadManifestError("the config does not match the manifest: its size or digest differs")
    dialect = next((one for one in DIALECTS if one.knows(of)), None)
    if dialect is None:
        said = of.artifact_type or of.config.media_type
        if any(_SIGNATURE.match(one) for one in (said, *(layer.media_type for layer in of.layers))):
            raise BadManifestError("this is a signature, not a model; use the reference of the signed artifact")
        raise BadManifestError(f"{said} is not a model in a known dialect, and its layers have no titles")
    reading = dialect.read(of, config)
    layers = tuple(_layers(of.layers, reading, allow_unsafe=allow_unsafe))
    problem = reading.problem or _problem(of, layers)
    return Contents(reading.dialect, layers, tuple(reading.roots), problem, allow_unsafe)


def explain_contents(found: Contents) -> list[str]:
    """Return lines for users: the interpretation of each layer, and why it is refused."""
    lines = [f"dialect: {found.dialect}"]
    for number, one in enumerate(found.layers, 1):
        file = one.file
        nameless = "(no name)" if file.encoding == "raw" else "(the archive contains the file names)"
        what = f"{file.role} {_shown(file.path) or nameless}, {file.encoding}, {file.size} bytes"
        note = f" ({one.note})" if one.note else ""
        verdict = f"refused: {one.refusal}" if one.refusal else "taken"
        lines.append(f"layer {number}: {one.media_type}: {what}{note}: {verdict}")
    if found.problem:
        lines.append(f"refused: {found.problem}")
    return lines


def _layers(of: Iterable[Descriptor], reading: Reading, *, allow_unsafe: bool) -> Iterable[ClassifiedLayer]:
    tree = safe_paths.Tree()
    for one, said in zip(of, reading.layers, strict=True):
        refusal = said.refusal or _path_refusal(said, tree)
        verdict = file_policy.FileVerdict(said.role or "unknown")
        if not refusal:  # the policy only sees paths of limited length
            verdict = _judged(said, allow_unsafe=allow_unsafe)
        file = File(said.path, one.size, one.digest, verdict.role, said.encoding, said.under)
        yield ClassifiedLayer(one.media_type, file, said.note, refusal or verdict.refusal)


def _judged(said: Said, *, allow_unsafe: bool) -> file_policy.FileVerdict:
    if said.encoding == "raw":
        return file_policy.evaluate_file(said.path, said.role, form=said.form, allow_unsafe=allow_unsafe)
    return file_policy.evaluate_archive(said.role, said.path, allow_unsafe=allow_unsafe)


def _path_refusal(said: Said, tree: safe_paths.Tree) -> str:
    """Return why the path is refused, by itself or in conflict with earlier paths; empty if it is accepted."""
    archive = said.encoding != "raw"
    try:
        if said.under:
            safe_paths.check_path(said.under)
        if said.path or not archive:
            tree.add(safe_paths.check_path(said.path), folder=archive)
    except safe_paths.BadPathError as error:
        return str(error)
    return ""


def _problem(of: Manifest, layers: tuple[ClassifiedLayer, ...]) -> str:
    if sum(one.size for one in of.layers) > BYTES_MAX:
        return f"its layers are larger than {BYTES_MAX >> 40} TiB together"
    sizes = {one.digest: one.size for one in of.layers}
    if any(one.size != sizes[one.digest] for one in of.layers):
        return "it states two sizes for one digest"
    if not any(one.file.role in kinds.WEIGHTS or one.file.encoding != "raw" or one.refusal for one in layers):
        return "it contains no weights"
    return ""


def _shown(text: str) -> str:
    """Return printable text as it is, other or overlong text escaped."""
    return text if text.isprintable() and len(text) <= safe_paths.PATH_BYTES_MAX else repr(text[:80])
