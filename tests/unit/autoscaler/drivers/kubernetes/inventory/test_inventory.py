"""Nodes as inventory: node labels, additions from Settings, and Models with node selectors."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.capacity.attachable_nodes import GPU_COUNT, OWNER_KIND, OWNER_NAME, OWNER_NAMESPACE, Groups
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.planner.plan import plan
from autoscaler.provisioning.unplaceable_models import list_unplaceable_models
from autoscaler.slicing import slicers
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.slicing.vendors import TEMPLATES
from autoscaler.spec.model import Model
from autoscaler.spec.pod import API_VERSION, Pod
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Settings
from autoscaler.state.actions import StartReplica
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.world import Slice, World
from tests.support.builders.resource_slices import partitionable
from tests.support.builders.worlds import T0, device, gateway, level, model, world


def gpu_node(gpus: str = "1", **labels: str) -> Any:
    status = {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"type": "Ready", "status": "True"}]}
    node_labels = {name.replace("gpu_", "nvidia.com/gpu."): value for name, value in labels.items()}
    return {"metadata": {"name": "n", "labels": node_labels}, "spec": {}, "status": status}


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
def test_first_matching_settings_entry_gives_device_facts_not_in_labels(node: Any, found: tuple[str, int, int]) -> None:
    there = nodes.build_slices([nodes.read_node(node)], DECLARED)
    assert (there[0].product, there[0].memory_bytes >> 30, len(there)) == found
    assert (there[0].labels, there[0].labels_known) == (node["metadata"]["labels"], True)


def test_gpu_of_unknown_memory_size_counts_as_one_gibibyte() -> None:
    (there,) = nodes.build_slices([nodes.read_node(gpu_node(type="x"))], DECLARED[:1])
    assert (there.product, there.memory_bytes) == ("", 1 << 30)


@pytest.mark.parametrize(
    ("notes", "groups", "many"),
    [
        ({}, {}, 0),
        ({GPU_COUNT: "4"}, {}, 3),
        ({GPU_COUNT: "2"}, {}, 0),
        ({OWNER_KIND: "MachineSet", OWNER_NAME: "g", OWNER_NAMESPACE: "default"}, {"MachineSet default/g": (4, {})}, 3),
        ({}, {"MachineSet default/h": (4, {"type": "g4dn"})}, 3),
    ],
    ids=[
        "its maximum number of devices is unknown",
        "it reports it",
        "not so many",
        "its MachineSet says it",
        "by its labels",
    ],
)
def test_gpus_beyond_declared_count_are_usable_only_if_machine_allows_them(
    notes: dict[str, str], groups: Groups, many: int
) -> None:
    """Otherwise they may be shares of one GPU, and nothing reports how it is shared."""
    node = gpu_node("3", type="g4dn")
    node["metadata"]["annotations"] = notes
    there = nodes.build_slices([nodes.read_node(node)], DECLARED, groups=groups)
    assert sum(not one.closed for one in there) == many


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: mps}}",
         "nodes[0].slicing.replicas: missing; kind mps requires how many times each device is offered"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: whole, replicas: 2}}",
         "nodes[0].slicing.replicas: a whole device is not shared: remove it, or set kind timeslice or mps"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: mig, replicas: 7}}",
         ("nodes[0].slicing.replicas: with kind mig, nodes report the number of parts of each device: "
          "remove it, or set kind timeslice or mps")),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: kai, replicas: 7}}",
         "nodes[0].slicing.replicas: KAI shares a device by memory: remove it, or set kind timeslice or mps"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: dra, replicas: 7}}",
         "nodes[0].slicing.replicas: kind dra requires `sharing`: remove it, or set kind timeslice or mps"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: mps, replicas: 7, sharing: mps}}",
         "nodes[0].slicing.sharing: requires slicing kind dra: remove it, or change the kind"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: dra, sharing: hami}}",
         "nodes[0].slicing.sharing: expected one of mps, timeslice"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: dra, sharing: mps, cut: true}}",
         ("nodes[0].slicing.cut: not allowed with `sharing`, for which Pilotlight claims the whole GPU: "
          "remove one of the two")),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: dra, sharing: mps, alternatives: 1}}",
         ("nodes[0].slicing.alternatives: not allowed with `sharing`, for which Pilotlight claims the whole GPU: "
          "remove one of the two")),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: whole, cut: true}}",
         "nodes[0].slicing.cut: requires slicing kind mig or dra: remove it, or change the kind"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: dra, overcommit: false}}",
         "nodes[0].slicing.overcommit: requires slicing kind hami or volcano: remove it, or change the kind"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: volcano, template: vir04}}",
         "nodes[0].slicing.template: requires slicing kind hami: remove it, or change the kind"),
        ("{selector: {}, device: {model: Ascend310P, memory: 1Gi}, slicing: {kind: hami, template: vir99}}",
         f"nodes[0].slicing.template: expected one of {', '.join(TEMPLATES)}"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: timeslice, replicas: 1}}",
         "nodes[0].slicing.replicas: expected a whole number, at least 2 and at most 1000"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, slicing: {kind: sliced, replicas: 2}}",
         "nodes[0].slicing.kind: expected one of dra, hami, kai, mig, mps, timeslice, volcano, whole"),
        ("{selector: {}, device: {model: T4, memory: 1Gi}, devicesMax: 65}",
         "nodes[0].devicesMax: expected a whole number, at least 1 and at most 64"),
        ("{device: {model: T4, memory: 1Gi}}", "nodes[0].selector: missing; expected keys with values"),
        ("{selector: {}}", "nodes[0].device: missing; expected keys with values"),
        ("{selector: {a b: c}, device: {model: T4, memory: 1Gi}}",
         "nodes[0].selector.a b: expected a Kubernetes label: at most 63 of A-Za-z0-9._-"),
        ("{selector: {}, device: {model: '', memory: 1Gi}}",
         "nodes[0].device.model: expected the name of a product, such as T4"),
        ("{selector: {}, device: {model: T4, memory: 0}}", "nodes[0].device.memory: expected a size above 0"),
        ("{selector: {}, device: {model: T4, memory: 1Gi, count: 0}}",
         "nodes[0].device.count: expected a whole number, at least 1 and at most 64"),
    ],
)  # fmt: skip
def test_invalid_nodes_entry_in_settings_is_rejected_with_its_path(entry: str, line: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents([("a.yaml", f"apiVersion: {API_VERSION}\nkind: Settings\nnodes: [{entry}]")])
    assert str(caught.value) == f"a.yaml: Settings: {line}"


@pytest.mark.parametrize(
    ("cutting", "line"),
    [
        ("{configMap: default-mig-parted-config}",
         "cutting.configMap: the GPU operator overwrites this ConfigMap: use another one"),
        ("{namespace: A}", "cutting.namespace: expected a Kubernetes object name: lower-case letters, digits, - and ."),
    ],
)  # fmt: skip
def test_invalid_cutting_setting_is_rejected_with_its_path(cutting: str, line: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents([("a.yaml", f"apiVersion: {API_VERSION}\nkind: Settings\ncutting: {cutting}")])
    assert str(caught.value) == f"a.yaml: Settings: {line}"


# --- Models with node selectors ---------------------------------------------------------------------------------------


def choosy(name: str = "a", memory_gi: float = 10, **labels: str) -> Model:
    return model(name, memory_gi, pod=Pod(node_selector=labels))


def on(node: str, memory_gi: float = 24, **labels: str) -> Slice:
    return device(f"{node}/gpu0", memory_gi, node, labels=labels, labels_known=True)


def called(*models: Model, slices: tuple[Slice, ...], **fields: Any) -> World:
    return world(models, slices, gateways=[gateway(levels=[level(one.name, 1) for one in models])], **fields)


def places(there: World) -> dict[str, str]:
    """Model -> slice on which it starts."""
    return {
        str(a.replica.model): a.replica.resources.slices[0]
        for a in plan(there, T0).actions
        if isinstance(a, StartReplica)
    }


def test_model_is_placed_on_matching_node_though_another_fits_better() -> None:
    there = called(choosy(zone="z2"), slices=(on("n1", 12, zone="z1"), on("n2", 80, zone="z2", disk="ssd")))
    assert places(there) == {"a": "n2/gpu0"}


def test_models_with_different_selectors_are_placed_on_matching_nodes() -> None:
    models = (choosy("a", 20, zone="z1"), choosy("b", 20, zone="z2"), choosy("c", 20, zone="z3"))
    there = called(*models, slices=(on("n1", zone="z2"), on("n2", zone="z3"), on("n3", zone="z1")))
    assert places(there) == {"a": "n3/gpu0", "b": "n1/gpu0", "c": "n2/gpu0"}


def test_default_node_selector_applies_unless_overridden_by_model() -> None:
    defaults = Settings(pod=Pod(node_selector={"zone": "z1"}))
    slices = (on("n1", 80, zone="z1"), on("n2", 12, zone="z2"))
    assert places(called(choosy(), slices=slices, settings=defaults)) == {"a": "n1/gpu0"}
    assert places(called(choosy(zone="z2"), slices=slices, settings=defaults)) == {"a": "n2/gpu0"}


def test_model_without_matching_node_is_unplaceable_with_a_reason() -> None:
    there = called(choosy(zone="z9"), slices=(on("n1", zone="z1"), on("n2")))
    reason = "needs a node with labels zone=z9; no node with a suitable device has them"
    assert list_unplaceable_models(there) == {"a": reason}
    answer = plan(there, T0)
    assert [(unmet.reason, unmet.never) for unmet in answer.unmet] == [(reason, True)]
    explanation = explain_model(there, answer, Log(), there.models[choosy().name].name, T0)
    assert [one.ruled_out for one in explanation.candidates] == ["its node does not have the labels zone=z9"] * 2


def test_node_with_incomplete_labels_matches_unless_a_known_label_differs() -> None:
    slices = (device("g0", labels={"zone": "z1"}), device("g1", node="n2"))
    assert places(called(choosy(zone="z1", disk="ssd"), slices=slices[:1])) == {"a": "g0"}
    assert places(called(choosy(zone="z2"), slices=slices)) == {"a": "g1"}


def test_change_of_one_node_rebuilds_only_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilding all slices each time would take quadratic time when all nodes of a cluster change."""
    asked, inventory = list[str](), slicers.list_slices

    def counted(facts: NodeFacts) -> tuple[Slice, ...]:
        asked.append(facts.name)
        return inventory(facts)

    monkeypatch.setattr(slicers, "list_slices", counted)
    made: nodes.Made = {}
    there = [nodes.read_node(gpu_node(type="g4dn"))._replace(name=f"n{i}") for i in range(3)]
    first = nodes.build_slices(there, DECLARED, made=made)
    assert (asked, nodes.build_slices(there, DECLARED, made=made)) == (["n0", "n1", "n2"], first)
    for changed in (
        there[1]._replace(usable=False),
        there[1]._replace(taints=(Taint("gpu", "", "NoSchedule"),)),
        there[1]._replace(labels={"type": "other"}),
        there[1]._replace(amounts={"nvidia.com/gpu": "2"}),
    ):
        asked.clear()
        now = [there[0], changed, there[2]]
        assert (nodes.build_slices(now, DECLARED, made=made), asked) == (
            nodes.build_slices(now, DECLARED),
            ["n1", "n0", "n1", "n2"],
        )
    asked.clear()
    assert nodes.build_slices(there[:1], DECLARED, made=made) == first[:1]
    assert (list(made), asked) == (["n0"], [])
    assert nodes.build_slices(there[:1], made=made) != first[:1], "what the Settings say counts at once"


def test_resource_claim_on_a_node_rebuilds_only_slices_of_that_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, inventory = list[str](), slicers.list_slices

    def counted(facts: NodeFacts) -> tuple[Slice, ...]:
        asked.append(facts.name)
        return inventory(facts)

    there = [nodes.NodeSeen(name, {}, usable=True, lost=False) for name in ("n0", "n1")]
    published = resource_claims.group_slices_by_node([one for node in there for one in partitionable(node.name)])
    made: nodes.Made = {}
    before = nodes.build_slices(there, published=published, made=made)
    part = next(
        f"{one['spec']['driver']}/{one['spec']['pool']['name']}/{device['name']}"
        for one in published["n1"]
        for device in one["spec"].get("devices", ())
        if "profile" in device["attributes"]
    )
    after = nodes.build_slices(there, published=published, kept=["gpu.nvidia.com/n9/gpu-0", part])
    assert after != before, "it is offered before what has no room beside it"
    monkeypatch.setattr(slicers, "list_slices", counted)
    assert nodes.build_slices(there, published=published, kept=["gpu.nvidia.com/n9/gpu-0", part], made=made) == after
    assert asked == ["n1"]
