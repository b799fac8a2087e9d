"""Growth (`gpu.growth`): a starting replica gets more memory than it requests if no other replica could use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.documents.document_types import DocumentError
from autoscaler.drivers.local.devices import Devices
from autoscaler.explain.decision_log import Log
from autoscaler.explain.fit import explain_fit
from autoscaler.explain.model import explain_model
from autoscaler.fold.fold import fold
from autoscaler.placement.index import residual_waste
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.node_search import NodeArrays, NodeCapacity
from autoscaler.placement.index.residual_waste_tables import Taught, build_untrained_estimate
from autoscaler.placement.memory_growth import Taker, filled_bytes
from autoscaler.placement.model.types import Bin, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import plan
from autoscaler.queries.granted_memory import Given, compute_growth, compute_slots, explain_no_growth
from autoscaler.queries.granted_memory import compute_engine_limits as engine_limits
from autoscaler.spec.model import Cache, Gpu, Model, ModelSpec, ReplicaRange
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import DeclaredDevice
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Growth, RequestShape, SliceClass
from autoscaler.state.world import Replica, World
from pilotlight.models.document_loading import fill_memory_estimate
from pilotlight.models.explain_fit_needs import load_memory_needs
from pilotlight.models.model_memory import estimate_memory
from tests.support.builders.artifacts import model_files
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.worlds import GI, T0, device, folded, gateway, level, model, replica, world
from tests.support.example_budget import examples
from tests.support.harness.driver_events import seen_of
from tests.unit.autoscaler.placement.index.test_elastic_requests import counted
from tests.unit.autoscaler.placement.test_packer import on, shelf
from tests.unit.autoscaler.planner.test_plan_elastic import after, document, launched

MIB = 1 << 20


def want(name: str, memory_gi: float = 10, more_gi: float = 10, step: int = MIB, **fields: Any) -> PlacementRequest:
    made = placement_request(name, memory_bytes=int(memory_gi * GI), growth=Growth(int(more_gi * GI), step))
    return change_request(made, **fields)


def kind(memory_gi: float, **fields: Any) -> RequestShape:
    return RequestShape(memory_bytes=int(memory_gi * GI), **fields)


def run(
    requests: Sequence[PlacementRequest],
    shelves: Sequence[Bin],
    yet: Mapping[RequestShape, int] | None = None,
    taught: Taught | None = None,
) -> PackResult:
    yard = SliceIndex(shelves, taught=taught)
    yard.yet = lambda victims: dict(yet or {})
    return pack(requests, yard, frozenset(), RestartCosts(), T0)


def grants(packing: PackResult) -> list[tuple[str, float]]:
    return [(placement.want.model, placement.memory_bytes / GI) for placement in packing.placements]


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_growing_replica_gets_otherwise_unusable_memory_in_whole_steps() -> None:
    assert grants(run([want("a")], [shelf(device("g0", 24))])) == [("a", 20)]
    assert grants(run([want("a")], [shelf(device("g0", 24), on("x", 9))])) == [("a", 15)]
    assert grants(run([want("a", step=2 * GI)], [shelf(device("g0", 24), on("x", 9))])) == [("a", 14)]
    assert grants(run([want("a", more_gi=0)], [shelf(device("g0", 24))])) == [("a", 10)], "who may have no more"
    odd = replace(device("g0"), memory_bytes=15 * GI + 5)
    assert grants(run([want("a", step=1)], [shelf(odd)])) == [("a", 15)], "whole MiB, as pods ask for it"


def test_growing_replica_leaves_memory_that_later_replicas_could_use() -> None:
    hole = [shelf(device("g0", 24))]
    assert grants(run([want("a")], hole, {kind(14): 1})) == [("a", 10)]
    assert grants(run([want("a")], hole, {kind(6): 1})) == [("a", 18)], "one of 6"
    assert grants(run([want("a")], hole, {kind(6): 2})) == [("a", 12)], "two of 6"
    assert grants(run([want("a")], hole, {kind(6): 5})) == [("a", 12)], "a third one would not fit anyway"
    assert grants(run([want("a")], hole, {kind(6): 1, kind(7.5): 1})) == [("a", 10.5)]
    assert grants(run([want("a")], hole, {kind(15): 9, kind(2, products=("h100",)): 9})) == [("a", 20)]
    assert grants(run([want("a")], hole, {kind(16, spare_bytes=4 * GI): 1})) == [("a", 10)], "it makes do with 12"
    assert grants(run([want("a")], hole, {want("a").kind: 1})) == [("a", 20)], "which is this one itself"


def test_growth_leaves_memory_for_a_replica_that_fits_after_a_drain() -> None:
    leaving = shelf(device("g0", 24), on("x", 10, leaving=True))
    assert grants(run([want("a")], [leaving])) == [("a", 14)]
    assert grants(run([want("a")], [leaving], {kind(12): 1})) == [("a", 12)], "it fits when x has left"


def test_replica_does_not_grow_if_a_waiting_one_could_use_the_device() -> None:
    shelves = [shelf(device("g0", 24), on("x", 9)), shelf(device("g1", 8))]
    made = run([want("a"), want("b", 20, more_gi=0, unserved_since_s=9.0)], shelves)
    assert (grants(made), [one.want.model for one in made.unmet]) == ([("a", 10)], ["b"])
    never = run([want("a"), want("b", 30, more_gi=0, unserved_since_s=9.0)], shelves)
    assert grants(never) == [("a", 15)], "no Device could ever hold it"


def test_growing_replica_gets_all_memory_of_a_dedicated_slice_except_dra() -> None:
    own = device("g0", 16, shared=False)
    assert grants(run([want("a")], [shelf(own)], {kind(1): 9})) == [("a", 16)]
    for shared in (True, False):
        assert grants(run([want("a")], [shelf(replace(own, kind="dra", shared=shared))])) == [("a", 10)]


def test_replica_placed_with_reduced_memory_does_not_grow() -> None:
    yard = SliceIndex([shelf(device("g0", 12))])
    yard.budget = lambda: counted(50, 10 * GI)
    made = pack([want("a", 4, spare_bytes=2 * GI)], yard, frozenset(), RestartCosts(), T0)
    assert grants(made) == [("a", 2)]


def test_growth_leaves_the_memory_that_the_learned_demand_would_use() -> None:
    """The demand is for half devices, whichever models are declared now."""
    halves = build_untrained_estimate({500: 1.0})
    ((_, got),) = grants(run([want("a", 8)], [shelf(device("g0", 32))], taught=halves))
    assert 16 <= got <= 16 + 0.32, "one half, but for a level of the tables"
    (whole,) = run([want("a", 20)], [shelf(device("g0", 32))], taught=halves).placements
    assert whole.memory_bytes == 30 * GI, "nothing of that size fits beside it"


def test_reserved_memory_is_the_largest_fitting_multiple_of_demanded_size() -> None:
    stock = NodeArrays([NodeCapacity("n", (SliceClass(1000), SliceClass(1000)))], build_untrained_estimate({400: 1.0}))
    part = stock.part(np.array([0]))

    def needed(left: int) -> int:
        return residual_waste.compute_needed_milli(
            build_untrained_estimate({400: 1.0}).tables, part._replace(left=np.array([left, 1000])), 0
        )

    assert needed(390) == 0
    assert 385 <= needed(500) <= 400
    assert 785 <= needed(1000) <= 800
    shut = part._replace(left=np.array([300, -1]))
    assert residual_waste.compute_needed_milli(build_untrained_estimate({400: 1.0}).tables, shut, 0) == 0


def test_all_memory_is_reserved_if_demand_has_too_many_combinations() -> None:
    assert filled_bytes(10**6, [Taker(one, one, 9) for one in range(1001, 1100)]) == 10**6
    assert filled_bytes(10, []) == 0
    assert filled_bytes(10, [Taker(4, 4, 9)]) == 8
    assert filled_bytes(10, [Taker(4, 6, 9)]) == 10
    assert filled_bytes(10, [Taker(11, 11, 9)]) == 0


TAKERS = st.lists(st.builds(Taker, st.integers(1, 30), st.just(0), st.integers(0, 3)), max_size=4)


@settings(deadline=None, max_examples=examples(200))
@given(TAKERS, st.integers(0, 60))
def test_fillable_memory_equals_the_largest_sum_of_replicas_that_fits(takers: list[Taker], left: int) -> None:
    rigid = [one._replace(most_bytes=one.least_bytes) for one in takers]
    sums = [
        sum(count * one.least_bytes for count, one in zip(counts, rigid, strict=True))
        for counts in product(*(range(one.many + 1) for one in rigid))
    ]
    assert filled_bytes(left, rigid) == max(one for one in sums if one <= left)


WANTS = st.lists(
    st.builds(
        lambda number, memory, more, spare: placement_request(
            f"m{number}", number, memory_bytes=memory * MIB, growth=Growth(more * MIB, 7 * MIB),
            spare_bytes=spare * MIB * (spare < memory),
        ),
        st.integers(0, 99), st.integers(1, 100), st.integers(0, 90), st.integers(0, 20),
    ),
    max_size=8, unique_by=lambda one: one.ordinal,
)  # fmt: skip
SHELVES = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 90), st.booleans()), min_size=1, max_size=5)
YET = st.dictionaries(
    st.builds(lambda mib: RequestShape(memory_bytes=mib * MIB), st.integers(1, 60)), st.integers(0, 3)
)


def _shelf(number: int, size: int, used: int, shared: bool) -> Bin:
    slice_ = replace(device(f"g{number}", shared=shared), memory_bytes=size * MIB)
    return shelf(slice_, *([on("x", used * MIB / GI)] if shared and used < size else []))


@settings(deadline=None, max_examples=examples(300))
@given(WANTS, SHELVES, YET, st.booleans())
def test_growth_keeps_all_placements_and_never_exceeds_free_memory(
    wants: list[PlacementRequest], sizes: list[tuple[int, int, bool]], yet: dict[RequestShape, int], judges: bool
) -> None:
    shelves = [_shelf(at, *one) for at, one in enumerate(sizes)]
    taught = build_untrained_estimate({300: 1.0, 450: 2.0}) if judges else None
    grown = run(wants, shelves, yet, taught)
    plain = run([one._replace(growth=Growth()) for one in wants], shelves, yet, taught)
    assert [(one.want.model, one.slices) for one in grown.placements] == [
        (one.want.model, one.slices) for one in plain.placements
    ]
    assert [(one.want.model, one.reason) for one in grown.unmet] == [
        (one.want.model, one.reason) for one in plain.unmet
    ]
    assert grown == run(wants[::-1], shelves[::-1], yet, taught), "the same in any order"
    free = {one.slice.id: one.free.memory_bytes for one in shelves}
    for one, as_asked in zip(grown.placements, plain.placements, strict=True):
        (id,) = one.slices
        free[id] -= one.memory_bytes
        more = one.memory_bytes - as_asked.memory_bytes
        assert 0 <= more <= one.want.growth.most_bytes
        assert more % (7 * MIB) == 0
    assert min(free.values(), default=0) >= 0


# --- the plan ---------------------------------------------------------------------------------------------------------


def growing(name: str = "a", memory_gi: float = 10, percent: int = 100, **fields: Any) -> Model:
    """A llama.cpp model: four slots of 2 GiB and a file of 2 GiB."""
    cache = Cache(total_bytes=int(memory_gi * GI), slot_bytes=2 * GI, token_bytes=GI // 4096, context_tokens=8192)
    spec = ModelSpec(engine="llama.cpp", artifact="file:///a.gguf", **{"gpu": Gpu(growth_percent=percent), **fields})
    size = int(memory_gi * GI)
    return Model(name=ModelName(name), spec=spec, memory_bytes=size, slots=4, estimated_bytes=size, cache=cache)


def started(at: World) -> Replica:
    (action,) = plan(at, T0).actions
    assert isinstance(action, StartReplica)
    return action.replica


def asked(*models: Model, gi: float = 24, replicas: Sequence[Replica] = ()) -> World:
    return world(models, [device("gpu0", gi)], replicas, [gateway(levels=[level(models[0].name, 1)])])


def test_explain_reports_memory_and_slots_of_a_grown_replica() -> None:
    a = growing(context_tokens=2048)
    one = started(asked(a, gi=17.5))
    assert (one.resources.memory_bytes, one.slots, one.spec_hash) == (16 * GI, 7, a.spec_hash())
    assert a.spec_hash() == replace(a, spec=replace(a.spec, gpu=Gpu())).spec_hash(), "no replica restarts for it"
    assert engine_limits(a, one) == Given(None, 16 * GI, 7, 0)
    runs = replace(one, state=S.READY, since_s=T0, times=replace(one.times, ready_s=T0))
    then = world([a], [device("gpu0", 17.5)], [runs])
    log = explain_model(then, plan(then, T0), Log(), a.name, T0).sentences
    assert any("granted 16Gi instead of 10Gi, with 7 slots instead of 4" in line for line in log)
    fit = explain_fit(then, a, load_memory_needs(a, gpus=False), T0)
    assert fit.most_bytes == 20 * GI
    assert (
        "It is granted up to 20Gi where no other Model can use that memory (gpu.growth): its engine is started with "
        "more slots, at most 9." in fit.sentences
    )
    assert f"{one.id} was granted 16Gi instead of 10Gi, with 7 slots instead of 4." in fit.sentences
    assert plan(then, T0).actions == ()


def test_growth_leaves_memory_for_another_model_on_the_device() -> None:
    a, b = growing(context_tokens=2048), model("b", 7)
    first = started(asked(a, b))
    assert first.resources.memory_bytes == 16 * GI
    runs = replace(first, state=S.READY, since_s=T0, times=replace(first.times, ready_s=T0))
    assert started(asked(b, a, replicas=[runs])).resources.slices == first.resources.slices
    b_runs, b = replica(b, "rb"), replace(b, spec=replace(b.spec, replicas=ReplicaRange(min=1)))
    assert started(asked(a, b, replicas=[b_runs])).resources.memory_bytes == 16 * GI, "b has all that it may have"
    two = replace(b, spec=replace(b.spec, replicas=ReplicaRange(min=1, max=2)))
    assert started(asked(a, two, replicas=[replica(two, "rb")])).resources.memory_bytes == 10 * GI, (
        "7 of 7 GiB may be asked for"
    )
    paused = replace(b, spec=replace(b.spec, paused=True))
    assert started(asked(a, paused)).resources.memory_bytes == 20 * GI


def test_no_replica_starts_in_the_memory_of_a_grown_replica() -> None:
    a, b = growing(context_tokens=2048), model("b", 6)
    grown = replica(a, "ra", memory_bytes=20 * GI, slots=9)
    held = plan(asked(b, a, replicas=[grown]), T0)
    assert not any(isinstance(action, StartReplica) for action in held.actions)


def test_usage_of_a_grown_replica_is_not_learned_as_model_demand() -> None:
    a = growing(context_tokens=2048)
    for memory_gi, learns in ((10, True), (20, False)):
        at = world([a], [device()], [replica(a, "ra", memory_bytes=memory_gi * GI)])
        measured = replace(seen_of(at.replicas[next(iter(at.replicas))], Seen.READY), used_bytes=9 * GI)
        then, _ = fold(at, (measured,), T0)
        assert (a.name in then.learned.histories and then.learned.histories[a.name].used is not None) == learns


# --- engines and documents --------------------------------------------------------------------------------------------


def test_growth_extends_the_context_if_the_model_sets_no_length() -> None:
    a = growing()
    assert compute_growth(a) == Growth(int(6 * GI), 256 * GI // 4096), "all of the model's own context for each slot"
    assert engine_limits(a, replica(a, "r", memory_bytes=12 * GI)) == Given(None, 12 * GI, 4, 16384)
    assert engine_limits(a, replica(a, "r")) == Given(None, 10 * GI, 4, 0)
    grown = replica(a, "r", memory_bytes=12 * GI)
    then = world([a], [device()], [grown])
    explanation = " ".join(explain_model(then, plan(then, T0), Log(), a.name, T0).sentences)
    assert "granted 12Gi instead of 10Gi, with 16384 tokens of context instead of 8192" in explanation
    less = launched(a, engine_limits(a, grown), "llama-server").argv
    assert after(less, "--ctx-size") == "16384"


def test_growth_is_zero_with_a_reason_if_the_engine_cannot_use_more_memory() -> None:
    unread, small = replace(growing(), cache=None), growing(context_tokens=2048, percent=10)
    one_slot = replace(growing(), slots=1)
    unknown = model("c", 0, gpu=Gpu(growth_percent=50))
    for rigid, why in (
        (unread, "cannot be read here"), (small, "another slot"), (one_slot, "full context"),
        (unknown, "set gpu.memory"),
    ):  # fmt: skip
        assert compute_growth(rigid) == Growth()
        assert why in explain_no_growth(rigid)
    assert explain_no_growth(growing()) == explain_no_growth(model("d")) == ""


@pytest.mark.parametrize("context_tokens", [None, 8192])
@pytest.mark.parametrize("slots_", [1, 3])
def test_engine_arguments_of_a_grown_replica_fit_its_granted_memory(
    tmp_path: Path, context_tokens: int | None, slots_: int
) -> None:
    """Uses the estimator itself, with a real header."""
    path = model_files.attending(tmp_path / "a.gguf", layers=6)
    spec = ModelSpec(
        engine="llama.cpp", artifact=f"file://{path}", context_tokens=context_tokens, gpu=Gpu(growth_percent=300)
    )
    made = fill_memory_estimate(Model(name=ModelName("a"), spec=spec, slots=slots_))
    most, step = compute_growth(made)
    assert (most > 0) == (slots_ > 1 or context_tokens is not None)
    for more in range(0, most + 1, max(1, most // 9)):
        granted = made.memory_bytes + more // step * step
        limits = engine_limits(made, replica(made, "r", memory_bytes=granted, slots=compute_slots(made, granted)))
        if context_tokens is None:
            tokens = limits.shared_context_tokens or (made.cache and made.cache.context_tokens)
            of, base = (
                estimate_memory(replace(made, slots=1, spec=replace(spec, context_tokens=one)))
                for one in (tokens, made.cache and made.cache.context_tokens)
            )
            assert of is not None
            assert base is not None
            assert of.total_bytes(gpus=False) - base.total_bytes(gpus=False) <= more
        else:
            of = estimate_memory(replace(made, slots=limits.slots))
            assert of is not None
            assert of.total_bytes(gpus=False) <= granted
            assert limits.slots == slots_ + more // step


async def test_vllm_with_growth_is_started_with_its_granted_memory_fraction() -> None:
    devices = Devices((DeclaredDevice(name="gpu0", memory_bytes=Bytes(24 * GI)),))
    await devices.open()
    spec = ModelSpec(engine="vllm", artifact="hf://org/m", gpu=Gpu(growth_percent=100))
    of = Model(name=ModelName("a"), spec=spec, memory_bytes=10 * GI, slots=64)
    one = started(asked(of, gi=18))
    assert (one.resources.memory_bytes, one.slots) == (18 * GI, 64)
    half = replica(of, "r", memory_bytes=18 * GI)
    limits = engine_limits(of, half, devices.fraction(of, half))
    assert after(launched(of, limits, "vllm").argv, "--gpu-memory-utilization") == "0.750"


def test_memory_placeholder_in_a_command_becomes_the_grown_memory() -> None:
    own = model("own", 10, gpu=Gpu(growth_percent=50), command=("run", "{port}", "--memory={memory_bytes}"))
    limits = engine_limits(own, replica(own, "r", memory_bytes=14 * GI))
    assert f"--memory={14 * GI}" in launched(own, limits).argv


def test_invalid_growth_setting_is_rejected_with_the_field_path() -> None:
    file = {"engine": "llama.cpp", "artifact": "file:///a.gguf"}
    assert document(**file, gpu={"growth": 50}).spec.gpu == Gpu(growth_percent=50)
    for spec, expected in (
        ({**file, "gpu": {"growth": 50, "count": 2}}, "spec.gpu.growth: only a part of one device can be larger"),
        ({**file, "gpu": {"growth": 50}, "args": ["--parallel=9"]}, "spec.args[0]: not allowed with gpu.growth"),
        (
            {"engine": "ollama", "gpu": {"growth": 50, "memory": "8Gi"}},
            "spec.gpu.growth: the cache size of engine ollama cannot",
        ),
        ({"engine": "vllm", "artifact": "hf://o/m", "gpu": {"growth": 50}}, "spec.gpu.growth: requires gpu.memory"),
        ({**file, "gpu": {"growth": 1001}}, "spec.gpu.growth: expected"),
    ):
        with pytest.raises(DocumentError) as error:
            document(**spec)
        assert expected in str(error.value)


def test_replicas_grown_by_successive_plans_never_exceed_device_memory() -> None:
    """Each replica starts on a device where the others have already been granted memory."""
    models = [growing(f"m{at}", 6, context_tokens=2048) for at in range(3)]
    at = world(models, [device("gpu0", 24)], gateways=[gateway(levels=[level(one.name, 1) for one in models])])
    for _ in models:
        at = folded(at, plan(at, T0).actions)
        runs = {
            id: replace(one, state=S.READY, since_s=T0, times=replace(one.times, ready_s=T0))
            for id, one in at.replicas.items()
        }
        at = world(models, at.nodes.slices.values(), runs.values(), at.gateways.values())
    assert sum(one.resources.memory_bytes for one in at.replicas.values()) == 24 * GI
    assert sorted(one.resources.memory_bytes // GI for one in at.replicas.values()) == [6, 6, 12]
