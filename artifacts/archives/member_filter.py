"""Decides which members of an archive are extracted, ignored or rejected. Pure.

Extracted are regular files and folders with safe paths (`artifacts.safe_paths`) that the policy allows
(`artifacts.file_policy`) and that do not collide with other files of the artifact. A link, a device or a path that
leaves the folder makes the whole archive invalid; members outside the model's folder are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from artifacts import file_policy, safe_paths
from artifacts.archives.tar_reader import BadArchiveError, Member
from artifacts.dialects.artifact_contents import File
from artifacts.file_kinds import Role

_WHAT = {"link": "a link", "special": "a device, a pipe, a sparse file or of unknown type"}


class AcceptedMember(NamedTuple):
    """A file or folder to extract."""

    path: str
    size: int
    folder: bool
    role: Role


class Sieve:
    """Checks the members of one archive in order. `tree`: paths already used by the artifact's other layers."""

    def __init__(self, of: File, tree: safe_paths.Tree, root: str = "", *, allow_unsafe: bool = False) -> None:
        self._role: Role | None = None if of.role in {"mixed", "unknown"} else of.role
        self._under = of.under
        self._tree = tree
        self._root = root
        self._allow_unsafe = allow_unsafe

    def judge(self, member: Member) -> AcceptedMember | None:
        """Return the member to extract, or None to ignore it. Raises BadArchiveError."""
        path = strip_dot_slash(member.path)
        at_root = path == (self._root or ".")
        if at_root and member.kind == "folder":
            return None
        if self._root and not at_root:
            if not path.startswith(f"{self._root}/"):
                return None
            path = path[len(self._root) + 1 :]
        folder = member.kind == "folder"
        if member.kind in _WHAT:
            raise BadArchiveError(f"in the archive: {member.path[:80]!r} is {_WHAT[member.kind]}, not a file or folder")
        try:
            safe_paths.check_path(path)
            path = safe_paths.check_path(f"{self._under}/{path}") if self._under else path
            self._tree.add(path, folder=folder)
        except safe_paths.BadPathError as error:
            raise BadArchiveError(f"in the archive: {error}") from None
        if folder:
            return AcceptedMember(path, 0, folder=True, role="unknown")
        verdict = file_policy.evaluate_file(path, self._role, allow_unsafe=self._allow_unsafe)
        if verdict.refusal:
            raise BadArchiveError(f"in the archive: {path}: {verdict.refusal}")
        return AcceptedMember(path, member.size, folder=False, role=verdict.role)


def strip_dot_slash(path: str) -> str:
    """Remove the `./` that `tar .` puts before each name; nothing else is normalized."""
    return path.removeprefix("./")


def select_model_root(roots: Sequence[str], names: Iterable[str]) -> str:
    """Return the model's folder: the first of `roots` that occurs in the archives. Raises BadArchiveError."""
    best = next((number for number, root in enumerate(roots) if not root), len(roots))
    for name in map(strip_dot_slash, names):
        if not best:
            break
        found = (number for number in range(best) if name == roots[number] or name.startswith(f"{roots[number]}/"))
        best = next(found, best)
    if best == len(roots):
        raise BadArchiveError(f"the archive has no folder {' or '.join(roots)}")
    return roots[best]
