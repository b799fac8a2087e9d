"""Summarises what tests cost: `python -m tests.plugins.report FILE [FILE ...]`, with files of `pytest --costs`.

Prints Markdown tables: wall time by folder and by file, the slowest tests, and the totals of set-up, CPU, waiting,
imports and process starts. `make test-profile` runs the tests and this.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

SLOWEST = 40
FILES = 40
Line = dict[str, Any]


def wall_s(line: Line) -> float:
    """Wall time of the three phases of a test."""
    return float(sum(line.get(f"{phase}_s", 0.0) for phase in ("setup", "call", "teardown")))


def cpu_s(line: Line) -> float:
    """CPU time of a test in its own process and in the child processes that it reaped."""
    return float(line.get("cpu_s", 0.0) + line.get("children_cpu_s", 0.0))


def folder(line: Line) -> str:
    """`tests/simulation`."""
    return str(Path(line["test"].partition("::")[0]).parent)


def file(line: Line) -> str:
    """`tests/simulation/test_seeds.py`."""
    return str(line["test"].partition("::")[0])


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are shown with one decimal."""
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def grouped(lines: Sequence[Line], by: Callable[[Line], str]) -> list[tuple[str, int, float, float]]:
    """(group, tests, wall s, CPU s), the most expensive first."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[by(line)].append(line)
    rows = [(key, len(some), sum(map(wall_s, some)), sum(map(cpu_s, some))) for key, some in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def report(lines: Sequence[Line]) -> str:
    """All tables."""
    tests = [line for line in lines if "test" in line]
    imports = sum(line.get("collecting_s", 0.0) for line in lines)
    wall = sum(map(wall_s, tests))
    totals = [
        ("tests", len(tests)),
        ("wall time of tests, s", wall),
        ("of it set-up and teardown, s", sum(line.get("setup_s", 0.0) + line.get("teardown_s", 0.0) for line in tests)),
        ("CPU time, own process, s", float(sum(line.get("cpu_s", 0.0) for line in tests))),
        ("CPU time, child processes, s", float(sum(line.get("children_cpu_s", 0.0) for line in tests))),
        ("waiting (wall time without CPU time), s", float(sum(max(0.0, wall_s(line) - cpu_s(line)) for line in tests))),
        ("imports of test modules, all workers, s", imports),
        ("process starts", sum(line.get("processes", 0) for line in tests)),
        ("time in process starts, s", float(sum(line.get("starting_s", 0.0) for line in tests))),
    ]
    slowest = sorted(tests, key=lambda line: -wall_s(line))[:SLOWEST]
    head = ("tests", "wall s", "CPU s")
    return "\n".join([
        table("Totals", ("what", "amount"), totals),
        table("By folder", ("folder", *head), grouped(tests, folder)),
        table(f"The {FILES} most expensive files", ("file", *head), grouped(tests, file)[:FILES]),
        table(
            f"The {SLOWEST} slowest tests", ("test", "wall s", "CPU s", "processes"),
            [(line["test"], wall_s(line), cpu_s(line), line.get("processes", 0)) for line in slowest],
        ),
    ])  # fmt: skip


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.plugins.report")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by `pytest --costs FILE`")
    files: list[Path] = parser.parse_args().files
    print(report([json.loads(line) for path in files for line in path.read_text().splitlines()]))


if __name__ == "__main__":
    main()
