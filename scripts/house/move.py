"""Moves product files to the paths of moves.tsv and rewrites all references: python scripts/house/move.py FOLDER...

A FOLDER is a package or a file; only these files move. Files that become one file later move to the folder of that
file under their own names. Imports, dotted names in strings and documents, and paths are rewritten in all tracked
files. Running it again changes nothing. It fails on a product file that has no row, and on a row whose file does not
exist in either place.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("moves.tsv")
PRODUCT = ("autoscaler", "gateway", "artifacts", "pilotlight", "loadtest")
TEXTS = (".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".tpl", ".txt", ".ini", ".cfg", ".json", "Makefile", "run")
SKIPPED = ("scripts/house/", "CHANGELOG.md", "tests/golden/", "requirements/", "charts/")


class Edit(NamedTuple):
    """Characters `begin` to `end` of a line become `text`."""

    line: int
    begin: int
    end: int
    text: str


def main(folders: list[str]) -> None:
    """Moves and rewrites."""
    table = dict(line.split("\t") for line in TABLE.read_text().splitlines() if line.strip())
    paths = targets(table, folders)
    check(table, folders)
    paths = {old: new for old, new in paths.items() if old != new and (ROOT / old).is_file()}
    modules = {dotted(old): dotted(new) for old, new in paths.items()}
    for old, new in paths.items():
        move(old, new)
    for name in tracked():
        rewrite(name, modules, paths)


def targets(table: dict[str, str], folders: list[str]) -> dict[str, str]:
    """Old path -> new path. Of files that become one, the one that has its name, or the first, gets its path."""
    many = Counter(table.values())
    found, taken = dict[str, str](), set[str]()
    for old, new in table.items():
        if not within(old, folders):
            continue
        path = new
        if many[new] > 1:
            sources = [one for one, to in table.items() if to == new]
            main_source = next((one for one in sources if Path(one).name == Path(new).name), sources[0])
            own = Path(old).name if Path(old).name != "__init__.py" else f"{Path(old).parent.name}.py"
            path = new if old == main_source else str(Path(new).with_name(own))
        if path in taken:
            raise SystemExit(f"two files become {path}")
        taken.add(path)
        found[old] = path
    return found


def within(path: str, folders: list[str]) -> bool:
    """Whether it is one of the folders (or files) or in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def check(table: dict[str, str], folders: list[str]) -> None:
    """Each product file has a row, as it is or as it was."""
    known = table.keys() | set(targets(table, list(PRODUCT)).values())
    for name in tracked():
        if within(name, folders) and name.endswith(".py") and name not in known and Path(name).name != "__init__.py":
            raise SystemExit(f"{name} has no row in {TABLE.name}")
    for old, new in targets(table, folders).items():
        if not any((ROOT / one).exists() for one in (old, new, table[old])):
            raise SystemExit(f"{old} does not exist, and neither does {new}")


def move(old: str, new: str) -> None:
    """By git, so that the history follows."""
    target = ROOT / new
    target.parent.mkdir(parents=True, exist_ok=True)
    git("mv", old, new)
    package = target.parent
    while package != ROOT:
        init = package / "__init__.py"
        if not init.exists():
            init.write_text("")
            git("add", str(init))
        package = package.parent


def dotted(path: str) -> str:
    """The name of a module."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def rewrite(name: str, modules: dict[str, str], paths: dict[str, str]) -> None:
    """One tracked file."""
    path = ROOT / name
    if name.startswith(SKIPPED) or not name.endswith(TEXTS) or path.is_symlink():
        return
    text = path.read_text()
    if name.endswith(".py"):
        after = names_in_tokens(imports(text, modules), modules, paths)
    else:
        after = names_in_text(text, modules, paths)
    if after != text:
        path.write_text(wrapped(after) if name.endswith(".py") else after)


# --- imports ----------------------------------------------------------------------------------------------------------


def imports(text: str, modules: dict[str, str]) -> str:
    """With its import statements, and the names that they bind, as they are after the move."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    renamed = dict[str, str]()
    edits = list[Edit]()
    statements = [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom)]
    bound = Counter(one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    bound.update(one.arg for one in ast.walk(tree) if isinstance(one, ast.arg))
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    bound.update(one.name for one in ast.walk(tree) if isinstance(one, functions))
    used = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
    used |= {alias.asname or alias.name for one in statements for alias in one.names}
    for one in sorted(statements, key=lambda one: -one.lineno):
        new = statement(one, modules, bound, used, renamed)
        if new is not None:
            replace(lines, one, new)
    text = "".join(lines)
    if renamed:
        tree, lines = ast.parse(text), text.splitlines(keepends=True)
        edits = [
            Edit(one.lineno, one.col_offset, one.end_col_offset or 0, renamed[one.id])
            for one in ast.walk(tree)
            if isinstance(one, ast.Name) and one.id in renamed
        ]
        for edit in sorted(edits, key=lambda one: (-one.line, -one.begin)):
            line = lines[edit.line - 1].encode()
            lines[edit.line - 1] = (line[: edit.begin] + edit.text.encode() + line[edit.end :]).decode()
        text = "".join(lines)
    return text


def statement(
    one: ast.Import | ast.ImportFrom, modules: dict[str, str], bound: Counter[str], used: set[str],
    renamed: dict[str, str],
) -> list[str] | None:  # fmt: skip
    """The statements that take its place; None: it stays."""
    if isinstance(one, ast.Import):
        if not any(alias.name in modules for alias in one.names):
            return None
        return ["import " + ", ".join(show(modules.get(alias.name, alias.name), alias.asname) for alias in one.names)]
    source = one.module or ""
    if one.level or source.split(".")[0] not in PRODUCT:
        return None
    kept, apart = list[str](), dict[str, list[str]]()
    for alias in one.names:
        whole = f"{source}.{alias.name}"
        if whole not in modules:
            kept.append(show(alias.name, alias.asname))
            continue
        parent, _, name = modules[whole].rpartition(".")
        asname = None if alias.asname == name else alias.asname
        if asname is None and alias.asname is None and name != alias.name:
            if bound[alias.name] or name in used or bound[name]:
                asname = alias.name
            else:
                renamed[alias.name] = name
        apart.setdefault(parent, []).append(show(name, asname))
    moved = modules.get(source, source)
    if not apart and moved == source:
        return None
    if kept:
        apart.setdefault(moved, [])[:0] = kept
    return [f"from {parent} import {', '.join(names)}" for parent, names in apart.items()]


def show(name: str, asname: str | None) -> str:
    """One name of an import."""
    return name if asname is None else f"{name} as {asname}"


def replace(lines: list[str], one: ast.stmt, new: list[str]) -> None:
    """The statement in its lines; what stands behind it on its last line stays behind the last of the new ones."""
    begin, end = one.lineno - 1, (one.end_lineno or one.lineno) - 1
    indent = lines[begin][: one.col_offset]
    behind = lines[end].encode()[one.end_col_offset :].decode()
    lines[begin : end + 1] = [indent + f"\n{indent}".join(new) + behind]


# --- text -------------------------------------------------------------------------------------------------------------

_DOTTED = re.compile(rf"\b(?:{'|'.join(PRODUCT)})(?:\.\w+)+")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PRODUCT)})/[\w/.-]+\.py\b")


def names_in_text(text: str, modules: dict[str, str], paths: dict[str, str]) -> str:
    """Dotted names of modules and of what is in them, and paths."""

    def name(match: re.Match[str]) -> str:
        parts = match[0].split(".")
        for count in range(len(parts), 1, -1):
            module = ".".join(parts[:count])
            if module in modules:
                return ".".join([modules[module], *parts[count:]])
        return match[0]

    return _PATH.sub(lambda match: paths.get(match[0], match[0]), _DOTTED.sub(name, text))


def names_in_tokens(text: str, modules: dict[str, str], paths: dict[str, str]) -> str:
    """The same in strings and comments of Python."""
    lines = text.splitlines(keepends=True)
    found = [one for one in tokenize.generate_tokens(io.StringIO(text).readline)
             if one.type in {tokenize.STRING, tokenize.COMMENT}]  # fmt: skip
    for one in reversed(found):
        after = names_in_text(one.string, modules, paths)
        if after != one.string:
            (first, begin), (last, end) = one.start, one.end
            before, behind = lines[first - 1][:begin], lines[last - 1][end:]
            lines[first - 1 : last] = [before + after + behind]
    return "".join(lines)


LINE = 120
"""Characters of a line of Python."""


def wrapped(text: str) -> str:
    """With the words of docstrings and comments that are beyond LINE on the next line of their paragraph."""
    lines = text.splitlines()
    kinds = prose(text)
    at = 0
    while at < len(lines):
        line, kind = lines[at], kinds[at]
        if len(line) <= LINE or not kind:
            at += 1
            continue
        indent = line[: len(line) - len(line.lstrip())] + ("# " if kind == "comment" else "")
        body = line.removesuffix('"""') if kind in {"last", "only"} else line
        cut = body.rfind(" ", 0, LINE + 1)
        rest = body[cut + 1 :]
        lines[at] = body[:cut]
        if kind in {"last", "only"}:
            lines[at + 1 : at + 1] = [indent + rest, indent + '"""'] if rest else [indent + '"""']
            kinds[at] = "inner"
            kinds[at + 1 : at + 1] = ["inner", "end"] if rest else ["end"]
        elif at + 1 < len(lines) and kinds[at + 1] == kind and continues(lines[at + 1], indent):
            lines[at + 1] = f"{indent}{rest} {lines[at + 1].strip().removeprefix('# ')}"
        else:
            lines[at + 1 : at + 1] = [indent + rest]
            kinds[at + 1 : at + 1] = [kind]
        at += 1
    return "\n".join(lines) + "\n"


def continues(line: str, indent: str) -> bool:
    """Whether a line is of the same paragraph as the one before it."""
    words = line.strip().removeprefix("# ")
    return line.startswith(indent.rstrip("# ")) and bool(words) and words[0] not in "*-+|" and words != '"""'


def prose(text: str) -> list[str]:
    """Of each line what it is: a line within a docstring (`inner`), its last or only one with words, a line that is a
    comment; empty: code.
    """
    kinds = [""] * len(text.splitlines())
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        first, last = one.start[0] - 1, one.end[0] - 1
        if one.type == tokenize.COMMENT and not one.line[: one.start[1]].strip():
            kinds[first] = "comment"
        if one.type == tokenize.STRING and one.string.startswith('"""') and not one.line[: one.start[1]].strip():
            kinds[first : last + 1] = ["inner"] * (last - first + 1)
            kinds[last] = "end" if one.string.splitlines()[-1].strip() == '"""' else "last"
            if first == last:
                kinds[last] = "only"
    return kinds


def tracked() -> list[str]:
    """Paths of all files that git knows."""
    return [name for name in git("ls-files").splitlines() if (ROOT / name).is_file()]


def git(*words: str) -> str:
    """Run a command of git and return its output."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1:] or list(PRODUCT))
