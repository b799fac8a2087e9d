"""When placement values are trained, and from what: equal Worlds give equal inputs, and inputs are bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from autoscaler.fold.fold import fold
from autoscaler.placement.index.residual_waste_tables import WHOLE, Face, Tables, Taught, build_untrained_estimate
from autoscaler.placement.learning import training
from autoscaler.placement.learning.learner import SEED, Learner
from autoscaler.placement.learning.training import (
    ALIKE_MAX,
    FAILED_S,
    LANES_MAX,
    Tried,
    build_training_input,
    sample_nodes,
    training_reason,
)
from autoscaler.state.events import LessonLearnt
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, RequestFrequency, RequestShape, SliceClass
from autoscaler.state.world import Alike, History, PlacementValues, TrainingInput, World
from tests.support.builders.placement_values import cluster, exercise_of, lesson
from tests.support.builders.worlds import GI, T0, device, model, world

LANE = SliceClass(24 * GI)
AGAIN_S = training.AGAIN_S
CHANGED = "the demand changed"


def test_equal_nodes_appear_once_in_the_training_input_with_their_count() -> None:
    made = exercise_of(cluster())
    assert made.nodes == (Alike((LANE, LANE), CPU_MAX, BYTES_MAX, 3),)
    assert [(one.kind.memory_bytes, one.weight) for one in made.demand] == [(8 * GI, 1 << 20), (12 * GI, 1 << 20)]
    assert made.seed == SEED


def test_shuffled_models_and_slices_give_the_same_training_input() -> None:
    names = [f"m{number}" for number in range(40)]
    models = [model(name, 1 + number % 7) for number, name in enumerate(names)]
    slices = [device(f"g{number}", (24, 48, 80)[number % 3], f"n{number % 11}") for number in range(60)]
    known = {name: History(last_activity_s=T0 - 40 * number) for number, name in enumerate(names)}
    one = exercise_of(world(models, slices, histories=known))
    for each in (models, slices, names):
        Random(1).shuffle(each)
    assert exercise_of(world(models, slices, histories={name: known[name] for name in names})) == one


@pytest.mark.parametrize(
    "one",
    [
        world([model("a", 8)], [device("g0"), device("g1")]),
        world([model("a", 80)], [device("g0"), device("g1")], histories={"a": History(last_activity_s=T0)}),
        world([model("a", 8)], [device("g0")], histories={"a": History(last_activity_s=T0)}),
        world([model("a", 8)], histories={"a": History(last_activity_s=T0)}),
    ],
    ids=["there are no requests", "it fits nowhere", "one Slice is no choice", "no Slice"],
)
def test_no_training_input_without_demand_that_fits_or_a_second_slice(one: World) -> None:
    assert build_training_input(one, T0) is None


def test_training_input_above_its_limit_drops_the_rarest_node_kinds() -> None:
    many = [
        device(f"g{size}-{number}", 20 + size, f"n{size}-{number}")
        for size in range(ALIKE_MAX + 9)
        for number in range(1 + (size >= 9))
    ]
    made = exercise_of(world([model("a", 8)], many, histories={"a": History(last_activity_s=T0)}))
    assert [one.lanes[0].memory_bytes // GI for one in made.nodes] == [29 + size for size in range(ALIKE_MAX)]


def test_sample_of_a_large_cluster_contains_every_node_kind() -> None:
    few, many = (SliceClass(80 * GI),) * 8, (LANE,) * 4
    nodes = (Alike(few, CPU_MAX, BYTES_MAX, 1), Alike(many, CPU_MAX, BYTES_MAX, 10_000))
    made = sample_nodes(TrainingInput(nodes=nodes, demand=(), seed=1))
    assert [sum(node.lanes == lanes for node in made) for lanes in (few, many)] == [1, 999]
    assert sum(len(node.lanes) for node in made) <= LANES_MAX + 8
    assert len({node.name for node in made}) == len(made)


def test_initial_placement_values_equal_the_untrained_estimate_of_sizes() -> None:
    made = training.build_initial_values(exercise_of(cluster()))
    known, sizes = training.decode_placement_values(made), build_untrained_estimate({334: 1.0, 500: 1.0})
    assert (made.learnt, known.faces) == (False, ())
    assert np.array_equal(known.tables.values, sizes.tables.values)
    assert np.array_equal(known.tables.prices, sizes.tables.prices)


@pytest.mark.deep
def test_training_twice_with_one_seed_gives_equal_placement_values() -> None:
    one = exercise_of(cluster(2))
    made, again, other = (
        training.learn_placement_values(each, lambda seed: random.Random(seed).randrange)
        for each in (one, one, replace(one, seed=1))
    )
    assert made == again
    assert made.learnt
    assert made.exercise == one
    assert training.decode_placement_values(made).faces == (Face((("", LANE.memory_bytes),) * 2, CPU_MAX),)
    assert made.values != other.values


@pytest.mark.parametrize("scores", [(1.0, 3.0, 2.0), (3.0, 2.0, 1.0), (1.0, 2.0, 3.0)])
def test_training_keeps_the_result_with_the_highest_score(
    scores: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores fluctuate during learning: the last result is not always the best."""
    one = exercise_of(cluster())
    begun = build_untrained_estimate({334: 1.0})
    twice = Tables(np.repeat(begun.tables.values, 2, axis=0), np.zeros(2, np.int64))
    faces = (Face((("", LANE.memory_bytes),) * 2, CPU_MAX),)
    heard = [(Taught(faces, twice._replace(prices=np.array([score, 0], np.int64))), score) for score in scores]

    def list_lessons(_: Learner) -> Iterator[tuple[Taught, float]]:
        return iter(heard)

    monkeypatch.setattr(Learner, "lessons", list_lessons)
    made = training.decode_placement_values(
        training.learn_placement_values(one, lambda seed: random.Random(seed).randrange)
    )
    assert made.tables.prices.tolist() == [3, 0]


# --- when training is due ---------------------------------------------------------------------------------------------


def learnt(one: World | None = None) -> PlacementValues:
    return lesson(exercise_of(one or cluster()), 1)


def test_training_is_due_until_values_are_learned() -> None:
    now = exercise_of(cluster())
    assert training_reason(now, None, None, T0) == "no training has succeeded yet"
    assert training_reason(now, training.build_initial_values(now), None, T0) == "no training has succeeded yet"
    assert training_reason(now, learnt(), None, T0) == ""


def test_training_is_due_again_after_a_tenth_of_demand_changes() -> None:
    """Demand is capacity: a takes 334 thousandths of a device and b 500, so with equal weights a has 40 % of it."""
    now = exercise_of(cluster())
    for weight, reason in ((50, CHANGED), (70, ""), (100, ""), (140, ""), (170, CHANGED)):
        demand = tuple(RequestFrequency(kind, n) for (kind, _), n in zip(now.demand, (weight, 100), strict=True))
        assert training_reason(replace(now, demand=demand), learnt(), None, T0) == reason, weight
    alone = exercise_of(cluster(3, "a"))
    assert training_reason(alone, learnt(), None, T0) == CHANGED


def test_change_of_cpu_only_demand_does_not_trigger_training() -> None:
    now = exercise_of(cluster())
    more = replace(now, demand=(*now.demand, RequestFrequency(RequestShape(devices=0, cpu_milli=500), 1 << 30)))
    assert training_reason(more, learnt(), None, T0) == ""


def test_training_is_due_again_after_node_kinds_or_counts_change() -> None:
    ten = learnt(cluster(10))
    assert training_reason(exercise_of(cluster(9)), ten, None, T0) == ""
    assert training_reason(exercise_of(cluster(12)), ten, None, T0) == ""
    assert training_reason(exercise_of(cluster(13)), ten, None, T0) == "the number of nodes changed"
    assert training_reason(exercise_of(cluster(7)), ten, None, T0) == "the number of nodes changed"
    assert training_reason(exercise_of(cluster(10, gi=48)), ten, None, T0) == "a new kind of node was added"


@pytest.mark.parametrize(("failed", "wait_s"), [(False, AGAIN_S), (True, FAILED_S)])
def test_training_is_not_repeated_before_its_retry_delay_ends(failed: bool, wait_s: float) -> None:
    now, tried = exercise_of(cluster()), Tried(T0, failed)
    assert training_reason(now, None, tried, T0 + wait_s - 1) == ""
    assert training_reason(now, None, tried, T0 + wait_s) == "no training has succeeded yet"


# --- training results -------------------------------------------------------------------------------------------------


def test_initial_values_do_not_replace_learned_values() -> None:
    one = cluster()
    begun, made = training.build_initial_values(exercise_of(one)), learnt()
    one, _ = fold(one, [LessonLearnt(lesson=begun)], T0)
    assert one.learned.lesson is begun
    one, _ = fold(one, [LessonLearnt(lesson=made)], T0)
    assert one.learned.lesson is made
    after, _ = fold(one, [LessonLearnt(lesson=begun)], T0)
    assert after is one
    after, _ = fold(one, [LessonLearnt(lesson=learnt())], T0)
    assert after is one, "an equal one is no news"


def test_placement_values_of_wrong_size_or_range_are_rejected() -> None:
    made = learnt()
    for wrong in (
        replace(made, values=made.values[:-4]),
        replace(made, prices=b""),
        replace(made, learnt=False),
        replace(made, exercise=replace(made.exercise, nodes=())),
    ):
        with pytest.raises(ValueError, match="placement values do not match"):
            training.decode_placement_values(wrong)
    for number in (-1, WHOLE * 64 + 1):
        prices = np.array([0, number], np.dtype("<i4")).tobytes()
        with pytest.raises(ValueError, match="placement values have an entry outside 0 to 64000"):
            training.decode_placement_values(replace(made, prices=prices))
