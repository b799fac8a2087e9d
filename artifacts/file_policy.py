"""Policy that decides which model files may be stored on a node: weights that hold only numbers, and no code. Pure.

`allow_unsafe` (a Model's `allowUnsafe`) accepts files rejected here, but never an invalid path or a layer without a
known meaning. The same policy checks the file names inside archives during extraction.
"""

from __future__ import annotations

from typing import NamedTuple

from artifacts import file_kinds
from artifacts.file_kinds import Role

ALLOW = "a Model with `allowUnsafe: true` accepts it"


class FileVerdict(NamedTuple):
    """The role assigned to a file, and the reason if it is rejected; empty if it is accepted."""

    role: Role
    refusal: str = ""


def evaluate_file(path: str, role: Role | None = None, *, form: str = "", allow_unsafe: bool = False) -> FileVerdict:
    """Evaluate a file by its name and by the `role` and `form` that its layer declares.

    A dangerous name always counts, whatever the layer declares. The layer's role wins unless the name is more specific.
    """
    kind = file_kinds.classify_file(path)
    named = kind.role if kind is not None else None
    is_code = "code" in {role, named}
    decided: Role = "code" if is_code else _finer(role, named)
    if allow_unsafe:
        return FileVerdict(decided)
    if is_code:
        return FileVerdict(decided, f"code is not accepted from a registry; {ALLOW}")
    forms = {one for one in (form, kind.form if kind is not None else "") if one}
    if forms & file_kinds.PROGRAMS:
        return FileVerdict(
            decided, f"weights in this format (.{min(forms)}) can run programs when they are loaded; {ALLOW}"
        )
    if role is None and kind is None:
        return FileVerdict(decided, f"its purpose is unknown; {ALLOW}")
    if decided in file_kinds.WEIGHTS and not (forms and forms <= file_kinds.HARMLESS):
        return FileVerdict(
            decided, f"weights are accepted as safetensors or GGUF, and this is not known to be either; {ALLOW}"
        )
    return FileVerdict(decided)


def evaluate_archive(role: Role | None, path: str, *, allow_unsafe: bool = False) -> FileVerdict:
    """Evaluate an archive by its role and its one declared name; member names are checked during extraction."""
    if role != "code" and (not path or file_kinds.classify_file(path) is None):
        return FileVerdict(role or "mixed")
    return evaluate_file(path, role if role != "mixed" else None, allow_unsafe=allow_unsafe)


def _finer(role: Role | None, named: Role | None) -> Role:
    """Return the name's role if the layer declares none or a coarser one, else the layer's role."""
    if role is None:
        return named or "unknown"
    coarse = {
        "weight": file_kinds.WEIGHTS | {"config", "tokenizer"},
        "config": {"tokenizer", "template", "license"},
        "doc": {"license"},
    }
    return named if named is not None and named in coarse.get(role, set()) else role
