"""The state directory: its lock, and the records, histories and placement values that it keeps."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.local.learned_files import FORGOTTEN, MOMENTS, HistoryFile, LessonFile
from autoscaler.drivers.local.state_directory import EPOCH, InUseError, ReplicaRecord, StateDirectory, StateError
from autoscaler.state.world import History
from tests.support.builders.placement_values import cluster, exercise_of, lesson
from tests.support.harness.faults.fault_injection import InjectedError, inject


def record(name: str) -> ReplicaRecord:
    return ReplicaRecord(id=ReplicaId(name), model=ModelName("m"), spec_hash="h", intent="i", slices=(), memory_bytes=1)


def test_state_directory_is_private_and_keeps_its_installation_id(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path / "a" / "b")
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert {p.name for p in state.path.iterdir()} == {"version", "installation", "lock", "replicas", "logs", "run"}
    assert StateDirectory.attach(tmp_path / "a" / "b").mark_prefix == state.mark_prefix
    state.close()
    again = StateDirectory.open(tmp_path / "a" / "b")
    assert again.mark_prefix == state.mark_prefix
    again.close()


def test_second_process_in_a_state_directory_gets_an_error_with_the_pid(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path / "s")
    with pytest.raises(InUseError) as refused:
        StateDirectory.open(tmp_path / "s")
    pid = (tmp_path / "s" / "lock").read_text().strip()
    expected = (
        f"another Pilotlight process uses {tmp_path}/s (pid {pid}): stop it, or name another directory with --state"
    )
    assert str(refused.value) == expected
    state.close()


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2", "newer Pilotlight (layout 2, this version supports 1)"),
        ("x", "not a state directory of Pilotlight"),
        ("9" * 5000, "not a state directory of Pilotlight"),
    ],
)
def test_directory_of_newer_version_or_other_program_is_left_unchanged(tmp_path: Path, version: str, why: str) -> None:
    (tmp_path / "version").write_text(version)
    for use in (StateDirectory.open, StateDirectory.attach):
        with pytest.raises(StateError, match="--state") as refused:
            use(tmp_path)
        assert why in str(refused.value)
        assert str(tmp_path) in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["version"]


@pytest.mark.parametrize("name", ["version", "installation", EPOCH])
@pytest.mark.parametrize("content", [b"", b"-1", b"0x1\n", b"\xff", b"0123456789abcdeg"])
def test_corrupt_state_file_is_named_in_the_error_and_left_unchanged(tmp_path: Path, name: str, content: bytes) -> None:
    state = StateDirectory.open(tmp_path)
    assert [state.next_epoch(), state.next_epoch()] == [1, 2]
    state.close()
    (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the rejection released the lock
        with pytest.raises(StateError) as refused:
            StateDirectory.open(tmp_path)
        assert not isinstance(refused.value, InUseError)
        assert f"{tmp_path / name} contains no " in str(refused.value)
        assert (tmp_path / name).read_bytes() == content


def test_epoch_increases_and_is_not_issued_if_write_fails(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path)
    (tmp_path / EPOCH).write_text("1700000000\n")
    assert state.next_epoch() == 1700000001
    (tmp_path / f".{EPOCH}.new").mkdir()
    with pytest.raises(StateError, match="epoch cannot be written"):
        state.next_epoch()
    state.close()


def test_error_for_unwritable_directory_names_the_state_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/pilotlight"):
        with pytest.raises(StateError, match="name a writable one with --state") as refused:
            StateDirectory.open(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_attach_to_missing_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="does not exist"):
        StateDirectory.attach(tmp_path / "s")


def test_replica_record_with_a_special_character_in_its_id_is_read_back(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path)
    names = ["a", "a/b", "..", "ns/name:tag", "x" * 500, "ä"]
    for name in names:
        state.put(record(name))
        assert state.log(ReplicaId(name)).parent == tmp_path / "logs"
    good, broken = state.records()
    assert {r.id for r in good} == set(names)
    assert not broken
    for name in names:
        state.drop(ReplicaId(name))
        state.drop(ReplicaId(name))
    assert state.records() == ((), ())
    state.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id":"r1"}', b"\xff\xfe"])
def test_corrupt_record_is_moved_aside_and_reported_once(tmp_path: Path, content: bytes) -> None:
    state = StateDirectory.open(tmp_path)
    state.put(record("r2"))
    (tmp_path / "replicas" / "r1.json").write_bytes(content)
    good, broken = state.records()
    assert [r.id for r in good] == ["r2"]
    assert len(broken) == 1
    assert "r1.json" in broken[0]
    assert (tmp_path / "replicas" / "r1.broken").read_bytes() == content
    assert not state.records()[1]
    state.close()


def test_record_whose_write_was_interrupted_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDirectory.open(tmp_path)
    state.put(record("r2"))
    with monkeypatch.context() as interrupted:
        inject(interrupted, "pathlib:Path.rename", lambda *_: True)
        with pytest.raises(InjectedError):
            state.put(record("r1"))
    assert len([*(tmp_path / "replicas").iterdir()]) == 2
    state.drop_unfinished()
    assert [path.name for path in (tmp_path / "replicas").iterdir()] == ["r2.json"]
    state.close()


def test_a_record_of_a_later_version_with_more_fields_is_read(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path)
    state.put(record("r1"))
    path = tmp_path / "replicas" / "r1.json"
    path.write_text(path.read_text().replace("{", '{"more":1,', 1))
    assert [r.id for r in state.records()[0]] == ["r1"]
    state.close()


NOT_MOMENTS = {"starts_s", "tries", "episodes", "failure", "failed_hash", "regrets", "used"}
M = ModelName("m")


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_new_history_field_must_be_declared_as_timestamp_or_not() -> None:
    assert {f.name for f in msgspec.structs.fields(History)} == {*MOMENTS, *FORGOTTEN, *NOT_MOMENTS}


def test_saved_history_is_loaded_with_times_on_the_clock_of_the_process(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path)
    history = History(
        starts_s=(2.5, 3.0),
        last_activity_s=990.0,
        served_until_s=1000.0,
        retry_at_s=1060.0,
        refused_until_s=1060.0,
        episodes=2,
        failure="it died",
        peaks=((99, 3),),
    )
    assert HistoryFile(state, Clock(1000.0), Clock(5000.0)).save({M: history})
    loaded, broken = HistoryFile(state, Clock(7.0), Clock(5020.0)).load()
    now = loaded[M]
    assert not broken
    assert (now.starts_s, now.episodes, now.failure, now.peaks) == ((2.5, 3.0), 2, "it died", ())
    assert now.last_activity_s == 7.0 - 30.0
    assert now.retry_at_s == now.refused_until_s == 7.0 + 40.0
    assert now.served_until_s is not None
    assert abs(now.served_until_s - (7.0 - 20.0)) < 1e-6
    assert (now.hold_until_s, now.first_try_s, now.stopped_idle_s) == (0.0, None, None)
    state.close()


def test_history_loaded_after_the_clock_was_set_back_has_not_aged(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path)
    HistoryFile(state, Clock(1000.0), Clock(5000.0)).save({M: History(last_activity_s=990.0)})
    assert HistoryFile(state, Clock(2000.0), Clock(1.0)).load()[0][M].last_activity_s == 1990.0
    state.close()


def test_history_is_saved_at_most_once_a_minute_unless_forced(tmp_path: Path) -> None:
    state, clock = StateDirectory.open(tmp_path), Clock(1000.0)
    file = HistoryFile(state, clock, Clock(5000.0))
    assert file.save({})
    clock.now_s = 1059.0
    assert not file.save({})
    assert file.save({}, at_once=True)
    clock.now_s = 1119.0
    assert file.save({})
    state.close()


def test_corrupt_history_file_is_moved_aside_and_history_is_empty(tmp_path: Path) -> None:
    state = StateDirectory.open(tmp_path)
    file = HistoryFile(state, Clock(1.0), Clock(1.0))
    assert file.load() == ({}, "")
    (tmp_path / "histories.json").write_text("{")
    loaded, broken = file.load()
    assert not loaded
    assert "histories.json" in broken
    assert file.load() == ({}, "")
    state.close()


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


def test_placement_values_of_another_version_are_not_loaded_or_deleted(state: StateDirectory) -> None:
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


def test_history_that_cannot_be_saved_is_reported_and_the_other_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, faults, bad = StateDirectory.open(tmp_path), list[tuple[str, str]](), History(starts_s=(666.0,))
    inject(
        monkeypatch, "autoscaler.drivers.local.learned_files:_move", lambda one, *_: one.starts_s == (666.0,),
        expected=False,
    )  # fmt: skip
    file = HistoryFile(state, Clock(1000.0), Clock(5000.0))
    histories = {ModelName("bad"): bad, M: History(episodes=2)}
    assert file.save(histories, fault=lambda name, what, _: faults.append((name, what)))
    loaded, broken = file.load()
    assert (broken, list(loaded), loaded[M].episodes, faults) == ("", [M], 2, [("bad", "histories")])
    state.close()
