"""Comparing two commits: the statistics, the order of turns, invalid input, and the protocol of a worker."""

from __future__ import annotations

import io
import json
import math
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from bench import compare
from bench.compare import (
    COLUMNS,
    PAIRS_MIN,
    PARTS,
    WORKTREES_MAX,
    Cost,
    Measure,
    Part,
    Tree,
    UsageError,
    Worker,
    figures,
    interval,
    is_finished,
    is_narrow,
    order,
    t_quantile,
)
from bench.documents import ROOT
from bench.kit import BenchError

PAIR_S = 5.0
"""Duration of a simulated pair."""


def simulated(mean: float, deviation: float, seed: int) -> Iterator[float]:
    """Ratios whose logarithms are normally distributed."""
    draw = random.Random(seed)
    while True:
        yield math.exp(draw.gauss(math.log(mean), deviation))


def until_finished(source: Iterator[float], width: float = 0.02, limit_s: float = 600) -> list[float]:
    """The ratios that a comparison takes from the source."""
    ratios: list[float] = []
    while not is_finished(ratios, len(ratios) * PAIR_S, width, limit_s):
        ratios.append(next(source))
    return ratios


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 7, 2.3646),
        (0.975, 8, 2.3060),
        (0.975, 30, 2.0423),
        (0.975, 1000, 1.9623),
        (0.95, 5, 2.0150),
        (0.995, 10, 3.1693),
        (0.5, 4, 0.0),
    ],
)
def test_computed_t_quantile_equals_the_published_tables(probability: float, degrees: int, expected: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=5e-5)


def test_interval_of_two_ratios_equals_the_one_computed_by_hand() -> None:
    found = interval([math.exp(0.01), math.exp(0.03)])  # standard error 0.01, one degree of freedom
    assert found.ratio == pytest.approx(math.exp(0.02))
    assert found.low == pytest.approx(math.exp(0.02 - 0.127062), rel=1e-5)
    assert found.high == pytest.approx(math.exp(0.02 + 0.127062), rel=1e-5)


def test_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert interval([2.0, 0.5]).ratio == pytest.approx(1.0)


def test_interval_contains_the_true_ratio_in_95_percent_of_simulations() -> None:
    source, hits = simulated(1.05, 0.03, seed=7), 0
    for _ in range(2000):
        found = interval([next(source) for _ in range(10)])
        hits += found.low <= 1.05 <= found.high
    assert 0.94 < hits / 2000 < 0.96


def test_comparison_stops_when_the_interval_is_narrow() -> None:
    ratios = until_finished(simulated(1.05, 0.015, seed=1))
    assert PAIRS_MIN <= len(ratios) < 40
    found = interval(ratios)
    assert found.high - found.low < 0.02
    assert 1.0 < found.low < 1.05 < found.high


def test_comparison_stops_at_the_time_limit_when_ratios_vary_too_much() -> None:
    ratios = until_finished(simulated(1.0, 0.3, seed=1))
    assert len(ratios) == 600 / PAIR_S
    assert not is_narrow(ratios, 0.02)


def test_comparison_stops_at_the_minimum_pair_count_if_ratios_are_equal() -> None:
    assert len(until_finished(iter([1.0] * 100))) == PAIRS_MIN


def test_comparison_stops_at_the_time_limit_below_the_minimum_pair_count() -> None:
    assert len(until_finished(iter([1.0] * 100), limit_s=2 * PAIR_S)) == 2


def test_two_compared_sides_alternate_in_running_first() -> None:
    assert [order(turn) for turn in range(3)] == [(0, 1), (1, 0), (0, 1)]


def test_single_measured_pair_gives_a_ratio_without_an_interval() -> None:
    assert interval([1.1])[1:] == (0.0, math.inf)
    assert figures([1.1]) == {"ratio": 1.1, "low": None, "high": None, "rounds": 1}


class Recorder:
    """A fake worker that records its turns."""

    def __init__(self, name: str, turns: list[str]) -> None:
        self.name, self.turns = name, turns

    async def turn(self) -> Cost:
        self.turns.append(self.name)
        return Cost({"base": 100.0, "new": 105.0}[self.name], 1)


async def test_costs_are_returned_in_base_new_order_although_runs_alternate() -> None:
    turns: list[str] = []
    workers = cast("list[Worker]", [Recorder("base", turns), Recorder("new", turns)])
    for turn in range(2):
        costs = await compare._alternating(workers, turn)
        assert [cost.cpu_us for cost in costs] == [100.0, 105.0]
    assert turns == ["base", "new", "new", "base"]


def test_added_costs_give_total_time_divided_by_total_operations() -> None:
    assert (Cost(30.0, 10) + Cost(10.0, 10)).us_per_operation == 2.0


async def test_comparison_reports_this_tree_relative_to_the_base(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pair(part: str, trees: tuple[Tree, Tree], number: int) -> list[Cost]:
        return [Cost(100.0, 10), Cost(210.0, 20)]

    monkeypatch.setattr(compare, "_pair", pair)
    trees = (Tree(ROOT, "base"), Tree(ROOT, "new"))
    ratios = await compare.compare("plan", trees, 0.02, 600)
    assert ratios == [pytest.approx(1.05)] * PAIRS_MIN
    assert "new relative to base" in capsys.readouterr().out


async def test_failed_comparison_part_is_reported_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pair(part: str, trees: tuple[Tree, Tree], number: int) -> list[Cost]:
        if part == "plan":
            raise BenchError("commit base: no module")
        return [Cost(1.0, 1), Cost(1.0, 1)]

    monkeypatch.setattr(compare, "_pair", pair)
    found: dict[str, list[float]] = {}
    await compare.run(["plan", "cluster:fold"], (Tree(ROOT, "base"), Tree(ROOT, "new")), 0.02, 600, found)
    assert list(found) == ["cluster:fold"]
    assert "plan failed: commit base: no module" in capsys.readouterr().out


async def test_benchmark_worker_prints_one_cost_per_round_until_its_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def prepare(place: Path) -> AsyncIterator[Measure]:
        assert place.is_dir()

        async def measure() -> Cost:
            print("what a benchmark prints")
            return Cost(12.5, 5)

        yield measure

    output = io.StringIO()
    monkeypatch.setitem(PARTS, "fake", Part(prepare, 1.0))
    monkeypatch.setattr(sys, "stdin", io.StringIO("round\nround\n"))
    monkeypatch.setattr(sys, "stdout", output)
    await compare.serve("fake")
    ready, *answers = output.getvalue().splitlines()
    assert ready == "ready"
    assert [json.loads(answer) for answer in answers] == [{"cpu_us": 12.5, "operations": 5}] * 2


def test_commit_that_has_the_benchmark_is_measured_by_its_own_version(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "compare.py").write_text((ROOT / "bench" / "compare.py").read_text())
    environment = Tree(tmp_path, "base").environment("plan", 3)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "build" / "compiled"), str(tmp_path)]
    assert environment["PYTHONHASHSEED"] == "3"


@pytest.mark.parametrize("text", [None, "PARTS = {}"], ids=["without this module", "without the part"])
def test_older_commit_is_measured_by_the_benchmarks_of_this_tree(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench" / "compare.py").write_text(text)
    tree = Tree(tmp_path, "base")
    assert tree.benchmarks("plan") == ROOT
    path = tree.environment("plan", 0)["PYTHONPATH"].split(os.pathsep)
    assert path == [str(tmp_path / "build" / "compiled"), str(ROOT)]


def test_tree_at_an_unnormalized_path_runs_its_own_benchmark_of_each_part() -> None:
    own = Tree(ROOT, "own")
    tree = own._replace(folder=own.folder / "bench" / "..")  # another name of the same folder
    assert all(tree.benchmarks(part) == tree.folder for part in PARTS)


def test_least_recently_used_worktrees_above_the_limit_are_selected(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "cabedf"]
    for used_s, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (used_s, used_s))
    assert compare.least_recent(list(reversed(folders))) == folders[:-WORKTREES_MAX]


@pytest.mark.parametrize(
    ("base", "parts", "message"),
    [
        ("", ["plan"], "the base is missing; name a commit"),
        ("main", [], "the parts are missing; choose from: PARTS="),
        ("main", ["plan", "plans"], "part 'plans' is unknown; choose from: dataplane:calls,"),
        ("main", ["dataplane:calls"], "dataplane:calls needs wrk on the PATH (Debian: apt install wrk)"),
    ],
)
def test_missing_or_unknown_arguments_are_rejected_with_a_fix(
    base: str, parts: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        compare.check(base, parts)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base", "nothing", "plan"], "commit 'nothing' does not exist; "),
        (["--base", "main", "--seconds", "long", "plan"], "argument --seconds: invalid float value: 'long'; "),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_status_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "git", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["compare", *words])
    with pytest.raises(SystemExit) as caught:
        compare.main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench-compare: {message}")


def test_record_appends_one_row_per_part_below_one_header(tmp_path: Path) -> None:
    path, trees = tmp_path / "history.tsv", (Tree(ROOT, "1111111"), Tree(ROOT, "2222222-dirty"))
    compare.record(path, 25, trees, {"plan": figures([1.0, 1.02])})
    compare.record(path, 26, trees, {"plan": figures([1.5]), "cluster:fold": figures([2.0, 2.0])})
    header, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    assert header == list(COLUMNS)
    assert [row[1:6] for row in rows] == [
        ["25", "1111111", "2222222-dirty", "plan", "1.01"],
        ["26", "1111111", "2222222-dirty", "plan", "1.5"],
        ["26", "1111111", "2222222-dirty", "cluster:fold", "2.0"],
    ]
    assert rows[1][6:] == ["", "", "1"]
    assert rows[2][6:] == ["2.0", "2.0", "2"]


def test_each_recorded_benchmark_ratio_lies_within_its_interval() -> None:
    header, *rows = [line.split("\t") for line in compare.HISTORY.read_text().splitlines()]
    assert header == list(COLUMNS)
    for row in rows:
        low, ratio, high = (float(row[COLUMNS.index(name)]) for name in ("low", "ratio", "high"))
        assert low <= ratio <= high, row
