"""Models that lie somewhere as files and not as an artifact: which files are taken, and what names them. Pure.

Owns the choice, for Hugging Face's repositories and for buckets alike. Promises: what a registry's artifact would not
be taken with (`artifacts.file_policy`) is not taken from here either; what is left out is said; which of several
quantisations is meant is never guessed. The same files, by what their place says of them, have the same digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from artifacts import digest as digests
from artifacts import file_policy, files, safe_paths
from artifacts.dialects.contents import BYTES_MAX, RefusedError
from artifacts.digest import BadDigestError, Digest
from artifacts.files import Role

FILES_MAX = 4096
NAMED_MAX = 12
"""Files in an error."""


class ListedFile(NamedTuple):
    """A file, as its place says it."""

    path: str
    size: int
    claim: str
    """What is said of its bytes, and no longer true when they change: `sha256:HEX`, `git:SHA1`, `etag:TEXT`."""

    @property
    def digest(self) -> Digest | None:
        """Where that is said; else it is learned when the file has come."""
        try:
            return digests.parse_digest(self.claim)
        except BadDigestError:
            return None

    @property
    def name(self) -> Digest:
        """Its digest, or something that stands for it while that is not known."""
        return self.digest or digests.compute_digest(f"{self.path}\0{self.size}\0{self.claim}".encode())


class SelectedFile(NamedTuple):
    """A file that is taken."""

    entry: ListedFile
    role: Role


class Listing(NamedTuple):
    """A model."""

    place: str
    """Whose files these are, without their revision: `hf://owner/name`, `s3://bucket/prefix/`."""
    taken: tuple[SelectedFile, ...]
    left: tuple[tuple[str, str], ...]
    """Paths that are not taken, and why."""

    @property
    def digest(self) -> Digest:
        """Of what is taken."""
        rows = [[one.entry.path, one.entry.size, one.entry.claim] for one in self.taken]
        return digests.compute_digest(json.dumps([self.place, sorted(rows)], separators=(",", ":")).encode())

    @property
    def unsafe(self) -> bool:
        """Of its files some were taken only since all are."""
        return any(file_policy.evaluate_file(one.entry.path).refusal for one in self.taken)

    @property
    def bytes(self) -> int:
        """Of all files that are taken."""
        return sum(one.entry.size for one in self.taken)


def select_files(
    place: str, entries: Iterable[ListedFile], include: Sequence[str] = (), *, allow_unsafe: bool = False
) -> Listing:
    """What is taken. Of what a person named by `include` all is, or nothing. Raises RefusedError."""
    all_ = sorted(entries)
    tree, taken, left = safe_paths.Tree(), list[SelectedFile](), list[tuple[str, str]]()
    for one in _wanted(place, all_, include):
        if not include and any(part.startswith(".") and part.strip(".") for part in one.path.split("/")):
            continue  # as `weights pack`: git's own files, and those of tools
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
    if not any(one.role in files.WEIGHTS for one in taken):
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
            weights = [one.path for one in all_ if files.classify_file(one.path) is not None and _is_weight(one.path)]
            raise RefusedError(f"{place}: include={pattern!r} fits no file; {_named('its weights are', weights)}")
    return [one for one in all_ if any(_fits(one.path, pattern) for pattern in include)]


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, f"{pattern}*" if pattern.endswith("/") else pattern)


def _is_weight(path: str) -> bool:
    kind = files.classify_file(path)
    return kind is not None and kind.role in files.WEIGHTS


def _refuse_several(place: str, taken: Sequence[SelectedFile]) -> None:
    """Several models in one place, of which one is meant. Raises RefusedError."""
    names = [one.entry.path for one in taken if one.role == "weight"]
    all_ggufs = [name for name in names if name.casefold().endswith(".gguf")]
    parts = ((name, files.PART.fullmatch(name)) for name in all_ggufs)
    ggufs = [name for name, part in parts if part is None or int(part[2]) == 1]
    other = len(names) > len(all_ggufs)
    if len(ggufs) + other > 1:
        also = " and safetensors beside them" if other else ""
        said = f"{place}: holds several models{also}; say which with ?include=PATTERN"
        raise RefusedError(f"{said}: {_named('', ggufs).strip()}")


def _named(before: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{before} {', '.join(names[:NAMED_MAX])}{more}" if names else f"{before} none"
