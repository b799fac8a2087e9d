"""Conversion of Inferences with Triton: KubeDL's predictors, other operators' fields, and what is reported."""

from __future__ import annotations

import pytest
import yaml

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.importers import triton_inference
from autoscaler.importers.result import ConversionResult, to_yaml
from tests.support.builders.converted_documents import spec_of

KUBEDL = """
apiVersion: serving.kubedl.io/v1alpha1
kind: Inference
metadata: {name: llama, namespace: models, labels: {team: search}}
spec:
  framework: Triton
  predictors:
    - name: base
      replicas: 2
      trafficWeight: 80
      batching: {batchSize: 32}
      template:
        metadata: {labels: {app: llama}}
        spec:
          nodeSelector: {gpu: l40s}
          volumes: [{name: repository, persistentVolumeClaim: {claimName: models}}]
          containers:
            - name: triton
              image: nvcr.io/nvidia/tritonserver:25.01-py3
              imagePullPolicy: Always
              command: [/opt/tritonserver/bin/tritonserver]
              args:
                - --model-repository=/models
                - --model-control-mode=explicit
                - --load-model=llama-base
                - --http-port=8000
                - --grpc-port
                - "8001"
                - --allow-metrics=true
                - --log-verbose=1
              ports: [{containerPort: 8000}]
              env: [{name: A, value: "1"}, {name: CUDA_VISIBLE_DEVICES, value: "0"}]
              volumeMounts: [{name: repository, mountPath: /models}]
              resources: {limits: {nvidia.com/gpu: 1, memory: 8Gi}}
    - name: canary
      autoScale: {minReplicas: 0, maxReplicas: 3, autoScaler: {kind: HPA}}
      template:
        spec:
          containers:
            - image: nvcr.io/nvidia/tritonserver:25.01-py3
              command: [sh, -c, "tritonserver --model-store s3://models/canary"]
status: {inferenceEndpoint: llama.models.svc}
"""
FLAT = """
apiVersion: triton.example.com/v1
kind: Inference
metadata: {name: bert}
spec: %s
"""


def convert(text: str) -> list[ConversionResult]:
    return triton_inference.convert_inferences([("i.yaml", text)])


def convert_flat(spec: str) -> ConversionResult:
    (one,) = convert(FLAT % spec)
    return one


def test_each_predictor_of_kubedl_becomes_a_model_with_engine_triton() -> None:
    base, canary = convert(KUBEDL)
    assert spec_of(base) == {
        "engine": "triton", "artifact": "file:///models", "image": "nvcr.io/nvidia/tritonserver:25.01-py3",
        "args": ["--log-verbose=1"], "env": {"A": "1"}, "gpu": {"count": 1}, "resources": {"limits": {"memory": "8Gi"}},
        "replicas": {"min": 2, "max": 2},
        "pod": {
            "labels": {"app": "llama"}, "nodeSelector": {"gpu": "l40s"},
            "volumeMounts": [{"name": "repository", "mountPath": "/models"}],
            "volumes": [{"name": "repository", "persistentVolumeClaim": {"claimName": "models"}}],
        },
    }  # fmt: skip
    assert dict(base.notes).keys() == {
        "spec.predictors.0.trafficWeight", "spec.predictors.0.batching", "ports", "env CUDA_VISIBLE_DEVICES",
        "spec.predictors.0.template.spec.containers.0.imagePullPolicy",
    }  # fmt: skip
    found = spec_of(canary)
    assert (found["artifact"], found["replicas"]) == ("s3://models/canary", {"min": 0, "max": 3})
    documents = parse_documents([("printed", to_yaml([base, canary]))])
    assert [one.name for one in documents.models] == ["llama-base", "llama-canary"]
    assert base.document is not None
    assert base.document["metadata"] == {"name": "llama-base", "namespace": "models", "labels": {"team": "search"}}


@pytest.mark.parametrize("key", triton_inference.REPOSITORY_KEYS)
def test_container_fields_of_another_operator_are_read_from_the_spec(key: str) -> None:
    found = spec_of(convert_flat(f"{{image: triton, {key}: /repository, replicas: 0, tolerations: [{{key: gpu}}]}}"))
    assert found == {
        "engine": "triton", "artifact": "file:///repository", "image": "triton", "gpu": {"count": 0},
        "replicas": {"min": 0, "max": 1}, "paused": True, "pod": {"tolerations": [{"key": "gpu"}]},
    }  # fmt: skip


def test_model_that_triton_loads_under_another_name_is_reported() -> None:
    notes = dict(convert_flat("{image: t, args: [--model-repository, /m, --load-model, other]}").notes)
    assert notes == {"args --load-model": "the Model loads bert: rename it to other"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("{image: t}", "the model repository was not found"),
        ("{image: t, modelRepository: 'gs://models'}", "the model repository was not found"),
        ("{framework: TFServing, predictors: []}", "spec.framework: expected Triton"),
        ("{modelRepository: /m, template: {spec: {containers: []}}}", "spec.template.spec.containers: expected one"),
        ("{image: t, modelRepository: /m, nodeName: a b}", ""),
    ],
)
def test_inference_without_an_equivalent_is_refused_with_the_reason(spec: str, reason: str) -> None:
    taken = convert_flat(spec)
    assert taken.refused.startswith(reason)
    assert (taken.document is None) is bool(reason)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FLAT.replace("Inference", "Service") % "{}", "i.yaml: Service bert: kind: expected Inference"),
        (FLAT % "{predictors: {}}", "i.yaml: Inference bert: spec.predictors: expected a list"),
        (FLAT % "{predictors: [1]}", "i.yaml: Inference bert: spec.predictors[0]: expected keys with values"),
        (FLAT % "{replicas: -1}", "i.yaml: Inference bert: spec.replicas: expected"),
    ],
)
def test_invalid_inference_is_one_error_with_file_and_key(text: str, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        convert(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_list_printed_by_kubectl_is_expanded() -> None:
    items = {"kind": "List", "items": [yaml.safe_load(FLAT % "{image: t, modelRepository: /m}")]}
    assert len(convert(yaml.safe_dump(items))) == 1
