"""Counts the mutants that the tests detect: `make mutants`.

A mutant is the product with one small fault, made by cosmic-ray. A fixed seed draws the mutants from the files of the
core, without those that change only type annotations. Each mutant runs in a git worktree of a commit, against the tests
of the tier that execute the changed line. Tests that start the product as a process are left out: nothing records which
of its lines they execute. Results are kept in build/mutants, so that an interrupted run continues.

The last line is JSON: {"drawn": N, "detected": N, "survived": ["FILE:LINE OPERATOR", ...]}.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.run import WAITING

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "mutants"
TOOLS = FOLDER / "tools"
"""Where `make mutants` installs requirements/mutants.lock: no other test needs these libraries."""
FILES = ("autoscaler/planner/plan.py", "autoscaler/placement/packer.py", "gateway/dispatch/dispatcher.py")
COUNT, SEED = 60, 25
RUN_S_MAX = 900.0
"""A mutant whose tests take longer has made an endless loop: it is detected."""
DETECTED, PASSED = {1, 2}, {0, 5}
"""Exit statuses of pytest: failed tests or modules that cannot be imported; all passed, or none selected."""
GROUP = re.compile(r"@[^\[\]/:@]+$")
"""What pytest-xdist appends to the ids of tests with a group."""


class Mutant(NamedTuple):
    """One change of a file. `line` is the first changed line; `text` is the whole changed file."""

    file: str
    line: int
    operator: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.partition('/')[2]}"


class _NoAnnotations(ast.NodeTransformer):
    """Removes type annotations: `from __future__ import annotations` makes them mere text."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant("")
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def is_other_program(text: str, original: str) -> bool:
    """Whether a text is Python and differs from the original in more than type annotations."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return ast.dump(_NoAnnotations().visit(tree)) != ast.dump(_NoAnnotations().visit(ast.parse(original)))


def draw(tree: Path, files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants of these files."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    texts = {file: (tree / file).read_text() for file in files}
    operators = {name: get_operator(name)() for name in sorted(operator_names()) if not get_operator(name).arguments()}
    places = []
    for file, text in texts.items():
        nodes = list(ast_nodes(get_ast(text)))
        for name, operator in operators.items():
            begins = (begin for node in nodes for begin, _ in operator.mutation_positions(node))
            places += [(file, name, occurrence, line) for occurrence, (line, _) in enumerate(begins)]
    random.Random(seed).shuffle(places)
    drawn: list[Mutant] = []
    for file, name, occurrence, line in places:
        changed = mutate_code(texts[file], operators[name], occurrence)
        if changed is not None and is_other_program(changed, texts[file]):
            drawn.append(Mutant(file, line, name, changed))
        if len(drawn) == count:
            break
    return drawn


def record(tree: Path, files: Sequence[str], tier: Sequence[str], data: Path) -> None:
    """Runs a tier and writes into `data` which tests execute which lines of these files."""
    config = FOLDER / "coverage.ini"
    config.write_text("[run]\ninclude =\n" + "".join(f"    */{file}\n" for file in files))
    ignored = [f"--ignore=tests/{folder}" for folder in ("integration", *WAITING)]
    coverage = ("-p", "pytest_cov", "--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report=")
    words = ["-n", "2", "--dist", "loadgroup", *ignored, *coverage, *tier, "tests"]
    status = _pytest(tree, words, None, {"COVERAGE_FILE": str(data)})
    if status not in PASSED:
        sys.exit(f"the tests fail without a mutant (exit status {status}): repair them first")


def executing(data: Path) -> Mapping[str, Mapping[int, set[str]]]:
    """File -> line -> ids of the tests that execute it."""
    import coverage

    found = coverage.CoverageData(str(data))
    found.read()
    result: dict[str, dict[int, set[str]]] = {}
    for path in found.measured_files():
        file = next((one for one in FILES if path.endswith(f"/{one}")), path)
        result[file] = {
            line: {GROUP.sub("", context.rpartition("|")[0]) for context in contexts if "|" in context}
            for line, contexts in found.contexts_by_lineno(path).items()
        }
    return result


def tests_of(mutant: Mutant, lines: Mapping[int, set[str]]) -> list[str]:
    """The tests that execute the changed line. If it is executed only at import: all that execute the file.

    Of a statement with several lines not all need to be recorded: then the nearest recorded line above counts.
    """
    line = max((line for line in lines if line <= mutant.line), default=0)
    return sorted(lines.get(line) or set().union(*lines.values()))


def is_detected(tree: Path, mutant: Mutant, tests: Sequence[str], tier: Sequence[str]) -> bool:
    """Whether one of these tests fails. Those named after the file come first, because they are the likeliest."""
    stem = Path(mutant.file).stem
    near = [test for test in tests if stem in test.partition("::")[0]]
    far = [test for test in tests if stem not in test.partition("::")[0]]
    with _changed(tree / mutant.file, mutant.text):
        for ids, workers in ((near, "0"), (far, "2")):
            if not ids:
                continue
            listed = FOLDER / "tests.txt"
            listed.write_text("\n".join(ids))
            try:
                words = ["-x", "-n", workers, "--dist", "loadgroup", *tier, f"@{listed}"]
                status = _pytest(tree, words, RUN_S_MAX)
            except subprocess.TimeoutExpired:
                return True
            if status in DETECTED:
                return True
            if status not in PASSED:
                sys.exit(f"pytest cannot run the tests of {mutant} (exit status {status})")
    return False


@contextmanager
def _changed(path: Path, text: str) -> Iterator[None]:
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def _pytest(
    tree: Path, words: Sequence[str], limit_s: float | None, environment: Mapping[str, str] | None = None
) -> int:
    """The exit status. Raises subprocess.TimeoutExpired after killing pytest and its workers."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    path = os.pathsep.join((str(tree), str(TOOLS)))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    with (FOLDER / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=tree, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A worktree of a commit."""
    tree = FOLDER / "tree"
    subprocess.run(["git", "worktree", "add", "-q", "--detach", "--force", str(tree), commit], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def main() -> None:
    """Prints one line per mutant and the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT, help=f"number of mutants, {COUNT} if not given")
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed of the draw, {SEED} if not given")
    parser.add_argument("--tier", choices=("test", "deep"), default="test", help="the tests; `test` if not given")
    parser.add_argument("--commit", default="HEAD", help="HEAD if not given")
    parser.add_argument(
        "--only", default="", help="only the mutants that survived according to the JSON result in this file"
    )
    asked = parser.parse_args()
    tier = ["-m", "not deep"] if asked.tier == "test" else ["--hypothesis-profile=deep"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with worktree(asked.commit) as tree:
        drawn = draw(tree, FILES, asked.count, asked.seed)
        if asked.only:
            survivors = json.loads(Path(asked.only).read_text().splitlines()[-1])["survived"]
            drawn = [mutant for mutant in drawn if str(mutant) in survivors]
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True)
        data = FOLDER / f"{commit.stdout.strip()}-{asked.tier}.coverage"
        if not data.exists():
            print("recording which tests execute which lines; this takes as long as the tests", flush=True)
            record(tree, FILES, tier, data)
        lines = executing(data)
        kept = data.with_suffix(".json")
        results: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
        for number, mutant in enumerate(drawn, 1):
            if str(mutant) not in results:
                tests = tests_of(mutant, lines[mutant.file])
                results[str(mutant)] = "detected" if is_detected(tree, mutant, tests, tier) else "survived"
                kept.write_text(json.dumps(results, indent=1))
            print(f"{number} of {len(drawn)}: {mutant} {results[str(mutant)]}", flush=True)
        survived = [str(mutant) for mutant in drawn if results[str(mutant)] == "survived"]
    print(json.dumps({"drawn": len(drawn), "detected": len(drawn) - len(survived), "survived": survived}))


if __name__ == "__main__":
    main()
