"""Conversion of Lingo Deployments: a patch that contains annotations only."""

from __future__ import annotations

import pytest
import yaml

from autoscaler.documents.document_types import DocumentError
from autoscaler.importers import lingo

EMBED = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: embed
  namespace: ml
  annotations:
    lingo.substratus.ai/models: text-embedding-ada-002,all-mini
    lingo.substratus.ai/min-replicas: "1"
    other: kept
spec:
  replicas: 0
  template: {spec: {containers: [{name: engine, image: embed:1, ports: [{containerPort: 9000, name: http}]}]}}
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: embed, namespace: ml}
spec: {ports: [{name: metrics, port: 81, targetPort: 9999}, {name: http, port: 80, targetPort: http}]}
"""
LINGO = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: lingo}
spec:
  template:
    spec:
      containers:
      - {name: lingo, image: "registry.example/lingo:v1", env: [{name: CONCURRENCY, value: "40"}, {name: SCALE_DOWN_DELAY, value: "90"}]}
"""  # noqa: E501


def said_of(*texts: str) -> dict[str, object]:
    """The annotations of the only workload."""
    (taken,) = lingo.convert_workloads([(f"{number}.yaml", text) for number, text in enumerate(texts)])
    assert taken.document is not None
    assert taken.document.keys() == {"apiVersion", "kind", "metadata"}, "nothing else is laid over it"
    metadata = taken.document["metadata"]
    assert isinstance(metadata, dict)
    assert metadata.keys() == {"name", "namespace", "annotations"}
    found = metadata["annotations"]
    assert isinstance(found, dict)
    return {str(key).removeprefix("pilotlight.dev/"): value for key, value in found.items()}


def test_lingo_deployment_without_settings_gets_the_lingo_defaults() -> None:
    assert said_of(EMBED) == {
        "models": "text-embedding-ada-002,all-mini", "replicas-min": "1", "replicas-max": "3", "slots": "100",
        "idle-seconds": "30", "port": "9000",
    }  # fmt: skip


def test_slots_and_idle_time_of_a_workload_come_from_global_lingo_settings() -> None:
    found = said_of(LINGO, EMBED, SERVICE)
    assert (found["slots"], found["idle-seconds"], found["port"]) == ("40", "90", "9000")


def test_port_of_a_lingo_workload_comes_from_its_service() -> None:
    assert said_of(EMBED, SERVICE.replace("targetPort: http", "targetPort: 8123"))["port"] == "8123"
    without = EMBED.replace(", ports: [{containerPort: 9000, name: http}]", "")
    (taken,) = lingo.convert_workloads([("f", without)])
    assert [note.key for note in taken.notes] == ["port"]


def test_conversion_of_a_lingo_statefulset_states_that_nothing_changes() -> None:
    (taken,) = lingo.convert_workloads([("f", EMBED.replace("kind: Deployment", "kind: StatefulSet"))])
    assert taken.what == "StatefulSet embed"
    assert "nothing needs to change" in taken.about[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINGO, "f: metadata.annotations: expected a Deployment or StatefulSet with the annotation"),
        (
            EMBED.replace("annotations:", "annotations: 7\n  labels:"),
            "f: Deployment embed: metadata.annotations: expected",
        ),
        ("a: [", "f: document 1: a: line 1"),
    ],
)
def test_invalid_lingo_document_is_rejected_with_its_location(text: str, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        lingo.convert_workloads([("f", text)])
    assert str(caught.value).startswith(message)


def test_kubectl_list_of_lingo_workloads_is_converted() -> None:
    items = [yaml.safe_load(text) for text in (EMBED, SERVICE)]
    assert said_of(yaml.safe_dump({"kind": "List", "items": items}))["port"] == "9000"
