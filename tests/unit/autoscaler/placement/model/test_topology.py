"""Topology: replicas of one model are spread over, or grouped by, a node label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.documents.load import DocumentError, parse_documents
from autoscaler.placement.model.topology import CLIQUE
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Price, Settings
from autoscaler.state.world import Replica, Slice, World
from tests.support.builders.worlds import T0, device, folded, model, replica, world

RACK = "topology.kubernetes.io/rack"
RACKS = ("a", "a", "a", "b", "b", "")
"""The rack of each node; the last node has none."""


def slices(racks: Sequence[str] = RACKS, many: int = 4) -> list[Slice]:
    return [
        replace(device(f"n{node}-g{at}", 80, f"n{node}"), labels={RACK: rack} if rack else {}, labels_known=True)
        for node, rack in enumerate(racks)
        for at in range(many)
    ]


def ada(low: int, **spec: Any) -> Model:
    return model("ada", 70, low=low, high=8, spread=RACK, **spec)


def racks(at: World) -> list[str]:
    """The racks of all replicas of the model."""
    nodes = [at.nodes.slices[id] for one in at.replicas.values() if one.model == "ada" for id in one.resources.slices]
    return sorted(one.labels.get(RACK, "") for one in nodes)


def planned(at: World) -> World:
    return folded(at, plan(at, T0).actions)


def test_spread_places_replicas_on_nodes_with_different_label_values() -> None:
    assert racks(planned(world([ada(3)], slices()))) == ["", "a", "b"]
    assert racks(planned(world([ada(6)], slices()))) == ["", "", "a", "a", "b", "b"]
    together = replace(ada(3), spec=replace(ada(3).spec, spread=None))
    assert racks(planned(world([together], slices()))) == ["a", "a", "a"], "else room stays in one piece"


def test_spread_ignores_replicas_of_an_older_spec() -> None:
    two = ada(2)
    there = replica(two, "r1", ["n0-g0"])
    assert racks(planned(world([two], slices(RACKS[:5]), [there]))) == ["a", "b"]
    old: Replica = replace(there, spec_hash="older")
    new = planned(world([ada(1)], slices(RACKS[:5]), [old]))
    (successor,) = [one for one in new.replicas.values() if one.id != old.id]
    assert new.nodes.slices[successor.resources.slices[0]].labels[RACK] == "a", "it takes its place, in whatever rack"


def test_spread_replicas_share_a_label_value_if_no_other_has_capacity() -> None:
    assert racks(planned(world([ada(3)], slices(["a", "a"])))) == ["a", "a", "a"]


def test_lower_price_takes_precedence_over_spread() -> None:
    dear = [replace(one, product="H100") if one.labels.get(RACK) == "b" else one for one in slices(RACKS[:5])]
    settings = Settings(prices=(Price(device="H100", per_hour=3.0),))
    assert racks(planned(world([ada(2)], dear, settings=settings))) == ["a", "a"]
    wide = replace(ada(2), spec=replace(ada(2).spec, gpu=replace(ada(2).spec.gpu, count=2)))
    assert racks(planned(world([wide], slices(RACKS[:5])))) == ["a", "a", "b", "b"]


def test_change_of_spread_or_near_does_not_change_the_spec_hash() -> None:
    assert ada(1).spec_hash() == replace(ada(1), spec=replace(ada(1).spec, spread=None)).spec_hash()
    assert ada(1).spec_hash() == near(1).spec_hash()


def near(low: int, **spec: Any) -> Model:
    return model("ada", 70, low=low, high=8, near=CLIQUE, **spec)


def cliques(*cliques: str, many: int = 1) -> list[Slice]:
    """Devices by the clique of their node; each node is in its own rack."""
    return [
        replace(one, labels={RACK: one.node} | ({CLIQUE: clique} if clique else {}), labels_known=True)
        for node, clique in enumerate(cliques)
        for one in (device(f"n{node}-g{at}", 80, f"n{node}") for at in range(many))
    ]


def nodes(at: World) -> list[str]:
    """The nodes of all replicas."""
    return sorted(at.nodes.slices[id].node for one in at.replicas.values() for id in one.resources.slices)


def test_replicas_with_near_fill_one_clique_before_other_nodes_are_used() -> None:
    there = cliques("f.1", "", "f.2", "f.1", "f.2")
    assert nodes(planned(world([near(2)], there))) == ["n0", "n3"]
    anywhere = replace(near(2), spec=replace(near(2).spec, near=None))
    assert nodes(planned(world([anywhere], there))) == ["n0", "n1"], "else the first that there is"
    two = near(2)
    assert nodes(planned(world([two], there, [replica(two, "r1", ["n2-g0"])]))) == ["n2", "n4"]
    assert nodes(planned(world([near(3)], there))) == ["n0", "n1", "n3"], "no more room: anywhere"


def test_model_with_near_uses_the_clique_with_most_of_its_replicas() -> None:
    four = near(4)
    there = cliques("f.1", "f.1", "f.2", "f.2", "f.2")
    on = [replica(four, f"r{at}", [f"n{at}-g0"]) for at in (0, 2, 3)]
    assert nodes(planned(world([four], there, on))) == ["n0", "n2", "n3", "n4"]
    two = near(2)
    unlabelled = cliques("f.1", "", "")
    assert nodes(planned(world([two], unlabelled, [replica(two, "r1", ["n2-g0"])]))) == ["n0", "n2"]


def test_model_with_near_and_spread_uses_different_hosts_of_one_clique() -> None:
    there = cliques("f.1", "f.2", "f.1", "f.2", many=2)
    assert nodes(planned(world([near(2)], there))) == ["n0", "n0"]
    assert nodes(planned(world([near(2, spread=RACK)], there))) == ["n0", "n2"]
    assert nodes(planned(world([near(4, spread=RACK)], there))) == ["n0", "n0", "n2", "n2"], "nearness comes first"
    one = near(2, spread=RACK)
    beside = cliques("f.1", "f.2", many=2)
    assert nodes(planned(world([one], beside, [replica(one, "r1", ["n1-g0"])]))) == ["n1", "n1"], "even on one host"


def test_invalid_label_in_spread_or_near_is_rejected_with_the_field_path() -> None:
    for key in ("spread", "near"):
        spec = f"{{engine: vllm, {key}: a b}}"
        text = f"apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{name: ada}}\nspec: {spec}"
        with pytest.raises(DocumentError, match=rf"spec\.{key}.*expected a Kubernetes label"):
            parse_documents([("a.yaml", text)])
