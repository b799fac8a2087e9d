"""Device prices: an expensive device is kept for models that need it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ModelName
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.placement.model.prices import Prices
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Gpu, Model, StartLimits
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.settings import Price, Settings
from autoscaler.state.actions import StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Copy, NodeId, Slice
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, world
from tests.support.example_budget import examples

H100, T4 = "NVIDIA-H100-80GB-HBM3", "Tesla-T4"
LISTED = (
    Price(device="h100", per_hour=9.8),
    Price(device="H100", per_hour=3.9, bought="spot"),
    Price(device="*t4*", per_hour=0.53),
    Price(device="A100-SXM4-80GB", per_hour=1.2, bought="fabric"),
    Price(device="A100-SXM4-80GB", per_hour=4.1),
    Price(device="A100-SXM4-80GB", per_hour=1.9, bought="flex"),
    Price(device="A100-SXM4-80GB", per_hour=2.4, bought="reserved"),
    Price(device="A100-SXM4-80GB", per_hour=2.2, bought="committed"),
)


@pytest.mark.parametrize(
    ("product", "labels", "price"),
    [
        (H100, {}, 9.8),
        (H100, {"karpenter.sh/capacity-type": "spot"}, 3.9),
        (H100, {"eks.amazonaws.com/capacityType": "ON_DEMAND"}, 9.8),
        (H100, {"cloud.google.com/gke-spot": "true"}, 3.9),
        (H100, {"karpenter.sh/capacity-type": "something new"}, 9.8),
        (T4 + "-SHARED", {"karpenter.sh/capacity-type": "spot"}, 0.53),
        ("A100-SXM4-80GB", {}, 4.1),
        ("A100-SXM4-80GB", {"kubernetes.azure.com/scalesetpriority": "spot"}, 4.1),
        ("A100-SXM4-80GB", {"cloud.google.com/gke-flex-start": "true"}, 1.9),
        ("A100-SXM4-80GB", {"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}, 2.4),
        ("A100-SXM4-80GB", {"pilotlight.dev/class": "committed", "karpenter.sh/capacity-type": "on-demand"}, 2.2),
        ("A100-SXM4-80GB", {"pilotlight.dev/class": "paid", "cloud.google.com/gke-flex-start": "true"}, 1.9),
        ("NVIDIA-A100-SXM4-80GB", {}, 4.1),
        ("NVIDIA-A100-SXM4-40GB", {}, 0.0),
        ("NVIDIA-H1000", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_device_price_is_found_by_product_word_or_glob_and_capacity_type(
    product: str, labels: dict[str, str], price: float
) -> None:
    assert Prices(LISTED).of(device(product=product, labels=labels)) == price
    assert Prices(()).of(device(product=product)) == 0.0


def placed(
    *slices: Slice, models: tuple[Model, ...], prices: tuple[Price, ...] = (), copies: frozenset[Copy] = frozenset()
) -> dict[str, str]:
    """Model -> its Slice, with a request queued for every model."""
    levels = [level(one.name, waiting=1) for one in models]
    there = world(models, slices, gateways=[gateway(levels=levels)], settings=Settings(prices=prices), copies=copies)
    starts = [action for action in plan(there, T0).actions if isinstance(action, StartReplica)]
    return {start.replica.model: start.replica.resources.slices[0] for start in starts}


H100_FREE, T4_FREE = device("h", 80, "n0", product=H100), device("t", 16, "n1", product=T4)
SMALL, LARGE = model("small", 4), model("large", 40)


def test_small_model_avoids_an_h100_while_a_cheaper_device_is_free() -> None:
    """Also with a Copy of its weights on the H100's node, after other models in order, or without configured prices."""
    there = frozenset({Copy(artifact="oci://r.io/small", node=NodeId("n0"))})
    copied = model("small", 4, artifact="oci://r.io/small")
    assert placed(H100_FREE, T4_FREE, models=(SMALL,)) == {"small": "t"}
    assert placed(H100_FREE, T4_FREE, models=(SMALL,), prices=LISTED) == {"small": "t"}
    assert placed(H100_FREE, T4_FREE, models=(copied,), prices=LISTED, copies=there) == {"small": "t"}
    assert placed(H100_FREE, T4_FREE, models=(SMALL, LARGE), prices=LISTED) == {"small": "t", "large": "h"}
    assert placed(H100_FREE, models=(SMALL,), prices=LISTED) == {"small": "h"}, "a dear device is better than none"


def test_costly_device_is_used_while_a_replica_starts_on_the_cheap_one() -> None:
    """The exception in docs/how-to/prices.md: the T4 has room, but another replica is starting there."""
    called = (model("first", 4), model("second", 4))
    assert placed(H100_FREE, T4_FREE, models=called, prices=LISTED) == {"first": "t", "second": "h"}
    assert placed(T4_FREE, models=called, prices=LISTED) == {"first": "t"}, "one at a time starts on a Device"


def test_device_of_a_hanging_start_is_used_after_exclusive_seconds() -> None:
    """The price does not matter: at first neither is free, then the H100 is, or the T4 without it. Starts hang here."""
    first, other, second = (
        model(name, 4, start=StartLimits(exclusive_seconds=60)) for name in ("first", "other", "second")
    )

    def at(after_s: float, *slices: Slice) -> list[str]:
        on_t4 = replica(first, "f", ["t"], S.STARTING, since_s=T0, started_s=T0)
        on_h100 = replica(other, "o", ["h"], S.STARTING, since_s=T0 - 30, started_s=T0 - 30)
        begun = [one for one, name in ((on_t4, "t"), (on_h100, "h")) if name in {slice_.id for slice_ in slices}]
        there = world(
            (first, other, second), slices, begun, settings=Settings(prices=LISTED),
            gateways=[gateway(levels=[level(name, waiting=1) for name in (*(one.model for one in begun), "second")])],
        )  # fmt: skip
        starts = [action.replica for action in plan(there, T0 + after_s).actions if isinstance(action, StartReplica)]
        return [one.resources.slices[0] for one in starts if one.model == "second"]

    assert [at(after_s, H100_FREE, T4_FREE) for after_s in (0, 29, 31)] == [[], [], ["h"]]
    assert [at(after_s, T4_FREE) for after_s in (0, 59, 61)] == [[], [], ["t"]]


def test_cheaper_suitable_device_is_used_unless_model_prefers_another() -> None:
    a100 = device("a", 80, "n2", product="A100-SXM4-80GB")
    assert placed(H100_FREE, a100, models=(LARGE,), prices=LISTED) == {"large": "a"}
    choosy = model("large", 40, gpu=Gpu(models=("*h100*", "*a100*")))
    assert placed(H100_FREE, a100, models=(choosy,), prices=LISTED) == {"large": "h"}
    indifferent = model("large", 40, gpu=Gpu(models=("*h100*|*a100*",)))
    assert placed(H100_FREE, a100, models=(indifferent,), prices=LISTED) == {"large": "a"}


SIZES = st.lists(st.sampled_from([2, 4, 8, 15]), min_size=1, max_size=5)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(SIZES, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_h100_is_used_only_if_every_t4_has_a_replica(sizes: list[int], t4s: int, h100s: int, priced: bool) -> None:
    models = tuple(model(f"m{number}", size) for number, size in enumerate(sizes))
    slices = [device(f"t{number}", 16, f"n{number}", product=T4) for number in range(t4s)]
    slices += [device(f"h{number}", 80, f"m{number}", product=H100) for number in range(h100s)]
    found = placed(*slices, models=models, prices=LISTED if priced else ())
    assert {ModelName(name) for name in found} <= {one.name for one in models}
    on_t4 = {slice_ for slice_ in found.values() if slice_.startswith("t")}
    if any(slice_.startswith("h") for slice_ in found.values()):
        assert len(on_t4) == t4s


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("{device: T4}", "prices[0].perHour: missing"),
        ("{device: T4, perHour: -1}", "prices[0].perHour: expected a number, at least 0"),
        ("{device: T4, perHour: .nan}", "line 3: expected a finite number"),
        ('{device: "", perHour: 1}', "prices[0].device: expected the name of a product, such as T4"),
        (
            "{device: T4, perHour: 1}, {device: t4, perHour: 2}",
            "prices[1].device: `t4` occurs twice in class on-demand",
        ),
        ("{device: T4, perHour: 1, class: gift}", "prices[0].class"),
        ("{device: T4, perHour: 1, currency: euro}", "prices[0].currency"),
    ],
)
def test_invalid_price_is_rejected_with_a_one_line_error(entry: str, line: str) -> None:
    with pytest.raises(DocumentError, match=r"Settings|finite") as error:
        parse_documents([("s.yaml", f"apiVersion: {API_VERSION}\nkind: Settings\nprices: [{entry}]")], {})
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_on_demand_and_spot_price_of_one_product_are_both_accepted() -> None:
    both = "{device: T4, perHour: 1}, {device: T4, perHour: 0.4, class: spot}"
    settings = parse_documents(
        [("s.yaml", f"apiVersion: {API_VERSION}\nkind: Settings\nprices: [{both}]")], {}
    ).settings
    assert [one.per_hour for one in settings.prices] == [1.0, 0.4]


def test_prices_in_two_currencies_are_rejected() -> None:
    entries = "[{device: T4, perHour: 1, currency: EUR}, {device: L4, perHour: 1}]"
    with pytest.raises(DocumentError, match=r"prices\[1\].currency: expected EUR, as in the first entry"):
        parse_documents([("s.yaml", f"apiVersion: {API_VERSION}\nkind: Settings\nprices: {entries}")], {})
