"""`pilotlight plan`: what would be started where, by the plan itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ModelName
from autoscaler.documents import Documents
from autoscaler.model import Gpu
from autoscaler.settings import Price, Settings
from autoscaler.whatif import Answer, Asked, what_if
from pilotlight.cli import cli
from tests.kit.worlds import GI, device, model

DOCUMENTS = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
- selector: {type: g4dn}
  device: {model: T4, memory: 16Gi}
  slicing: {kind: timeslice, replicas: 3}
- selector: {type: p5}
  device: {model: H100, memory: 80Gi, count: 2}
---
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: small}
spec: {engine: command, command: [x, "{port}"], gpu: {memory: 4Gi}, replicas: {max: 5}}
---
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: big}
spec: {engine: command, command: [x, "{port}"], gpu: {memory: 60Gi}, replicas: {max: 3}}
"""


def asked(**calls: int) -> dict[ModelName, Asked]:
    return {ModelName(name): Asked(waiting) for name, waiting in calls.items()}


def starts(answer: Answer) -> list[tuple[str, ...]]:
    return [(one.model, *one.slices) for one in answer.starts]


def test_starts_that_come_one_after_the_other_are_all_told() -> None:
    """One starts at a time on a Device; the answer is what there is in the end."""
    documents = Documents(models=(model("a", 4, high=3), model("b", 21)))
    answer = what_if(documents, [device("g0", 24)], asked(a=9, b=1))
    assert starts(answer) == [("a", "g0"), ("a", "g0"), ("a", "g0")]
    assert [(left.free_bytes, left.memory_bytes) for left in answer.left] == [(12 * GI, 24 * GI)]
    assert [unmet.model for unmet in answer.unmet] == ["b"]


def test_several_devices_and_none() -> None:
    team = model("team", 20, gpu=Gpu(count=2))
    documents = Documents(models=(team, model("cpu", 0, gpu=Gpu(count=0))))
    answer = what_if(documents, [device("g0", 24), device("g1", 24)], asked(team=1, cpu=1))
    assert starts(answer) == [("cpu",), ("team", "g0", "g1")]
    assert [left.free_bytes for left in answer.left] == [0, 0]


def test_prices_count() -> None:
    documents = Documents(
        models=(model("a", 4),), settings=Settings(prices=(Price(device="H100", per_hour=9.0),))
    )  # fmt: skip
    there = [device("g0", 24, "n0", product="NVIDIA H100"), device("g1", 24, "n1", product="L4")]
    assert starts(what_if(documents, there, asked(a=1))) == [("a", "g1")]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([1, 4, 9, 30]), st.integers(0, 20)), min_size=1, max_size=5))
def test_nothing_is_given_out_twice_and_what_is_asked_is_started_or_unmet(rows: list[tuple[int, int]]) -> None:
    models = [model(f"m{number}", size, high=4) for number, (size, _) in enumerate(rows)]
    calls = {one.name: Asked(many) for one, (_, many) in zip(models, rows, strict=True)}
    answer = what_if(Documents(models=tuple(models)), [device("g0", 24), device("g1", 24)], calls)
    assert all(0 <= left.free_bytes <= left.memory_bytes for left in answer.left)
    taken = sum(one.memory_bytes for one in answer.starts)
    assert taken == sum(left.memory_bytes - left.free_bytes for left in answer.left)
    unmet = {one.model for one in answer.unmet}
    for one, (_, many) in zip(models, rows, strict=True):
        begun = sum(start.model == one.name for start in answer.starts)
        assert begun == min(4, -(-many // one.slots)) or one.name in unmet


# --- the command ------------------------------------------------------------------------------------------------------


def run(folder: Path, demand: str, *more: str) -> tuple[int, str, str]:
    """(status, what it printed, what it said on standard error)."""
    (folder / "p.yaml").write_text(DOCUMENTS)
    (folder / "d.yaml").write_text(demand)
    done = CliRunner().invoke(cli, ["plan", "-c", f"{folder}/p.yaml", "--demand", f"{folder}/d.yaml", *more])
    return done.exit_code, done.stdout, done.stderr


def test_it_is_printed_for_people_and_for_programs(tmp_path: Path) -> None:
    status, told, _ = run(tmp_path, "small: {waiting: 17}\nbig: 9\n")
    lines = told.splitlines()
    assert status == 0
    assert lines[0] == "start big on nodes[1]/gpu0 (60Gi of each): wake big: 9 waiting, tenant default: 3 x 4 slots"
    assert "free  nodes[0]/gpu0/s2: 0 bytes of 5.3Gi" in lines
    assert any(line.startswith("unmet small: needs 4Gi on one device") for line in lines)
    status, told, _ = run(tmp_path, "small: 1\n", "--output", "json")
    found = json.loads(told)
    assert [start["slices"] for start in found["starts"]] == [["nodes[0]/gpu0/s0"]], "the T4, not an H100"
    assert (found["unmet"], len(found["left"])) == ([], 5)
    assert run(tmp_path, "small: 0\n")[1].startswith("nothing would be started\n")


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ("smal: 1", "smal: no such Model in the documents; there are: big, small"),
        (
            "small: -1",
            "small.waiting: expected {waiting: NUMBER, running: NUMBER} or a number of Calls that wait, from 0",
        ),
        ("small: true", "small.waiting: expected"),
        ("small: {waiting: 1, now: 2}", "small: expected {waiting: NUMBER, running: NUMBER}"),
        ("small: 1\nsmall: 2", "line 2: key `small` occurs twice"),
        ("small: .nan", "expected a finite number"),
        ("", "expected a line for each Model that is called"),
        ("- small", "expected a line for each Model that is called"),
    ],
)
def test_a_demand_that_is_wrong_is_one_line(tmp_path: Path, demand: str, said: str) -> None:
    status, _, error = run(tmp_path, demand)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(DOCUMENTS)
    done = CliRunner().invoke(cli, ["plan", "-c", f"{tmp_path}/p.yaml", "--demand", f"{tmp_path}/none.yaml"])
    assert done.stderr == f"pilotlight: {tmp_path}/none.yaml: No such file or directory\n"
