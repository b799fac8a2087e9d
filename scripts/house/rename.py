"""Renames functions and classes of modules: python scripts/house/rename.py TABLE.tsv...

A row has three columns: the path of the module, the name today, the new name. Definitions, imports, attributes of
imported modules, names in strings (`monkeypatch.setattr(module, "name")`, dotted names) and in documents are rewritten
in all tracked files. A row whose new name would collide with another name somewhere is reported and skipped.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("autoscaler", "gateway", "artifacts", "pilotlight", "loadtest")
TEXTS = (".md", ".toml", ".sh", ".yaml", ".yml", ".tpl", ".txt", ".importlinter")
SKIPPED = ("scripts/house/", "CHANGELOG.md", "tests/golden/", "requirements/")
LOCAL = "local"
Key = tuple[str, str]
"""A module and a name in it."""
Binding = str | Key
"""The meaning of a name in a scope: LOCAL, the dotted name of a module, or a Key."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """The bytes `begin` to `end` of a line become `text`."""

    line: int
    begin: int
    end: int
    text: str


class Scope(NamedTuple):
    """Names that are bound in a module, a class or a function."""

    names: dict[str, Binding]
    is_class: bool = False


class File(ast.NodeVisitor):
    """One file: collects edits for the rows, and the rows that collide."""

    def __init__(self, path: str, table: dict[Key, str], modules: set[str], imported: dict[Key, Key]) -> None:
        self.path, self.table, self.modules, self.imported = path, table, modules, imported
        self.module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.text = (ROOT / path).read_text()
        self.tree = ast.parse(self.text)
        self.lines = self.text.encode().split(b"\n")
        self.edits, self.clashes = list[Edit](), dict[Key, str]()
        self.scopes = [Scope(self._bound(self.tree.body, module=True))]
        self.visit_body(self.tree.body)

    # --- scopes -------------------------------------------------------------------------------------------------------

    def _bound(self, body: Iterable[ast.AST], *, module: bool = False) -> dict[str, Binding]:
        found = dict[str, Binding]()
        outer = set[str]()
        for name, binding in self._bindings(body, outer):
            own = module and binding == LOCAL and (self.module, name) in self.table
            meant: Binding = (self.module, name) if own else binding
            found[name] = meant if found.get(name, meant) == meant else LOCAL
        return {name: binding for name, binding in found.items() if name not in outer}

    def _bindings(self, body: Iterable[ast.AST], outer: set[str]) -> Iterator[tuple[str, Binding]]:
        for node in body:
            if isinstance(node, Function | ast.ClassDef):
                yield node.name, LOCAL
                yield from self._bindings(node.decorator_list, outer)
                continue
            if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name):
                        yield inner.target.id, LOCAL
                continue
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], LOCAL)
                continue
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    key = (str(node.module), alias.name)
                    yield alias.asname or alias.name, whole if whole in self.modules else key
                continue
            if isinstance(node, ast.Global | ast.Nonlocal):
                outer.update(node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                yield node.id, LOCAL
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                yield node.name, LOCAL
            elif isinstance(node, ast.MatchMapping) and node.rest:
                yield node.rest, LOCAL
            yield from self._bindings(ast.iter_child_nodes(node), outer)

    def resolve(self, name: str) -> Binding | None:
        """Return the meaning of the name in this scope."""
        for depth, scope in enumerate(reversed(self.scopes)):
            if scope.is_class and depth:
                continue
            if name in scope.names:
                return scope.names[name]
        return None

    # --- nodes --------------------------------------------------------------------------------------------------------

    def visit_body(self, body: Iterable[ast.AST]) -> None:
        """All of them."""
        for node in body:
            self.visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        """A function, whose decorators, defaults and annotations are of the scope outside."""
        self.define(node)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.visit_body(node.decorator_list)
        self.visit_body([*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)])
        self.visit_body(one.annotation for one in every if one is not None and one.annotation is not None)
        if node.returns is not None:
            self.visit(node.returns)
        names = self._bound(node.body) | {one.arg: LOCAL for one in every if one is not None}
        self.within(Scope(names), node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """See visit_FunctionDef."""
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """As a function."""
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        self.visit_body([*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)])
        self.within(Scope({one.arg: LOCAL for one in every if one is not None}), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class."""
        self.define(node)
        self.visit_body([*node.decorator_list, *node.bases, *node.keywords])
        self.within(Scope(self._bound(node.body), is_class=True), node.body)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        """Its targets are its own."""
        self.visit(node.generators[0].iter)
        names = dict[str, Binding]()
        for one in node.generators:
            names |= dict(self._bindings([one.target], set()))
        with_rest = [part for one in node.generators for part in (one.target, *one.ifs)]
        with_rest += [one.iter for one in node.generators[1:]]
        self.within(
            Scope(names), [*with_rest, *([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])]
        )

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension  # noqa: N815  ast's names

    def within(self, scope: Scope, body: Iterable[ast.AST]) -> None:
        """Visits nodes in a scope."""
        self.scopes.append(scope)
        self.visit_body(body)
        self.scopes.pop()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Imported names."""
        for alias in node.names:
            key = (str(node.module), alias.name)
            if key not in self.table:
                continue
            new = self.table[key]
            if not alias.asname:
                self.check(key, new, alias.lineno)
            self.edit(alias.lineno, alias.col_offset, len(alias.name), new)
            if alias.asname == new:
                self.edits[-1] = Edit(alias.lineno, alias.col_offset, alias.end_col_offset or 0, new)

    def visit_Name(self, node: ast.Name) -> None:
        """A reference, or an assignment at the level of the module."""
        binding = self.resolve(node.id)
        if isinstance(binding, tuple) and binding in self.table and node.id == binding[1]:
            self.check(binding, self.table[binding], node.lineno)
            self.edit(node.lineno, node.col_offset, len(node.id), self.table[binding])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A name in an imported module."""
        module = self.module_of(node.value)
        key = self.origin((module, node.attr))
        if module and key in self.table:
            self.edit(
                node.end_lineno or 0, (node.end_col_offset or 0) - len(node.attr), len(node.attr), self.table[key]
            )
        self.generic_visit(node)

    def origin(self, key: Key) -> Key:
        """The module that defines what another imports under the same name."""
        return self.imported.get(key, key)

    def module_of(self, node: ast.expr) -> str:
        """The module that an expression is; empty: none."""
        if isinstance(node, ast.Name):
            binding = self.resolve(node.id)
            return binding if isinstance(binding, str) and binding != LOCAL else ""
        return ""

    def visit_Call(self, node: ast.Call) -> None:
        """`setattr(module, "name", ...)` and the like, and `cast("Name", ...)`."""
        first = node.args[0] if node.args else None
        is_cast = isinstance(node.func, ast.Name) and node.func.id == "cast"
        if is_cast and isinstance(first, ast.Constant) and isinstance(first.value, str):
            for match in re.finditer(r"\w+", first.value):
                binding = self.resolve(match[0])
                if isinstance(binding, tuple) and binding in self.table:
                    self.edit(first.lineno, first.col_offset + 1 + match.start(), len(match[0]), self.table[binding])
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
            key = self.origin((self.module_of(node.args[0]), node.args[1].value))
            if key in self.table:
                at = node.args[1]
                self.edit(at.lineno, at.col_offset + 1, len(key[1]), self.table[key])
        self.generic_visit(node)

    # --- edits --------------------------------------------------------------------------------------------------------

    def define(self, node: Function | ast.ClassDef) -> None:
        """Renames a definition at the level of the module."""
        key = (self.module, node.name)
        if len(self.scopes) == 1 and key in self.table:
            self.check(key, self.table[key], node.lineno)
            begin = self.lines[node.lineno - 1].index(f" {node.name}".encode(), node.col_offset) + 1
            self.edit(node.lineno, begin, len(node.name), self.table[key])

    def check(self, key: Key, new: str, line: int) -> None:
        """Notes a collision."""
        for depth, scope in enumerate(reversed(self.scopes)):
            if (not scope.is_class or not depth) and new in scope.names:
                self.clashes.setdefault(key, f"{self.path}:{line}: {new} is another name there")

    def edit(self, line: int, begin: int, length: int, text: str) -> None:
        """Notes an edit."""
        self.edits.append(Edit(line, begin, begin + length, text))

    def result(self) -> str:
        """The text with its edits."""
        lines = list(self.lines)
        for one in sorted(set(self.edits), reverse=True):
            line = lines[one.line - 1]
            lines[one.line - 1] = line[: one.begin] + one.text.encode() + line[one.end :]
        return prose(b"\n".join(lines).decode(), self.here())

    def here(self) -> dict[str, str]:
        """Old and new name of what is renamed and has its own name here."""
        names = self.scopes[0].names.items()
        return {
            name: self.table[key]
            for name, key in names
            if isinstance(key, tuple) and key in self.table and key[1] == name
        }


def prose(text: str, names: dict[str, str]) -> str:
    """With names in backticks, in docstrings and comments."""
    if not names:
        return text
    quoted = re.compile(rf"`({'|'.join(map(re.escape, names))})(?=[`(])")
    lines = text.splitlines(keepends=True)
    tokens = [
        one for one in tokenize.generate_tokens(io.StringIO(text).readline)
        if one.type == tokenize.COMMENT or (one.type == tokenize.STRING and one.string.startswith('"""'))
    ]  # fmt: skip
    for one in reversed(tokens):
        after = quoted.sub(lambda match: f"`{names[match[1]]}", one.string)
        if after != one.string:
            (first, begin), (last, end) = one.start, one.end
            lines[first - 1 : last] = [lines[first - 1][:begin] + after + lines[last - 1][end:]]
    return "".join(lines)


def in_text(text: str, table: dict[Key, str], imported: dict[Key, Key]) -> str:
    """Dotted names, `package.module:name`, and `module.name` in backticks."""
    by_dotted = {f"{module}.{old}": f"{module}.{new}" for (module, old), new in table.items()}
    short = dict[str, set[str]]()
    for (module, old), new in table.items():
        last = module.rpartition(".")[2]
        short.setdefault(f"{last}.{old}", set()).add(f"{last}.{new}")

    def dotted(match: re.Match[str]) -> str:
        parts = match[0].split(".")
        for count in range(len(parts), 1, -1):
            known = by_dotted.get(".".join(parts[:count]))
            if known:
                return ".".join([known, *parts[count:]])
        return match[0]

    text = re.sub(rf"\b(?:{'|'.join(PRODUCT)})(?:\.\w+)+(?!:\w)", dotted, text)

    def with_colon(match: re.Match[str]) -> str:
        key = (match[1], match[2])
        return f"{match[1]}:{table.get(imported.get(key, key), match[2])}"

    text = re.sub(rf"\b((?:{'|'.join(PRODUCT)})(?:\.\w+)+):(\w+)", with_colon, text)

    def quoted(match: re.Match[str]) -> str:
        known = short.get(match[1], set())
        return f"`{next(iter(known))}`" if len(known) == 1 else match[0]

    return re.sub(r"`(\w+\.\w+)`", quoted, text)


def imports(path: str, table: dict[Key, str]) -> Iterator[tuple[Key, Key]]:
    """Yield the names that a module imports, each with its origin."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.parse((ROOT / path).read_text()).body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            key = (str(node.module), alias.name) if isinstance(node, ast.ImportFrom) else ("", "")
            if key in table and alias.asname in {None, alias.name}:
                yield (module, alias.name), key


def tracked() -> list[str]:
    """Paths of the files to rewrite."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    return [name for name in names if name and not name.startswith(SKIPPED) and (ROOT / name).is_file()]


def main(tables: list[str]) -> None:
    """Renames."""
    table = dict[Key, str]()
    for path in tables:
        for row in Path(path).read_text().splitlines():
            if row.strip():
                module, old, new = row.split("\t")
                table[module.removesuffix(".py").removesuffix("/__init__").replace("/", "."), old] = new.strip()
    files = tracked()
    python = [name for name in files if name.endswith(".py")]
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in python}
    imported = {key: origin for name in python for key, origin in imports(name, table)}
    while True:
        parsed = [File(name, table, modules, imported) for name in python]
        clashes = {key: why for one in parsed for key, why in one.clashes.items()}
        if not clashes:
            break
        for key, why in clashes.items():
            print(f"skipped {'.'.join(key)}: {why}", file=sys.stderr)
            del table[key]
    for one in parsed:
        after = in_text(one.result(), table, imported)
        if after != one.text:
            (ROOT / one.path).write_text(after)
    for name in files:
        if name.endswith(TEXTS):
            before = (ROOT / name).read_text()
            after = in_text(before, table, imported)
            if after != before:
                (ROOT / name).write_text(after)
    print(f"{len(table)} renamed")


if __name__ == "__main__":
    main(sys.argv[1:])
