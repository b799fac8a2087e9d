"""The file that keeps what was learnt: what is wrong with it is one line, and never more than a minute lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from autoscaler.drivers.local.lessons import LessonFile
from autoscaler.drivers.local.state_directory import StateDirectory
from tests.kit.taught import cluster, exercise_of, lesson

LESSON = lesson(exercise_of(cluster()), 1, apart=True)


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    return StateDirectory.open(tmp_path / "state")


def test_what_was_kept_is_read_again(state: StateDirectory) -> None:
    file = LessonFile(state)
    assert file.load() == (None, "")
    file.save(LESSON)
    file.save(replace(LESSON, learnt=True))
    assert LessonFile(state).load() == (LESSON, "")


def test_another_version_stays_where_it_is_until_something_was_learnt(state: StateDirectory) -> None:
    path = state.path / "lesson.json"
    path.write_bytes(b'{"version": 2, "lesson": {"of": "another kind"}}')
    assert LessonFile(state).load() == (None, f"{path} is of version 2, not 1: what it says is learnt again")
    assert path.exists()
    LessonFile(state).save(LESSON)
    assert LessonFile(state).load() == (LESSON, "")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"version": 1}', msgspec.json.encode({"version": 1, "lesson": replace(LESSON, prices=b"x")})],
)
def test_a_broken_one_is_moved_aside_and_told_of_in_one_line(state: StateDirectory, text: bytes) -> None:
    path = state.path / "lesson.json"
    path.write_bytes(text)
    lesson, problem = LessonFile(state).load()
    assert lesson is None
    assert problem.startswith(f"{path} cannot be read (")
    assert problem.endswith("; it is learnt again")
    assert "\n" not in problem
    assert not path.exists()
    assert LessonFile(state).load() == (None, "")
