"""When a node is a candidate for MIG repartitioning: its CPU, its other partitions, and the other nodes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.placement.mig_candidates import list_mig_candidates
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, Unplaced
from autoscaler.planner.plan import plan
from autoscaler.provisioning.unplaceable_models import list_unplaceable_models
from autoscaler.queries.granted_memory import spare_bytes
from autoscaler.queries.mig_status import CUT_S_MAX, TRIES_MAX, list_profiles
from autoscaler.rearrange.mig_repartition import EVERY_S, NODE_EVERY_S, NODES_MAX, WAIT_S, WANTS_MAX, plan_repartition
from autoscaler.spec.model import Gpu
from autoscaler.spec.pod import Pod
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.resources import HostResources
from autoscaler.state.world import NodeId, World
from tests.support.builders.mig_nodes import (
    PRODUCT,
    SMALL,
    asked,
    cores,
    cuttable,
    host_amounts,
    many,
    order,
    slices,
    town,
    why,
)
from tests.support.builders.worlds import T0, device, gateway, level, model, replace_fields, world


def test_no_gpu_is_repartitioned_for_a_replica_that_lacks_only_cpu() -> None:
    requested = many(["mid"], **cores(6))
    short = world(slices=slices(_1g_10gb="7"), cuttable={"n1": cuttable()}, hosts=host_amounts(8, 4), **requested)
    for later_s in (0.0, NODE_EVERY_S + 1, 2 * NODE_EVERY_S + 1):
        assert order(short, T0 + later_s) is None
    assert "has too little CPU: 4 cores left of 8" in why(short)
    assert "repartitioned" not in why(short), "that would not help"
    other = replace_fields(short, slices={one.id: one for one in slices(_7g_80gb="1")}, cuttable={"n1": cuttable()})
    assert order(replace_fields(other, hosts=host_amounts(8, 8))) is None, "the replica fits on an existing slice"
    hard = many(["mid"], gpu=Gpu(isolation="hardware"), **cores(6))
    bare = world(cuttable={"n1": cuttable()}, hosts=host_amounts(8, 4), **hard)
    assert order(bare) is None
    assert "could be repartitioned for it, but it has too little CPU" in why(bare)
    assert order(replace_fields(bare, hosts=host_amounts(8, 8))) is not None


def test_model_that_needs_more_cpu_than_any_node_has_is_unplaceable() -> None:
    at = world(
        slices=slices(_1g_10gb="7"), cuttable={"n1": cuttable()}, hosts=host_amounts(8, 8), **many(["x"], **cores(64))
    )
    (unmet,) = plan(at, T0).unmet
    assert (order(at), unmet.never, "repartitioned" in unmet.reason) == (None, True, False)
    assert list_unplaceable_models(at).keys() == {"x"}


def test_node_is_repartitioned_for_as_many_replicas_as_its_cpu_allows() -> None:
    at = world(cuttable={"n1": cuttable()}, hosts=host_amounts(8, 8), **many(["a", "b", "c"], **cores(4)))
    action = order(at)
    assert action is not None
    assert "2 replicas will fit" in action.reason
    coming = replace_fields(at, cuttable={"n1": cuttable(state="pending", **asked(1, T0 - EVERY_S, (SMALL,)))})
    reasons = {one.model: one.reason for one in plan(coming, T0).unmet}
    assert [name for name, reason in reasons.items() if "will have room for it" in reason] == ["a", "b"]


def test_no_repartition_if_a_free_partition_is_large_enough() -> None:
    """Whatever else prevents the placement."""
    at = town(there=slices(_3g_40gb="2"))
    want = build_placement_request(at.models[ModelName("big")], 0, T0 - WAIT_S, EvictionLevel.BUSY, "")
    assert plan_repartition((Unplaced(want, "why"),), at, T0).order is None
    assert plan_repartition((Unplaced(want, "why"),), town(there=slices(_1g_10gb="7")), T0).order is not None


def test_node_is_not_repartitioned_into_its_current_layout() -> None:
    """A partition of the layout has less memory than its profile specifies, or is unhealthy."""
    there = [replace(one, healthy=False) for one in slices(_7g_80gb="1")]
    at = town(there=there, want_gi=70.0)
    assert order(at) is None
    assert "its GPUs have that layout already" in why(at)
    assert order(town(cuttable(state="failed", **asked(1, T0 - CUT_S_MAX)), there=there, want_gi=70.0)) is not None


def test_no_model_is_unplaceable_if_a_node_can_be_repartitioned() -> None:
    names = [f"s{number:03}" for number in range(WANTS_MAX + 16)]
    at = world(
        slices=[device("x", 4, "other")], cuttable={"n1": cuttable(gpus=8)},
        **many(names, gpu=Gpu(isolation="hardware")),
    )  # fmt: skip
    found = plan(at, T0)
    assert (len(found.unmet), [one.model for one in found.unmet if one.never]) == (len(names), [])
    assert list_unplaceable_models(at) == {}


def test_models_that_fit_no_node_do_not_block_a_repartition() -> None:
    huge = many([f"a{number:03}" for number in range(WANTS_MAX)], 90.0)
    big = many(["big"], 30.0)
    waits = [*huge["gateways"], replace(big["gateways"][0], id="g2")]
    at = world([*huge["models"], *big["models"]], gateways=waits, cuttable={"n1": cuttable()})
    action = order(at)
    assert action is not None
    assert "the first of Model big" in action.reason


@pytest.mark.parametrize("first", ["no MIG", "busy", "too small", "another zone"])
def test_mig_repartition_finds_the_only_usable_node_behind_many_others(first: str) -> None:
    others = [
        cuttable(
            f"a{number:03}", labels={"zone": "a"},
            product={"no MIG": "NVIDIA-L4", "too small": "NVIDIA-A30"}.get(first, PRODUCT),
        )
        for number in range(NODES_MAX)
    ]  # fmt: skip
    foreign = {f"{one.name} nvidia.com/mig-1g.10gb": 1 for one in others} if first == "busy" else {}
    selected = {"pod": Pod(node_selector={"zone": "z"})} if first == "another zone" else {}
    last = cuttable("z", labels={"zone": "z"})
    at = world(cuttable={one.name: one for one in [*others, last]}, others=foreign, **many(["big"], 30, **selected))
    action = order(at)
    assert action is not None
    assert action.order.node == "z"
    assert list_unplaceable_models(at) == {}


def test_equal_nodes_count_as_one_candidate_for_mig_repartitioning() -> None:
    nodes = {f"n{number}": cuttable(f"n{number}") for number in range(9)}
    one = world(cuttable={"n0": nodes["n0"]})
    assert len(list_mig_candidates(world(cuttable=nodes))) == len(list_mig_candidates(one)) > 0
    nodes["n8"] = cuttable("n8", labels={"zone": "z"})
    nodes["n7"] = cuttable("n7", product="NVIDIA-A30")
    large = {NodeId("n6"): HostResources(8000, 64 << 30, 8000, 64 << 30)}
    found = list_mig_candidates(world(cuttable=nodes, hosts=large))
    assert {shelf.slice.node for shelf in found} == {"n0", "n6", "n7", "n8"}


def test_tainted_node_is_not_repartitioned_and_the_reason_names_the_taint() -> None:
    at = town(cuttable(taints=(Taint("key", "", "NoSchedule"),)), there=[])
    assert order(at) is None
    assert "could be repartitioned for it, but its node is tainted key:NoSchedule" in why(at)


def test_model_is_unplaceable_only_after_the_last_repartition_try_fails() -> None:
    at = town(cuttable(state="pending", **asked(TRIES_MAX)))
    assert (list_unplaceable_models(at), "will have room for it" in why(at)) == ({}, True)
    assert list_unplaceable_models(town(cuttable(state="failed", **asked(TRIES_MAX)))).keys() == {"big"}


def test_replica_with_elastic_memory_prefers_a_full_size_mig_profile() -> None:
    """It requests 80Gi, which no profile has, and can run with 72Gi."""

    def elastic(memory_gi: float, percent: int) -> World:
        made = replace(model("el", memory_gi, gpu=Gpu(elastic_percent=percent)), slots=4)
        made = replace(made, spec=replace(made.spec, engine="vllm"))
        assert spare_bytes(made) > 0
        waits = gateway(levels=[level("el", waiting=1, wait_s=WAIT_S)])
        return world([made], gateways=[waits], cuttable={"n1": cuttable()})

    huge = elastic(80.0, 10)
    action = order(huge)
    assert action is not None
    assert action.order.cuts == (("7g.80gb",),)
    assert list_unplaceable_models(huge) == {}
    action = order(elastic(10.0, 10))
    assert action is not None
    assert "1g.10gb" not in list_profiles(action.order.cuts), "there is more for it"
    shown = replace_fields(elastic(10.0, 10), cuttable={"n1": cuttable(state="pending", **asked(1, T0 - 1, (SMALL,)))})
    assert "will have room for it" in why(shown), "no other is cut for it"
