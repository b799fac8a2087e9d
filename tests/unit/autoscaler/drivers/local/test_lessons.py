"""The file of learned values: errors are reported in one line, and at most a minute of values is lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from autoscaler.drivers.local.lessons import LessonFile
from autoscaler.drivers.local.state_directory import StateDirectory
from tests.support.builders.placement_values import cluster, exercise_of, lesson

LESSON = lesson(exercise_of(cluster()), 1, apart=True)


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    return StateDirectory.open(tmp_path / "state")


def test_placement_values_saved_last_are_loaded_by_the_next_process(state: StateDirectory) -> None:
    file = LessonFile(state)
    assert file.load() == (None, "")
    file.save(LESSON)
    file.save(replace(LESSON, learnt=True))
    assert LessonFile(state).load() == (LESSON, "")


def test_placement_values_of_other_version_are_kept_until_next_save(state: StateDirectory) -> None:
    path = state.path / "lesson.json"
    path.write_bytes(b'{"version": 2, "lesson": {"of": "another kind"}}')
    assert LessonFile(state).load() == (None, f"{path} has version 2, not 1: its values are learned again")
    assert path.exists()
    LessonFile(state).save(LESSON)
    assert LessonFile(state).load() == (LESSON, "")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"version": 1}', msgspec.json.encode({"version": 1, "lesson": replace(LESSON, prices=b"x")})],
)
def test_corrupt_placement_values_file_is_moved_aside_and_reported(state: StateDirectory, text: bytes) -> None:
    path = state.path / "lesson.json"
    path.write_bytes(text)
    lesson, problem = LessonFile(state).load()
    assert lesson is None
    assert problem.startswith(f"{path} cannot be read (")
    assert problem.endswith("; its values are learned again")
    assert "\n" not in problem
    assert not path.exists()
    assert LessonFile(state).load() == (None, "")
