"""Topology: replicas spread over or grouped by a node label, and devices of one replica joined by a link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.explain.decision_log import Log
from autoscaler.explain.fit import Needs, explain_fit
from autoscaler.explain.model import explain_model
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.predicates import find_required_amount
from autoscaler.placement.model.topology import (
    CLIQUE,
    UNKNOWN,
    count_team_devices,
    link_shortage_reason,
    name_device_link,
    team_of,
)
from autoscaler.placement.model.types import Bin, EvictionLevel, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.settings import Price, Settings
from autoscaler.state.resources import HostResources, Link
from autoscaler.state.world import NodeId, Replica, Slice, SliceId, World
from tests.support.builders.layouts import laid, looked, names
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.worlds import GI, T0, device, folded, gateway, level, model, replace_fields, replica, world
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import on, placed, run, shelf, victims, want

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
    assert new.nodes.slices[successor.resources.slices[0]].labels[RACK] == "a", "it takes the place in any rack"


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


H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
TWO_OF_A_ROOT = want("a", 20, devices=2, link=Link.PCIE_ROOT)
TWO_BY_NVLINK = change_request(TWO_OF_A_ROOT, link=Link.NVLINK)


def rooted(*roots: str, node: str = "n0", **fields: Any) -> list[Slice]:
    return [device(f"{node}-g{at}", 24, node, link=root, **fields) for at, root in enumerate(roots)]


# --- known links ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "nvlink"),
    [
        (H100, True), ("NVIDIA-H100-80GB-HBM3", True), ("NVIDIA-A100-SXM4-80GB", True), ("NVIDIA H200", True),
        ("NVIDIA-B200", True), ("NVIDIA-GB200", True), ("Tesla-V100-SXM3-32GB", True),
        ("NVIDIA-H100-PCIe", False), ("NVIDIA-H100-NVL", False), ("NVIDIA-H200-NVL", False),
        ("NVIDIA-A100-80GB-PCIe", False), ("Tesla-V100-SXM2-16GB", False), (L40S, False), ("", False),
    ],
)  # fmt: skip
def test_device_has_nvlink_if_its_product_name_implies_it(product: str, nvlink: bool) -> None:
    assert bool(name_device_link(device(product=product), Link.NVLINK)) == nvlink


def test_device_has_nvlink_if_its_node_has_a_clique_label() -> None:
    assert name_device_link(device(labels={CLIQUE: "b1d2.7"}), Link.NVLINK)
    assert not name_device_link(device(labels={CLIQUE: ""}), Link.NVLINK)


def test_nvlink_devices_on_different_pcie_roots_satisfy_pcie_root() -> None:
    both = replace(device(product=H100), link="r1"), replace(device(product=H100), link="r2")
    assert len(count_team_devices(both, Link.PCIE_ROOT)) == 1
    cards = (replace(one, product=L40S) for one in both)
    assert len(count_team_devices(cards, Link.PCIE_ROOT)) == 2
    assert team_of(device(node="n1"), Link.NODE) == team_of(device("g1", node="n1", product=H100), Link.NODE)


def test_no_link_shortage_is_reported_for_a_model_with_link_any() -> None:
    assert not link_shortage_reason(device(), Link.NODE, {}, 1)
    assert not link_shortage_reason(device(), Link.NODE, count_team_devices([device(), device("g1")], Link.NODE), 2)


# --- placement --------------------------------------------------------------------------------------------------------


def test_pcie_root_model_gets_two_devices_under_one_pcie_root() -> None:
    there = [shelf(one) for one in (*rooted("r1", "r2"), *rooted("r1", "r2", "r2", node="n1"))]
    assert placed(run([TWO_OF_A_ROOT], there)) == [("a", "n1-g1", "n1-g2")]
    assert placed(run([change_request(TWO_OF_A_ROOT, link=Link.NODE)], there[:2])) == [("a", "n0-g0", "n0-g1")]
    assert placed(run([TWO_OF_A_ROOT], there[:2])) == []


def test_equal_pcie_root_names_on_two_nodes_are_different_roots() -> None:
    assert placed(run([TWO_OF_A_ROOT], map(shelf, rooted("r1", "r1")))) == [("a", "n0-g0", "n0-g1")]
    assert placed(run([TWO_OF_A_ROOT], map(shelf, (*rooted("r1"), *rooted("r1", node="n1"))))) == []


def test_nvlink_devices_satisfy_pcie_root_even_if_roots_are_unknown() -> None:
    there = [shelf(one) for one in (*rooted("", "", product=L40S), *rooted("", "", node="n1", product=H100))]
    for each in (TWO_BY_NVLINK, TWO_OF_A_ROOT):
        assert placed(run([each], there)) == [("a", "n1-g0", "n1-g1")]


def test_eviction_frees_linked_devices_even_if_other_victims_cost_less() -> None:
    cheap, dear = on("cheap", 20, priority=-1), on("dear", 20)
    there = [
        shelf(one, *who) for one, who in zip(rooted("r1", "r2", "r3", "r3"), ([], [cheap], [dear], [dear]), strict=True)
    ]
    first = change_request(TWO_OF_A_ROOT, priority=1)
    assert victims(run([change_request(first, link=Link.NODE)], there)) == ["cheap"]
    assert victims(run([first], there)) == ["dear"]
    (waits,) = run([first], there).unmet
    assert waits.promised


def test_new_replica_waits_until_a_draining_one_frees_a_linked_device() -> None:
    going = on("x", 20, leaving=True)
    there = [shelf(one, *who) for one, who in zip(rooted("r1", "r2", "r2"), ([], [], [going]), strict=True)]
    (waits,) = run([TWO_OF_A_ROOT], there).unmet
    assert (waits.promised, waits.reason) == (True, "waits on n0-g2 until x has stopped")


# --- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "there", "reason"),
    [
        (
            TWO_OF_A_ROOT, rooted("", ""),
            f"needs 2 whole devices of 20Gi on one PCIe root; for every device, {UNKNOWN[Link.PCIE_ROOT]}",
        ),
        (
            TWO_BY_NVLINK, rooted("r1", "r1", product=L40S),
            f"needs 2 whole devices of 20Gi connected by NVLink; for every device, {UNKNOWN[Link.NVLINK]}",
        ),
        (
            change_request(TWO_OF_A_ROOT, devices=3), rooted("r1", "r1", "r2", "r2", ""),
            "needs 3 whole devices of 20Gi on one PCIe root; at most 2 have this link",
        ),
    ],
)  # fmt: skip
def test_missing_link_between_enough_devices_is_reported_as_permanent(
    asked: PlacementRequest, there: list[Slice], reason: str
) -> None:
    (missing,) = run([asked], map(shelf, there)).unmet
    assert (missing.reason, missing.never) == (reason, True)


def test_reason_for_missing_linked_devices_names_the_model_using_one() -> None:
    kept = on("x", 20, kept=True)
    there = [shelf(one, *who) for one, who in zip(rooted("r1", "r1", "r2", "r3"), ([], [kept], [], []), strict=True)]
    (missing,) = run([TWO_OF_A_ROOT], there).unmet
    assert not missing.never
    assert missing.reason == (
        "needs 2 whole devices of 20Gi on one PCIe root; the PCIe root with the most free devices has 1: n0-g1 is held "
        "by x (idle, kept by replicas.min)"
    )


def test_cpu_shortage_is_reported_only_for_nodes_with_linked_devices() -> None:
    there = [*map(shelf, rooted("r1", "r2")), *map(shelf, rooted("r1", "r1", node="n1"))]
    hosts = {NodeId(node): HostResources(8000, 64 * GI, left, 64 * GI) for node, left in (("n0", 3000), ("n1", 1000))}
    asked = change_request(TWO_OF_A_ROOT, cpu_milli=4000)
    (missing,) = pack([asked], SliceIndex(there, hosts), frozenset(), RestartCosts(), T0).unmet
    assert missing.reason == (
        "needs 2 whole devices of 20Gi on one PCIe root, with 4 cores; node n1 has too little CPU: 1 cores left of "
        "8 cores"
    )
    small = {NodeId(node): HostResources(most, 64 * GI, most, 64 * GI) for node, most in (("n0", 9000), ("n1", 3000))}
    (never,) = pack([asked], SliceIndex(there, small), frozenset(), RestartCosts(), T0).unmet
    assert (never.never, "more than 3 cores" in never.reason) == (True, True)


def wanting(link: Any, **spec: Any) -> Model:
    return model("a", 20, low=1, gpu=Gpu(count=2, link=link), **spec)


def test_explain_reports_the_link_shortage_of_each_device_without_a_peer() -> None:
    at = world([wanting("pcieRoot")], rooted("r1", "r2", ""))
    explanation = explain_model(at, plan(at, T0), Log(), at.models[ModelName("a")].name, T0)
    assert [one.ruled_out for one in explanation.candidates] == [
        *["2 suitable devices on one PCIe root are needed; including it, its node has only 1"] * 2,
        "its PCIe root is unknown (a DRA driver may report it, a device plug-in does not)",
    ]
    assert any("at most 1 have this link" in line for line in explanation.sentences)


def test_explain_rules_out_a_node_with_too_few_devices() -> None:
    wanted, busy = model("b", 20, gpu=Gpu(count=2)), model("a", 20, low=1)
    slices = [device("g0", 24, "n0"), device("g1", 24, "n0"), device("h0", 24, "n1")]
    here = [replica(busy, f"r{at}", on=(f"g{at}",)) for at in range(2)]
    made = world([wanted, busy], slices, here, [gateway(levels=[level("b", 1)])])
    ruled_out = {
        one.slice: one.ruled_out for one in explain_model(made, plan(made, T0), Log(), wanted.name, T0).candidates
    }
    assert ruled_out[SliceId("h0")] == "its node has 1 suitable devices of 2 needed"
    assert "held by a" in ruled_out[SliceId("g0")]


def test_explain_counts_only_linked_devices_that_fit_the_model() -> None:
    there = [replace(one, product=product) for one, product in zip(rooted("r1", "r1"), (L40S, "L4"), strict=True)]
    at = world(
        [replace(a := wanting("pcieRoot"), spec=replace(a.spec, gpu=replace(a.spec.gpu, models=("*l40s*",))))], there
    )
    explanation = explain_model(at, plan(at, T0), Log(), at.models[ModelName("a")].name, T0)
    assert [one.ruled_out for one in explanation.candidates] == [
        "2 suitable devices on one PCIe root are needed; including it, its node has only 1",
        "its product is L4, not *l40s*",
    ]  # fmt: skip


def test_explain_fit_rejects_a_device_without_a_linked_peer() -> None:
    at = world([wanting("pcieRoot")], rooted("r1", "r2", "r2"))
    fit = explain_fit(at, at.models[ModelName("a")], Needs(), T0)
    assert [one.fits for one in fit.places] == [False, True, True]


# --- the document, and its plan ---------------------------------------------------------------------------------------


def test_plan_starts_a_replica_on_devices_joined_by_the_requested_link() -> None:
    at = world([wanting("nvlink")], [*rooted("", "", product=L40S), *rooted("", "", node="n1", product=H100)])
    (start,) = plan(at, T0).actions
    assert getattr(start, "replica").resources.slices == ("n1-g0", "n1-g1")  # noqa: B009  there is only one kind of Action here


def test_link_changes_the_spec_hash_unless_the_link_is_any() -> None:
    assert wanting("any").spec_hash() != wanting("nvlink").spec_hash()
    assert wanting("any").spec_hash() == model("a", 20, low=1, gpu=Gpu(count=2)).spec_hash()


@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        ("{link: nvlink}", "spec.gpu.link: applies to several devices: set gpu.count above 1, or remove it"),
        ("{count: 2, link: fast}", "spec.gpu.link: expected one of any, nvlink, pcieRoot"),
    ],
)
def test_invalid_link_setting_is_rejected_with_the_field_path(gpu: str, line: str) -> None:
    text = (
        f"apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{name: a}}\nspec: {{engine: ollama, gpu: {gpu}}}"
    )
    with pytest.raises(DocumentError) as caught:
        parse_documents([("a.yaml", text)])
    assert line in str(caught.value)


# --- fragmented capacity ----------------------------------------------------------------------------------------------


def test_defragmentation_moves_a_replica_if_too_few_devices_share_a_root() -> None:
    """Four devices of n0 are free, two on each of two PCIe roots; one root has another device that is in use."""
    at, roots = laid({0: [1, 5], 1: [9], 2: [10], 3: [10]}), {0: "r1", 6: "r1", 7: "r1", 8: "r3", 9: "r3"}
    slices = {
        id: replace(one, link=roots.get(int(id[-1]), "")) for id, one in at.nodes.slices.items() if one.node == "n0"
    }
    linked = replace_fields(at, slices=at.nodes.slices | slices)
    asked = placement_request("big", devices=3, memory_bytes=70 * GI, force=EvictionLevel.LOWER)
    assert not names(looked(linked, T0, asked)), "there is room enough"
    found = looked(linked, T0, change_request(asked, link=Link.PCIE_ROOT))
    assert names(found) == ["n0-a"]
    assert found.unmet[0].reason == (
        "needs 3 whole devices of 70Gi on one PCIe root; 4 are free, at most 2 on one PCIe root; moves n0-a from n0-g0 "
        "to n0-g8 first"
    )


# --- properties -------------------------------------------------------------------------------------------------------


def drawn(rng: Random) -> tuple[list[Bin], list[PlacementRequest]]:
    """Nodes with PCIe or board GPUs, with links known by label or DRA, and random occupants and placement requests."""
    shelves: list[Bin] = []
    for node in range(rng.randrange(1, 5)):
        labels = {CLIQUE: "f.1"} if rng.random() < 0.2 else {}
        product, is_known = rng.choice((H100, L40S, L40S, "")), rng.random() < 0.7
        for at in range(rng.randrange(1, 6)):
            root = f"r{rng.randrange(3)}" if is_known and rng.random() < 0.9 else ""
            one = device(f"n{node}-g{at}", 24, f"n{node}", link=root, product=product, labels=labels)
            who = [on(f"x{node}{at}", 20, busy=rng.random() < 0.5, kept=rng.random() < 0.2)] * (rng.random() < 0.5)
            shelves.append(shelf(one, *who, locked=rng.random() < 0.1))
    requests = [
        want(f"a{number}", 20, devices=rng.choice((1, 2, 2, 3)), link=rng.choice(list(Link)),
             priority=rng.choice((-1, 0, 1)), force=rng.choice(list(EvictionLevel)))
        for number in range(rng.randrange(1, 5))
    ]  # fmt: skip
    return shelves, [one if one.kind.devices > 1 else change_request(one, link=Link.NODE) for one in requests]


def joined(slices: Iterable[Slice], link: Link) -> bool:
    found = {team_of(one, link) for one in slices}
    return len(found) == 1 and all(name for _, name in found)


def largest(want: PlacementRequest, shelves: Sequence[Bin]) -> int:
    """Size of the largest set of linked devices that could ever hold the request, by exhaustive search."""
    able = [one.slice for one in shelves if find_required_amount(want, one) is not None]
    counts = Counter(team_of(one, want.kind.link) for one in able if name_device_link(one, want.kind.link))
    return max(counts.values(), default=0)


def after(packing: PackResult, shelves: Sequence[Bin]) -> list[Bin]:
    """The bins after all victims have left."""
    removed = {victim.replica for victim in packing.victims}
    return [shelf(one.slice, *(i for i in one.incumbents if i.replica not in removed)) for one in shelves]


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.integers(0, 1 << 30))
def test_replica_that_needs_a_link_gets_only_devices_joined_by_it(seed: int) -> None:
    rng = Random(seed)
    shelves, requests = drawn(rng)
    slices = {one.slice.id: one.slice for one in shelves}
    found = run(requests, shelves)
    taken = set[SliceId]()
    for one in found.placements:
        assert len(set(one.slices)) == one.want.kind.devices
        assert joined((slices[id] for id in one.slices), one.want.kind.link)
        assert not taken & {*one.slices}
        taken |= {*one.slices}
    for missing in found.unmet:
        assert missing.never == (largest(missing.want, shelves) < missing.want.kind.devices)
    mixed_shelves, mixed_wants = rng.sample(shelves, len(shelves)), rng.sample(requests, len(requests))
    assert run(mixed_wants, mixed_shelves) == found, "the same input in any order gives the same answer"
    first = min(requests, key=lambda one: (-one.urgency.priority, one.model))
    alone = run([first], shelves)
    if alone.victims:
        (came,) = run([first], after(alone, shelves)).placements
        assert joined((slices[id] for id in came.slices), first.kind.link), (
            "the evicted replicas were on linked devices"
        )
        for victim in alone.victims:
            less = alone._replace(victims=tuple(one for one in alone.victims if one != victim))
            assert not run([first], after(less, shelves)).placements, "and no replica was evicted without need"


def test_device_links_are_recomputed_after_node_labels_change() -> None:
    there = [shelf(one) for one in rooted("", "")]
    yard, asked = SliceIndex(there), [TWO_BY_NVLINK]
    assert pack(asked, yard, frozenset(), RestartCosts(), T0).unmet[0].never
    for one in there:
        labelled = one.copy()
        labelled.slice = replace(one.slice, labels={CLIQUE: "f.1"})
        yard.put(labelled)
    assert placed(pack(asked, yard, frozenset(), RestartCosts(), T0)) == [("a", "n0-g0", "n0-g1")]
