"""Weights and images on nodes: among equally suitable nodes, the one with the least to download is chosen."""

from __future__ import annotations

from typing import Any

from autoscaler.placement.index.artifact_locality import IMAGE_BYTES
from autoscaler.planner.plan import Planner, plan
from autoscaler.spec.model import Model
from autoscaler.state.actions import StartReplica
from autoscaler.state.images import NodeImages, make_image
from autoscaler.state.world import Copy, History, NodeId, World
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replica, world

ENGINE = "vllm/vllm-openai:v1"
FULL = f"docker.io/{ENGINE}"
WEIGHTS = "oci://r.io/a:1"


def having(*nodes: str, gi: float = 9) -> dict[str, NodeImages]:
    """Nodes that have the engine's image."""
    return {node: NodeImages((make_image((FULL,), int(gi * GI)),)) for node in nodes}


def at(*nodes: str, **of: Any) -> World:
    """Equal nodes n0 to n3 with one device each; the weights are on `nodes`, and a request is queued."""
    found = frozenset(Copy(artifact=WEIGHTS, node=NodeId(node)) for node in nodes)
    wanted = of.pop("wanted", needs(20))
    there = [device(f"g{n}", 24, f"n{n}") for n in range(4)]
    return world([wanted], there, gateways=[gateway(levels=[level("a", waiting=1)])], copies=found, **of)


def needs(memory_gi: float, **spec: Any) -> Model:
    return model("a", memory_gi, artifact=WEIGHTS, image=ENGINE, **spec)


def chosen(one: World) -> str:
    """The Slice of the plan's only start."""
    (start,) = [action for action in plan(one, T0).actions if isinstance(action, StartReplica)]
    return start.replica.resources.slices[0]


def test_node_with_the_image_is_preferred_among_equal_devices() -> None:
    assert chosen(at()) == "g0"
    assert chosen(at(images=having("n2"))) == "g2"
    assert chosen(at(images={"n2": NodeImages((), (make_image((FULL,)),))})) == "g2", "as its agent reports"
    assert chosen(at(images=having("n0", "n1", "n2", "n3"))) == "g0", "all have it"
    assert chosen(at(images={"n2": NodeImages((make_image(("other:1",), GI),))})) == "g0"


def test_locality_prefers_the_node_with_more_bytes_of_weights_and_image() -> None:
    assert chosen(at("n3", images=having("n2"))) == "g3", "20 GiB of weights, 9 GiB of image"
    assert chosen(at("n3", images=having("n2"), wanted=needs(4))) == "g2"
    assert chosen(at("n3", images=having("n2", gi=3), wanted=needs(4))) == "g3"
    assert chosen(at("n3", images=having("n2"), wanted=needs(4, gpu=None))) == "g2"
    assert chosen(at("n1", "n3", images=having("n2", "n3"))) == "g3", "both is more than either"
    assert chosen(at("n1", "n3", images=having("n2", "n3"), wanted=needs(4))) == "g3"


def test_image_of_unknown_size_counts_with_the_default_size() -> None:
    unknown = {"n2": NodeImages((), (make_image((FULL,)),))}
    usual_gi = IMAGE_BYTES / GI
    assert chosen(at("n3", images=unknown, wanted=needs(usual_gi - 1))) == "g2"
    assert chosen(at("n3", images=unknown, wanted=needs(usual_gi + 1))) == "g3"


def test_eviction_prefers_the_node_that_has_the_image() -> None:
    idle = [model(f"x{n}", 20) for n in range(4)]
    there = [replica(one, f"r{n}", on=(f"g{n}",)) for n, one in enumerate(idle)]
    slices = [device(f"g{n}", 24, f"n{n}") for n in range(4)]
    lately = {str(one.name): History(last_activity_s=T0 - 1) for one in idle}
    calls = [gateway(levels=[level("a", waiting=1)])]
    one = world([needs(20), *idle], slices, there, calls, lately, images=having("n2"))
    (going,) = [action for action in plan(one, T0).actions if not isinstance(action, StartReplica)]
    assert getattr(going, "replica", "") == "r2"


def test_reused_planner_chooses_the_node_by_current_image_locations() -> None:
    planner = Planner()
    for nodes in (["n1"], ["n2"], [], ["n2", "n3"]):
        one = at(images=having(*nodes))
        (start,) = [action for action in planner.plan(one, T0).actions if isinstance(action, StartReplica)]
        assert start.replica.resources.slices[0] == chosen(one)
