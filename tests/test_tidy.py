"""The house stays tidy: sizes, docstrings, pure modules, one word per concept. Bounds are not widened to pass."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pilotlight", "gateway", "autoscaler", "artifacts", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
BESIDE = ("tests", "bench", "examples")
EVERYTHING = sorted([*SOURCES, *(path for folder in BESIDE for path in (ROOT / folder).rglob("*.py"))])

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
DOCSTRING_CHARACTERS_MIN = 60

IMPURE = frozenset(
    {
        *("gateway/" + room for room in ("edge", "upstream", "exchange", "front", "sync", "link", "ops", "telemetry")),
        "gateway/kept",
        "gateway/memory",
        *("autoscaler/" + name for name in ("loop", "serve", "ops", "metrics", "processwatch")),
        "artifacts/gguf",
        "autoscaler/engines/installed",
        "autoscaler/page",
    }
)
"""Modules that may do I/O (architecture, section 3), beside the folders below."""
IMPURE_FOLDERS = ("pilotlight/", "loadtest/", "autoscaler/drivers/", "autoscaler/engines/xllamacpp_server")
FORBIDDEN = frozenset(
    {"asyncio", "aiohttp", "time", "random", "os", "socket", "logging"}
    | {"subprocess", "threading", "signal", "uvloop", "psutil"}
)
SYNONYMS = {
    r"\bworkers?\b": "Replica or process",
    r"\bbackends?\b": "engine or Replica",
    r"\binstances?\b": "Replica, or an object's own name",
    r"\bmanager\b": "the noun that is owned",
    r"\bhelpers?\b": "the noun that is owned",
    r"(?<!importlib\.)\butils?\b": "the noun that is owned",
    r"\bhandler\b(?!: Answer|\(request\))": "the noun that is owned",
}
"""Words for things that have another word (architecture, section 2). Names of foreign interfaces are exempt by line."""


def name(path: Path) -> str:
    """`gateway/wire` for gateway/wire.py."""
    return str(path.relative_to(ROOT).with_suffix(""))


def pure(path: Path) -> bool:
    """Whether the module must not do I/O."""
    return name(path) not in IMPURE and not name(path).startswith(IMPURE_FOLDERS)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_files_and_functions_fit_a_screen(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, f"{name(path)} is too long: split it by concept"
    for function in functions(ast.parse(text)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines <= FUNCTION_LINES_MAX, f"{name(path)}: {function.name} has {lines} lines"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.read_text()], ids=name)
def test_every_module_says_what_it_owns(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(docstring) >= DOCSTRING_CHARACTERS_MIN, f"{name(path)}: say what it owns, promises and must not do"


@pytest.mark.parametrize("path", [p for p in SOURCES if pure(p)], ids=name)
def test_pure_modules_import_nothing_impure(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {(node.module or "").split(".")[0]}
        else:
            continue
        assert not modules & FORBIDDEN, f"{name(path)} is pure and imports {modules & FORBIDDEN}"
    assert not any(isinstance(node, ast.Await | ast.AsyncFunctionDef) for node in ast.walk(tree)), name(path)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_one_word_per_concept(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern, better in SYNONYMS.items():
            if "isinstance" not in line:
                found = re.search(pattern, line, re.IGNORECASE)
                assert found is None, f"{name(path)}:{number}: {line.strip()!r}: say {better}"


def test_only_the_front_door_installs_uvloop() -> None:
    for path in SOURCES:
        if not name(path).startswith("pilotlight/"):
            assert "import uvloop" not in path.read_text(), name(path)
