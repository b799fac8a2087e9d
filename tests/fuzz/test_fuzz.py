"""Short runs of the fuzz targets: seeds, inputs that were found before, and some hundred inputs near them.

`make fuzz` runs longer, guided by coverage.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings

import autoscaler
from tests.fuzz.__main__ import GUIDED, NAMES
from tests.fuzz.checks import resource_limits
from tests.fuzz.checks.resource_limits import Limited, LimitError
from tests.fuzz.inputs import kubernetes_objects, kubernetes_watches
from tests.fuzz.inputs.strategies import inputs
from tests.fuzz.target_registry import FOUND, MADE, found, target
from tests.fuzz.targets import contract_messages, watched_objects
from tests.support.example_budget import examples

ROOT = Path(__file__).parents[2]
PRODUCT = Path(autoscaler.__file__).parents[1]
"""The compiled run has only the tests below ROOT."""
EXAMPLES = 600
STRUCTURED = ("objects", "reports", "yaml", "gguf", "safetensors", "port", "providers")
"""Targets with a generator of structured inputs."""
CASES = 5_000
"""Number of cases per target in the deep tier."""


@pytest.mark.parametrize("name", NAMES)
def test_fuzz_seeds_and_findings_raise_no_unexpected_error_in_any_decoder(name: str) -> None:
    one_input = target(name).limited()
    for data in (*target(name).seeds, *found(name)):
        one_input(data)


@pytest.mark.parametrize("name", NAMES)
def test_decoders_given_mutated_fuzz_seeds_raise_no_unexpected_error(name: str) -> None:
    one_input = target(name).limited()

    @settings(derandomize=True, deadline=None, max_examples=examples(EXAMPLES), database=None)
    @given(inputs(target(name)))
    def one(data: bytes) -> None:
        one_input(data)

    one()


@pytest.mark.deep
@pytest.mark.parametrize("name", STRUCTURED)
def test_decoders_given_structured_inputs_raise_no_unexpected_error(name: str) -> None:
    one_input, case = target(name).limited(), target(name).case
    assert case is not None
    for number in range(CASES):
        data = case(Random(number))
        try:
            one_input(data)
        except BaseException as error:
            error.add_note(f"case {number}, {len(data)} bytes: {data[:500]!r}")
            raise


def test_input_over_the_cpu_or_memory_limit_raises_limit_error() -> None:
    def takes_time(data: bytes) -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.2:
            assert not data

    with pytest.raises(LimitError, match="s of CPU"):
        Limited(takes_time, cpu_s_max=0.001)(b"")
    if not resource_limits.reset_peak():
        pytest.skip("this system does not report the peak of the memory")
    with pytest.raises(LimitError, match="MiB"):
        Limited(lambda data: bytearray(64 << 20).extend(data), memory_bytes_max=32 << 20)(b"")


def test_make_fuzz_runs_every_target_and_every_finding_has_a_target() -> None:
    assert tuple(MADE) == NAMES
    assert [name for name in NAMES if target(name).case is not None] == list(STRUCTURED)
    assert {path.name for path in FOUND.glob("*")} <= set(NAMES)


def test_every_kubernetes_watch_of_the_product_has_a_fuzz_target() -> None:
    made = watched_objects.places()
    sites = [(file, {(file, line) for line in lines}) for file, lines in kubernetes_watches.sites()]
    missing = [file for file, lines in sites if not made & lines]
    assert not missing, "build what makes these watches in tests/fuzz/inputs/kubernetes_watches.py"
    assert kubernetes_watches.followed() == sorted(kubernetes_watches.FOLLOWED), (
        "add what is followed to tests/fuzz/inputs/kubernetes_watches.py"
    )
    assert {kind.plural for kind in watched_objects.kinds()} == set(kubernetes_objects.SEEDS), (
        "tests/fuzz/inputs/kubernetes_objects.py has one of each kind"
    )


def test_every_decoded_message_type_has_a_fuzz_target() -> None:
    decoded = set[str]()
    for package in ("autoscaler", "gateway", "pilotlight"):
        for path in (PRODUCT / package).rglob("*.py"):
            decoded.update(re.findall(r"\bmake_decoder\(([A-Z]\w*)\)", path.read_text()))
            decoded.update(re.findall(r"\b_follow\(.*, ([A-Z]\w*),", path.read_text()))
    assert {"Report", "RoutesDelta"} <= decoded <= {kind.__name__ for kind in contract_messages.KINDS}


@pytest.mark.skipif(not GUIDED, reason="atheris is not installed: nothing guides the fuzz")
def test_coverage_guided_fuzzer_started_for_one_target_executes_inputs() -> None:
    environment = os.environ | {"FUZZ_S": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.fuzz", "messages"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "stat::number_of_executed_units" in ran.stderr
