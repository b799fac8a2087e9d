"""The log of transitions is bounded, ordered, and can be read by Model and by time."""

from __future__ import annotations

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.explain.decision_log import REFUSED_EVERY_S, Log
from autoscaler.state.actions import FailStart, Unmet
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S


def row(at_s: float, model: str = "m") -> Transition:
    return Transition(at_s, ReplicaId("r"), ModelName(model), (), S.STARTING, S.READY, "seen", "")


def test_full_decision_log_drops_its_oldest_row_and_lists_the_newest_first() -> None:
    log = Log(3)
    log.extend([row(1.0, "a"), row(2.0, "b")])
    log.extend([row(3.0, "c"), row(3.0, "d")])
    assert len(log) == 3
    assert [r.model for r in log.latest(2)] == ["d", "c"], "also at the same time"
    assert [r.model for r in log.latest(9)] == ["d", "c", "b"]


def test_decision_log_query_for_a_model_returns_only_its_rows() -> None:
    log = Log()
    log.extend([row(1.0, "a"), row(2.0, "b"), row(3.0, "a")])
    assert [r.at_s for r in log.of_model(ModelName("a"))] == [1.0, 3.0]
    assert log.of_model(ModelName("c")) == ()


def unmet(model: str = "m", reason: str = "needs 30Gi", *, never: bool = True) -> tuple[Unmet, ...]:
    return (Unmet(model=ModelName(model), reason=reason, never=never),)


def test_rejection_for_lack_of_a_device_is_logged_once_per_minute() -> None:
    log = Log()
    log.extend([row(0.0)])
    (first,) = log.refuse(unmet(), 1.0)
    assert log.refuse(unmet(), 2.0) == (), "a client that tries again is no news"
    assert [r.model for r in log.refuse(unmet("other"), 3.0)] == ["other"]
    assert [r.reason for r in log.refuse(unmet(reason="needs 40Gi"), 4.0)] == ["fits on no device: needs 40Gi"]
    (again,) = log.refuse(unmet(reason="needs 40Gi"), 4.0 + REFUSED_EVERY_S)
    assert log.latest(1) == (again,)
    assert log.of_model(ModelName("m"))[1] == first


def test_rejection_of_an_impossible_start_is_logged_once_per_minute() -> None:
    log = Log()
    impossible = [FailStart(model=ModelName("m"), reason="there is no /x.gguf")]
    assert [r.reason for r in log.refuse(impossible, 1.0)] == ["cannot start: there is no /x.gguf"]
    assert log.refuse(impossible, 2.0) == ()
    assert len(log.refuse(impossible, 1.0 + REFUSED_EVERY_S)) == 1


def test_model_that_waits_for_a_device_is_not_logged_as_rejected() -> None:
    log = Log()
    assert log.refuse(unmet(never=False), 1.0) == ()
    assert len(log) == 0
