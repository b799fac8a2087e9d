"""Nodes as inventory: what labels tell, what the Settings add, and Models that choose nodes by their labels."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.actions import StartReplica
from autoscaler.drivers.kubernetes import nodes
from autoscaler.explain import explain_model
from autoscaler.fitting import misfits
from autoscaler.log import Log
from autoscaler.model import Model
from autoscaler.plan import plan
from autoscaler.podspec import Pod
from autoscaler.quantity import Bytes
from autoscaler.settings import NodeDevice, NodeKind, Settings
from autoscaler.world import Slice, World
from tests.kit.worlds import T0, device, gateway, level, model, world


def gpu_node(gpus: str = "1", **labels: str) -> Any:
    status = {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"type": "Ready", "status": "True"}]}
    told = {name.replace("gpu_", "nvidia.com/gpu."): value for name, value in labels.items()}
    return {"metadata": {"name": "n", "labels": told}, "spec": {}, "status": status}


DECLARED = (
    NodeKind(selector={"type": "g4dn"}, device=NodeDevice(model="T4", memory_bytes=Bytes(16 << 30))),
    NodeKind(selector={}, device=NodeDevice(model="any", memory_bytes=Bytes(8 << 30), count=4)),
)


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (gpu_node(gpu_product="H100", gpu_memory="81920", type="g4dn"), ("H100", 80, 1)),
        (gpu_node(type="g4dn"), ("T4", 16, 1)),
        (gpu_node("3", type="g4dn"), ("T4", 16, 1)),
        (gpu_node("3", type="g4dn", gpu_count="2"), ("T4", 16, 2)),
        (gpu_node("2", type="other", gpu_memory="1024"), ("any", 1, 2)),
    ],
    ids=["labels first", "declared", "shared by its plug-in", "a label counts them", "the next that matches"],
)
def test_what_labels_do_not_tell_the_first_match_in_the_settings_does(node: Any, found: tuple[str, int, int]) -> None:
    there = nodes.slices([nodes.read(node)], DECLARED)
    assert (there[0].product, there[0].memory_bytes >> 30, len(there)) == found
    assert (there[0].labels, there[0].labels_known) == (node["metadata"]["labels"], True)


def test_of_what_nobody_tells_there_is_little() -> None:
    (there,) = nodes.slices([nodes.read(gpu_node(type="x"))], DECLARED[:1])
    assert (there.product, there.memory_bytes) == ("", 1 << 30)


# --- Models that choose nodes by their labels -------------------------------------------------------------------------


def choosy(name: str = "a", memory_gi: float = 10, **labels: str) -> Model:
    return model(name, memory_gi, pod=Pod(node_selector=labels))


def on(node: str, memory_gi: float = 24, **labels: str) -> Slice:
    return device(f"{node}/gpu0", memory_gi, node, labels=labels, labels_known=True)


def called(*models: Model, slices: tuple[Slice, ...], **fields: Any) -> World:
    return world(models, slices, gateways=[gateway(levels=[level(one.name, 1) for one in models])], **fields)


def places(there: World) -> dict[str, str]:
    """Model -> where it starts."""
    return {str(a.replica.model): a.replica.slices[0] for a in plan(there, T0).actions if isinstance(a, StartReplica)}


def test_a_model_goes_to_a_node_with_its_labels_though_another_fits_better() -> None:
    there = called(choosy(zone="z2"), slices=(on("n1", 12, zone="z1"), on("n2", 80, zone="z2", disk="ssd")))
    assert places(there) == {"a": "n2/gpu0"}


def test_models_of_other_labels_share_the_nodes_that_are_there() -> None:
    models = (choosy("a", 20, zone="z1"), choosy("b", 20, zone="z2"), choosy("c", 20, zone="z3"))
    there = called(*models, slices=(on("n1", zone="z2"), on("n2", zone="z3"), on("n3", zone="z1")))
    assert places(there) == {"a": "n3/gpu0", "b": "n1/gpu0", "c": "n2/gpu0"}


def test_what_the_settings_say_of_all_pods_counts_and_a_model_may_say_otherwise() -> None:
    defaults = Settings(pod=Pod(node_selector={"zone": "z1"}))
    slices = (on("n1", 80, zone="z1"), on("n2", 12, zone="z2"))
    assert places(called(choosy(), slices=slices, settings=defaults)) == {"a": "n1/gpu0"}
    assert places(called(choosy(zone="z2"), slices=slices, settings=defaults)) == {"a": "n2/gpu0"}


def test_that_no_node_has_its_labels_is_known_without_a_call_and_told() -> None:
    there = called(choosy(zone="z9"), slices=(on("n1", zone="z1"), on("n2")))
    reason = "needs a node labelled zone=z9; none that has such a device is"
    assert misfits(there) == {"a": reason}
    answer = plan(there, T0)
    assert [(unmet.reason, unmet.never) for unmet in answer.unmet] == [(reason, True)]
    told = explain_model(there, answer, Log(), there.models[choosy().name].name, T0)
    assert [one.ruled_out for one in told.candidates] == ["its node is not labelled zone=z9"] * 2


def test_where_labels_are_not_known_only_a_contradiction_counts() -> None:
    slices = (device("g0", labels={"zone": "z1"}), device("g1"))
    assert places(called(choosy(zone="z1", disk="ssd"), slices=slices[:1])) == {"a": "g0"}
    assert places(called(choosy(zone="z2"), slices=slices)) == {"a": "g1"}
