"""Which engine images nodes should pull in advance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.agent_contract import ImageWant, NodeReport
from autoscaler.contract import ModelName
from autoscaler.placement.model.types import NodeConstraints
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import Pod
from autoscaler.state.images import NodeImages, make_image
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import RequestShape
from autoscaler.state.world import NodeAgentStatus, NodeId, Replica, World
from autoscaler.weights import image_prepull
from autoscaler.weights.image_prepull import NODE_MAX, NODES_ENOUGH, ImageWants
from tests.support.builders.worlds import T0, device, model, replace_fields, replica, world

ENGINE = ImageWant(image="vllm/vllm-openai:v1")
MANY = 12


def needs(name: str = "a", memory_gi: float = 20, of: str = ENGINE.image, **more: Any) -> Model:
    return model(name, memory_gi, image=of, **more)


def having(*nodes: str, of: str = ENGINE.image) -> dict[str, NodeImages]:
    return {node: NodeImages((), (make_image((of,)),)) for node in nodes}


def at(
    models: Iterable[Model], replicas: Iterable[Replica] = (), agents: Iterable[int] = range(MANY), **more: Any
) -> World:
    """Nodes n0, n1, ... with a device each, which is small on nodes with an even number."""
    there = [device(f"n{n}/g", 24 if n % 2 else 8, f"n{n}", product="L4" if n % 2 else "T4") for n in range(MANY)]
    nodes = {f"n{n}": NodeAgentStatus(report=NodeReport(node=f"n{n}", boot="b", sequence=1), seen_s=T0) for n in agents}
    return world(models, there, replicas, agents=nodes, **more)


def starting(of: Model, node: int, **more: Any) -> Replica:
    return replica(of, f"{of.name}-{node}", on=(f"n{node}/g",), state=S.PENDING, **{"started_s": None, **more})


def image_wants(one: World, ahead: Iterable[tuple[ModelName, NodeId]] = ()) -> dict[str, tuple[ImageWant, ...]]:
    return {str(node): requests for node, requests in ImageWants().of(one, ahead).items()}


def where(one: World) -> set[str]:
    """The nodes that should pull anything."""
    return {*image_wants(one)}


def test_image_of_a_starting_replica_is_requested_with_its_pull_secret() -> None:
    secret = ImageWant(image=ENGINE.image, pull_secret="regcred")
    a = needs(pull_secret="regcred")
    assert image_wants(at([a], [starting(a, 3)]))["n3"] == (secret,)
    none = needs(of="")
    assert image_wants(at([none], [starting(none, 3)])) == {}, "its pods belong to another controller"


def test_image_is_requested_on_the_node_of_a_planned_placement() -> None:
    a = needs()
    assert image_wants(at([a]), [(a.name, NodeId("n5")), (ModelName("gone"), NodeId("n1"))]) == {"n5": (ENGINE,)}


def test_image_is_not_requested_if_present_or_without_a_node_agent() -> None:
    a = needs()
    everywhere = having(*(f"n{n}" for n in range(MANY)), of=f"docker.io/{ENGINE.image}")
    assert image_wants(at([a], [starting(a, 3)], images=everywhere)) == {}
    assert image_wants(at([a], [starting(a, 3)], agents=())) == {}
    assert "n3" not in where(at([a], [starting(a, 3)], agents=[5, 7]))


def test_image_of_a_model_in_use_is_pulled_on_a_limited_number_of_nodes() -> None:
    always = needs(low=1)
    first = where(at([always]))
    assert len(first) == NODES_ENOUGH
    assert all(int(node[1:]) % 2 for node in first), "the others have too little memory"
    one, *_ = sorted(first)
    assert where(at([always], images=having(one))) == first - {one}, "the others stay"
    assert where(at([always], images=having("n0", "n2"))) == first, "those could not hold it"
    assert where(at([always], images=having(*first))) == set()
    assert where(at([needs()])) == set(), "no Model uses it"
    ready = replica(needs(), "r", on=("n3/g",))
    assert len(where(at([needs()], [ready], images=having("n3")))) == 1
    assert where(at([needs(low=1, gpu=Gpu(count=0))])) == set(), "any node could hold it"


def test_number_of_images_pulled_ahead_per_node_is_bounded() -> None:
    assert len(where(at([needs("a", low=1), needs("b", low=1)]))) == NODES_ENOUGH
    kinds = [needs(f"m{n}", of=f"engine:{n}", low=1) for n in range(20)]
    assert len(where(at(kinds))) > NODES_ENOUGH
    assert max(map(len, image_wants(at(kinds, agents=[1])).values())) == NODE_MAX
    begins = starting(kinds[-1], 1)
    assert image_wants(at(kinds, [begins], agents=[1]))["n1"][0].image == "engine:19", "who begins comes first"


def test_image_is_pulled_only_on_healthy_nodes_that_the_model_accepts() -> None:
    choosy = needs(memory_gi=4, low=1, gpu=Gpu(models=("*t4*",)))
    assert all(int(node[1:]) % 2 == 0 for node in where(at([choosy])))
    labelled = needs(low=1, pod=Pod(node_selector={"zone": "a"}))
    one = at([labelled])
    slices = {id: replace(it, labels={"zone": "a" if it.node == "n7" else "b"}, labels_known=True)
              for id, it in one.nodes.slices.items()}  # fmt: skip
    assert where(replace_fields(one, slices=slices)) == {"n7"}
    beside = needs("b", low=1)
    for node in where(at([beside])):
        slices = {id: replace(it, labels={"zone": "a" if it.node == node else "b"}, labels_known=True)
                  for id, it in one.nodes.slices.items()}  # fmt: skip
        both = replace_fields(at([labelled, beside]), slices=slices)
        assert len(where(both)) == NODES_ENOUGH, "a node that one Model has it on already is one of the other's"
    closed = {id: replace(it, healthy=it.node in {"n1", "n9"}) for id, it in one.nodes.slices.items()}
    assert where(replace_fields(at([needs(low=1)]), slices=closed)) == {"n1", "n9"}


def test_cached_image_requests_equal_freshly_computed_requests() -> None:
    kept, a, b = ImageWants(), needs(low=1), needs("b", of="engine:2", low=1)
    for one in (
        at([a]), at([a, b]), at([a, b], images=having("n1", "n3")), at([b], images=having("n1")), at([a], agents=[3]),
        at([a], [starting(a, 5)]), at([]),
    ):  # fmt: skip
        assert kept.of(one) == image_wants(one)
        assert kept.of(one) == image_wants(one)


def test_suitable_nodes_are_computed_once_while_slices_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, could_hold = list[RequestShape](), image_prepull._could_hold

    def counted(one: World, kind: RequestShape, choice: NodeConstraints) -> set[NodeId]:
        looks.append(kind)
        return could_hold(one, kind, choice)

    monkeypatch.setattr(image_prepull, "_could_hold", counted)
    models = [needs(name, low=1) for name in ("a", "b")] + [needs("c", 6, low=1)]
    requests, one = ImageWants(), at(models)
    first = requests.of(one)
    assert len(looks) == 2, "a and b ask for the same"
    pulled = replace_fields(one, images=having(*first))
    assert requests.of(pulled) == ImageWants().of(pulled)
    looks.clear()
    assert requests.of(one) == first
    assert not looks, "images come and go all the time"
    fewer = replace_fields(one, slices={id: of for id, of in one.nodes.slices.items() if of.node not in first})
    assert requests.of(fewer) == ImageWants().of(fewer) != first
