"""What of a Model no agent of a node may bring is refused before anybody is asked."""

from __future__ import annotations

import pytest

from autoscaler.contract import ModelName
from autoscaler.model import Gpu, Model, ModelSpec
from autoscaler.nodesupply import UNSAFE, NodeSupply, NotBroughtError
from tests.kit.worlds import device, replica, world


def model(artifact: str, **spec: object) -> Model:
    return Model(name=ModelName("m"), spec=ModelSpec(engine="vllm", artifact=artifact, **spec))  # type: ignore[arg-type]  # a test's own words


async def test_unsafe_weights_are_brought_to_no_node_of_a_cluster() -> None:
    unsafe, plain = model("oci://r/a:1", allow_unsafe=True, gpu=Gpu()), model("oci://r/a:1", gpu=Gpu())
    supply = NodeSupply(lambda: world([unsafe], [device()]), lambda: 0.0)
    assert supply.obstacle(unsafe) == UNSAFE
    assert supply.obstacle(plain) == ""
    assert supply.obstacle(model("file:///m", allow_unsafe=True)) == "", "nothing of it is brought"
    with pytest.raises(NotBroughtError, match="allowUnsafe"):
        await supply(replica(unsafe, "r"), unsafe, lambda _: None)  # type: ignore[misc]  # it is in a registry
