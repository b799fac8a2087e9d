"""Labels of nodes that do not exist yet: capacity is ordered only where it may match a Model's node selector."""

from __future__ import annotations

import pytest

from autoscaler.planner.plan import plan
from autoscaler.providers.cro.provider import NODES, CroFabric
from autoscaler.slicing.vendors import RESOURCES, VENDORS
from autoscaler.spec.pod import Pod
from autoscaler.state.actions import AcquireLease
from autoscaler.state.capacity import Offer
from autoscaler.state.node_labels_and_taints import MAKERS, PendingLabels, can_label_appear
from autoscaler.state.world import World
from tests.support.builders.capacity import acted, cloud, offer, offered, orders, surge, waits
from tests.support.builders.worlds import T0, device, model, replace_fields
from tests.support.harness.providers import cro_rig

HOST = "kubernetes.io/hostname"
NODE = {HOST: "w1", "kubernetes.io/os": "linux"}
"""All labels of a node without GPUs."""


def choosy(*offers: Offer, **selector: str) -> World:
    """Requests wait for a Model with this selector; the only node has no suitable GPU."""
    of = model("a", 16, slots=1, pod=Pod(node_selector=selector))
    there = device("cpu", 1, "w0", product="A100", labels={"kubernetes.io/os": "linux"}, labels_known=True)
    begin = replace_fields(surge(), models={of.name: of}, slices={there.id: there})
    return offered(begin, *offers)


def chosen(at: World) -> list[str]:
    """Names of the ordered offers, or `refused` if none is ordered and the requests fail at once."""
    made = plan(at, T0)
    refused = [one for one in made.unmet if one.never]
    return ["refused"] if refused else [one.order.offer.name for one in made.actions if isinstance(one, AcquireLease)]


def test_gpus_are_attached_only_to_a_node_that_matches_the_selector() -> None:
    """The node has no GPU yet, so the offer must list all labels."""
    bare = offer(name="w1", node="w1", labels=NODE, price_per_hour=0.5)
    right = offer(name="w2", node="w2", labels={**NODE, HOST: "w2", "team": "x"})
    assert chosen(choosy(bare, right, team="x")) == ["w2"]
    assert chosen(choosy(bare, team="x")) == ["refused"]
    assert chosen(choosy(bare, right, **{HOST: "w1"})) == ["w1"]
    assert chosen(choosy(bare, right, **{"kubernetes.io/os": "windows"})) == ["refused"]
    assert chosen(choosy(bare, right, **{"topology.kubernetes.io/zone": "z"})) == ["refused"], "it would have it by now"


@pytest.mark.parametrize(
    "key",
    ["nvidia.com/gpu.product", "amd.com/gpu.vram", "beta.amd.com/gpu.family", "gpu.intel.com/product",
     "feature.node.kubernetes.io/pci-10de.present"],
)  # fmt: skip
def test_missing_gpu_discovery_label_rules_out_only_nodes_with_a_gpu(key: str) -> None:
    assert chosen(choosy(offer(labels=NODE), **{key: "true"})) == ["w1"]
    known = choosy(offer(labels=NODE), **{key: "true"})
    own = device("w1g", 1, "w1", product="A100", labels=NODE, labels_known=True)
    assert chosen(replace_fields(known, slices={**known.nodes.slices, own.id: own})) == ["refused"], (
        "the label is read from its own GPU"
    )


def test_offer_without_labels_is_ordered_for_any_node_selector() -> None:
    assert chosen(choosy(offer(), team="x")) == ["w1"]


def test_cro_fabric_attaches_to_the_node_with_the_selected_label() -> None:
    rack = cro_rig.Rack()
    rack.world = World(epoch=1, settings=cro_rig.SETTINGS)
    seen: list[Offer] = []

    async def act() -> None:
        for name, more in (("w1", {}), ("w2", {"team": "x"})):
            there = cro_rig.node(name)
            there["metadata"]["labels"] = {HOST: name, **more}
            rack.server.put(f"{NODES}/{name}", there)
        seen.extend(await CroFabric("rack", cro_rig.MODEL, rack.server, lambda: rack.world).offers())

    rack.run(act())
    assert [one.node for one in seen] == ["w1", "w2"]
    assert chosen(choosy(*seen, team="x")) == ["w2"]
    assert chosen(choosy(seen[0], team="x")) == ["refused"]


@pytest.mark.parametrize(
    "key",
    ["kubernetes.io/os", "kubernetes.io/arch", "topology.kubernetes.io/region", "topology.kubernetes.io/zone",
     "nvidia.com/gpu.present"],
)  # fmt: skip
def test_missing_common_node_label_does_not_rule_out_an_offer(key: str) -> None:
    assert chosen(choosy(cloud(labels={"pool": "t4"}), **{key: "x"})) == ["g4"]
    assert chosen(choosy(cloud(labels={"pool": "t4", key: "x"}), **{key: "x"})) == ["g4"]
    assert chosen(choosy(cloud(labels={"pool": "t4", key: "y"}), **{key: "x"})) == ["refused"], "it is known"


@pytest.mark.parametrize(
    "key",
    ["team", "lab.example/team", HOST, "nvidia.com/gpu.product", "node.kubernetes.io/instance-type",
     "karpenter.sh/nodepool", "cloud.google.com/gke-accelerator", "kubernetes.io/os.example/x"],
)  # fmt: skip
def test_offer_that_lacks_a_pool_specific_selector_label_is_not_ordered(key: str) -> None:
    pool, other = cloud(labels={"pool": "t4"}), cloud("a", labels={"pool": "l4", key: "x"}, price_per_hour=9.0)
    assert chosen(choosy(pool, **{key: "x"})) == ["refused"]
    assert chosen(choosy(pool, other, **{key: "x"})) == ["a"]


def test_replica_that_may_fit_an_undelivered_order_waits_for_the_order() -> None:
    begin = choosy(cloud(labels={"pool": "t4"}), **{"kubernetes.io/os": "linux"})
    at, done = acted(begin)
    assert orders(done) == [("cloud", 1)]
    assert [one.lease is not None for one in plan(waits(at, T0 + 10), T0 + 10).unmet] == [True]


def test_label_domains_of_all_device_vendors_are_recognized() -> None:
    fields = {*RESOURCES, *(one.product_label for one in VENDORS), *(one.count_label for one in VENDORS)}
    assert all(can_label_appear(key, PendingLabels.DEVICES) for key in fields if key)
    assert not any(can_label_appear(f"x{one}/y", PendingLabels.DEVICES) for one in MAKERS)
    assert not any(can_label_appear(key, PendingLabels.NOTHING) for key in fields)
