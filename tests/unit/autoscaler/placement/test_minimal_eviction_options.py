"""Placements of a batch that look equivalent but are not, and the candidate slices if there are many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from autoscaler.contract import TenantName
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.minimal_eviction import (
    PLACES_MAX,
    Assigned,
    Evictee,
    MinimalEvictionInput,
    find_fewer_victims,
)
from autoscaler.placement.model.types import Bin, PlacementRequest
from autoscaler.slicing.nvidia_device_plugin import TIMESLICE
from autoscaler.state.world import DeviceId, NodeId, SliceId
from tests.support.builders.worlds import T0, device
from tests.unit.autoscaler.placement.test_packer import on, placed, run, shelf, victims, want
from tests.unit.autoscaler.placement.test_packer_hosts import asks, host_of

ACME, ZETA = (TenantName("acme"),), (TenantName("zeta"),)


class Has(NamedTuple):
    """A placement request, and the Slice on which it has room so far."""

    want: PlacementRequest
    at: str
    now: bool = False


def places(
    held: Sequence[Has], shelves: Sequence[Bin], cores: Mapping[str, int] | None = None
) -> dict[str, str] | None:
    """Where each is placed so that x, on the last bin, stays; None if x has to leave. `cores`: CPU of each node."""
    slices = {NodeId(node): [one for one in shelves if one.slice.node == node] for node in cores or ()}
    yard = SliceIndex(shelves, {node: host_of(there, (cores or {})[node]) for node, there in slices.items()})
    x = shelves[-1]
    puts = find_fewer_victims(
        [Assigned(one.want, (SliceId(one.at),), one.now, yard.shelf(SliceId(one.at)).slice.node) for one in held],
        [Evictee(x.incumbents[0], (x.slice.id,))], yard, T0,
    )  # fmt: skip
    if puts is None:
        return None
    assert not any(put.victims for put in puts)
    return {str(one.want.model): str(put.slices[0]) for one, put in zip(held, puts, strict=True)}


def test_devices_with_equal_memory_but_other_tenants_are_not_equivalent() -> None:
    """Whether a and b are on g0 and g1, or on g1 and g0, decides whether c may be on g0."""
    shared = [device("g0", 20, "n", kind=TIMESLICE), device("g1", 20, "m", kind=TIMESLICE)]
    shelves = [*map(shelf, shared), shelf(device("p", 20, "n"), on("x", 20))]
    held = [
        Has(want("a", 10, trust=ACME), "g1"),
        Has(want("b", 10, trust=ZETA), "g0"),
        Has(want("c", 10, trust=ACME, avoids=(NodeId("m"),)), "p"),
    ]
    assert places(held, shelves) == {"a": "g0", "b": "g1", "c": "g0"}


def test_equal_devices_on_nodes_with_different_cpu_are_not_equivalent() -> None:
    shelves = [
        shelf(device("g0", node="n0")),
        shelf(device("g1", node="n1")),
        shelf(device("p", node="p"), on("x", 20)),
    ]
    held = [Has(asks("a", 2), "g1"), Has(asks("b", 3), "p")]
    assert places(held, shelves, {"n0": 2, "n1": 4, "p": 4}) == {"a": "g0", "b": "g1"}


def test_equal_devices_are_not_equivalent_if_one_node_has_another_device() -> None:
    shelves = [
        shelf(device("g0", 80, "n0")), shelf(device("g1", 80, "n1")), shelf(device("g2", 64, "n1", product="X")),
        shelf(device("p", 64, "p", product="X"), on("x", 60)),
    ]  # fmt: skip
    held = [Has(asks("a", 3, 70), "g1"), Has(asks("b", 3, 60, products=("X",)), "p")]
    assert places(held, shelves, {"n0": 4, "n1": 4, "p": 4}) == {"a": "g0", "b": "g2"}


def test_equal_nodes_are_not_equivalent_after_one_receives_a_replica() -> None:
    shelves = [shelf(device(f"g{node}{at}", node=f"n{node}")) for node in range(2) for at in range(2)]
    shelves.append(shelf(device("p", node="p"), on("x", 20)))
    held = [
        Has(asks("a", 1, 24), "g00"), Has(asks("b", 1, 24), "g01"), Has(asks("c", 3, 24), "g10"),
        Has(asks("d", 3, 24), "p"),
    ]  # fmt: skip
    found = places(held, shelves, {"n0": 4, "n1": 4, "p": 4})
    assert found is not None
    assert {found["a"][:2], found["b"][:2]} == {"g0", "g1"}


def test_equal_devices_are_not_equivalent_after_one_receives_a_replica() -> None:
    """The only solution is 10, 5 and 5 on one device, and 8, 6 and 6 on the other, although 8 also fits beside 10."""
    shelves = [shelf(device("g0", 20)), shelf(device("g1", 20)), shelf(device("p", 20, "p"), on("x", 20))]
    sizes = {"a": 10, "b": 8, "c": 6, "d": 6, "e": 5, "f": 5}
    at = ("g0", "g0", "g1", "g1", "g1", "p")
    held = [Has(want(name, size), there) for (name, size), there in zip(sizes.items(), at, strict=True)]
    assert places(held, shelves) == {"a": "g0", "b": "g1", "c": "g1", "d": "g1", "e": "g0", "f": "g0"}


@pytest.mark.parametrize("leaving", [False, True])
def test_replica_starting_now_avoids_a_device_another_tenant_is_leaving(*, leaving: bool) -> None:
    there = [on("y", 2, trust=ZETA, leaving=leaving)] if leaving else []
    other = shelf(device("g1", 12, kind=TIMESLICE), *there)
    other.trusts = frozenset(one.trust for one in there)
    shelves = [shelf(device("g0", 24)), other, shelf(device("p", 24, "p"), on("x", 20))]
    held = [Has(want("a", 10, trust=ACME), "g0", now=True), Has(want("b", 20), "p")]
    assert places(held, shelves) == (None if leaving else {"a": "g1", "b": "g0"})


@pytest.mark.parametrize(("leaving", "stuck"), [(True, False), (True, True), (False, False)])
def test_waiting_replica_moves_only_to_a_device_that_other_tenants_leave(*, leaving: bool, stuck: bool) -> None:
    other = shelf(device("g1", 12, kind=TIMESLICE), on("y", 2, trust=ZETA, leaving=leaving, stuck=stuck))
    other.trusts = frozenset({ZETA})
    shelves = [shelf(device("g0", 24)), other, shelf(device("p", 24, "p"), on("x", 20))]
    held = [Has(want("a", 10, trust=ACME), "g0"), Has(want("b", 20), "p")]
    assert places(held, shelves) == ({"a": "g1", "b": "g0"} if leaving and not stuck else None)
    on_it = [Has(want("a", 10, trust=ACME), "g1"), Has(want("b", 20), "g0")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoscaler.placement.minimal_eviction.MOVERS_MAX", 0)
        assert (places(on_it, shelves) is not None) == (leaving and not stuck), "where it is, too"


@pytest.mark.parametrize("free", [False, True])
def test_victim_is_spared_without_a_move_if_both_replicas_fit_its_slice(
    monkeypatch: pytest.MonkeyPatch, *, free: bool
) -> None:
    monkeypatch.setattr("autoscaler.placement.minimal_eviction.MOVERS_MAX", 0)
    shelves = [shelf(device("g0", 24)), shelf(device("p", 24, "p"), on("x", 10 if free else 20))]
    assert places([Has(want("a", 10), "p")], shelves) == ({"a": "p"} if free else None)


def test_isolation_domains_with_different_tenants_are_not_equivalent() -> None:
    shared = [device(f"g{at}", 20, kind="dra") for at in range(2)]
    shelves = [*map(shelf, shared), shelf(device("p", 20, "p"), on("x", 20))]
    held = [
        Has(want("a", 10, trust=ACME), "g0"), Has(want("b", 10, trust=ZETA), "g1"), Has(want("c", 8), "g0"),
        Has(want("d", 8, trust=ACME), "p"),
    ]  # fmt: skip
    assert places(held, shelves) == {"a": "g0", "b": "g1", "c": "g1", "d": "g0"}


def test_half_device_is_not_equivalent_to_a_whole_device_of_its_size() -> None:
    """While a replica starts on one half, no other can start on the other half."""
    halves = [replace(device(f"h{at}", 12), device=DeviceId("h")) for at in range(2)]
    shelves = [shelf(one) for one in (*halves, device("l", 12), device("q", 24))]
    shelves.append(shelf(device("p", 24, "p"), on("x", 20)))
    held = [
        Has(want("a", 10), "h0", now=True), Has(want("b", 10), "q", now=True), Has(want("c", 20), "p"),
        Has(want("d", 11), "l"),
    ]  # fmt: skip
    found = places(held, shelves)
    assert found is not None
    assert (found["c"], found["d"][0], {found["a"][0], found["b"][0]}) == ("q", "h", {"h", "l"})


def test_devices_are_not_equivalent_if_a_replica_avoids_one_of_them() -> None:
    shelves = [shelf(device(f"g{at}", node=f"n{at}")) for at in range(2)]
    shelves.append(shelf(device("p", node="p"), on("x", 20)))
    held = [Has(want("a", 20), "g1"), Has(want("b", 20, avoids=(NodeId("n0"),)), "p")]
    assert places(held, shelves) == {"a": "g0", "b": "g1"}


def test_partly_used_device_is_not_equivalent_to_a_smaller_empty_one() -> None:
    """Only a whole device fits b."""
    shelves = [shelf(device("g0", 24), on("y", 12, kept=True)), shelf(device("g1", 12)), shelf(device("g2", 12, "n2"))]
    shelves.append(shelf(device("p", 12, "p"), on("x", 12)))
    away = (NodeId("n2"),)
    held = [Has(want("a", 12, avoids=away), "g1"), Has(want("b", 0, avoids=away), "p"), Has(want("c", 12), "g0")]
    assert places(held, shelves) == {"a": "g0", "b": "g1", "c": "g2"}


@pytest.mark.parametrize("leaving", [False, True])
def test_nodes_are_not_equivalent_if_free_memory_of_other_devices_differs(*, leaving: bool) -> None:
    """Free now, or after a replica has left."""
    there = [on("z", 60, leaving=True)] if leaving else []
    shelves = [
        shelf(device("g0", 80, "n0")), shelf(device("g2", 64, "n0", product="X"), on("y", 60, kept=True)),
        shelf(device("g1", 80, "n1")), shelf(device("g3", 64, "n1", product="X"), *there),
        shelf(device("p", 64, "p", product="X"), on("x", 60)),
    ]  # fmt: skip
    held = [Has(asks("a", 3, 70), "g1"), Has(asks("b", 3, 60, products=("X",)), "p"), Has(want("c", 1), "g2")]
    assert places(held, shelves, {"n0": 4, "n1": 4, "p": 4}) == {"a": "g0", "b": "g3", "c": "g2"}


def test_device_with_a_starting_replica_is_not_equivalent_to_one_without() -> None:
    """Only g0 fits c, which starts at once, as a does: a has to use g1, and b, which waits, g0."""
    shelves = [shelf(device("g0", 20, "n0")), shelf(device("g1", 10, "n1")), shelf(device("q", 24, "n0"))]
    shelves.append(shelf(device("p", 24, "p"), on("x", 20)))
    held = [
        Has(want("a", 8), "g0", now=True), Has(want("b", 8), "g1"),
        Has(want("c", 8, avoids=(NodeId("n1"),)), "q", now=True), Has(want("d", 22), "p"),
    ]  # fmt: skip
    assert places(held, shelves) == {"a": "g1", "b": "g0", "c": "g0", "d": "q"}


def test_devices_with_equal_free_memory_but_other_cpu_are_not_equivalent() -> None:
    shelves = [shelf(device("g0", 20, "n0")), shelf(device("g1", 10, "n1"))]
    shelves.append(shelf(device("p", 10, "p"), on("x", 10)))
    held = [Has(asks("a", 1), "g1"), Has(asks("b", 3), "g0"), Has(asks("c", 3, avoids=(NodeId("n1"),)), "p")]
    assert places(held, shelves, {"n0": 4, "n1": 4, "p": 4}) == {"a": "g0", "b": "g1", "c": "g0"}
    assert places(held, shelves, {"n0": 3, "n1": 4, "p": 4}) is None


def test_devices_are_not_equivalent_if_their_victims_differ_in_priority() -> None:
    """Only a may evict y. The devices differ although c finds room on either of them."""
    shelves = [
        shelf(device("g0", 24), on("y", 20, kept=True, priority=1)), shelf(device("g1", 24), on("z", 20)),
        shelf(device("q", 12)), shelf(device("p", 24, "p"), on("x", 20)),
    ]  # fmt: skip
    requests = [want("a", 20, priority=2), want("b", 20, priority=1), want("c", 10, priority=1)]
    held = [Assigned(one, (SliceId(at),), now=False) for one, at in zip(requests, ("g1", "p", "q"), strict=True)]
    victims = [Evictee(shelves[at].incumbents[0], (shelves[at].slice.id,)) for at in (3, 0, 1)]
    puts = find_fewer_victims(held, victims, SliceIndex(shelves), T0)
    assert puts is not None
    assert [(*put.slices, *(one.model for one in put.victims)) for put in puts] == [("g0", "y"), ("g1", "z"), ("q",)]


def test_replica_that_fits_without_eviction_is_assigned_no_victim() -> None:
    shelves = [shelf(device("g0", 24), on("z", 10)), shelf(device("p", 24, "p"), on("x", 20))]
    held = [Assigned(want("a", 10), (SliceId("g0"),), now=False), Assigned(want("b", 14), (SliceId("p"),), now=False)]
    victims = [Evictee(shelves[at].incumbents[0], (shelves[at].slice.id,)) for at in (1, 0)]
    puts = find_fewer_victims(held, victims, SliceIndex(shelves), T0)
    assert puts is not None
    assert [[one.model for one in put.victims] for put in puts] == [[], ["z"]]


def test_replica_starting_now_avoids_a_device_where_another_starts() -> None:
    for locked in (False, True):
        shelves = [shelf(device("g0", 24)), shelf(device("g1", 12), locked=locked)]
        shelves.append(shelf(device("p", 24, "p"), on("x", 20)))
        held = [Has(want("a", 10), "g0", now=True), Has(want("b", 20), "p"), Has(want("c", 1), "g1")]
        assert places(held, shelves) == (None if locked else {"a": "g1", "b": "g0", "c": "g1"})
        waits = [held[0]._replace(now=False), *held[1:]]
        assert places(waits, shelves) == {"a": "g1", "b": "g0", "c": "g1"}, "it waits anyway"


def test_replica_is_not_moved_to_a_node_with_too_little_cpu() -> None:
    for cores in (1, 2):
        shelves = [shelf(device("g0", 24)), shelf(device("g1", 12, "n1")), shelf(device("p", 24, "p"), on("x", 20))]
        held = [Has(asks("a", 2), "g0"), Has(want("b", 20), "p")]
        assert places(held, shelves, {"n0": 4, "n1": cores}) == (None if cores < 2 else {"a": "g1", "b": "g0"})


def looked_at(
    one: PlacementRequest, shelves: Iterable[Bin], *, now: bool, at: tuple[str, ...] = ("here",)
) -> list[str]:
    """Candidate Slices of a request placed on `here`, which has more free memory than the others."""
    there = [shelf(device(id, 80)) for id in at]
    return list(
        MinimalEvictionInput([Assigned(one, tuple(map(SliceId, at)), now)], [], SliceIndex((*there, *shelves)), T0).ids
    )


def tight(many: int = PLACES_MAX) -> list[Bin]:
    """Empty devices of 12 GiB."""
    return [shelf(device(f"t{at:02}", 12)) for at in range(many)]


def test_slices_with_the_least_free_memory_are_considered_first() -> None:
    roomy = [shelf(device(f"a{at:02}", 24)) for at in range(PLACES_MAX)]
    assert looked_at(want("a", 10), [*roomy, *tight()], now=True) == ["here", *(one.slice.id for one in tight())]
    found = looked_at(want("a", 10), [*roomy, *tight(3)], now=True)
    assert (len(found), found[:4]) == (1 + PLACES_MAX, ["here", "t00", "t01", "t02"])


def test_replica_starting_now_considers_only_slices_that_are_free_now() -> None:
    coming = [shelf(device(f"c{at:02}", 12), on(f"x{at}", 10, leaving=True)) for at in range(PLACES_MAX)]
    locked = [shelf(device(f"l{at:02}", 12), locked=True) for at in range(PLACES_MAX)]
    free = shelf(device("z", 24))
    for others in (coming, locked):
        assert looked_at(want("a", 10), [*others, free], now=True) == ["here", "z"]
        assert len(looked_at(want("a", 10), [*others, free], now=False)) == 1 + PLACES_MAX, "it waits anyway"


def test_slices_already_assigned_do_not_count_toward_the_candidate_limit() -> None:
    on_ = tuple(f"h{at:02}" for at in range(PLACES_MAX))
    roomier = [shelf(device(f"r{at:02}", 90)) for at in range(PLACES_MAX)]
    assert len(looked_at(want("a", 10), roomier, now=True, at=on_)) == 2 * PLACES_MAX


def test_multi_device_replica_considers_only_nodes_with_enough_devices() -> None:
    alone = [shelf(device(f"a{at:02}", 80, f"n{at:02}")) for at in range(PLACES_MAX)]
    both = [shelf(device(f"z{at}", 80, "z")) for at in range(2)]
    two = want("a", 0, devices=2)
    assert looked_at(two, [*alone, *both], now=True, at=("h0", "h1")) == ["h0", "h1", "z0", "z1"]
    there = [shelf(device(id, 80, id)) for id in ("h0", "h1")]
    held = Assigned(two, (SliceId("h0"), SliceId("h1")), now=True)
    assert MinimalEvictionInput([held], [], SliceIndex((*there, *alone, *both)), T0).ids == ["h0", "h1", "z0", "z1"], (
        "each counts once"
    )


def test_replica_never_moves_to_a_forbidden_node_to_spare_a_victim() -> None:
    """On g1 is room for a, and with a there, b would need no eviction."""
    shelves = [shelf(device("g0", 12)), shelf(device("g1", 24, "n1"), on("x", 14, busy=True))]
    assert victims(run([want("a", 10, priority=1), want("b", 12)], shelves)) == []
    kept_off = want("a", 10, priority=1, avoids=(NodeId("n1"),))
    answer = run([kept_off, want("b", 12)], shelves)
    assert (placed(answer), victims(answer)) == ([("a", "g0")], ["x"])
    labelled = [replace(one.slice, labels={"zone": one.slice.node}, labels_known=True) for one in shelves]
    shelves = [shelf(slice_, *one.incumbents) for slice_, one in zip(labelled, shelves, strict=True)]
    here = want("a", 10, priority=1, selector=(("zone", shelves[0].slice.node),))
    assert victims(run([here, want("b", 12)], shelves)) == ["x"]
