"""Seeded whole-system runs. `SEEDS` (default 500) sets their number; a failing seed prints how to replay it.

`make test` runs the first seeds, `make test-deep` all of them.
"""

from __future__ import annotations

import os
from hashlib import sha256

import pytest

from tests.simulation.__main__ import main
from tests.simulation.checks import fault_containment
from tests.simulation.scenario import play
from tests.support.harness.faults.fault_injection import DOCUMENT_POINTS, GATEWAY_POINTS, concerns, inject

SEEDS = int(os.environ.get("SEEDS", "500"))
STANDARD = 40
SEED_WITH_FAULT, SEED_WITHOUT_FAULT = 24, 8
BATCH = 10
"""Seeds in one test, so that a progress dot means something."""

COMPLETED_SHARE = 0.6
"""Of a batch's requests that entered a queue, storms and short deadlines included; 0.65 to 0.87 is usual."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=() if first <= STANDARD else pytest.mark.deep) for first in range(1, SEEDS + 1, BATCH)],
)
def test_simulation_run_of_any_seed_violates_no_invariant(first: int) -> None:
    """Safety in the storm, liveness after it, nothing left at the end; and even in the storm requests complete."""
    calls = completed = 0
    for seed in range(first, min(first + BATCH, SEEDS + 1)):
        result = play(seed)
        assert not result.broken, f"replay with `python -m tests.simulation {seed}`:\n" + "\n".join(result.broken[:10])
        calls, completed = calls + result.calls - result.full, completed + result.completed
    if first + BATCH - 1 <= SEEDS:  # a single seed may be all storm
        assert completed >= calls * COMPLETED_SHARE, f"only {completed} of {calls} Calls completed"


def test_simulation_of_ten_seeds_fills_a_queue_at_least_once() -> None:
    """I12 is checked with a full queue: some seed fills one."""
    assert any(play(seed).full for seed in range(1, 11))


def test_trace_option_prints_all_lines_that_the_trace_hash_covers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m tests.simulation 3 --trace` prints every note that is part of the hash."""
    monkeypatch.setattr("sys.argv", ["tests.simulation", "3", "--trace"])
    assert main() == 0
    *notes, last = capsys.readouterr().out.splitlines(keepends=True)
    trace = sha256("".join(notes).encode()).hexdigest()
    assert trace == play(3).trace
    assert last.startswith("seed 3: ")
    assert f", trace {trace[:12]}, " in last
    assert any(" granted " in note for note in notes)


@pytest.mark.parametrize(
    "point", [DOCUMENT_POINTS[0], *(pytest.param(one, marks=pytest.mark.deep) for one in DOCUMENT_POINTS[1:])]
)
def test_fault_in_documents_explain_or_status_affects_no_other_model(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_containment, "POINTS", ())
    monkeypatch.setattr(fault_containment, "DOCUMENT_POINTS", (point,))
    result = play(SEED_WITH_FAULT)
    assert not result.broken
    assert result.contained, "the fault had an effect"


@pytest.mark.parametrize(
    "point", [GATEWAY_POINTS[0], *(pytest.param(one, marks=pytest.mark.deep) for one in GATEWAY_POINTS[1:])]
)
def test_fault_in_dispatch_of_a_gateway_affects_no_other_model(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_containment, "POINTS", (point,))
    monkeypatch.setattr(fault_containment, "DOCUMENT_POINTS", ())
    result = play(SEED_WITH_FAULT)
    assert not result.broken
    assert result.contained, "the fault had an effect"


def test_simulation_fails_if_a_model_without_a_fault_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "autoscaler.planner.plan:compute_slots", concerns("m0"), expected=False)
    broken = play(SEED_WITHOUT_FAULT).broken
    assert any(line.startswith("I14: m0 is at fault in ") for line in broken)


@pytest.mark.parametrize("seed", [3, 8, 14])
def test_two_simulation_runs_of_one_seed_give_the_same_trace(seed: int) -> None:
    """I13: a run is a function of its seed."""
    assert play(seed).trace == play(seed).trace
