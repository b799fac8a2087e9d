"""Which weights of a Model can be requested from node agents, and what prevents it."""

from __future__ import annotations

from autoscaler.contract import ModelName
from autoscaler.controller.weights_wait import AgentNodeSupply
from autoscaler.spec.model import Adapter, Gpu, Model, ModelSpec
from autoscaler.state.world import ClusterFacts
from tests.support.builders.worlds import device, replica, world

LORA = (Adapter(name="lora", artifact="oci://r.io/lora:1"),)


def model(artifact: str, **spec: object) -> Model:
    return Model(name=ModelName("m"), spec=ModelSpec(engine="vllm", artifact=artifact, **spec))  # type: ignore[arg-type]


def supply(facts: ClusterFacts | None = None) -> AgentNodeSupply:
    at = world([], [device()], mounting=facts)
    return AgentNodeSupply(lambda: at, lambda: 0.0)


def test_model_that_allows_unsafe_weights_is_not_blocked_from_starting() -> None:
    assert supply().obstacle(model("oci://r.io/a:1", allow_unsafe=True)) == ""
    assert supply().brings(model("oci://r.io/a:1", allow_unsafe=True))


def test_adapters_are_delivered_even_if_the_model_weights_are_local() -> None:
    one = model("file:///m", adapters=LORA)
    assert supply().brings(one)
    assert not supply().brings(model("file:///m"))
    assert supply()(replica(one, "r"), model("file:///m"), lambda _: None) is None


def test_reason_that_blocks_an_adapter_names_the_adapter_or_its_artifact() -> None:
    on_cpu = model("file:///m", adapters=LORA, gpu=Gpu(count=0))
    assert supply().obstacle(on_cpu).startswith("oci://r.io/lora:1 is pulled to one node")
    nowhere = supply(ClusterFacts()).obstacle(model("pvc://claim", adapters=LORA))
    assert nowhere.startswith(
        "the weights of its adapter lora cannot be mounted in its pods: Pilotlight may not create"
    )
