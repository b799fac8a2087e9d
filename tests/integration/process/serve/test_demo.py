"""`make demo` succeeds, says so in its last two lines, shows every step and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.harness.serve.serve import describe, running

pytestmark = [pytest.mark.xdist_group("demo"), pytest.mark.standard]  # all tests check one run
ROOT = Path(__file__).resolve().parents[4]
S_MAX = 400.0
OURS = "WHOSE_DEMO"
"""An environment variable inherited by every process of one run, so that each is found, whatever its parent."""
LAST_TWO = re.compile(
    r"device-seconds: (\d+\.\d) used, (\d+\.\d) if both were always on\n"
    r"demo: 40 calls, 40 completed, 0 lost, 0 from the wrong model; "
    r"cold start median \d+ ms \(engine alone \d+ ms\); replicas now: 0\n"
)
STEP = re.compile(r"^\d\d:\d\d:\d\d\.\d{3}  (ada|bob) +(\S+) +(.*)$", re.MULTILINE)
REQUESTS = {"parked", "answered", "SIGKILL"}
"""Steps that the demo itself prints; `serve` prints the others."""
THREE_TIMES_FROM_ZERO = 3 * ["starting", "ready", "draining", "stopping", "gone"]


class Run(NamedTuple):
    """The result of one finished demo."""

    status: int
    out: str
    err: str
    left: list[str]
    """Its processes that were still running."""

    def steps(self, model: str, *, requests: bool) -> list[str]:
        """Return the steps of a model in order: those the demo printed (`requests`), or those that `serve` printed."""
        return [step for name, step, _ in STEP.findall(self.out) if name == model and (step in REQUESTS) == requests]


def marked(token: str) -> list[int]:
    """Return the running processes that have this value of OURS in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OURS) == token and running(process.pid):
                found.append(process.pid)
        except psutil.Error:
            continue  # it has exited, or we may not read it
    return found


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run the demo once for this module."""
    assert "\t@$(PY) -m examples.demo " in (ROOT / "Makefile").read_text()
    token = uuid.uuid4().hex
    command = [sys.executable, "-m", "examples.demo"]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, OURS: token}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=S_MAX)
        yield Run(process.returncode, out, err, [describe(pid) for pid in marked(token)])
    finally:
        for pid in marked(token):
            with contextlib.suppress(ProcessLookupError):  # it has exited meanwhile
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_completed_demo_prints_a_two_line_summary(run: Run) -> None:
    assert run.status == 0, run.out + run.err
    last = LAST_TWO.fullmatch("".join(run.out.splitlines(keepends=True)[-2:]))
    assert last is not None, run.out
    assert 0 < float(last[1]) < float(last[2])


def test_ended_demo_leaves_no_process_and_no_state_directory(run: Run) -> None:
    assert run.left == []
    state = re.search(r"state in (\S+)", run.err)
    assert state is not None
    assert not Path(state[1]).parent.exists()
    assert run.err.endswith("pilotlight: stopped\n")


@pytest.mark.parametrize("model", ["ada", "bob"])
def test_demo_starts_and_scales_each_model_to_zero_three_times(run: Run, model: str) -> None:
    assert run.steps(model, requests=True)[:6] == 3 * ["parked", "answered"]
    assert run.steps(model, requests=False)[:15] == THREE_TIMES_FROM_ZERO
    assert run.steps(model, requests=False)[-1] == "gone"


def test_engine_killed_during_start_is_reported_and_restarted(run: Run) -> None:
    assert run.steps("bob", requests=True)[6:] == ["SIGKILL"]
    steps = [step for step in run.steps("bob", requests=False) if step != "stopping"]  # it can be printed after `gone`
    at = steps.index("failed")
    assert at >= 13, "three times from zero before"
    assert steps[at - 1] == "starting"
    assert steps[at + 1 : at + 4] == ["gone", "starting", "ready"]
    (reason,) = [reason for model, step, reason in STEP.findall(run.out) if (model, step) == ("bob", "failed")]
    assert reason.startswith("was killed by SIGKILL"), "what it printed last, if it had begun to load, comes behind"


def test_running_model_is_drained_so_another_can_use_its_device(run: Run) -> None:
    reasons = {(model, reason.split(":")[0]) for model, step, reason in STEP.findall(run.out) if step == "draining"}
    # Which model is served first depends on how soon the killed engine is detected; the other gets the device next.
    assert reasons & {("bob", "make room for ada"), ("ada", "make room for bob")}
