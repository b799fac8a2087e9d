"""The memory of a replica identifies its grant even if the document no longer offers that grant."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import plan
from autoscaler.queries.measured_memory import MIB, describe_granted_memory, has_grown, has_shrunk
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.events import Seen
from autoscaler.state.world import History, Replica, World
from tests.support.builders.worlds import GI, T0, device, model, replica, world
from tests.support.harness.driver_events import seen_of
from tests.unit.autoscaler.placement.test_growth import growing

GROWS, ELASTIC, NEITHER = Gpu(growth_percent=100), Gpu(elastic_percent=30), Gpu()


def asks(gpu: Gpu) -> Model:
    """A Model that requests 10 GiB."""
    return growing(context_tokens=2048, gpu=gpu)


def serving(of: Model, memory_gi: int) -> Replica:
    """A replica that has served for a while."""
    return replica(of, "ra", memory_bytes=memory_gi * GI, ready_s=T0 - 5000, since_s=T0 - 5000)


def seen_using(of: Model, one: Replica, used_gi: float) -> World:
    at = world([of], [device()], [one], histories={of.name: History(last_activity_s=T0 - 10)})
    then, _ = fold(at, (replace(seen_of(one, Seen.READY), used_bytes=int(used_gi * GI)),), T0)
    return then


@pytest.mark.parametrize("gpu", [GROWS, NEITHER])
def test_usage_of_a_replica_with_extra_memory_does_not_raise_the_estimate(gpu: Gpu) -> None:
    then = seen_using(asks(gpu), replica(asks(gpu), "ra", memory_bytes=20 * GI, slots=9), 19)
    assert then.models[asks(gpu).name].memory_bytes == 10 * GI
    said = explain_model(then, plan(then, T0), Log(), asks(gpu).name, T0).sentences
    assert any("granted 20Gi instead of 10Gi, with 9 slots instead of 4" in line for line in said)


@pytest.mark.parametrize("gpu", [ELASTIC, NEITHER])
def test_usage_of_a_replica_with_less_memory_does_not_lower_the_estimate(gpu: Gpu) -> None:
    cut = seen_using(asks(gpu), serving(asks(gpu), 7), 5)
    assert cut.models[asks(gpu).name].memory_bytes == 10 * GI
    whole = seen_using(asks(gpu), serving(asks(gpu), 10), 5)
    assert whole.models[asks(gpu).name].memory_bytes == 6.25 * GI, "from one that has all it asks for it is learnt"


def test_usage_of_a_replica_with_its_requested_memory_sets_the_estimate() -> None:
    """It got the memory requested at its start; later measurements neither grow nor shrink its grant."""
    of = asks(NEITHER)
    for corrected_gi in (6, 13):
        now = replace(of, memory_bytes=corrected_gi * GI)
        one = replica(of, "ra")
        assert (has_grown(now, one), has_shrunk(now, one), describe_granted_memory(now, one)) == (False, False, "")
    assert seen_using(of, replica(of, "ra"), 13).models[of.name].memory_bytes == 13 * GI


def test_memory_rounded_to_a_mebibyte_is_neither_grown_nor_shrunk() -> None:
    of, whole, two = asks(NEITHER), model("w", 0), model("t", 4, gpu=Gpu(count=2))
    for one in (replica(of, "r", memory_bytes=10 * GI + MIB - 1), replica(of, "r", memory_bytes=10 * GI - MIB + 1)):
        assert (has_grown(of, one), has_shrunk(of, one)) == (False, False)
    assert describe_granted_memory(whole, replica(whole, "r", memory_bytes=24 * GI)) == ""
    assert describe_granted_memory(two, replica(two, "r", memory_bytes=24 * GI)) == ""
    assert describe_granted_memory(of, replica(of, "r", memory_bytes=20 * GI, spec_hash="0" * 8)) == "", (
        "it runs by another document"
    )
