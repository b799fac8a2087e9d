"""Merges modules into one: python scripts/house/merge.py TARGET.py SOURCE.py...

The bodies are appended to TARGET in the order in which they need each other, their imports are joined, and references
in all tracked files are rewritten. It fails if two modules define the same name. Docstrings are joined: edit the
result.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (".py", ".md", ".toml", ".sh", ".tsv", ".importlinter")


class Module(NamedTuple):
    """A parsed module."""

    path: str
    dotted: str
    docstring: str
    imports: list[str]
    """Statements at the top level, also such as are under TYPE_CHECKING, which are kept as text."""
    body: str
    names: set[str]


def dotted(path: str) -> str:
    """`a.b` for a/b.py."""
    return path.removesuffix(".py").replace("/", ".")


def read(path: str) -> Module:
    """Raises OSError, SyntaxError."""
    text = (ROOT / path).read_text()
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    docstring, imports, cut = ast.get_docstring(tree, clean=False) or "", list[str](), set[int]()
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and bool(docstring)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            if not is_docstring:
                imports.append("".join(lines[node.lineno - 1 : node.end_lineno]))
            cut |= set(range(node.lineno - 1, node.end_lineno or 0))
    names = {name for node in tree.body for name in defined(node)}
    body = "".join(line for number, line in enumerate(lines) if number not in cut).strip("\n") + "\n"
    return Module(path, dotted(path), docstring, imports, body, names)


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def merged(target: Module, sources: list[Module]) -> str:
    """The text of the new module. Raises SystemExit if names collide."""
    everything = [target, *sources]
    for number, one in enumerate(everything):
        for other in everything[number + 1 :]:
            if both := (one.names & other.names) - {"_log", "T"}:
                raise SystemExit(f"{one.path} and {other.path} both define {', '.join(sorted(both))}")
    own = {one.dotted for one in everything}
    imports = list(dict.fromkeys(text for one in everything for text in one.imports))
    # A module follows those that it needs at import time.
    ordered = list[Module]()
    while len(ordered) < len(everything):
        ready = [
            one for one in everything
            if one not in ordered and not (needs(one) & own - {one.dotted} - {done.dotted for done in ordered})
        ]  # fmt: skip
        ordered.append(ready[0] if ready else next(one for one in everything if one not in ordered))
    body = "\n\n".join(one.body for one in ordered)
    docstring = "\n\n".join(one.docstring.strip() for one in everything)
    whole = f'"""{docstring}\n"""\n\n' + "".join(imports) + "\n\n" + body
    return reference(whole, {one.dotted: target.dotted for one in sources}, inside=target.dotted)


def needs(module: Module) -> set[str]:
    """The modules that it imports."""
    found = set[str]()
    for node in ast.walk(ast.parse("".join(module.imports))):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def reference(text: str, moved: dict[str, str], inside: str = "") -> str:
    """`text` with the moved modules' new names. `inside`: the module that it is of, whose own names need no import."""
    tree = ast.parse(text)
    edits = list[tuple[int, int, int, int, str]]()
    attributes, bound = dict[str, str](), set[str]()
    known, taken = modules_known(tree, set(moved.values())), names_bound(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module, where = str(node.module), (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
        if module in moved or (inside and module == inside):
            kept = ", ".join(written(alias) for alias in node.names)
            edits.append((*where, "" if inside else f"from {moved[module]} import {kept}"))
            continue
        lines = list[str]()
        for alias in node.names:
            new = moved.get(f"{module}.{alias.name}") or (inside if f"{module}.{alias.name}" == inside else "")
            if not new:
                lines.append(f"from {module} import {written(alias)}")
                continue
            package, _, name = new.rpartition(".")
            bound.add(alias.asname or alias.name)
            as_before = alias.asname or alias.name
            called = known.get(new) or (name if name not in taken else as_before)
            attributes[as_before] = "" if inside else called
            if not inside and new not in known:
                lines.append(f"from {package} import {name}" + ("" if called == name else f" as {called}"))
        if any((alias.asname or alias.name) in bound for alias in node.names):
            edits.append((*where, ("\n" + " " * node.col_offset).join(dict.fromkeys(lines))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in attributes:
            new = attributes[node.value.id]
            value = node.value
            if not new and node.attr in taken:
                print(f"{inside}:{node.lineno}: {node.attr} may be another {node.attr} here", file=sys.stderr)
            end = (value.end_lineno or 0, (value.end_col_offset or 0) + (0 if new else 1))
            edits.append((value.lineno, value.col_offset, *end, new))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and attributes.get(node.id):
            edits.append(
                (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, attributes[node.id])
            )
    return edited(text, edits)


def modules_known(tree: ast.AST, modules: set[str]) -> dict[str, str]:
    """Return the imported ones of these modules, with the names that the text uses for them."""
    aliases = (
        (f"{node.module}.{alias.name}", alias.asname or alias.name)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    )  # fmt: skip
    return {module: called for module, called in aliases if module in modules}


def names_bound(tree: ast.AST) -> set[str]:
    """Names that something in the text is called by."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return found | {alias.asname or alias.name for node in imports for alias in node.names}


def written(alias: ast.alias) -> str:
    """As in an import."""
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def edited(text: str, edits: list[tuple[int, int, int, int, str]]) -> str:
    """The edits are in characters of UTF-8 lines, as `ast` counts them."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    done = set[tuple[int, int]]()
    for first, begin, last, end, new in sorted(set(edits), reverse=True):
        if (first, begin) in done:
            continue
        done.add((first, begin))
        head, tail = lines[first - 1][:begin], lines[last - 1][end:]
        lines[first - 1 : last] = [head + new.encode() + tail]
    return b"".join(lines).decode()


def main(paths: list[str]) -> None:
    """Merges and rewrites."""
    target, *sources = [read(path) for path in paths]
    text = merged(target, sources)
    moved = {one.dotted: target.dotted for one in sources}
    (ROOT / target.path).write_text(text)
    for one in sources:
        subprocess.run(["git", "rm", "-qf", one.path], cwd=ROOT, check=True)
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in tracked:
        path = ROOT / name
        if name.startswith("scripts/house/") or not name.endswith(TEXTS) or not path.is_file():
            continue
        before = path.read_text()
        after = before
        if name.endswith(".py") and name != target.path and any(old.rpartition(".")[2] in before for old in moved):
            after = reference(before, moved)
        for old, new in moved.items():
            after = re.sub(rf"\b{re.escape(old)}\b(?!\.py)", new, after)
            after = after.replace(f"{old.replace('.', '/')}.py", f"{new.replace('.', '/')}.py")
        if after != before:
            path.write_text(after)


if __name__ == "__main__":
    main(sys.argv[1:])
