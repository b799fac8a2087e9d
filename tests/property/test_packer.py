"""Properties of the packer and the plan for every `World`.

No over-commit, no unnecessary eviction, no eviction because of added capacity, and the same Plan for the same `World`.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations
from math import inf, nan
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.fold.fold import fold
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.types import Bin, EvictionLevel, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import plan
from autoscaler.state.actions import DrainReplica, StartReplica, StopReplica
from autoscaler.state.events import Seen, SlicesSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Growth
from autoscaler.state.world import SliceId, World
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import GI, T0, device, folded, kinds, replace_fields
from tests.support.example_budget import examples
from tests.support.harness.driver_events import seen_of
from tests.unit.autoscaler.placement.test_packer import benches, on, placed, run, shelf, victims, want, wanted
from tests.unit.autoscaler.planner.test_plan import worlds

K = TypeVar("K")
V = TypeVar("V")
QUICK = settings(derandomize=True, deadline=None, max_examples=examples(150))
LONG = settings(derandomize=True, deadline=None, max_examples=examples(300))


# --- no over-commit ---------------------------------------------------------------------------------------------------

MAY_BE: dict[S, tuple[Seen, ...]] = {
    S.PENDING: (Seen.STARTING,),
    S.STARTING: (Seen.STARTING, Seen.READY, Seen.EXITED),
    S.READY: (Seen.READY, Seen.UNREADY, Seen.TAKEN, Seen.EXITED),
    S.UNREADY: (Seen.READY, Seen.TAKEN, Seen.EXITED),
    S.DRAINING: (Seen.READY, Seen.TAKEN, Seen.EXITED),
    S.FAILED: (Seen.EXITED,),
    S.STOPPING: (Seen.READY, Seen.EXITED),
    S.SCRUBBING: (Seen.EXITED, Seen.CLEAN),
}
"""States that a driver may report for a replica in this phase of the `World`."""


@QUICK
@given(worlds(), st.integers(0, 1 << 30))
def test_slices_are_never_overcommitted_while_ended_replicas_hold_memory(begin: World, seed: int) -> None:
    """Engines die, linger and are scrubbed in any order; memory counts as held until it is proven clean."""
    rng, at, now_s = Random(seed), begin, T0
    for _ in range(12):
        now_s += rng.choice((0.5, 30.0, 700.0))
        at = rebuild_indices(at, now_s)
        at = folded(at, plan(at, now_s).actions, now_s)
        _all_fit(at)
        for one in sorted(at.replicas.values(), key=lambda one: one.id):
            if rng.random() < 0.6:
                seen = rng.choice(MAY_BE[one.state])
                at, _ = fold(at, (seen_of(one, seen, proof="exited"),), now_s)
        _all_fit(at)


def _all_fit(at: World) -> None:
    held: dict[SliceId, int] = {}
    for one in at.replicas.values():
        for id in one.resources.slices:
            held[id] = held.get(id, 0) + one.resources.memory_bytes
    assert all(many <= at.nodes.slices[id].memory_bytes for id, many in held.items() if id in at.nodes.slices)


# --- the same input, the same output ----------------------------------------------------------------------------------


@QUICK
@given(worlds(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_the_cluster_state(begin: World, rng: Random) -> None:
    def mixed(things: dict[K, V]) -> dict[K, V]:
        return {key: things[key] for key in sorted(things, key=lambda _: rng.random())}

    other = rebuild_indices(
        replace_fields(
            begin,
            models=mixed(begin.models),
            slices=mixed(begin.nodes.slices),
            replicas=mixed(begin.replicas),
            gateways=mixed(begin.gateways),
            histories=mixed(begin.learned.histories),
        ),
        T0,
    )
    assert plan(other, T0) == plan(begin, T0)


# --- more capacity ----------------------------------------------------------------------------------------------------


def more(at: World, *sizes_gi: int, now_s: float = T0) -> World:
    """The same `World` with these devices added, on a node of their own and on an existing one."""
    added = [
        device(f"{'a' if number % 2 else 'z'}{number}", one, f"n{number % 2}") for number, one in enumerate(sizes_gi)
    ]
    after, _ = fold(at, (SlicesSeen(slices=(*at.nodes.slices.values(), *added)),), now_s)
    return after


ADDED = st.lists(st.sampled_from([6, 12, 24, 80]), min_size=1, max_size=3)


@LONG
@given(worlds(), ADDED)
def test_added_capacity_drains_no_replica_except_for_a_waiting_model(begin: World, sizes: list[int]) -> None:
    """Adding capacity drains no replica that would stay without it.
    An exception is a victim for a Model that waits and has no room either way.
    """
    before, after = plan(begin, T0), plan(more(begin, *sizes), T0)
    went = {action.replica for action in before.actions if isinstance(action, DrainReplica | StopReplica)}
    for action in after.actions:
        if isinstance(action, DrainReplica | StopReplica) and action.replica not in went:
            assert isinstance(action, DrainReplica)
            assert action.victim_of in {unmet.model for unmet in before.unmet} & {unmet.model for unmet in after.unmet}
    if not before.unmet and not any(isinstance(action, StartReplica) for action in before.actions):
        assert kinds(after) == kinds(before), "no request waited, so additional nodes change nothing"


@QUICK
@given(wanted(), benches(), ADDED)
def test_added_capacity_never_unplaces_a_replica_that_fitted_before(
    wants: list[PlacementRequest], shelves: list[Bin], sizes: list[int]
) -> None:
    added = [shelf(device(f"{'az'[number % 2]}{number}", one, f"n{number % 3}")) for number, one in enumerate(sizes)]
    for one in wants:
        before, after = run([one], shelves), run([one], [*shelves, *added])
        if before.placements:
            assert after.placements
        elif one.kind.devices == 1:
            assert after.placements or after.victims == before.victims


def test_added_device_lets_the_first_two_device_replica_take_both_devices() -> None:
    """The order of PlacementRequests is kept, so the set of placed ones may change: the first never fitted before."""
    first, second = want("first", 24, devices=2, force=EvictionLevel.NONE), want("second", 24, unserved_since_s=1.0)
    assert placed(run([first, second], [shelf(device("g0"))])) == [("second", "g0")]
    assert placed(run([first, second], [shelf(device("g0")), shelf(device("g1"))])) == [("first", "g0", "g1")]


# --- victims ----------------------------------------------------------------------------------------------------------


def without(shelves: list[Bin], removed: set[ReplicaId]) -> list[Bin]:
    return [shelf(one.slice, *(i for i in one.incumbents if i.replica not in removed)) for one in shelves]


@QUICK
@given(wanted(), benches())
def test_replica_without_room_evicts_a_minimal_set_of_victims(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    """No proper subset of the victims frees enough room, and all of them do."""
    for one in wants:
        chosen = {victim.replica for victim in run([one], shelves).victims}
        leave = {i.replica for at in shelves for i in at.incumbents if i.leaving and not i.stuck}
        for many in range(len(chosen) + 1 if chosen else 0):
            for few in combinations(sorted(chosen), many):
                answer = run([one], without(shelves, {*few, *leave}))
                assert bool(answer.placements) == (many == len(chosen))


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@LONG
@given(SIZES, SIZES, st.lists(st.booleans(), min_size=5, max_size=5))
def test_victims_evicted_for_several_replicas_on_one_device_are_minimal(
    asked: list[int], there: list[int], busy: list[bool]
) -> None:
    """A victim of an earlier request stays if the victims of a later one free enough room for both."""
    while sum(there) > 24:
        there = there[1:]
    on_it = [on(f"x{number}", size, busy=busy[number]) for number, size in enumerate(there)]
    requests = [want(f"w{number}", size, unserved_since_s=number) for number, size in enumerate(asked)]
    answer = run(requests, [shelf(device(), *on_it)])
    served = sum(one.want.kind.memory_bytes for one in answer.placements)
    served += sum(one.want.kind.memory_bytes for one in answer.unmet if one.promised)
    chosen = {victim.replica for victim in answer.victims}
    stays = {one.replica: one.room.memory_bytes for one in on_it if one.replica not in chosen}
    assert served + sum(stays.values()) <= 24 * GI
    for one in on_it:
        if one.replica in chosen:
            assert served + sum(stays.values()) + one.room.memory_bytes > 24 * GI, "it could have stayed"


def test_victim_made_redundant_by_a_later_victim_is_not_evicted() -> None:
    answer = run(
        [want("a", 6, unserved_since_s=0), want("b", 4, unserved_since_s=1)],
        [shelf(device(), on("early", 4, busy=True), on("late", 16, busy=True))],
    )
    assert victims(answer) == ["late"]
    assert [missing.reason for missing in answer.unmet] == [
        "waits on gpu0 until late has stopped", "waits on gpu0 for the eviction of late",
    ]  # fmt: skip


# --- invalid input ----------------------------------------------------------------------------------------------------

NOT_AMOUNTS = [nan, inf, -inf, -1, -0.5, 0.5, 1 << 101]


@pytest.mark.parametrize("field", ["devices", "memory_bytes", "compute_percent", "cpu_milli", "host_bytes"])
@pytest.mark.parametrize("amount", NOT_AMOUNTS)
def test_invalid_resource_amount_raises_an_error_that_names_the_field(field: str, amount: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^{field} of a placement request is .*: expected an integer from 0 to [0-9]+$"
    ):
        run([change_request(want("a"), **{field: amount})], [shelf(device())])


@pytest.mark.parametrize("amount", NOT_AMOUNTS)
def test_invalid_growth_amount_raises_an_error_that_names_the_field(amount: Any) -> None:
    for field, least in (("most_bytes", 0), ("step_bytes", 1)):
        for memory_gi in (10, 90):
            odd = want("a", memory_gi)._replace(growth=Growth(**{"most_bytes": 1 << 30, field: amount}))
            with pytest.raises(
                ValueError, match=f"^growth.{field} of a placement request is .*: expected an integer from {least} "
            ):
                run([odd], [shelf(device())])
    with pytest.raises(ValueError, match=r"^growth.step_bytes of a placement request is 0"):
        run([want("a")._replace(growth=Growth(1 << 30, 0))], [shelf(device())])


@pytest.mark.parametrize("field", ["priority", "unserved_since_s"])
def test_nan_priority_or_wait_time_raises_an_error_that_names_the_field(field: str) -> None:
    """NaN would sort anywhere, so that the result would depend on the input order."""
    never: dict[str, Any] = {field: nan}
    with pytest.raises(ValueError, match=f"^{field} of a placement request is nan: expected a number$"):
        run([want("a"), change_request(want("b"), **never)], [shelf(device())])


def test_replica_without_a_model_name_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"^model of a placement request is empty: expected the name of a Model$"):
        run([want("a"), want("")], [shelf(device())])


def test_nan_as_the_current_time_raises_value_error() -> None:
    """With NaN no residency would ever be over, or all of them."""
    with pytest.raises(ValueError, match=r"^now_s is nan: expected a time in seconds$"):
        pack((want("a"),), SliceIndex([shelf(device())]), frozenset(), RestartCosts(), nan)


@pytest.mark.parametrize("second_gi", [10, 20])
def test_two_replicas_of_a_model_with_one_ordinal_raise_value_error(second_gi: int) -> None:
    both = [want("a", 10), want("b"), want("a", second_gi)]
    for requests in (both, both[::-1]):
        with pytest.raises(
            ValueError, match=r"^two placement requests of a have ordinal 0: expected distinct ordinals$"
        ):
            run(requests, [shelf(device("g0"))])
    numbered = [want("a", ordinal=0), want("a", second_gi, ordinal=1)]
    assert len(run(numbered, [shelf(device("g0")), shelf(device("g1"))]).placements) == 2


@pytest.mark.parametrize("price", [nan, inf, -inf, -1.0])
def test_invalid_price_raises_an_error_that_names_the_node(price: float) -> None:
    with pytest.raises(ValueError, match=r"^node n0 is out of bounds: .* at a price of at least 0"):
        run([want("a")], [dataclasses.replace(shelf(device("g0")), price=price), shelf(device("g1"))])


@pytest.mark.parametrize("amount", [nan, inf, -1, 0, 1 << 101])
def test_invalid_slice_is_skipped_and_others_are_used(amount: Any) -> None:
    """The inventory is external input: one invalid Slice must not prevent all placements."""
    odd = shelf(replace(device("g0"), memory_bytes=amount), locked=False)
    assert placed(run([want("a")], [odd, shelf(device("g1"))])) == [("a", "g1")]
    if amount != 0:
        none = shelf(replace(device("g0"), compute_percent=amount))
        assert placed(run([want("a")], [none, shelf(device("g1"))])) == [("a", "g1")]


def test_packing_no_replicas_or_no_devices_raises_no_error() -> None:
    assert run([], []) == PackResult()
    assert run([], [shelf(device())]) == PackResult()
    assert run([want("a")], []).unmet[0].reason == "needs 10Gi on one device; there is no device"
