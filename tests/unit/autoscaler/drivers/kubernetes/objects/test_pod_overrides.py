"""Affinity and anti-affinity to other pods of the Model where the scheduler chooses the node."""

from __future__ import annotations

from typing import Any

from autoscaler import engines
from autoscaler.drivers.kubernetes.objects import replica_pod as pods
from autoscaler.drivers.kubernetes.objects.pod_overrides import APART, NEAR, PREFERRED
from autoscaler.spec.model import Model
from autoscaler.spec.ownership import INSTALLATION, Ownership
from autoscaler.spec.pod import OURS
from tests.unit.autoscaler.drivers.kubernetes.objects.test_replica_pod import manifest, model, replica

RACK, HOST = "topology.kubernetes.io/rack", "kubernetes.io/hostname"
CPU = "gpu: {count: 0}\n"


def liked(of: Model, *slices: str) -> dict[str, list[tuple[str, int, str]]]:
    """Kind of affinity -> (topology key, weight, Model of the selected pods)."""
    found: dict[str, Any] = manifest(of, *slices)["spec"].get("affinity", {})
    return {
        kind: [
            (term["topologyKey"], one["weight"], term["labelSelector"]["matchLabels"][OURS + "model"])
            for one in said.get(PREFERRED, ())
            if "labelSelector" in (term := one.get("podAffinityTerm", {}))
        ]
        for kind, said in found.items()
    }


def test_near_and_spread_of_a_cpu_model_become_pod_affinity_terms() -> None:
    assert liked(model(CPU)) == {}
    assert liked(model(CPU + f"spread: {RACK}")) == {"podAntiAffinity": [(RACK, APART, "ada")]}
    assert liked(model(CPU + f"near: {RACK}")) == {"podAffinity": [(RACK, NEAR, "ada")]}
    both = liked(model(CPU + f"near: {RACK}\nspread: {HOST}"))
    assert both == {"podAffinity": [(RACK, NEAR, "ada")], "podAntiAffinity": [(HOST, APART, "ada")]}


def test_near_and_spread_become_preferred_affinity_not_required() -> None:
    spec = manifest(model(CPU + f"near: {RACK}\nspread: {HOST}"))["spec"]
    assert all(said.keys() == {PREFERRED} for said in spec["affinity"].values())


def test_pod_on_planned_node_has_no_preferred_pod_affinity() -> None:
    assert liked(model(f"spread: {RACK}"), "n1/gpu0") == {"nodeAffinity": []}


def test_affinity_from_the_model_spec_is_kept_next_to_generated_terms() -> None:
    other = {"weight": 3, "podAffinityTerm": {"topologyKey": HOST}}
    said = f"{PREFERRED}: [{{weight: 3, podAffinityTerm: {{topologyKey: {HOST}}}}}]"
    laid = f"pod: {{affinity: {{podAntiAffinity: {{{said}}}}}}}\n"
    spec = manifest(model(CPU + laid + f"spread: {RACK}"))["spec"]
    mine, ours = spec["affinity"]["podAntiAffinity"][PREFERRED]
    assert (mine, ours["podAffinityTerm"]["topologyKey"]) == (other, RACK)


def test_affinity_ignores_pods_of_other_installations() -> None:
    of, owner = model(CPU + f"near: {RACK}\nspread: {HOST}"), Ownership("blue-1")
    one = replica(of)
    launch = engines.build_launch_command(of, None, pods.HOST, pods.assign_engine_port(one.id), {}, gpus=True)
    pod = pods.build_pod_manifest(one, of, launch, "engine:1", owner=owner)
    affinity = pod["spec"]["affinity"]
    terms = [term["podAffinityTerm"] for kind in affinity.values() for term in kind[PREFERRED]]
    selected = [term["labelSelector"]["matchLabels"] for term in terms]
    assert [labels[INSTALLATION] for labels in selected] == ["blue-1", "blue-1"]
    assert all(labels.items() <= pod["metadata"]["labels"].items() for labels in selected)
