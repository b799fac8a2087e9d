"""Replicas that scaling signals require: current values, peaks, and unknown values."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.contract import ModelName
from autoscaler.demand.desired_replicas import DesiredReplicas, compute_desired_replicas
from autoscaler.demand.scaling_signals import SIGNAL_EXPIRY_S, record_signal
from autoscaler.fold.fold import fold
from autoscaler.spec.model import Model, PrometheusQuery, Scaling, SignalName
from autoscaler.state.events import DocumentsSeen, SignalsSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, Replica, Signal, SignalTotal
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, world

TOKENS = Scaling(tokens_per_second=400.0)
USED = History(starts_s=(8.0,), last_activity_s=T0)


def signal(total: float, *, peak: float = 0.0, before: float | None = 0.0, **fields: Any) -> Signal:
    """A signal that was just read."""
    known: dict[str, Any] = {"seen_s": T0, "since_s": T0 - 1, "peak": max(peak, total), "peak_before": before}
    return Signal(last=SignalTotal(total=total, unknown=fields.pop("unknown", "")), **{**known, **fields})


def replicas(of: Model, count: int, state: S = S.READY) -> list[Replica]:
    """Replicas that became ready long ago."""
    return [replica(of, f"r{number}", state=state, created_s=T0 - 5000) for number in range(count)]


def scaled(
    of: Model, have: int, found: dict[SignalName, Signal], *, waiting: int = 0, running: int = 1, now_s: float = T0,
    supply: list[Replica] | None = None,
) -> DesiredReplicas:  # fmt: skip
    """The result with `have` replicas, these signals and this load."""
    levels = [level(of.name, waiting, running)] if waiting or running else []
    made = world(
        [of], [device()], replicas(of, have) if supply is None else supply,
        [gateway(levels=levels, seen_s=now_s)], {of.name: USED}, signals={of.name: found},
    )  # fmt: skip
    return compute_desired_replicas(made, of, now_s)


def test_signal_above_its_target_starts_replicas_and_is_the_reason() -> None:
    a = model("a", slots=8, high=5, scaling=TOKENS)
    answer = scaled(a, 1, {"tokensPerSecond": signal(950.0)})
    assert (answer.count, answer.urgent) == (3, False)
    assert answer.reason == "1 running, tenant acme; tokensPerSecond is 950 and needs 3 x 400"
    assert scaled(a, 1, {"tokensPerSecond": signal(400.0)}).count == 1
    assert scaled(a, 1, {"tokensPerSecond": signal(1e300)}).count == 5, "at most replicas.max"


def test_the_most_demanding_of_several_signals_counts() -> None:
    both = Scaling(kv_cache_percent=80.0, prometheus=PrometheusQuery(query="sum(x)", target=10.0))
    a = model("a", slots=8, high=9, scaling=both)
    answer = scaled(a, 2, {"kvCachePercent": signal(190.0), "prometheus": signal(31.0)})
    assert (answer.count, "prometheus is 31 and needs 4 x 10" in answer.reason) == (4, True)


def test_sum_of_floats_at_its_target_needs_no_further_replica() -> None:
    a = model("a", slots=8, high=9, scaling=Scaling(kv_cache_percent=80.0))
    total = 100 * sum([0.8, 0.8, 0.8])
    assert total > 240.0
    assert scaled(a, 3, {"kvCachePercent": signal(total)}).count == 3


def test_starting_replicas_count_as_supply() -> None:
    a = model("a", slots=8, high=5, scaling=TOKENS)
    supply = [replica(a, "r0"), *(replica(a, f"s{number}", state=S.STARTING) for number in range(2))]
    assert scaled(a, 3, {"tokensPerSecond": signal(950.0)}, supply=supply).count == 3


def test_scale_down_waits_until_fewer_replicas_meet_the_peak() -> None:
    a = model("a", slots=8, high=5, idle_seconds=60.0, scaling=TOKENS)
    kept = scaled(a, 3, {"tokensPerSecond": signal(100.0, peak=850.0)})
    assert (kept.count, "tokensPerSecond was 850 recently and needs 3 x 400" in kept.reason) == (3, True)
    assert scaled(a, 3, {"tokensPerSecond": signal(100.0, before=850.0)}).count == 3
    assert scaled(a, 3, {"tokensPerSecond": signal(100.0, peak=800.0)}).count == 2, "N-1 replicas meet the peak"
    assert scaled(a, 3, {"tokensPerSecond": signal(100.0)}).count == 1


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({}, "tokensPerSecond is unknown, because it was not read recently"),
        ({"tokensPerSecond": signal(0.0, seen_s=T0 - SIGNAL_EXPIRY_S)}, "it was not read recently"),
        ({"tokensPerSecond": signal(0.0, unknown="of a timeout")}, "tokensPerSecond is unknown, because of a timeout"),
        ({"tokensPerSecond": signal(0.0, before=None)}, "has not been read for a whole idle timeout yet"),
    ],
)
def test_unknown_signal_neither_stops_nor_starts_replicas(found: dict[SignalName, Signal], why: str) -> None:
    a = model("a", slots=8, high=5, idle_seconds=60.0, scaling=TOKENS)
    answer = scaled(a, 3, found)
    assert (answer.count, why in answer.reason) == (3, True), answer.reason


def test_incomplete_total_is_a_lower_bound_that_starts_replicas() -> None:
    a = model("a", slots=8, high=5, scaling=TOKENS)
    assert scaled(a, 2, {"tokensPerSecond": signal(950.0, unknown="of a timeout")}).count == 3


def test_result_changes_when_a_signal_expires() -> None:
    a = model("a", slots=8, high=5, scaling=TOKENS)
    found: dict[SignalName, Signal] = {"tokensPerSecond": signal(950.0)}
    answer = scaled(a, 1, found)
    assert answer.next_s == T0 + SIGNAL_EXPIRY_S
    assert scaled(a, 1, found, now_s=T0 + SIGNAL_EXPIRY_S).count == 1


def test_unknown_signal_does_not_prevent_scaling_to_zero() -> None:
    a = model("a", slots=8, high=5, idle_seconds=60.0, scaling=TOKENS)
    assert scaled(a, 3, {}, running=0).count == 3, "within the idle timeout"
    assert scaled(a, 3, {}, running=0, now_s=T0 + 61).count == 0


def test_high_signal_starts_no_replica_while_no_request_waits_or_runs() -> None:
    a = model("a", slots=8, high=5, idle_seconds=60.0, scaling=TOKENS)
    assert scaled(a, 1, {"tokensPerSecond": signal(950.0)}, running=0).count == 1
    assert scaled(a, 0, {"tokensPerSecond": signal(950.0)}, running=0).count == 0


def test_model_without_scaling_ignores_signals() -> None:
    a = model("a", slots=8, high=5)
    assert scaled(a, 1, {"tokensPerSecond": signal(950.0)}).count == 1


def test_peak_is_remembered_for_one_to_two_windows() -> None:
    known = record_signal(None, SignalTotal(total=5.0), 60.0, T0)
    assert (known.peak, known.peak_before) == (5.0, None)
    at_s = T0
    while at_s < T0 + 60.0:
        at_s += 10.0
        known = record_signal(known, SignalTotal(total=1.0), 60.0, at_s)
    assert (known.peak, known.peak_before) == (1.0, 5.0)
    while at_s < T0 + 120.0:
        at_s += 10.0
        known = record_signal(known, SignalTotal(total=1.0), 60.0, at_s)
    assert (known.peak, known.peak_before) == (1.0, 1.0)


def test_peaks_begin_again_after_an_interruption() -> None:
    known = signal(9.0, before=9.0)
    later = record_signal(known, SignalTotal(total=1.0), 60.0, T0 + SIGNAL_EXPIRY_S)
    assert (later.peak, later.peak_before) == (1.0, None)


def test_fold_keeps_signals_of_models_that_still_have_scaling() -> None:
    a, gone = model("a", scaling=TOKENS), ModelName("gone")
    total = SignalTotal(total=7.0)
    seen = [SignalsSeen(model=name, signals={"tokensPerSecond": total}) for name in (a.name, gone)]
    after, _ = fold(world([a]), seen, T0)
    assert {name: found["tokensPerSecond"].last for name, found in after.learned.signals.items()} == {a.name: total}
    for models in ((), (model("a"),)):
        assert not fold(after, [DocumentsSeen(models=models)], T0)[0].learned.signals
