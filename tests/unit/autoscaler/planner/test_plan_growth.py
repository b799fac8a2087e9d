"""Growth in a plan leaves memory for replicas that may start later."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

import autoscaler.placement.memory_growth
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.learning.expected_demand import PossibleStarts
from autoscaler.placement.memory_growth import Taker
from autoscaler.placement.model.request_builder import build_request_shape
from autoscaler.planner.plan import Planner, plan
from autoscaler.slicing.hami import Hami
from autoscaler.spec.model import Adopted, Gpu, Model, ReplicaRange
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import DrainReplica, StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import RequestShape, ResourceAmount, SliceClass
from autoscaler.state.world import Cordon, CordonTarget, History, Move, SliceId, StopOrder, World
from tests.support.builders.slices import card, hami_node
from tests.support.builders.worlds import (
    GI,
    T0,
    device,
    drain,
    folded,
    gateway,
    level,
    model,
    replace_fields,
    replica,
    world,
)
from tests.unit.autoscaler.placement.test_memory_growth import grants, growing, run, want
from tests.unit.autoscaler.placement.test_packer import on, shelf

A = growing("a", context_tokens=2048)


def yet(at: World, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()) -> dict[RequestShape, int]:
    """The possible starts of a `World` that has not been evaluated before."""
    keeper = PossibleStarts()
    keeper.look(at, at.models)
    return keeper.now(leaving, staying)


def got_gi(at: World) -> list[float]:
    return [one.replica.resources.memory_bytes / GI for one in plan(at, T0).actions if isinstance(one, StartReplica)]


def drained(at: World) -> list[str]:
    return [one.replica for one in plan(at, T0).actions if isinstance(one, DrainReplica)]


# --- a leaving replica may start again --------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [1, 2])
def test_growth_leaves_memory_for_a_replica_evicted_in_the_same_plan(high: int) -> None:
    """For w, v is evicted from the only card that w may use; the other card has room for a and v."""
    v, w = model("v", 12, high=high, idle_seconds=9e5), model("w", 20, priority=5, gpu=Gpu(models=("*H100*",)))
    cards = [device("gpu0", 24, "n0", product="L4"), device("gpu1", 24, "n1", product="NVIDIA-H100")]
    calls = [level(ModelName("a"), 1), level(ModelName("w"), 1)]
    at = world([A, v, w], cards, [replica(v, "rv", on=["gpu1"])], [gateway(levels=calls)])
    assert (drained(at), got_gi(at)) == (["rv"], [12])


def test_growth_leaves_memory_for_a_drained_idle_replica_to_return() -> None:
    b = model("b", 7, idle_seconds=9e5)
    for one, of, leaves in (
        (replica(b, "rb", on=["gpu1"]), b, []),
        (replica(b, "rb", on=["gpu1"]), replace(b, spec=replace(b.spec, idle_seconds=1.0)), ["rb"]),
        (replica(b, "rb", on=["gpu1"], state=S.DRAINING, drain=drain()), b, []),
    ):
        at = world([A, of], [device("gpu0", 24), device("gpu1", 7)], [one], [gateway(levels=[level(A.name, 1)])])
        stays = one.state is S.READY and not leaves
        assert (drained(at), got_gi(at)) == (leaves, [20 if stays else 16])


def test_possible_starts_count_partial_gpu_models_up_to_their_maximum() -> None:
    a, b = model("a", 4, high=3), model("b", 4, high=2)
    whole, two = model("c", 0), model("d", 4, gpu=Gpu(count=2))
    surging = [replica(one, f"{one.name}{at}") for one in [model("f", 4)] for at in range(2)]
    at = world([a, b, whole, two, model("e", 1, paused=True), model("f", 4)], [device()], [replica(a, "ra"), *surging])
    assert [(one.memory_bytes, many) for one, many in yet(at).items()] == [(4 * GI, 2 + 2)]


def test_possible_starts_skip_replaced_replicas_and_adopted_models() -> None:
    b = model("b", 4, high=2)
    heir = replica(b, "r2", on=["gpu1"], move=Move(replica=ReplicaId("r1"), room_for=ModelName("x")))
    ((_, many),) = yet(world([b], [device(), device("gpu1")], [replica(b, "r1"), heir])).items()
    assert many == 1
    assert yet(world([replace(b, adopted=Adopted(kind="Deployment", namespace="n", name="b"))], [device()])) == {}


def test_possible_starts_are_recounted_only_for_changed_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas start one after the other: each plan recounts only the model that changed, not all of them."""
    counted: list[str] = []

    def counting(of: Model, *args: Any) -> RequestShape:
        counted.append(of.name)
        return build_request_shape(of, *args)

    monkeypatch.setattr("autoscaler.placement.learning.expected_demand.build_request_shape", counting)
    models = [growing(f"m{at:02}", 2 + at % 3, context_tokens=2048) for at in range(30)]
    cards = [device(f"gpu{at:02}", 24, f"n{at:02}") for at in range(30)]
    at, planner = world(models, cards), Planner()
    for one in models:
        calls = gateway(levels=[level(one.name, 1)])
        at = rebuild_indices(replace(at, gateways={calls.id: calls}), T0)
        made = planner.plan(at, T0)
        before = len(counted)
        assert made == Planner().plan(at, T0)
        del counted[before:]
        at = folded(at, made.actions)
    assert len(counted) <= 3 * len(models), f"{len(counted)} for {len(models)}: not their square"
    for orders in ({"cordons": drained_node("n00")}, {"stops": {models[0].name: StopOrder(since_s=T0)}}):
        at = rebuild_indices(replace_fields(at, **orders), T0)
        assert planner.plan(at, T0) == Planner().plan(at, T0)


def test_possible_starts_are_updated_after_a_drain_stop_or_new_settings() -> None:
    b = model("b", 4, high=2)
    there, keeper = world([b, model("c", 3)], [device("gpu0", node="n0")], [replica(b, "r1")]), PossibleStarts()
    pod = Pod(resources=Resources(requests={"cpu": "2"}))
    moved = {SliceId("gpu0"): device("gpu0", node="n1")}
    for after in (
        there, replace_fields(there, cordons=drained_node("n1")),
        replace_fields(there, cordons=drained_node("n1"), slices=moved),
        there, replace(there, stops={b.name: StopOrder(since_s=T0)}), there,
        replace(there, settings=Settings(pod=pod)),
    ):  # fmt: skip
        keeper.look(after, after.models if after is there else ())
        assert keeper.now() == yet(after)
    keeper.look(world([b], [device()], [replica(b, "r1")]), [ModelName("c")])
    assert len(keeper.now()) == 1, "a Model that is removed while Settings change"


def test_each_leaving_replica_adds_one_possible_start() -> None:
    b = model("b", 4, high=3)
    there = [replica(b, "r1"), replica(b, "r2"), replica(b, "r3", state=S.DRAINING, drain=drain())]
    at = world([b], [device()], there)
    (kind,) = yet(at)
    assert yet(at) == {kind: 1}
    assert yet(at, leaving=[there[0].id]) == {kind: 2}
    assert yet(at, staying=[there[2].id]) == {}
    assert yet(at, leaving=[there[0].id], staying=[there[2].id]) == {kind: 1}


def drained_node(node: str) -> dict[CordonTarget, Cordon]:
    """An operator's drain of the node."""
    place = CordonTarget("node", node)
    return {place: Cordon(place=place, node=node, since_s=T0, drain=True)}


def test_possible_starts_count_a_replacement_only_once() -> None:
    """In a drain and in a rollout: otherwise the maximum number of replicas would not fit after the old ones end."""
    b = model("b", 4, high=2)
    one, other = replica(b, "r1", on=["gpu0"]), replica(b, "r2", on=["gpu1"])
    cards = [device("gpu0", node="n0"), device("gpu1", node="n1")]
    (kind,) = yet(world([b], cards, [one]))
    assert yet(world([b], cards, [one])) == {kind: 1}
    assert yet(world([b], cards, [one], cordons=drained_node("n0"))) == {kind: 2}
    assert yet(world([b], cards, [one, other], cordons=drained_node("n0"))) == {kind: 1}
    assert yet(world([b], cards, [replace(one, spec_hash="before"), other])) == {kind: 1}
    assert yet(world([b], cards, [one, other])) == {}
    assert yet(world([b], cards, [one], stops={b.name: StopOrder(since_s=T0)})) == {kind: 2}


@pytest.mark.parametrize("by", ["drain", "rollout"])
def test_replacement_grows_only_into_memory_no_possible_start_needs(by: str) -> None:
    """Up to two, each of 10 of 24 GiB, and gpu0 is not available: the second one fits on the device of the first."""
    two = replace(A, spec=replace(A.spec, replicas=ReplicaRange(min=1, max=2)))
    grown = replica(two, "ra", ["gpu0"], memory_bytes=20 * GI, slots=9)
    cards = [device("gpu0", 24, "n0"), device("gpu1", 24, "n1")]
    if by == "drain":
        at = world([two], cards, [grown], cordons=drained_node("n0"))
    else:
        at = world([two], cards, [replace(grown, spec_hash="before")])
    assert got_gi(at) == [14]
    one = replace(two, spec=replace(two.spec, replicas=ReplicaRange(min=1, max=1)))
    alone = replace(grown, spec_hash="before" if by == "rollout" else one.spec_hash())
    at = world([one], cards, [alone], cordons=drained_node("n0") if by == "drain" else {})
    assert got_gi(at) == [20], "no other replica may be placed"
    tight = [cards[0], device("gpu1", 11, "n1")]
    assert got_gi(replace_fields(at, slices={one.id: one for one in tight})) == [10], (
        "it needs no more memory than it requests"
    )


def test_growth_leaves_memory_for_a_failed_replacement_to_be_retried() -> None:
    """The new spec of b failed and is retried later: a starts now, and leaves memory for b."""
    b = model("b", 7, low=1)
    cards = [device("gpu0", 7, "n0"), device("gpu1", 24, "n1")]
    old = replica(b, "rb", ["gpu0"], spec_hash="before")
    history = {"b": History(retry_at_s=T0 + 60, episodes=1, failure="it broke")}
    calls = [gateway(levels=[level(A.name, 1)])]
    assert got_gi(world([A, b], cards, [old], calls, history)) == [16]
    assert got_gi(world([A, b], cards, [replica(b, "rb", ["gpu0"])], calls, history)) == [20]


# --- each shape is evaluated once -------------------------------------------------------------------------------------


def test_growth_on_equal_devices_evaluates_each_replica_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[RequestShape, SliceClass]] = []
    ask = autoscaler.placement.memory_growth._room

    def counted(kind: RequestShape, lane: SliceClass) -> ResourceAmount | None:
        asked.append((kind, lane))
        return ask(kind, lane)

    monkeypatch.setattr("autoscaler.placement.memory_growth._room", counted)
    cards = [shelf(device(f"g{at}", 24 if at % 2 else 23, product="L4")) for at in range(20)]
    waiting = [want(f"w{at}", 25 + at % 3, 0, products=("l4", "h100")) for at in range(200)]
    cards.append(shelf(device("h0", 80, product="H100"), on("x", 75)))
    made = run([*(want(f"a{at}") for at in range(20)), *waiting], cards, {RequestShape(memory_bytes=GI): 1})
    assert (len(made.placements), len(made.unmet)) == (20, 200)
    assert len(asked) == len(set(asked)) == (3 + 1) * 2


def test_growth_computes_fillable_memory_once_for_equal_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    fill = autoscaler.placement.memory_growth.filled_bytes

    def counted(left_bytes: int, takers: Iterable[Taker]) -> int:
        asked.append(left_bytes)
        return fill(left_bytes, takers)

    monkeypatch.setattr("autoscaler.placement.memory_growth.filled_bytes", counted)
    cards = [shelf(device(f"g{at}", 24 if at % 2 else 23)) for at in range(20)]
    made = run([want(f"a{at}") for at in range(20)], cards, {RequestShape(memory_bytes=6 * GI): 1})
    assert sorted({gi for _, gi in grants(made)}) == [17, 18]
    assert sorted(asked) == [13 * GI, 14 * GI]


def test_waiting_replica_limits_growth_only_on_nodes_it_selects() -> None:
    zones = [device(f"g{at}", 24, f"n{at}", labels={"zone": zone}, labels_known=True) for at, zone in enumerate("xyx")]
    full = [shelf(zones[0], on("b0", 14)), shelf(zones[1], on("b1", 14)), shelf(zones[2], on("b2", 14))]
    waits = want("w", 20, 0, unserved_since_s=9.0, selector=(("zone", "x"),))
    grown = grants(run([want(f"a{at}", 5) for at in range(3)] + [waits], full))
    assert sorted(gi for _, gi in grown) == [5, 5, 10]


# --- overcommitted memory ---------------------------------------------------------------------------------------------


def test_no_growth_on_an_overcommitted_card() -> None:
    a = growing(percent=400, memory_gi=30, context_tokens=2048)
    for devmem, gi in ((163840, 30), (81920, 80)):
        labels = {"nvidia.com/gpu.memory": "81920"}
        (one,) = Hami().inventory(hami_node(card(devmem=devmem), labels=labels)) or ()
        assert one.overcommitted == (devmem > 81920)
        assert got_gi(world([a], [one], [], [gateway(levels=[level(a.name, 1)])])) == [gi]
