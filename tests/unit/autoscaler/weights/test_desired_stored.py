"""Weights that node agents download, and weights that engines download themselves."""

from __future__ import annotations

import pytest

from autoscaler.agent_contract import should_store_on_node
from autoscaler.contract import ModelName
from autoscaler.explain.model import describe_weights
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.world import ClusterFacts, NodeId
from autoscaler.weights.desired import build_node_wants, find_unfetched_artifact
from tests.support.builders.worlds import device, world


@pytest.mark.parametrize(
    ("engine", "artifact", "brought"),
    [
        ("vllm", "oci://r.io/a:1", True),
        ("vllm", "s3://bucket/llama/", True),
        ("vllm", "hf://org/name@main", False),
        ("vllm", "hf://org/name@main?include=*.safetensors", True),
        ("llama.cpp", "hf://org/name?include=*Q4_K_M.gguf", True),
        ("llama.cpp", "hf://org/name", True),
        ("command", "hf://org/name", True),
        ("vllm", "pvc://claim/llama", False),
        ("vllm", "file:///models/llama", False),
        ("command", None, False),
    ],
)
def test_agent_stores_only_artifacts_the_engine_does_not_fetch(
    engine: str, artifact: str | None, brought: bool
) -> None:
    assert should_store_on_node(artifact, engine) is brought
    model = Model(name=ModelName("a"), spec=ModelSpec(engine=engine, artifact=artifact))  # type: ignore[arg-type]
    there = world([model], [device("g1", 80, "n1")])
    told = build_node_wants(there, [(model.name, NodeId("n1"))])
    assert [one.artifact for node in told.values() for one in node.wants] == ([artifact] if brought else [])


def test_engine_fetched_artifact_is_described_without_a_volume() -> None:
    found = {}
    for artifact in ("hf://org/name", "hf://org/name?include=*"):
        model = Model(name=ModelName("a"), spec=ModelSpec(engine="vllm", artifact=artifact))
        there = world([model], mounting=ClusterFacts(volumes=True))
        found[artifact] = (
            find_unfetched_artifact(model),
            [one for one in describe_weights(there, model) if "volume" in one],
        )
    (engines, no_words), (agents, words) = found.values()
    assert (engines, no_words, agents) == (None, [], "hf://org/name?include=*")
    assert words
