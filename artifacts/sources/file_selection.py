"""Models stored as plain files rather than as an artifact: which files are selected, and their digest. Pure.

Used for Hugging Face repositories and for buckets. Files that `artifacts.file_policy` would refuse in a registry
artifact are not selected here either; omitted files are reported; among several quantizations none is guessed. The same
files, as their source describes them, have the same digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from artifacts import file_kinds, file_policy, safe_paths
from artifacts.dialects.artifact_contents import BYTES_MAX, RefusedError
from artifacts.digest import BadDigestError, Digest, compute_digest, parse_digest
from artifacts.file_kinds import Role

FILES_MAX = 4096
NAMED_MAX = 12
"""Maximum number of file names in an error message."""


class ListedFile(NamedTuple):
    """A file as its source lists it."""

    path: str
    size: int
    claim: str
    """Identity of its content, which changes with the content: `sha256:HEX`, `git:SHA1`, `etag:TEXT`."""

    @property
    def digest(self) -> Digest | None:
        """Digest of the file if the source states one; otherwise it is known only after the download."""
        try:
            return parse_digest(self.claim)
        except BadDigestError:
            return None

    @property
    def name(self) -> Digest:
        """The file's digest, or a stand-in for it while it is unknown."""
        return self.digest or compute_digest(f"{self.path}\0{self.size}\0{self.claim}".encode())


class SelectedFile(NamedTuple):
    """A selected file."""

    entry: ListedFile
    role: Role


class Listing(NamedTuple):
    """The selected files of a model."""

    place: str
    """Source of the files without a revision: `hf://owner/name`, `s3://bucket/prefix/`."""
    taken: tuple[SelectedFile, ...]
    left: tuple[tuple[str, str], ...]
    """Omitted paths, each with the reason."""

    @property
    def digest(self) -> Digest:
        """Digest over the selected files."""
        rows = [[one.entry.path, one.entry.size, one.entry.claim] for one in self.taken]
        return compute_digest(json.dumps([self.place, sorted(rows)], separators=(",", ":")).encode())

    @property
    def unsafe(self) -> bool:
        """Whether some of the selected files are accepted only with `allow_unsafe`."""
        return any(file_policy.evaluate_file(one.entry.path).refusal for one in self.taken)

    @property
    def bytes(self) -> int:
        """Total size of the selected files."""
        return sum(one.entry.size for one in self.taken)


def select_files(
    place: str, entries: Iterable[ListedFile], include: Sequence[str] = (), *, allow_unsafe: bool = False
) -> Listing:
    """Select the files of a model; if `include` is given, all matches or none. Raises RefusedError."""
    all_ = sorted(entries)
    tree, taken, left = safe_paths.Tree(), list[SelectedFile](), list[tuple[str, str]]()
    for one in _wanted(place, all_, include):
        if not include and any(part.startswith(".") and part.strip(".") for part in one.path.split("/")):
            continue  # hidden files, such as those of git, are omitted, as in `weights pack`
        verdict = file_policy.evaluate_file(one.path, allow_unsafe=allow_unsafe)
        if verdict.refusal and include:
            raise RefusedError(f"{place}: {one.path}: {verdict.refusal}")
        if verdict.refusal:
            left.append((one.path, verdict.refusal))
            continue
        try:
            tree.add(safe_paths.check_path(one.path))
        except safe_paths.BadPathError as error:
            raise RefusedError(f"{place}: {error}") from None
        taken.append(SelectedFile(one, verdict.role))
    if not any(one.role in file_kinds.WEIGHTS for one in taken):
        more = f"; left out: {left[0][0]}: {left[0][1]}" if left else ""
        raise RefusedError(f"{place}: there are no weights (safetensors or GGUF){more}")
    if len(taken) > FILES_MAX or sum(one.entry.size for one in taken) > BYTES_MAX:
        raise RefusedError(f"{place}: more than {FILES_MAX} files, or {BYTES_MAX >> 40} TiB")
    if not include:
        _refuse_several(place, taken)
    return Listing(place, tuple(taken), tuple(left))


def _wanted(place: str, all_: Sequence[ListedFile], include: Sequence[str]) -> list[ListedFile]:
    if not include:
        return list(all_)
    for pattern in include:
        if not any(_fits(one.path, pattern) for one in all_):
            weights = [one.path for one in all_ if _is_weight(one.path)]
            raise RefusedError(f"{place}: include={pattern!r} matches no file; {_named('its weights are', weights)}")
    return [one for one in all_ if any(_fits(one.path, pattern) for pattern in include)]


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, f"{pattern}*" if pattern.endswith("/") else pattern)


def _is_weight(path: str) -> bool:
    kind = file_kinds.classify_file(path)
    return kind is not None and kind.role in file_kinds.WEIGHTS


def _refuse_several(place: str, taken: Sequence[SelectedFile]) -> None:
    """Reject a source with several models if none is selected. Raises RefusedError."""
    names = [one.entry.path for one in taken if one.role == "weight"]
    all_ggufs = [name for name in names if name.casefold().endswith(".gguf")]
    parts = ((name, file_kinds.PART.fullmatch(name)) for name in all_ggufs)
    ggufs = [name for name, part in parts if part is None or int(part[2]) == 1]
    other = len(names) > len(all_ggufs)
    if len(ggufs) + other > 1:
        also = " and safetensors" if other else ""
        said = f"{place}: contains several models{also}; select one with ?include=PATTERN"
        raise RefusedError(f"{said}: {_named('', ggufs).strip()}")


def _named(before: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{before} {', '.join(names[:NAMED_MAX])}{more}" if names else f"{before} none"
