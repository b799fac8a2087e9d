"""`pytest --changed BASE`: only the tests that reach a file that differs from the commit BASE.

A test file reaches what it imports, directly or through other files of the project; imports inside functions count. A
change of a file that is not Python (a golden file, a document) and the deletion of a module select every file that
names it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.gates import EVERYTHING, ROOT

IMPORT = re.compile(r"^[ \t]*(?:from[ ]+([\w.]+)[ ]+import[ ]+(\([^)]*\)|[^\n]*)|import[ ]+([^\n]*))", re.MULTILINE)
"""(package, members) or plain names. A regular expression reads 1,400 files ten times faster than `ast`, and a line of
a docstring that looks like an import only selects a test too many.
"""


def module_name(path: Path) -> str:
    """`gateway.request.api_routes` of gateway/request/api_routes.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, modules: Mapping[str, Path]) -> set[Path]:
    """The files of the project that a file imports, with the packages that contain them."""
    found: set[Path] = set()
    for package, members, plain in IMPORT.findall(path.read_text()):
        names = re.findall(r"[\w.]+", plain) if plain else [package]
        names += [f"{package}.{member}" for member in re.findall(r"\w+", members)]
        for name in names:
            parts = name.split(".")
            found |= {modules[one] for end in range(len(parts)) if (one := ".".join(parts[: end + 1])) in modules}
    return found


def importers(changed: Iterable[Path], graph: Mapping[Path, set[Path]]) -> set[Path]:
    """The changed files and all files that import one of them, directly or not."""
    by: dict[Path, set[Path]] = {}
    for path, imported in graph.items():
        for one in imported:
            by.setdefault(one, set()).add(path)
    found, waiting = set(), list(changed)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += by.get(path, ())
    return found


def reached(changed: Iterable[Path]) -> set[Path]:
    """The Python files that reach one of the changed files."""
    modules = {module_name(path): path for path in EVERYTHING}
    graph = {path: imports(path, modules) for path in EVERYTHING}
    conftests = {path for path in EVERYTHING if path.name == "conftest.py"}
    for path in EVERYTHING:  # pytest imports these for every test below them
        graph[path] |= {one for one in conftests if one.parent in path.parents and path.name.startswith("test_")}
    python = [path for path in changed if path in graph]
    others = [path for path in changed if path not in graph]  # deleted modules, and what is not Python
    stems = "|".join(re.escape(path.stem if path.suffix == ".py" else path.name) for path in others)
    named = re.compile(rf"(?<!\w)(?:{stems})(?!\w)")
    naming = [path for path in EVERYTHING if others and named.search(path.read_text())]
    return importers([*python, *naming], graph)


def changed_files(base: str) -> list[Path]:
    """The files that differ from a commit, also those not committed. Raises UsageError."""
    words = [["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]]
    done = [subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, check=False) for one in words]
    if any(one.returncode for one in done):
        raise pytest.UsageError(f"--changed {base}: {done[0].stderr.strip() or done[1].stderr.strip()}")
    return [ROOT / line for one in done for line in one.stdout.splitlines()]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--changed BASE`."""
    parser.addoption("--changed", metavar="BASE", help="only tests that reach a file that differs from a commit")


def pytest_configure(config: pytest.Config) -> None:
    """Works out once which files are reached; workers of pytest-xdist get the list."""
    base = config.getoption("--changed")
    if base:
        received = getattr(config, "workerinput", {}).get("reached")
        found = reached(changed_files(base)) if received is None else {Path(path) for path in received}
        config.pluginmanager.register(Changed(found), "changed")


class Changed:
    """Ignores the test files that reach no change, before they are imported."""

    def __init__(self, reached: set[Path]) -> None:
        self.reached = reached

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Gives a worker the list."""
        node.workerinput["reached"] = [str(path) for path in self.reached]

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Whether to ignore a file; None: the other rules decide."""
        is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
        return True if is_test and collection_path not in self.reached else None
