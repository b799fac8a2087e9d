"""Which offer is chosen and why, and models that fit no offer do not prevent orders for other models."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.capacity.lead_times import estimate_lead_time
from autoscaler.planner.plan import plan
from autoscaler.provisioning import offer_selection
from autoscaler.provisioning.offer_selection import (
    TRIALS_MAX,
    RatedOffer,
    choose_offer,
    rank_offers_lazily,
    rate_offer,
    rated_offer_sort_key,
)
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import Pod, Resources, Toleration
from autoscaler.state.actions import AcquireLease
from autoscaler.state.capacity import LeadTimeStats, Offer
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.resources import HostResources
from autoscaler.state.world import NodeId, World
from tests.support.builders.capacity import acted, cloud, offer, offered
from tests.support.builders.worlds import T0, device, gateway, level, model, world


def made(of: Offer, deadline_s: float = inf, devices: int = 1) -> RatedOffer:
    return rate_offer(of, devices, estimate_lead_time(of), deadline_s, 0.0)


def first(*rungs: RatedOffer) -> str:
    chosen = choose_offer(rungs)
    assert chosen is not None
    return chosen.rung.offer.provider


def test_no_offers_yield_no_choice() -> None:
    assert choose_offer(()) is None


def test_cheapest_offer_likely_to_arrive_in_time_is_chosen() -> None:
    slow, fast = cloud(expected_s=300.0, price_per_hour=0.5), offer(price_per_hour=5.0)
    assert first(made(slow), made(fast)) == "cloud", "there is no hurry"
    assert first(made(slow, 200.0), made(fast, 200.0)) == "rack"


def test_cheaper_offer_is_chosen_if_both_offers_meet_the_deadline() -> None:
    """Any deadline, however late, slightly reduces the probability of delivery in time."""
    dear = rate_offer(cloud(price_per_hour=2.0), 1, estimate_lead_time(cloud(), LeadTimeStats(came=8)), 540.0, 23.0)
    cheap = made(offer(price_per_hour=1.0), 517.0)
    assert cheap.in_time < cheap.expected.confidence < dear.in_time
    assert first(dear, cheap) == "rack"
    seldom = rate_offer(offer(price_per_hour=1.0), 1, estimate_lead_time(offer(), LeadTimeStats(failed=4)), 540.0, 23.0)
    assert seldom.sure, "it is not late: it does not come"
    assert not made(offer(price_per_hour=1.0), 60.0).sure


def test_offer_most_likely_in_time_is_chosen_if_all_are_likely_too_late() -> None:
    slow, fast = cloud(expected_s=300.0, price_per_hour=0.0), offer(expected_s=100.0, price_per_hour=5.0)
    assert first(made(slow, 50.0), made(fast, 50.0)) == "rack"
    assert first(made(slow, -1.0), made(fast, -1.0)) == "rack", "and if it is over, the soonest"


def test_owned_capacity_costs_nothing_and_lower_power_breaks_a_cost_tie() -> None:
    owned, bought = cloud(price_per_hour=0.0, bought="owned"), offer(price_per_hour=0.1)
    assert first(made(owned), made(bought)) == "cloud"
    node, device = cloud(price_per_hour=0.0, watts=900.0), offer(price_per_hour=0.0, watts=300.0)
    assert first(made(node), made(device)) == "rack"


def test_unneeded_devices_of_an_offer_count_toward_its_cost() -> None:
    assert first(made(offer(), devices=2), made(cloud(price_per_hour=1.5))) == "cloud"


def test_second_offer_is_added_only_if_allowed_and_the_first_is_uncertain() -> None:
    fast, slow = made(offer(), 60.0), made(cloud(), 60.0)
    both = choose_offer((fast, slow), frozenset({"cloud"}))
    assert both is not None
    assert both.hedge is slow
    for rungs, hedges in (((fast, slow), ()), ((made(offer()), made(cloud())), ("cloud",)), ((fast,), ("rack",))):
        chosen = choose_offer(rungs, frozenset(hedges))
        assert chosen is not None
        assert chosen.hedge is None


def test_offer_description_states_devices_time_and_duration() -> None:
    description = made(offer(), 120.0, 2).says()
    assert description.startswith("rack: 2 x A100 on w1, expected 30 s, in time with probability ")
    assert ", expected cost " in description
    assert "delivery time unknown" in made(cloud(expected_s=None)).says()
    assert made(cloud(lasts_s=7200.0)).says().endswith(", for 2 h at most")


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1000.0), st.floats(0.0, 50.0), st.sampled_from(["a", "b", "c"])),
        min_size=1,
        max_size=6,
    ),
    st.floats(1.0, 2000.0),
)
def test_cheapest_timely_offer_is_chosen_in_any_order_of_offers(
    rows: list[tuple[float, float, str]], deadline_s: float
) -> None:
    offers = [offer(p, f"n{n}", expected_s=s, price_per_hour=price) for n, (s, price, p) in enumerate(rows)]
    rungs = [made(one, deadline_s) for one in offers]
    chosen, other = choose_offer(rungs), choose_offer(rungs[::-1])
    assert chosen is not None
    assert other is not None
    assert chosen.rung == other.rung == min(rungs, key=rated_offer_sort_key)
    sure = [one for one in rungs if one.sure]
    assert all(chosen.rung.cost <= one.cost for one in sure)
    if not sure:
        assert chosen.rung.in_time == max(one.in_time for one in rungs)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 900.0), st.floats(0.0, 9.0), st.sampled_from(["rack", "cloud"]), st.integers(0, 3)),
        max_size=6,
    ),
    st.floats(1.0, 2000.0),
    st.sampled_from([frozenset[str](), frozenset({"cloud"}), frozenset({"cloud", "rack"})]),
)
def test_lazy_offer_evaluation_chooses_like_eager_with_the_fewest_trials(
    rows: list[tuple[float, float, str, int]], deadline_s: float, hedges: frozenset[str]
) -> None:
    """The last number of each entry is the number of devices that suffice; 0: the offer does not fit."""
    offers = [(offer(p, f"n{n}", expected_s=s, price_per_hour=price), do) for n, (s, price, p, do) in enumerate(rows)]
    real = {one.id: made(one, deadline_s, do) if do else None for one, do in offers}
    tried: list[str] = []

    def trial(hopeful: RatedOffer) -> RatedOffer | None:
        tried.append(hopeful.offer.name)
        return real[hopeful.offer.id]

    chosen = offer_selection.choose_sorted_offer(
        rank_offers_lazily([made(one, deadline_s) for one, _ in offers], trial), hedges
    )
    would_do = [one for one in real.values() if one is not None]
    assert chosen == choose_offer(would_do, hedges)
    assert len(tried) == len(set(tried))
    if chosen is not None and chosen.rung.in_time >= offer_selection.NOT_LATE * offer_selection.IN_TIME:
        cheaper = [
            one for one, _ in offers if rated_offer_sort_key(made(one, deadline_s)) <= rated_offer_sort_key(chosen.rung)
        ]
        assert sorted(tried) == sorted(one.name for one in cheaper)


NODES = 64
CROWD = 2 * TRIALS_MAX // NODES
MEEK = (Toleration(key="team", operator="Exists"),)
A = model("a", 16, slots=1, pod=Pod(tolerations=MEEK))


def behind(*crowd: Model, **fields: Any) -> World:
    """A request for `a` is queued behind requests for these models."""
    calls = gateway(levels=[level(one.name, 1, wait_s=60.0) for one in (A, *crowd)])
    return world([A, *crowd], [device("cpu", 1, "w1")], gateways=[calls], leading_since_s=T0 - 500, **fields)


def rack(**fields: Any) -> list[Offer]:
    """One device each on many nodes that differ from each other."""
    taints = (Taint("team", "b", "NoSchedule"),)
    of = [({"team": "b", "at": str(at)}, f"n{at}") for at in range(NODES)]
    return [offer(name=at, node=at, devices_max=1, labels=labels, taints=taints, **fields) for labels, at in of]


def owners(of: World) -> list[str]:
    """The models that capacity is ordered for."""
    return [one.order.owner for one in plan(of, T0).actions if isinstance(one, AcquireLease)]


@pytest.mark.parametrize(
    "requested",
    [
        {"pod": Pod(node_selector={"team": "x"}, tolerations=MEEK)},
        {"pod": Pod(tolerations=MEEK), "gpu": Gpu(count=4)},
        {"pod": Pod(tolerations=MEEK), "gpu": Gpu(models=("*H200*",))},
        {},
    ],
)
def test_models_excluded_by_offer_attributes_do_not_block_other_orders(requested: dict[str, Any]) -> None:
    crowd = [model(f"c{number}", 16, priority=1, **requested) for number in range(CROWD)]
    assert owners(offered(behind(*crowd), *rack())) == [A.name]


def test_models_that_fit_no_offer_do_not_block_orders_for_other_models() -> None:
    """Only a simulated placement shows that a node has no CPU left."""
    busy = Resources(requests={"cpu": "8"})
    crowd = [model(f"c{number}", 16, priority=1, pod=Pod(tolerations=MEEK, resources=busy)) for number in range(CROWD)]
    hosts = {NodeId(f"n{at}"): HostResources(8000, cpu_left_milli=1000 + at) for at in range(NODES)}
    assert owners(offered(behind(*crowd, hosts=hosts), *rack())) == [A.name]


def test_models_whose_capacity_is_ordered_do_not_block_later_orders() -> None:
    crowd = [model(f"c{number}", 16, low=32, high=32, priority=1, gpu=Gpu(models=("*H200*",))) for number in range(3)]
    many = cloud(product="H200", many=96)
    at = offered(behind(*crowd), many, *rack())
    assert A.name not in owners(at), "those go first, so many in one Plan"
    at, done = acted(at, rounds=14)
    assert len(done) == 97
