"""What was learnt of Offers outlives the process that learnt it."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from autoscaler.drivers import learnt
from autoscaler.drivers.learnt import LearntFile
from autoscaler.drivers.records import StateDirectory
from autoscaler.leases import STARTS_MAX, Kind, Learnt

KIND, OTHER = Kind("rack", "A100", "w1"), Kind("cloud", "T4", "")


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    return StateDirectory.open(tmp_path / "state")


def test_what_was_learnt_is_there_after_a_restart(state: StateDirectory) -> None:
    known = {KIND: Learnt(took_s=(1.5, 2.0), came=2, failed=1, gaps_s=(3.0, inf)), OTHER: Learnt(failed=4)}
    LearntFile(state).save(known)
    assert LearntFile(state).load() == (known, "")


def test_nothing_is_written_while_nothing_new_is_learnt(state: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(learnt, "replace_file", lambda path, text: written.append(text))
    file = LearntFile(state)
    file.save({})
    assert not written
    file.save({KIND: Learnt(took_s=(1.0,))})
    file.save({KIND: Learnt(took_s=(1.0,))})
    assert len(written) == 1


@pytest.mark.parametrize("text", ["{", "[{}]", '[{"kind": ["a"]}]', "null"])
def test_a_file_that_cannot_be_read_is_told_of_once_and_moved_aside(state: StateDirectory, text: str) -> None:
    (state.path / "capacity.json").write_text(text)
    known, said = LearntFile(state).load()
    assert not known
    assert "capacity.json cannot be read" in said
    assert LearntFile(state).load() == ({}, "")


def test_of_a_file_that_is_longer_than_ours_the_newest_count(state: StateDirectory) -> None:
    long = tuple(float(number) for number in range(STARTS_MAX + 5))
    LearntFile(state).save({KIND: Learnt(took_s=long)})
    known, _ = LearntFile(state).load()
    assert known[KIND].took_s == long[-STARTS_MAX:]
