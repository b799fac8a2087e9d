"""Defragmentation scenarios: four nodes of ten devices in virtual time, and invariants of every move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bins import build_bins
from autoscaler.planner.plan import Planner, plan
from autoscaler.rearrange.defragmentation import EVERY_S, MOVES_MAX
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.rearrange.replica_migration import AGAIN_S
from autoscaler.state.events import DocumentsSeen
from autoscaler.state.world import Replica, World
from tests.support.builders.layouts import (
    BIG,
    DEVICES,
    NODES,
    Laid,
    asked,
    big,
    free,
    laid,
    looked,
    moved,
    nobody,
    node_of,
    reason,
    slices,
    wide,
)
from tests.support.builders.worlds import GI, T0, Scene, folded, world
from tests.support.example_budget import examples

# --- the scenario -----------------------------------------------------------------------------------------------------


class Churn:
    """Starts and stops replicas one at a time."""

    def __init__(self, seed: int, begin: World, sizes: dict[str, int]) -> None:
        self.rng, self.sizes = Random(seed), sizes
        self.scene = Scene(begin, nobody)
        self.on = {str(one.model) for one in begin.replicas.values()}
        self.big, self.step_s = False, 2.0

    def tell(self) -> None:
        """Report the current documents."""
        models = [wide(name, size, int(name in self.on)) for name, size in self.sizes.items()]
        told = DocumentsSeen(models=(*models, big(low=int(self.big))), settings=self.scene.world.settings)
        self.scene.world, _ = advance(self.scene.world, [told], self.scene.now_s)

    def turn(self) -> None:
        """Add or remove one replica."""
        name = self.rng.choice(sorted(self.sizes))
        room = NODES * DEVICES - sum(self.sizes[one] for one in self.on)
        if name in self.on:
            self.on.discard(name)
        elif self.sizes[name] <= room:
            self.on.add(name)
        self.tell()

    def seconds(self, many: float) -> Iterator[World]:
        """Yield the World at each step for `many` seconds."""
        for _ in range(int(many // self.step_s)):
            self.scene.run(self.step_s, self.step_s)
            yield self.scene.world


def placeable(at: World, now_s: float) -> bool:
    want = asked(at)
    return SliceIndex(build_bins(at, now_s)).choose(want.kind, want.choice, want.supplies) is not None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_equal_replicas_are_packed_without_fragmentation_or_moves(seed: int, shared: bool) -> None:
    churn = Churn(seed, world([], slices(shared=shared)), {f"m{at}": 3 for at in range(6)})
    for at in range(6):  # one at a time, interleaved with stops and starts
        churn.on.add(f"m{at}")
        churn.tell()
        for _ in range(3):
            for after in churn.seconds(churn.rng.choice((4, 10, 24))):
                assert sum(free(after).values()) < 20 or placeable(after, churn.scene.now_s)
            churn.turn()
    assert not moved(churn.scene), "equal Replicas are packed so that nobody has to move"


TAKEN = range(DEVICES - BIG + 1, DEVICES + 1)
TOTALS = tuple(each for each in combinations_with_replacement(TAKEN, NODES) if sum(each) == NODES * DEVICES - 20)
"""Devices in use on each node when 20 are free, with at most seven free on one node."""


def in_pieces(rng: Random, most: int = 5) -> Laid:
    """A random layout of replicas of one to `most` devices."""
    totals = list(rng.choice(TOTALS))
    rng.shuffle(totals)
    at: Laid = {}
    for node, total in enumerate(totals):
        at[node] = []
        while sum(at[node]) < total:
            at[node].append(rng.randrange(1, min(most, total - sum(at[node])) + 1))
    return at


@settings(derandomize=True, deadline=None, max_examples=examples(25))
@given(st.integers(0, 1 << 30), st.booleans())
def test_defragmentation_joins_20_free_devices_while_replicas_serve(seed: int, shared: bool) -> None:
    """Replicas of one to five devices all stay ready, and one of eight is ready in bounded time."""
    scene = Scene(laid(in_pieces(Random(seed)), shared=shared), nobody)
    begin = scene.world
    assert sum(free(begin).values()) == 20
    assert max(free(begin).values()) < BIG
    while not scene.ready("big"):
        scene.run(10, 5)
        for old in begin.replicas.values():
            assert scene.ready(old.model), f"{old.model} is not served"
        assert scene.now_s - T0 <= (MOVES_MAX - 1) * EVERY_S + 60, reason(scene.world, scene.now_s)
    times = [at_s for at_s, _ in moved(scene)]
    assert all(later - sooner >= EVERY_S for sooner, later in pairwise(times))
    assert 1 <= len(times) <= MOVES_MAX
    heirs = [after for _, after in moved(scene)]
    assert not any(node_of(scene.world, one) == node_of(scene.world, _first(begin, one)) for one in heirs)


def _first(begin: World, heir: Replica) -> Replica:
    """The replica that was replaced by this move; each model has one replica."""
    return begin.replicas[begin.by_model[heir.model][0]]


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> World:
    at = in_pieces(Random(draw(st.integers(0, 1 << 30))), draw(st.integers(1, 7)))
    for node, more in draw(st.dictionaries(st.integers(0, NODES - 1), st.integers(1, 3), max_size=2)).items():
        at[node] += [more] if sum(at[node]) + more <= DEVICES else []
    return laid(at, shared=draw(st.booleans()))


@settings(derandomize=True, deadline=None, max_examples=examples(120))
@given(layouts(), st.randoms(use_true_random=False))
def test_every_move_is_necessary_and_has_a_free_target(at: World, rng: Random) -> None:
    found = looked(at, T0)
    there = list(at.replicas.items())
    rng.shuffle(there)
    assert found == looked(replace(at, replicas=dict(there)), T0)
    if not found.steps:
        assert max(free(at).values()) >= BIG or sum(free(at).values()) < 20, "free but fragmented"
        return
    homes = [id for step in found.steps for id in step.home.slices]
    assert len(homes) == len(set(homes))
    assert not any(at.by_slice.get(id) for id in homes), "free now, so that no move needs another's end"
    left = {step.move.replica for step in found.steps}
    for many in range(len(left) + 1):
        for few in combinations(sorted(left), many):
            here = replace(at, replicas={id: one for id, one in at.replicas.items() if id not in few})
            room = max(free(rebuild_indices(here, T0)).values()) >= BIG
            assert room == (many == len(left))


@settings(derandomize=True, deadline=None, max_examples=examples(8))
@given(st.integers(0, 1 << 30))
def test_no_replica_moves_again_within_the_minimum_interval(seed: int) -> None:
    rng = Random(seed)
    at = in_pieces(rng, 3)
    sizes = {f"n{node}-{letter}": one for node, on in at.items() for letter, one in zip("abcdefghij", on, strict=False)}
    churn = Churn(seed, laid(at, shared=bool(seed % 2)), sizes)
    churn.step_s = 5.0
    scene, were, served = churn.scene, dict[ModelName, list[float]](), set[str]()
    for _ in range(60):
        churn.turn()
        churn.big = rng.random() < 0.5
        churn.tell()
        served &= churn.on
        for after in churn.seconds(rng.choice((20, 100, 400))):
            served |= {name for name in churn.on if scene.ready(name)}
            assert all(scene.ready(name) for name in served)
            under_way = [one for one in after.replicas.values() if one.move and one.move.replica in after.replicas]
            assert len(under_way) <= 1
    for at_s, heir in moved(scene):
        assert all(at_s - before_s >= AGAIN_S for before_s in were.get(heir.model, [])), "it moved again"
        were.setdefault(heir.model, []).append(at_s)


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(layouts())
def test_reused_planner_plans_the_same_moves_as_a_new_one(begin: World) -> None:
    planner, at = Planner(), begin
    for now_s in (T0, T0 + 1, T0 + 400):
        at = replace(at, gateways={id: replace(one, seen_s=now_s) for id, one in at.gateways.items()})
        made = planner.plan(at, now_s)
        assert made == plan(at, now_s)
        at = folded(at, made.actions, now_s)
        claimed = {id: sum(at.replicas[one].resources.memory_bytes for one in on) for id, on in at.by_slice.items()}
        assert all(bytes_ <= 80 * GI for bytes_ in claimed.values())
