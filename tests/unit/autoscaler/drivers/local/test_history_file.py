"""The history of Models survives the process, converted to the clock of the next process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autoscaler.contract import ModelName
from autoscaler.drivers.local.history_file import FORGOTTEN, MOMENTS, HistoryFile
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.state.world import History

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
