"""Conversion of ollama-operator's Models: the command that runs Ollama, devices, names, and what is reported."""

from __future__ import annotations

import pytest

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.importers import ollama_operator
from autoscaler.importers.result import ConversionResult, to_yaml
from tests.support.builders.converted_documents import spec_of

HEAD = "apiVersion: ollama.ayaka.io/v1\nkind: Model\nmetadata: {name: phi-model}\n"
WHOLE = """
  replicas: 2
  image: phi3:3.8b
  imagePullPolicy: IfNotPresent
  imagePullSecrets: [{name: registry}]
  storageClassName: local-path
  persistentVolume: {accessMode: ReadWriteOnce}
  resources:
    requests: {cpu: 2, memory: 4Gi}
    limits: {nvidia.com/gpu: 1, memory: 8Gi}
  extra: {a: [1, null]}
status: {replicas: 2, conditions: [{type: Available}]}
"""


def convert(spec: str) -> ConversionResult:
    (one,) = ollama_operator.convert_models([("m.yaml", f"{HEAD}spec:{spec}")])
    return one


def test_model_becomes_a_command_that_pulls_and_serves_its_image() -> None:
    taken = convert(WHOLE)
    found = dict(spec_of(taken))
    command = found.pop("command")
    assert isinstance(command, list)
    assert "ollama pull phi3:3.8b && ollama cp phi3:3.8b phi-model" in command[-1]
    assert found == {
        "engine": "command", "aliases": ["phi3:3.8b"], "image": "ollama/ollama", "env": {"OLLAMA_KEEP_ALIVE": "-1"},
        "readinessPath": "/v1/models/phi-model", "gpu": {"count": 1},
        "resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
        "replicas": {"min": 2, "max": 2}, "pod": {"imagePullSecrets": [{"name": "registry"}]},
    }  # fmt: skip
    assert dict(taken.notes).keys() == {
        "spec.imagePullPolicy", "spec.storageClassName", "spec.persistentVolume", "spec.extra",
    }  # fmt: skip
    assert [one.name for one in parse_documents([("printed", to_yaml([taken]))]).models] == ["phi-model"]


@pytest.mark.parametrize("claim", ["store", "{claimName: store}"])
def test_persistent_volume_claim_is_mounted_as_the_ollama_store(claim: str) -> None:
    found = spec_of(convert(f" {{image: phi, persistentVolumeClaim: {claim}}}"))
    assert found["pod"] == {
        "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "store"}}],
        "volumeMounts": [{"name": "model", "mountPath": "/model", "subPath": "models"}],
    }
    assert found["env"] == {"OLLAMA_KEEP_ALIVE": "-1", "OLLAMA_MODELS": "/model"}
    assert "ollama pull" not in str(found["command"])


def test_model_with_zero_replicas_is_converted_as_paused() -> None:
    found = spec_of(convert(" {image: phi, replicas: 0}"))
    assert (found["replicas"], found["paused"], found["gpu"]) == ({"min": 0, "max": 1}, True, {"count": 0})


def test_image_that_is_not_an_ollama_model_name_is_rejected() -> None:
    taken = convert(' {image: "phi; rm -rf /"}')
    assert taken.document is None
    assert taken.refused.startswith("spec.image: expected the name of a model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}spec: {{}}", "m.yaml: Model phi-model: spec.image: missing; expected text"),
        (f"{HEAD}spec: {{image: [a]}}", "m.yaml: Model phi-model: spec.image: expected text"),
        (f"{HEAD}spec: 1", "m.yaml: Model phi-model: spec: expected keys with values"),
        (HEAD.replace("ayaka.io", "example.com"), "m.yaml: Model phi-model: apiVersion: expected Model (ollama.ayaka"),
        ("kind: Pod", "m.yaml: document 1: kind: expected Model (ollama.ayaka.io/v1)"),
        ("- 1", "m.yaml: document 1: expected keys with values"),
    ],
)
def test_invalid_document_is_an_error_with_its_path(text: str, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        ollama_operator.convert_models([("m.yaml", text)])
    assert str(caught.value).startswith(message)
