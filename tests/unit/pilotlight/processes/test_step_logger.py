"""The log for `explain` and the learner: an exception for one Model does not affect the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoscaler.contract import ModelName
from autoscaler.controller import loop
from autoscaler.controller.loop import LoopStep
from autoscaler.drivers.local.learned_files import LessonFile
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.explain.decision_log import Log
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.state.actions import Plan, Unmet
from autoscaler.state.world import World
from pilotlight.processes import learner_runner
from pilotlight.processes.autoscaler import build_step_logger
from pilotlight.processes.console import Narrator
from pilotlight.processes.learner_runner import LearnerRunner
from tests.support.builders.worlds import T0, model, world
from tests.support.harness.faults.fault_injection import InjectedError, inject
from tests.support.harness.manual_loop import SteppedLoop


def test_rejection_log_exception_is_reported_for_its_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, log = list[tuple[str, str]](), Log()
    fd = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    on_step = build_step_logger(log, Narrator(fd), lambda name, what, _: faults.append((name, what)))
    unmet = tuple(Unmet(model=ModelName(name), reason="needs 30Gi", never=True) for name in ("a", "b"))
    at = world([model("a", 20), model("b", 20)])
    inject(monkeypatch, "autoscaler.explain.decision_log:_refusal", lambda one: one.model == "a", expected=False)
    on_step(LoopStep(at, at, Plan(unmet=unmet), (), (), T0, T0, T0))
    os.close(fd)
    assert faults == [("a", "explain")]
    assert [row.model for row in log.latest(9)] == ["b"]


async def test_exception_in_learning_quarantines_its_model_and_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, seen = SteppedLoop(world([model("a", 20), model("b", 20)])), list[set[str]]()

    def due(at: World, *_: object) -> None:
        active = {str(name) for name in at.models} - set(list_quarantined_models(at))
        if "a" in active:
            raise InjectedError("learning")
        seen.append(active)

    faults = list[tuple[str | None, str]]()
    monkeypatch.setattr(loop, "report_fault", lambda name, what, _: faults.append((name, what)))
    monkeypatch.setattr(learner_runner, "_due", due)
    await LearnerRunner(stepped.loop, LessonFile(StateDirectory(tmp_path, "i", None)), lambda: T0).look()
    assert faults == [("a", "learning")]
    assert seen[-1] == {"b"}
