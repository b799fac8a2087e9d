"""Which files of a model may come onto a node: weights that hold only numbers, and no code. Pure.

Owns the refusals and their words. `allow_unsafe` (a Model's `allowUnsafe`) takes what is refused here; nothing takes a
path that is bad or a layer without a meaning. The same judges the names in archives when they are unpacked.
"""

from __future__ import annotations

from typing import NamedTuple

from artifacts import files
from artifacts.files import Role

ALLOW = "a Model with `allowUnsafe: true` takes it all the same"


class FileVerdict(NamedTuple):
    """What a file is taken for, and why it is refused; empty: it is not."""

    role: Role
    refusal: str = ""


def evaluate_file(path: str, role: Role | None = None, *, form: str = "", allow_unsafe: bool = False) -> FileVerdict:
    """A file by its name, and by what its layer says that it is (`role`, `form`).

    What the name says of danger counts, whatever the layer is called; a layer's role counts, unless the name is finer.
    """
    kind = files.classify_file(path)
    named = kind.role if kind is not None else None
    is_code = "code" in {role, named}
    decided: Role = "code" if is_code else _finer(role, named)
    if allow_unsafe:
        return FileVerdict(decided)
    if is_code:
        return FileVerdict(decided, f"code is not taken from a registry; {ALLOW}")
    forms = {one for one in (form, kind.form if kind is not None else "") if one}
    if forms & files.PROGRAMS:
        return FileVerdict(
            decided, f"weights of this form (.{min(forms)}) can run programs when they are loaded; {ALLOW}"
        )
    if role is None and kind is None:
        return FileVerdict(decided, f"nothing says what it is; {ALLOW}")
    if decided in files.WEIGHTS and not (forms and forms <= files.HARMLESS):
        return FileVerdict(
            decided, f"weights are taken as safetensors or GGUF, and this is not known to be either; {ALLOW}"
        )
    return FileVerdict(decided)


def evaluate_archive(role: Role | None, path: str, *, allow_unsafe: bool = False) -> FileVerdict:
    """An archive, by its role and the one name that is said of it; the names in it are judged when they are read."""
    if role != "code" and (not path or files.classify_file(path) is None):
        return FileVerdict(role or "mixed")
    return evaluate_file(path, role if role != "mixed" else None, allow_unsafe=allow_unsafe)


def _finer(role: Role | None, named: Role | None) -> Role:
    """The name's where the layer says nothing, or says the same less finely."""
    if role is None:
        return named or "unknown"
    coarse = {
        "weight": files.WEIGHTS | {"config", "tokenizer"},
        "config": {"tokenizer", "template", "license"},
        "doc": {"license"},
    }
    return named if named is not None and named in coarse.get(role, set()) else role
