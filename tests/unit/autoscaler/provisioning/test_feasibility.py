"""Models that fit on no device: found without a request, and with the same result as the packer's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.learning.expected_demand import build_restart_costs
from autoscaler.placement.model.bins import build_bins, build_placement_request
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.placement.packer import pack
from autoscaler.provisioning.feasibility import Fitting, is_fit_unchanged, list_unplaceable_models
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.capacity_orders import OffersSeen
from tests.support.builders.capacity import acted, offer, surge, told
from tests.support.builders.worlds import GI, T0, device, model, replica, world

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
    gone = told(begin, OffersSeen(provider="rack", offers=()))
    assert list_unplaceable_models(gone).keys() == {"a", "huge", "large"}
    assert not is_fit_unchanged(begin, gone)
    assert is_fit_unchanged(
        begin, told(begin, OffersSeen(provider="rack", offers=begin.capacity.offers["rack"]), now_s=T0 + 60)
    )
    ordered, _ = acted(begin)
    coming = told(ordered, OffersSeen(provider="rack", offers=()), now_s=T0 + 1)
    assert list_unplaceable_models(coming).keys() == {"huge"}
