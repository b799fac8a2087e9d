"""The fuzz targets, shortly: what they begin with, what was found before, and some hundred inputs near them.

For longer, and guided by coverage: `make fuzz`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.fuzz.__main__ import GUIDED, NAMES
from tests.fuzz.near import inputs
from tests.fuzz.targets import FOUND, TARGETS, found
from tests.kit.budget import examples

ROOT = Path(__file__).parents[2]
EXAMPLES = 600


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_was_found_before(name: str) -> None:
    for data in (*TARGETS[name].seeds, *found(name)):
        TARGETS[name].one_input(data)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_near_the_seeds(name: str) -> None:
    target = TARGETS[name]

    @settings(derandomize=True, deadline=None, max_examples=examples(EXAMPLES), database=None)
    @given(inputs(target))
    def one(data: bytes) -> None:
        target.one_input(data)

    one()


def test_every_target_is_run_by_make_fuzz() -> None:
    assert tuple(TARGETS) == NAMES
    assert {path.name for path in FOUND.glob("*")} <= set(NAMES)


@pytest.mark.skipif(not GUIDED, reason="atheris is not installed: nothing guides the fuzz")
def test_the_fuzzer_runs_a_target() -> None:
    environment = os.environ | {"FUZZ_S": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.fuzz", "messages"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "stat::number_of_executed_units" in ran.stderr
