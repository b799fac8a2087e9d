"""Learning on a cluster small enough to verify what is learned."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoscaler.placement.index.node_search import NodeArrays, NodeCapacity, compute_request_usage
from autoscaler.placement.index.request_encoding import encode_request
from autoscaler.placement.index.residual_waste_tables import Taught, build_untrained_estimate
from autoscaler.placement.learning.learner import ITERATIONS, WEIGHTS_MAX, Draw, Learner
from autoscaler.state.resources import RequestFrequency, RequestShape, SliceClass

NODES = (
    *(NodeCapacity(f"a{number}", (SliceClass(1000, "t4"),) * 4, 32_000) for number in range(8)),
    *(NodeCapacity(f"b{number}", (SliceClass(1000, "v100"),) * 2, 64_000) for number in range(6)),
    *(NodeCapacity(f"c{number}", (SliceClass(1000, "g2"),) * 8, 96_000) for number in range(3)),
)
LANES = sum(len(node.lanes) for node in NODES)
DEMAND = (
    RequestFrequency(RequestShape(memory_bytes=500, cpu_milli=6_000), 14),
    RequestFrequency(RequestShape(memory_bytes=1000, cpu_milli=8_000), 16),
    RequestFrequency(RequestShape(memory_bytes=460, cpu_milli=4_000), 8),
    RequestFrequency(RequestShape(memory_bytes=810, cpu_milli=11_000), 10),
    RequestFrequency(RequestShape(memory_bytes=300, cpu_milli=3_000), 6),
    RequestFrequency(RequestShape(devices=2, cpu_milli=16_000), 3),
    RequestFrequency(RequestShape(devices=8, cpu_milli=90_000), 2),
    RequestFrequency(RequestShape(devices=0, cpu_milli=8_000), 10),
    RequestFrequency(RequestShape(devices=0, cpu_milli=4_000), 8),
)
SIZES = {500: 14.0, 1000: 16.0 + 6.0 + 16.0, 460: 8.0, 810: 10.0, 300: 6.0}


def draws(seed: int) -> Draw:
    return random.Random(seed).randrange


def lessons(
    nodes: tuple[NodeCapacity, ...] = NODES, demand: tuple[RequestFrequency, ...] = DEMAND
) -> list[tuple[Taught, float]]:
    return list(Learner(nodes, demand, draws, LANES).lessons())


def best(demand: tuple[RequestFrequency, ...] = DEMAND) -> Taught:
    return max(lessons(demand=demand), key=lambda lesson: lesson[1])[0]


def filled(taught: Taught, seed: int) -> float:
    """Percent of devices in use after requests for 130 % of them have arrived."""
    draw, stock = draws(seed), NodeArrays(NODES, taught)
    arrived = used = 0
    pool = [one.kind for one in DEMAND for _ in range(one.weight)]
    while arrived < 1300 * LANES:
        kind = pool[draw(len(pool))]
        milli = kind.devices * (kind.memory_bytes or 1000)
        arrived += milli
        place = stock.choose(encode_request(kind, stock.lanes))
        if place is not None:
            stock.take(place, compute_request_usage(kind, NODES[place.node], place.lanes))
            used += milli
    return used / LANES / 10


def test_demand_in_reverse_order_gives_the_same_learned_tables() -> None:
    one, other = best(), best(tuple(reversed(DEMAND)))
    assert one.faces == other.faces
    assert one.tables.values.tobytes() == other.tables.values.tobytes()
    assert one.tables.prices.tobytes() == other.tables.prices.tobytes()


def test_learned_values_use_5_points_more_devices_than_untrained_ones() -> None:
    """CPU-only requests go to nodes whose devices are in use, not to nodes where they would strand free devices."""
    taught, begun = best(), build_untrained_estimate(SIZES)
    more = [filled(taught, seed) - filled(begun, seed) for seed in range(20)]
    assert np.mean(more) > 5


def test_learner_returns_the_untrained_estimate_before_any_iteration() -> None:
    heard = lessons()
    assert len(heard) == ITERATIONS + 1
    assert (heard[0][0].tables.values == build_untrained_estimate(SIZES).tables.values).all()
    assert all(0 < score <= 250 for _, score in heard), "at 95 %, 100 % and 130 %: a half and two wholes of 100"
    assert all((taught.tables.values >= 0).all() and (taught.tables.prices >= 0).all() for taught, _ in heard)


def test_scarce_nodes_with_exclusive_demand_get_the_highest_price() -> None:
    """Half of the demand requires one seventh of the devices."""
    nodes = (*NODES, NodeCapacity("big", (SliceClass(1000, "h100"),) * 8, 96_000))
    demand = (*DEMAND, RequestFrequency(RequestShape(memory_bytes=500, cpu_milli=3_000, products=("h100",)), 60))
    taught = lessons(nodes, demand)[-1][0]
    prices = dict(zip((face.lanes[0][0] for face in taught.faces), taught.tables.prices, strict=False))
    assert prices["h100"] > max(price for product, price in prices.items() if product != "h100")


def test_nodes_without_devices_do_not_change_the_initial_values() -> None:
    """A request's share of the capacity does not shrink because of nodes that it fits nowhere on."""
    with_hosts = (*NODES, *(NodeCapacity(f"h{number}", (), 64_000) for number in range(3)))
    first = lessons(with_hosts)[0][0]
    assert (first.tables.values[0] == lessons()[0][0].tables.values[0]).all()


@pytest.mark.parametrize(
    ("nodes", "demand"),
    [
        ((), DEMAND),
        ((NodeCapacity("a", ()),), DEMAND),
        (NODES, ()),
        (NODES, (RequestFrequency(RequestShape(devices=0), 5),)),
    ],
    ids=["no node", "no device", "no demand", "no demand for devices"],
)
def test_learner_rejects_input_without_devices_or_demand(
    nodes: tuple[NodeCapacity, ...], demand: tuple[RequestFrequency, ...]
) -> None:
    with pytest.raises(ValueError, match="nothing to learn from"):
        Learner(nodes, demand, draws)


def test_large_demand_is_scaled_down_to_a_bounded_number_of_samples() -> None:
    huge = tuple(RequestFrequency(kind, weight << 40) for kind, weight in DEMAND)
    rare = RequestFrequency(RequestShape(memory_bytes=700), 1)
    one = next(Learner(NODES, (*huge, rare), draws, LANES).lessons())
    assert one[1] > 0
    made = Learner(NODES, (*huge, rare), draws, LANES)
    assert WEIGHTS_MAX - len(DEMAND) <= len(made._demand) <= WEIGHTS_MAX + 1
    assert sum(kind == rare.kind for kind, _ in made._demand) == 1
