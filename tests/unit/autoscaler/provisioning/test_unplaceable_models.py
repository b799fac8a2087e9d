"""Models that fit no device are found without a request, and demand that may fit later is not rejected."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.capacity.remaining_offers import SILENT_S
from autoscaler.contract import ModelName
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.learning.expected_demand import build_restart_costs
from autoscaler.placement.model.bin_builder import build_bins
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import plan
from autoscaler.provisioning.unplaceable_models import Fitting, is_fit_unchanged, list_unplaceable_models
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.capacity import LeaseRefused, OffersSeen, ProvidersSeen, ProviderTroubled
from autoscaler.state.events import Reported
from autoscaler.state.world import World
from tests.support.builders.capacity import A, acted, cloud, observe, offer, offered, orders, quiet, shown, surge, waits
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replace_fields, replica, world

TWO = Gpu(count=2)
"""Two whole devices."""


def test_reason_for_a_model_too_large_for_every_device_names_the_largest() -> None:
    made = world([model("huge", 30), model("fits", 24), model("two", 2, gpu=TWO)], [device(memory_gi=24)])
    assert list_unplaceable_models(made) == {
        "huge": "needs 30Gi on one device; the largest has 24Gi",
        "two": "needs 2 whole devices of 2Gi on one node; the largest node has 1",
    }


def test_model_that_needs_no_gpu_is_placeable_without_devices() -> None:
    assert list_unplaceable_models(world([model("cpu", 30, gpu=Gpu(count=0))])) == {}


def test_model_is_unplaceable_if_there_is_no_device() -> None:
    assert list_unplaceable_models(world([model("a", 10)])) == {"a": "needs 10Gi on one device; there is no device"}


def test_no_model_is_unplaceable_before_devices_are_listed() -> None:
    assert list_unplaceable_models(world([model("a", 10)], synced=False)) == {}


def test_model_that_fits_only_a_full_or_unhealthy_device_is_placeable() -> None:
    one, other = model("one", 20), model("other", 20)
    assert list_unplaceable_models(world([one, other], [device(healthy=False)], [replica(one, "r")])) == {}


def test_larger_device_or_smaller_model_makes_a_model_placeable() -> None:
    huge, small = model("huge", 30), device(memory_gi=24)
    assert list_unplaceable_models(world([huge], [small]))
    assert list_unplaceable_models(world([huge], [small, device("gpu1", 40)])) == {}
    assert list_unplaceable_models(world([model("huge", 20)], [small])) == {}


MODELS = st.builds(
    lambda memory, count, compute, products, apart: model(
        "m", memory, gpu=Gpu(count=count, compute_percent=compute, models=products, isolation=apart)
    ),
    st.sampled_from([0, 8, 24, 48]),
    st.integers(1, 3),
    st.sampled_from([None, 30, 100]),
    st.sampled_from([(), ("*h100*",), ("*l4*", "*h100*")]),
    st.sampled_from(["any", "memory", "hardware"]),
)
DEVICES = st.lists(
    st.tuples(
        st.sampled_from([8, 24, 40]),
        st.sampled_from(["n0", "n1"]),
        st.sampled_from(["", "NVIDIA H100", "NVIDIA L4"]),
        st.booleans(),
    ),
    max_size=5,
)


@given(MODELS, DEVICES)
@settings(derandomize=True, deadline=None)
def test_model_is_unplaceable_exactly_if_the_packer_rejects_empty_devices(
    one: Model, fields: list[tuple[int, str, str, bool]]
) -> None:
    there = [device(f"gpu{n}", gi, node, product=what, shared=many) for n, (gi, node, what, many) in enumerate(fields)]
    made = world([one], there)
    want = build_placement_request(one, 0, T0, EvictionLevel.BUSY, "")
    packed = pack([want], SliceIndex(build_bins(made, T0)), made.nodes.copies, build_restart_costs(made), T0)
    never = [missing.reason for missing in packed.unmet if missing.never]
    assert Fitting(made).never(one) == "".join(never)
    assert bool(never) is not bool(packed.placements)


def test_model_that_fits_offered_or_ordered_capacity_is_placeable() -> None:
    begin = surge(offer(memory_bytes=40 * GI, devices_max=1))
    more = [model("large", 30), model("huge", 50)]
    begin = replace(begin, models={**begin.models, **{one.name: one for one in more}})
    assert list_unplaceable_models(begin).keys() == {"huge"}
    assert list_unplaceable_models(begin)[ModelName("huge")] == "needs 50Gi on one device; the largest has 40Gi"
    removed = observe(begin, OffersSeen(provider="rack", offers=()))
    assert list_unplaceable_models(removed).keys() == {"a", "huge", "large"}
    assert not is_fit_unchanged(begin, removed)
    assert is_fit_unchanged(
        begin, observe(begin, OffersSeen(provider="rack", offers=begin.capacity.offers["rack"]), now_s=T0 + 60)
    )
    ordered, _ = acted(begin)
    coming = observe(ordered, OffersSeen(provider="rack", offers=()), now_s=T0 + 1)
    assert list_unplaceable_models(coming).keys() == {"huge"}


LONE = offer(devices_max=1, shared=False)


def test_demand_is_infeasible_after_its_only_order_is_refused() -> None:
    """Its requests fail at once, and not after their timeout."""
    at, _ = acted(surge(LONE, waits_s=300.0))
    (id,) = at.capacity.leases
    at = observe(at, LeaseRefused(id=id, reason="busy"), now_s=T0 + 1)
    assert [one.never for one in plan(at, T0 + 2).unmet] == [True]


def test_model_waits_if_another_model_took_the_last_offer() -> None:
    at, _ = acted(surge(LONE))
    at = replace(at, models={**at.models, ModelName("b"): replace(A, name=ModelName("b"))})
    report = gateway(levels=[level("a", 1, wait_s=60.0), level("b", 1, wait_s=1.0)]).report
    assert report is not None
    found = {
        str(one.model): one for one in plan(observe(at, Reported(report=replace(report, sequence=5))), T0 + 1).unmet
    }
    assert found["a"].lease is not None
    assert (found["b"].never, found["b"].lease, found["b"].ready_s) == (False, None, None)
    assert list_unplaceable_models(at) == {}


def test_capacity_being_released_keeps_demand_feasible() -> None:
    at, _ = acted(surge(LONE))
    (lease,) = at.capacity.leases.values()
    leases = {lease.id: replace(lease, here_s=T0, release_s=T0 + 1)}
    at = replace(at, capacity=replace(at.capacity, offers={"rack": ()}, leases=leases))
    assert [one.never for one in plan(at, T0 + 2).unmet] == [False]
    assert list_unplaceable_models(at) == {}


def test_demand_larger_than_any_offer_is_rejected_at_once() -> None:
    (unmet,) = plan(surge(offer(memory_bytes=8 * GI)), T0).unmet
    assert unmet.never


@pytest.mark.parametrize(
    "gpu", [Gpu(count=4), Gpu(count=2, link="nvlink"), Gpu(isolation="hardware")], ids=["four", "joined", "kept apart"]
)
def test_demand_for_an_unavailable_gpu_count_link_or_isolation_is_rejected(gpu: Gpu) -> None:
    """Although a device of that size is offered."""
    needs = model("a", 16, high=4, slots=1, gpu=gpu)
    begin = replace(surge(offer(parts=2, memory_bytes=32 * GI)), models={needs.name: needs})
    (unmet,) = plan(begin, T0).unmet
    assert unmet.never
    assert [*list_unplaceable_models(begin)] == [needs.name]


def test_partial_device_does_not_satisfy_a_whole_device_demand() -> None:
    whole = model("a", 0, high=4, slots=1, gpu=Gpu(models=("A100",)))
    part = cloud(memory_bytes=8 * GI, device_bytes=24 * GI)
    begin = replace(surge(part), models={whole.name: whole})
    made = plan(begin, T0)
    assert (orders(made.actions), made.unmet[0].never) == ([], True)
    assert orders(plan(replace(surge(part), models={whole.name: model("a", 8, high=4, slots=1)}), T0).actions)


def away(at: World, now_s: float) -> World:
    """Requests are queued, and the provider has not responded by then."""
    return observe(
        waits(at, now_s), ProviderTroubled(provider="rack", says="does not respond", listing=True), now_s=now_s
    )


def test_demand_is_infeasible_if_its_only_provider_stops_answering() -> None:
    """Every leader comes to the same result, even one that started later and never received an offer."""
    for later_s in (SILENT_S - 1, SILENT_S, 3600.0):
        old = plan(away(surge(LONE), T0 + later_s), T0 + later_s)
        assert ([one.never for one in old.unmet], bool(orders(old.actions))) == (
            [later_s >= SILENT_S],
            later_s < SILENT_S,
        )
    begun = observe(
        replace_fields(surge(), leading_since_s=T0 + 900), ProvidersSeen(providers=("rack",)), now_s=T0 + 900
    )
    assert [one.never for one in plan(away(begun, T0 + 1000), T0 + 1000).unmet] == [True]


def test_orders_resume_when_a_silent_provider_answers() -> None:
    at = away(surge(LONE), T0 + 1000)
    assert [one.never for one in plan(at, T0 + 1000).unmet] == [True]
    at = offered(waits(quiet(at, T0 + 1001), T0 + 1100), LONE, now_s=T0 + 1100)
    made = plan(at, T0 + 1100)
    assert orders(made.actions) == [("rack", 1)]
    assert [(one.never, one.ready_s is not None) for one in made.unmet] == [(False, True)]


def test_pending_order_of_a_silent_provider_keeps_demand_feasible() -> None:
    """No other order can get this capacity before the provider responds."""
    slow = replace(LONE, expected_s=2000.0)
    at, _ = acted(surge(slow))
    at = shown(at, T0 + 5)
    (lease,) = at.capacity.leases.values()
    at = away(at, T0 + 1000)
    assert [(one.never, one.lease) for one in plan(at, T0 + 1000).unmet] == [(False, lease.id)]
    leases = {lease.id: replace(lease, here_s=T0 + 10, release_s=T0 + 11)}
    at = replace(at, capacity=replace(at.capacity, leases=leases))
    assert [one.never for one in plan(at, T0 + 1000).unmet] == [True]
