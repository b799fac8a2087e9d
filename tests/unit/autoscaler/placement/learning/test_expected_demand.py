"""Expected demand (request shapes and their frequencies) and restart costs."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.placement.learning.expected_demand import (
    HALF_LIFE_S,
    KINDS_MAX,
    build_demand_histogram,
    build_restart_costs,
)
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.settings import Settings
from autoscaler.state.resources import CPU_MAX, Isolation, RequestShape
from autoscaler.state.world import History, World
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replica, world


def kind(memory_gi: float, devices: int = 1, compute_percent: int = 0) -> RequestShape:
    return RequestShape(devices, int(memory_gi * GI), compute_percent, cpu_milli=100)


def shares(made: World) -> dict[RequestShape, float]:
    """Request shape -> its share of the total."""
    found = build_demand_histogram(made, T0)
    total = sum(weight for _, weight in found)
    return {kind: weight / total for kind, weight in found}


def called(ago_s: float = 0.0, *peaks: int) -> History:
    return History(last_activity_s=T0 - ago_s, peaks=tuple(enumerate(peaks)))


def test_demand_share_of_a_shape_equals_its_share_of_needed_replicas() -> None:
    """Two models of 10Gi need one and three replicas. One of 20Gi needs four: its peak was 13 requests with 4 slots."""
    models = [model("a", 10), model("b", 10, high=9), model("c", 20, high=9), model("never", 40)]
    calls = [gateway(levels=[level("a", 1), level("b", 4, 8)])]
    made = world(models, gateways=calls, histories={"c": called(0.0, 2, 13, 5)})
    assert shares(made) == {kind(10): 0.5, kind(20): 0.5}


def test_models_that_differ_in_device_count_or_compute_add_separate_demand() -> None:
    models = [
        model("a", 8, gpu=Gpu(count=2)),
        model("b", 8, gpu=Gpu(compute_percent=30)),
        model("c", 0, gpu=Gpu(count=0)),
    ]
    made = world(models, histories={"a": called(), "b": called(), "c": called()})
    assert shares(made) == dict.fromkeys(
        (kind(0, devices=0), kind(8, compute_percent=30), kind(8, devices=2)), pytest.approx(1 / 3)
    )


def test_demand_of_a_model_has_its_isolation_products_and_pod_requests() -> None:
    """Merged as the driver merges them. A limit without a request counts as the request."""
    requested = Resources(requests={"cpu": "1500m"}, limits={"memory": "2Gi", "rdma/hca": 1})
    models = [
        model("a", 8, gpu=Gpu(isolation="hardware", models=("*h100*",)), resources=requested),
        model("b", 8, pod=Pod(resources=Resources(requests={"memory": "0.5Gi"}))),
        model("c", 8, resources=Resources(requests={"cpu": "9999999999999999999E"})),
    ]
    made = world(models, histories={"a": called(), "b": called(), "c": called()})
    given = Settings(pod=Pod(resources=Resources(requests={"cpu": 2}, limits={"memory": "100m"})))
    assert set(shares(replace(made, settings=given))) == {
        RequestShape(1, 8 * GI, 0, Isolation.HARDWARE, ("*h100*",), 1_500, 2 * GI),
        RequestShape(1, 8 * GI, cpu_milli=2_000, host_bytes=GI // 2),
        RequestShape(1, 8 * GI, cpu_milli=CPU_MAX, host_bytes=1),
    }


def test_demand_of_unused_models_decays_except_minimum_replicas() -> None:
    models = [model("now", 1), model("past", 2), model("kept", 3, low=1)]
    made = world(models, histories={"now": called(), "past": called(2 * HALF_LIFE_S), "kept": called(20 * HALF_LIFE_S)})
    assert shares(made) == {kind(1): 4 / 9, kind(3): 4 / 9, kind(2): 1 / 9}


def test_request_rejected_at_scale_zero_counts_as_demand() -> None:
    models = [model("a", 1), model("b", 2, paused=True)]
    made = world(models, histories={"a": History(refused_cold_s=T0), "b": called()})
    assert shares(made) == {kind(1): 1.0}


def test_demand_is_capped_at_the_maximum_replicas_of_a_model() -> None:
    made = world([model("a", 1), model("b", 2, high=3)], histories={"a": called(0.0, 99), "b": called(0.0, 99)})
    assert shares(made) == {kind(2): 0.75, kind(1): 0.25}


def test_demand_is_empty_before_the_first_request() -> None:
    made = world([model("a", 1)], histories={"a": History(starts_s=(3.0,))})
    assert build_demand_histogram(made, T0) == ()


def many() -> list[Model]:
    return [model(f"m{number:03}", 1 + number / 7, high=4) for number in range(KINDS_MAX + 50)]


def test_demand_histogram_above_its_size_limit_drops_the_rarest_shapes() -> None:
    rare = {str(m.name): called(HALF_LIFE_S * (1 + n / 100)) for n, m in enumerate(many())}
    made = build_demand_histogram(world(many(), histories=rare), T0)
    assert [one.kind for one in made] == [kind(1 + number / 7) for number in range(KINDS_MAX)]


def test_shuffled_models_and_histories_give_the_same_demand_histogram() -> None:
    known = {str(m.name): called(17.0 * n, n % 9) for n, m in enumerate(many())}
    one = build_demand_histogram(world(many(), histories=known), T0)
    models, names = many(), list(known)
    Random(1).shuffle(models)
    Random(2).shuffle(names)
    other = build_demand_histogram(world(models, histories={name: known[name] for name in names}), T0)
    assert other == one


def test_restart_cost_is_the_median_start_time_or_60_s_if_none_is_known() -> None:
    a, b = model("a", 1), model("b", 1)
    known = {"a": History(starts_s=(1.0, 9.0, 3.0))}
    made = build_restart_costs(world([a, b], [device()], [replica(a, "ra"), replica(b, "rb")], histories=known))
    assert made.start_s == {ModelName("a"): 3.0}
    assert made.restart_s(ModelName("b")) == 60.0
