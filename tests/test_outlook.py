"""The Outlook: which shapes of Wants come how often, and what starts cost."""

from __future__ import annotations

from random import Random

import pytest

from autoscaler.contract import ModelName
from autoscaler.model import Gpu, Model
from autoscaler.outlook import HALF_LIFE_S, SHAPES_MAX, histogram, outlook
from autoscaler.packing import Shape
from autoscaler.world import History
from tests.kit.worlds import GI, T0, device, gateway, level, model, replica, world


def shape(memory_gi: float, devices: int = 1, compute_percent: int = 0) -> Shape:
    return Shape(devices, int(memory_gi * GI), compute_percent)


def called(ago_s: float = 0.0, *peaks: int) -> History:
    return History(last_activity_s=T0 - ago_s, peaks=tuple(enumerate(peaks)))


def test_each_shape_has_its_share_of_the_replicas_that_its_models_needed() -> None:
    """Two Models of 10Gi need one and three Replicas, one of 20Gi needs four: it peaked at 13 Calls with 4 slots."""
    models = [model("a", 10), model("b", 10, high=9), model("c", 20, high=9), model("never", 40)]
    calls = [gateway(levels=[level("a", 1), level("b", 4, 8)])]
    made = world(models, gateways=calls, histories={"c": called(0.0, 2, 13, 5)})
    assert histogram(made, T0) == {shape(10): 0.5, shape(20): 0.5}


def test_a_shape_is_devices_memory_and_compute() -> None:
    models = [
        model("a", 8, gpu=Gpu(count=2)),
        model("b", 8, gpu=Gpu(compute_percent=30)),
        model("c", 0, gpu=Gpu(count=0)),
    ]
    made = world(models, histories={"a": called(), "b": called(), "c": called()})
    assert histogram(made, T0) == dict.fromkeys(
        (shape(0, devices=0), shape(8, compute_percent=30), shape(8, devices=2)), pytest.approx(1 / 3)
    )


def test_demand_fades_and_a_minimum_does_not() -> None:
    models = [model("now", 1), model("past", 2), model("kept", 3, low=1)]
    made = world(models, histories={"now": called(), "past": called(2 * HALF_LIFE_S), "kept": called(20 * HALF_LIFE_S)})
    assert histogram(made, T0) == {shape(1): 4 / 9, shape(3): 4 / 9, shape(2): 1 / 9}


def test_a_call_that_was_refused_because_its_model_is_cold_is_demand_and_a_paused_model_has_none() -> None:
    models = [model("a", 1), model("b", 2, paused=True)]
    made = world(models, histories={"a": History(refused_cold_s=T0), "b": called()})
    assert histogram(made, T0) == {shape(1): 1.0}


def test_no_model_counts_for_more_replicas_than_it_may_have() -> None:
    made = world([model("a", 1), model("b", 2, high=3)], histories={"a": called(0.0, 99), "b": called(0.0, 99)})
    assert histogram(made, T0) == {shape(2): 0.75, shape(1): 0.25}


def test_while_nobody_has_called_nothing_is_expected() -> None:
    made = world([model("a", 1)], histories={"a": History(starts_s=(3.0,))})
    assert histogram(made, T0) == {}


def many() -> list[Model]:
    return [model(f"m{number:03}", 1 + number / 7, high=4) for number in range(SHAPES_MAX + 50)]


def test_the_histogram_is_bounded_keeps_the_most_wanted_and_still_sums_to_one() -> None:
    rare = {str(m.name): called(HALF_LIFE_S * (1 + n / 100)) for n, m in enumerate(many())}
    made = histogram(world(many(), histories=rare), T0)
    assert len(made) == SHAPES_MAX
    assert sum(made.values()) == pytest.approx(1.0)
    assert list(made) == [shape(1 + number / 7) for number in range(SHAPES_MAX)]


def test_the_order_of_what_was_observed_does_not_show() -> None:
    known = {str(m.name): called(17.0 * n, n % 9) for n, m in enumerate(many())}
    one = list(histogram(world(many(), histories=known), T0).items())
    models, names = many(), list(known)
    Random(1).shuffle(models)
    Random(2).shuffle(names)
    other = histogram(world(models, histories={name: known[name] for name in names}), T0)
    assert list(other.items()) == one


def test_a_restart_costs_the_median_of_the_starts_that_are_remembered() -> None:
    a, b = model("a", 1), model("b", 1)
    known = {"a": History(starts_s=(1.0, 9.0, 3.0))}
    made = outlook(world([a, b], [device()], [replica(a, "ra"), replica(b, "rb")], histories=known), T0)
    assert made.start_s == {ModelName("a"): 3.0}
    assert made.restart_s(ModelName("b")) == 60.0
