"""`NodeArrays` compared with a slow reference that recomputes everything, and their invariants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.placement.index.node_search import (
    ROWS_MAX,
    LaneAssignment,
    NodeArrays,
    NodeCapacity,
    RequestUsage,
    compute_request_usage,
)
from autoscaler.placement.index.request_encoding import CROWDS, encode_request
from autoscaler.placement.index.residual_waste_tables import (
    BINS,
    IDLE,
    LEVELS,
    UNITS,
    WHOLE,
    Taught,
    bin_of,
    build_tables,
    build_untrained_estimate,
    quantize_milli,
)
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, Isolation, RequestShape, ResourceAmount, SliceClass
from tests.support.example_budget import examples

GIB = 1 << 30
SIZES = {250: 3.0, 400: 2.0, 1000: 1.0}


def lanes(*sizes: int, product: str = "") -> tuple[SliceClass, ...]:
    return tuple(SliceClass(size, product) for size in sizes)


def stock(*nodes: NodeCapacity, taught: Taught | None = None) -> NodeArrays:
    return NodeArrays(nodes, taught or build_untrained_estimate(SIZES))


def choose(one: NodeArrays, kind: RequestShape, **more: np.ndarray) -> LaneAssignment | None:
    return one.choose(encode_request(kind, one.lanes), **more)


def take(one: NodeArrays, kind: RequestShape, place: LaneAssignment) -> None:
    one.take(place, compute_request_usage(kind, one.nodes[place.node], place.lanes))


def some_lessons(nodes: Sequence[NodeCapacity], seed: int) -> Taught:
    """Random learned values for all classes but one."""
    draw, faces = np.random.default_rng(seed), tuple(dict.fromkeys(node.face for node in nodes))[1:]
    classes = len(faces) + 1
    return Taught(faces, build_tables(draw.uniform(0, 600, (classes, BINS, LEVELS)), draw.uniform(0, 3, classes)))


# --- comparison with the slow reference -------------------------------------------------------------------------------


def slow(
    one: NodeArrays, taught: Taught, kind: RequestShape, crowd: Sequence[int] | None = None
) -> LaneAssignment | None:
    """The same choice as specified in research/packing 1.4b, one node and one lane at a time."""
    best: tuple[tuple[int | float, ...], LaneAssignment] | None = None
    for at, node in enumerate(one.nodes):
        span = slice(int(one.first[at]), int(one.first[at]) + len(node.lanes))
        left, percent, milli = (array[span].tolist() for array in (one.left_bytes, one.left_percent, one.milli))
        open_ = [not shut and not held for shut, held in zip(one.shut[span], one.held[span], strict=True)]
        rooms = [kind.takes(lane) for lane in node.lanes]
        fits = [
            lane
            for lane, room in enumerate(rooms)
            if room is not None and kind.rank(node.lanes[lane].product) is not None
            if open_[lane] and ResourceAmount(left[lane], percent[lane]).holds(room)
        ]
        cpu = int(one.cpu[at])
        if cpu < kind.cpu_milli or one.host_bytes[at] < kind.host_bytes or len(fits) < kind.devices:
            continue
        many = 0 if crowd is None else crowd[at]
        fits.sort(key=lambda lane: (tier(kind, node.lanes[lane], many), lane))
        idle = [lane for lane in range(len(left)) if milli[lane] == WHOLE][: kind.devices]
        for chosen in [(lane,) for lane in fits] if kind.devices == 1 else [tuple(sorted(fits[: kind.devices]))]:
            score = slow_score(one, taught, at, kind, chosen if kind.devices == 1 else idle)
            liking = max((tier(kind, node.lanes[lane], many) for lane in chosen), default=())
            tight = (milli[chosen[0]], chosen[0]) if kind.devices == 1 else ()
            key = (*liking, -score, at, *tight)
            if best is None or key < best[0]:
                best = (key, LaneAssignment(at, chosen))
    return None if best is None else best[1]


def tier(kind: RequestShape, lane: SliceClass, crowd: int = 0) -> tuple[int | float, ...]:
    return (kind.rank(lane.product) or 0, lane.price, crowd, lane.memory_bytes)


def slow_score(one: NodeArrays, taught: Taught, at: int, kind: RequestShape, chosen: Sequence[int]) -> int:
    """The constants are repeated here because they define LRV: changing one must fail a test."""
    node = one.nodes[at]
    face = taught.faces.index(node.face) if node.face in taught.faces else len(taught.faces)
    lefts = one.milli[int(one.first[at]) : int(one.first[at]) + len(node.lanes)].tolist()
    usable = [max(left, 0) for left in lefts]

    def milli_of(lane: SliceClass) -> int:
        room = kind.takes(lane) if kind.rank(lane.product) is not None else None
        if kind.devices != 1:
            return WHOLE
        return 0 if room is None else -(-WHOLE * room.memory_bytes // lane.memory_bytes)

    after = list(lefts)
    for lane in chosen:
        after[lane] = max(lefts[lane] - milli_of(node.lanes[lane]), 0)
    taken = WHOLE * len(chosen)
    if kind.devices == 1:
        taken = milli_of(max(node.lanes, key=lambda lane: lane.memory_bytes))
    by_cpu = WHOLE * len(node.lanes) * kind.cpu_milli // max(1, node.cpu_milli)
    price = 10 * int(taught.tables.prices[face]) * max(taken, by_cpu)
    before = worth(taught, face, int(one.cpu[at]), lefts, sum(usable))
    wasted = worth(taught, face, int(one.cpu[at]) - kind.cpu_milli, after, sum(usable) - taken)
    return ((before - wasted) * 18 - price) // (1000 * UNITS)


def worth(taught: Taught, face: int, cpu: int, lefts: Sequence[int], total: int) -> int:
    row = taught.tables.values[face, int(bin_of(np.array([cpu]), np.array([total]))[0])]
    if all(left == WHOLE for left in lefts):
        return int(row[IDLE]) * len(lefts)
    return sum(int(row[int(quantize_milli(np.array([left]))[0])]) for left in lefts)


LANES = st.sampled_from([
    lanes(1000), lanes(1000, 1000, product="a"), lanes(1000, 1000, 1000, 1000, product="b"), lanes(640, 640), (),
    (*lanes(1000, product="a"), SliceClass(500, "b", 50, Isolation.HARDWARE, shared=False, whole=False)),
    (SliceClass(1000, "b", price=2.5), SliceClass(1000, "b", shared=False, price=0.5)),
])  # fmt: skip
NODES = st.lists(
    st.tuples(LANES, st.sampled_from([8000, 32_000, CPU_MAX]), st.sampled_from([64 * GIB, BYTES_MAX])),
    min_size=1, max_size=8,
)  # fmt: skip
KINDS = st.builds(
    RequestShape,
    devices=st.sampled_from([0, 1, 1, 1, 2, 4]),
    memory_bytes=st.sampled_from([0, 90, 250, 333, 400, 640, 1000]),
    compute_percent=st.sampled_from([0, 0, 30]),
    isolation=st.sampled_from([Isolation.NONE, Isolation.NONE, Isolation.HARDWARE]),
    cpu_milli=st.sampled_from([0, 500, 3000, 12_000]),
    host_bytes=st.sampled_from([0, GIB, 40 * GIB]),
    spare_bytes=st.just(0),
    products=st.sampled_from([(), ("a",), ("a", "b"), ("b", "*"), ("A|b",)]),
)
Rows = Sequence[tuple[tuple[SliceClass, ...], int, int]]


@settings(derandomize=True, deadline=None, max_examples=examples(80))
@given(NODES, st.lists(st.tuples(KINDS, st.integers(0, 5)), min_size=1, max_size=30), st.integers(0, 99))
def test_device_choice_equals_a_reference_after_random_placements(
    rows: Rows, asked: Sequence[tuple[RequestShape, int]], seed: int
) -> None:
    nodes = [NodeCapacity(f"n{number}", *row) for number, row in enumerate(rows)]
    taught = some_lessons(nodes, seed)
    one = NodeArrays(nodes, taught)
    crowd = np.random.default_rng(seed).integers(0, CROWDS, len(nodes))
    there: list[tuple[LaneAssignment, RequestUsage]] = []
    for kind, removed in asked:
        place = choose(one, kind)
        assert place == slow(one, taught, kind)
        assert choose(one, kind, crowd=crowd) == slow(one, taught, kind, crowd.tolist())
        if place is not None:
            there.append((place, compute_request_usage(kind, nodes[place.node], place.lanes)))
            one.take(*there[-1])
        if removed == 0 and there:
            one.give_back(*there.pop(0))
        if removed == 1 and nodes[-1].lanes:
            one.set(len(nodes) - 1, 0, ResourceAmount(90, 30), shut=False, held=True)
            assert choose(one, kind) == slow(one, taught, kind)
            one.set(len(nodes) - 1, 0, ResourceAmount(90, 30), shut=True, held=False)
            assert choose(one, kind) == slow(one, taught, kind)
            return
        for left, size in ((one.left_bytes, one.size_bytes), (one.cpu, one.cpu_size)):
            assert (left >= 0).all()
            assert (left <= size).all()
        assert (one.left_percent >= 0).all()
        assert (one.host_bytes >= 0).all()
    for each in there:
        one.give_back(*each)
    assert state(one) == state(NodeArrays(nodes, taught))


def test_linked_devices_are_preferred_among_equally_priced_ones() -> None:
    four = lanes(1000, 1000, 1000, 1000)
    apart, joined = NodeCapacity("a", four), NodeCapacity("b", four, links=("x", "y", "x", "y"))
    one = stock(apart, joined)
    two = RequestShape(devices=2)
    assert choose(one, two) == LaneAssignment(1, (0, 2))
    take(one, two, LaneAssignment(1, (0, 2)))
    assert choose(one, two) == LaneAssignment(1, (1, 3))
    assert choose(one, RequestShape(devices=4)) == LaneAssignment(0, (0, 1, 2, 3)), "no link has four"
    three = stock(NodeCapacity("b", four, links=("x", "y", "x", "")), apart)
    assert choose(three, RequestShape(devices=3)) == LaneAssignment(0, (0, 1, 2)), (
        "no link has three: as if there were none"
    )
    dear = stock(apart, joined._replace(lanes=tuple(lane._replace(price=2.0) for lane in four)))
    assert choose(dear, two) == LaneAssignment(0, (0, 1)), "a cheap Device comes first"
    assert choose(dear, two, ok=np.array([False, True])) == LaneAssignment(1, (0, 2))


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(NODES, st.lists(KINDS, min_size=1, max_size=12), st.integers(0, 99))
def test_link_preference_never_changes_whether_a_replica_fits(
    rows: Rows, asked: Sequence[RequestShape], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    plain = [NodeCapacity(f"n{number}", *row) for number, row in enumerate(rows)]
    nodes = [node._replace(links=tuple(draw.choice(["x", "y", ""], len(node.lanes)))) for node in plain]
    one, other = (NodeArrays(each, some_lessons(each, seed)) for each in (nodes, plain))
    for kind in asked:
        place, without = choose(one, kind), choose(other, kind)
        assert (place is None) == (without is None)
        if place is None or without is None:
            continue
        tiers = [
            max((tier(kind, nodes[at.node].lanes[lane]) for lane in at.lanes), default=()) for at in (place, without)
        ]
        assert tiers[0] == tiers[1]
        if kind.devices > 1:
            names = {nodes[place.node].links[lane] for lane in place.lanes}
            assert place == without or (len(names) == 1 and "" not in names)
        else:
            assert place == without
        for each in (one, other):
            take(each, kind, place)  # keep both in the same state


def state(one: NodeArrays) -> list[list[int]]:
    arrays = (one.left_bytes, one.left_percent, one.milli, one.cpu, one.host_bytes, one.shut, one.held)
    return [array.tolist() for array in arrays]


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(NODES, st.lists(KINDS, min_size=1, max_size=12), st.lists(KINDS, min_size=1, max_size=12))
def test_rewind_restores_the_state_before_trial_placements(
    rows: Rows, kept: Sequence[RequestShape], tried: Sequence[RequestShape]
) -> None:
    nodes = [NodeCapacity(f"n{number}", *row) for number, row in enumerate(rows)]
    one, other = (NodeArrays(nodes, some_lessons(nodes, 1)) for _ in range(2))

    def fill(each: NodeArrays, kinds: Sequence[RequestShape]) -> list[LaneAssignment | None]:
        places = []
        for kind in kinds:
            places.append(place := choose(each, kind))
            if place is not None:
                take(each, kind, place)
        return places

    fill(one, kept)
    fill(other, kept)
    one.mark()
    first = fill(one, tried)
    if nodes[0].lanes:
        one.set(0, 0, ResourceAmount(0, 0), shut=True, held=True)
    one.rewind()
    assert state(one) == state(other)
    assert fill(one, tried) == fill(other, tried) == first


@settings(derandomize=True, deadline=None, max_examples=examples(30))
@given(NODES, NODES, st.lists(KINDS, min_size=1, max_size=20))
def test_replica_that_fits_still_fits_with_more_nodes(rows: Rows, more: Rows, asked: Sequence[RequestShape]) -> None:
    few = [NodeCapacity(f"n{number}", *row) for number, row in enumerate(rows)]
    many = few + [NodeCapacity(f"m{number}", *row) for number, row in enumerate(more)]
    for kind in asked:
        if choose(stock(*few), kind) is not None:
            assert choose(stock(*many), kind) is not None


# --- hand-computed examples -------------------------------------------------------------------------------------------


def test_fractional_device_replica_is_placed_where_least_waste_remains() -> None:
    """Demand is 250 and 400: a request for 600 fills the device that has 400 in use, but not the one that has 250."""
    one = stock(NodeCapacity("a", lanes(1000)), NodeCapacity("b", lanes(1000)))
    take(one, RequestShape(memory_bytes=400), LaneAssignment(0, (0,)))
    take(one, RequestShape(memory_bytes=250), LaneAssignment(1, (0,)))
    assert choose(one, RequestShape(memory_bytes=600)) == LaneAssignment(0, (0,))
    assert choose(one, RequestShape(memory_bytes=750)) == LaneAssignment(1, (0,))
    assert choose(one, RequestShape(memory_bytes=751)) is None


def test_whole_device_replica_takes_the_smallest_idle_devices_that_fit() -> None:
    one = stock(NodeCapacity("a", lanes(1000, 500, 1000, 1000)))
    take(one, RequestShape(memory_bytes=1), LaneAssignment(0, (0,)))
    assert choose(one, RequestShape(devices=2)) == LaneAssignment(0, (1, 2))
    assert choose(one, RequestShape(devices=2, memory_bytes=600)) == LaneAssignment(0, (2, 3))
    assert choose(one, RequestShape(devices=3, memory_bytes=600)) is None


def test_small_unpriced_devices_are_used_before_large_or_priced_ones() -> None:
    one = stock(
        NodeCapacity("a", (SliceClass(80, "h100", price=4.0),)),
        NodeCapacity("b", (SliceClass(24, "l4", price=0.8),)),
        NodeCapacity("c", lanes(80)),
        NodeCapacity("d", lanes(24)),
    )
    seen: list[str] = []
    while (place := choose(one, RequestShape(memory_bytes=20))) is not None and len(seen) < 12:
        take(one, RequestShape(memory_bytes=20), place)
        seen.append(one.nodes[place.node].name)
    assert "".join(seen) == "dccccbaaaa"


def test_local_weights_outweigh_a_tighter_fit_but_not_a_lower_price() -> None:
    one = stock(
        NodeCapacity("a", lanes(24)), NodeCapacity("b", lanes(80)), NodeCapacity("c", (SliceClass(24, price=1.0),))
    )
    assert choose(one, RequestShape(memory_bytes=20)) == LaneAssignment(0, (0,))
    assert choose(one, RequestShape(memory_bytes=20), lacks=np.array([1, 0, 1])) == LaneAssignment(1, (0,))
    assert choose(one, RequestShape(memory_bytes=20), lacks=np.array([1, 1, 0])) == LaneAssignment(0, (0,))
    assert choose(one, RequestShape(memory_bytes=20), ok=np.array([False, False, True])) == LaneAssignment(2, (0,))


def test_rounding_to_thousandths_never_overstates_free_memory() -> None:
    """One used byte of 9,999 is less than a thousandth of the lane, but still counts as used."""
    one = stock(NodeCapacity("a", lanes(9_999)))
    take(one, RequestShape(memory_bytes=1), LaneAssignment(0, (0,)))
    assert choose(one, RequestShape(memory_bytes=9_998)) == LaneAssignment(0, (0,))
    assert choose(one, RequestShape(memory_bytes=9_999)) is None
    assert choose(one, RequestShape()) is None


def test_node_without_enough_cpu_memory_or_the_product_is_not_chosen() -> None:
    one = stock(
        NodeCapacity("a", lanes(1000, product="t4"), 4000, 8 * GIB), NodeCapacity("b", lanes(1000, product="l4"), 1000)
    )
    assert choose(one, RequestShape(cpu_milli=2000)) == LaneAssignment(0, (0,))
    assert choose(one, RequestShape(host_bytes=9 * GIB)) == LaneAssignment(1, (0,))
    assert choose(one, RequestShape(products=("l4", "v100"))) == LaneAssignment(1, (0,))
    assert choose(one, RequestShape(cpu_milli=2000, host_bytes=9 * GIB)) is None
    assert choose(one, RequestShape(devices=0, cpu_milli=500, products=("none",))) is not None, (
        "needs no device, has no wish"
    )


def test_allocation_or_release_beyond_node_capacity_is_rejected() -> None:
    one = stock(NodeCapacity("a", lanes(1000), cpu_milli=1000))
    half, nothing = ResourceAmount(500, 0), RequestUsage(())
    for much in (
        RequestUsage((ResourceAmount(1001, 0),)),
        RequestUsage((half,), 1001),
        RequestUsage((half,), 0, BYTES_MAX + 1),
        RequestUsage((ResourceAmount(1, 101),)),
    ):
        with pytest.raises(ValueError, match="does not fit on node a"):
            one.take(LaneAssignment(0, (0,)), much)
    for never in (RequestUsage((ResourceAmount(1, 0),)), RequestUsage((ResourceAmount(0, 1),))):
        with pytest.raises(ValueError, match="does not fit on node a"):
            one.give_back(LaneAssignment(0, (0,)), never)
    for never in (nothing._replace(cpu_milli=1), nothing._replace(host_bytes=1)):
        with pytest.raises(ValueError, match="does not fit on node a"):
            one.give_back(LaneAssignment(0, ()), never)
    for negative in (
        RequestUsage((ResourceAmount(-1, 0),)),
        RequestUsage((ResourceAmount(0, -1),)),
        RequestUsage((half,), -1),
        RequestUsage((half,), 0, -1),
    ):
        with pytest.raises(ValueError, match="does not fit on node a"):
            one.take(LaneAssignment(0, (0,)), negative)
    for at in ((), (1,), (-1,), (0, 0)):
        with pytest.raises(ValueError, match="is not a valid assignment of"):
            one.take(LaneAssignment(0, at), RequestUsage((half,)))
    assert choose(one, RequestShape()) == LaneAssignment(0, (0,)), "and changes nothing"


def test_node_with_a_zero_size_device_is_rejected_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"^node b is out of bounds: "):
        stock(NodeCapacity("a", lanes(1)), NodeCapacity("b", lanes(0)))


def test_replica_of_the_maximum_memory_and_cpu_size_is_placed() -> None:
    nodes = (NodeCapacity("a", lanes(BYTES_MAX) * 16),)
    one, kind = NodeArrays(nodes, some_lessons(nodes, 3)), RequestShape(memory_bytes=BYTES_MAX, cpu_milli=CPU_MAX)
    assert choose(one, kind) == slow(one, some_lessons(nodes, 3), kind) == LaneAssignment(0, (0,))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("crowded", [False, True])
def test_cheapest_device_of_a_preferred_product_is_chosen_from_3600_nodes(devices: int, *, crowded: bool) -> None:
    """One node for each pair of product (each with its own size) and price: more tiers than fit into a key."""
    products, draw = tuple(f"p{number:02}" for number in range(60)), np.random.default_rng(1)
    sorts = [(product, price) for product in range(60) for price in range(60)]
    sorts = [sorts[at] for at in draw.permutation(len(sorts))]
    lanes_of = (
        SliceClass(int(1000 * 1.06**product), products[product], price=float(price)) for product, price in sorts
    )
    one = stock(*(NodeCapacity("a", (lane,) * devices) for lane in lanes_of))
    kind, crowd = RequestShape(devices=devices, products=products), draw.integers(0, CROWDS, len(sorts))
    for _ in range(8):
        ok = draw.random(len(sorts)) < draw.choice([0.001, 0.01, 1.0])
        ok[int(draw.integers(len(sorts)))] = True
        best = min(np.flatnonzero(ok).tolist(), key=lambda at: sorts[at])
        assert choose(one, kind, ok=ok, **({"crowd": crowd} if crowded else {})) == LaneAssignment(
            best, (*range(devices),)
        )


def test_score_rows_evicted_from_the_cache_are_recomputed() -> None:
    size = 1000
    one = stock(NodeCapacity("a", lanes(size)), NodeCapacity("b", lanes(size)))
    for cpu_milli in range(1, ROWS_MAX + 3):
        assert choose(one, RequestShape(memory_bytes=1, cpu_milli=cpu_milli)) is not None
    assert len(one._rows) == ROWS_MAX
    take(one, RequestShape(), LaneAssignment(0, (0,)))
    assert choose(one, RequestShape(memory_bytes=1, cpu_milli=1)) == LaneAssignment(1, (0,))


def test_node_without_devices_fits_only_a_cpu_only_replica() -> None:
    assert choose(stock(), RequestShape()) is None
    assert choose(stock(), RequestShape(devices=0)) is None
    assert choose(stock(NodeCapacity("a", ())), RequestShape()) is None
    assert choose(stock(NodeCapacity("a", ())), RequestShape(devices=0)) == LaneAssignment(0, ())
