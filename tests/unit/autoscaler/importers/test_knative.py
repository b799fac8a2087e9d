"""Conversion of Knative's Services: engines, scaling, devices, names, and what is reported or rejected."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.importers import knative
from autoscaler.importers.result import ConversionResult, to_yaml
from autoscaler.spec.document_names import simplify_name
from tests.support.builders.converted_documents import spec_of
from tests.support.example_budget import examples

VLLM = """
apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: llama-8b
  namespace: models
  labels: {team: search, app.kubernetes.io/managed-by: Helm, networking.knative.dev/visibility: cluster-local}
spec:
  template:
    metadata:
      annotations:
        autoscaling.knative.dev/class: kpa.autoscaling.knative.dev
        autoscaling.knative.dev/metric: concurrency
        autoscaling.knative.dev/target: "32"
        autoscaling.knative.dev/min-scale: "0"
        autoscaling.knative.dev/max-scale: "3"
        autoscaling.knative.dev/scale-to-zero-pod-retention-period: 1h30m
        serving.knative.dev/progress-deadline: 1800s
        sidecar.istio.io/inject: "false"
    spec:
      timeoutSeconds: 600
      responseStartTimeoutSeconds: 120
      serviceAccountName: puller
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}
      tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.9.1
          args:
            - --model=meta-llama/Llama-3.1-8B-Instruct
            - --served-model-name
            - llama3
            - llama 3
            - --port=8000
            - --max-model-len=8192
            - --enable-prefix-caching
            - --api-key=s3cr3t
          env:
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
            - {name: NVIDIA_VISIBLE_DEVICES, value: all}
            - {name: VLLM_LOGGING_LEVEL, value: WARNING}
          ports: [{containerPort: 8000, name: http1}]
          resources:
            requests: {cpu: 4, memory: 16Gi}
            limits: {nvidia.com/gpu: "1", memory: 32Gi}
          volumeMounts: [{name: cache, mountPath: /cache}]
          readinessProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 5}
          livenessProbe: {httpGet: {path: /health, port: 8000}}
      volumes: [{name: cache, emptyDir: {medium: Memory}}]
  traffic: [{latestRevision: true, percent: 100}]
status: {url: "https://llama-8b.models.example.com"}
"""


def service(container: dict[str, object], **revision: object) -> ConversionResult:
    """The conversion result of a Service with one container."""
    template = {"spec": {"containers": [container], **revision}}
    document = {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {"name": "m"}}
    (one,) = knative.convert_services([("s.yaml", yaml.safe_dump(document | {"spec": {"template": template}}))])
    return one


def test_vllm_service_becomes_a_model_with_its_scaling_devices_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knative, "is_alias", lambda text: simplify_name(text) == text)
    (taken,) = knative.convert_services([("s.yaml", VLLM)])
    assert taken.document is not None
    assert taken.document["metadata"] == {"name": "llama-8b", "namespace": "models", "labels": {"team": "search"}}
    assert spec_of(taken) == {
        "engine": "vllm", "artifact": "hf://meta-llama/Llama-3.1-8B-Instruct", "aliases": ["llama3", "llama-3"],
        "image": "vllm/vllm-openai:v0.9.1", "args": ["--enable-prefix-caching"],
        "env": {
            "HF_TOKEN": {"valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        "contextTokens": 8192, "gpu": {"count": 1},
        "resources": {"requests": {"cpu": 4, "memory": "16Gi"}, "limits": {"memory": "32Gi"}},
        "replicas": {"min": 0, "max": 3}, "slots": 32, "idleSeconds": 5400, "start": {"secondsMax": 1800},
        "responseSecondsMax": 600, "firstByteSecondsMax": 120,
        "pod": {
            "annotations": {"sidecar.istio.io/inject": "false"},
            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L40S"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [{"name": "cache", "emptyDir": {"medium": "Memory"}}], "serviceAccountName": "puller",
        },
    }  # fmt: skip
    assert dict(taken.notes).keys() == {
        "spec.traffic", "autoscaling.knative.dev/class", "autoscaling.knative.dev/metric",
        "spec.template.spec.containers.0.livenessProbe", "env NVIDIA_VISIBLE_DEVICES", "name: llama 3",
        "args --api-key", "spec.args --port",
    }  # fmt: skip
    text = to_yaml([taken])
    assert "s3cr3t" not in text
    assert [one.name for one in parse_documents([("printed", text)]).models] == ["llama-8b"]


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (["vllm", "serve"], ["acme/tiny", "--port", "8080"]),
        (["python3", "-m", "vllm.entrypoints.openai.api_server"], ["--model", "acme/tiny"]),
        (["/bin/sh", "-c"], ["vllm serve acme/tiny --host 0.0.0.0 \\\n --port 8080"]),
        ([], ["serve", "acme/tiny"]),
        ([], ["acme/tiny", "--port=$(PORT)"]),
    ],
)
def test_each_form_of_a_vllm_command_converts_to_the_same_model(command: list[str], args: list[str]) -> None:
    found = spec_of(service({"image": "docker.io/vllm/vllm-openai", "command": command, "args": args}))
    assert (found["engine"], found["artifact"], found["aliases"]) == ("vllm", "hf://acme/tiny", ["acme/tiny"])
    assert "args" not in found


def test_vllm_weights_in_a_volume_become_a_file_artifact() -> None:
    volume = {"name": "w", "persistentVolumeClaim": {"claimName": "weights"}}
    mounts = [{"name": "w", "mountPath": "/mnt/w"}]
    container: dict[str, object] = {
        "image": "vllm/vllm-openai",
        "args": ["--model=/mnt/w/tiny"],
        "volumeMounts": mounts,
    }
    found = spec_of(service(container, volumes=[volume]))
    assert found["artifact"] == "file:///mnt/w/tiny"
    assert found["pod"] == {"volumes": [volume], "volumeMounts": mounts}


@pytest.mark.parametrize(
    ("container", "command", "args"),
    [
        (
            {"image": "ghcr.io/ggml-org/llama.cpp:server-cuda", "args": ["-hf", "acme/tiny:Q4"]},
            ["/app/llama-server", "--host", "0.0.0.0", "--port", "{port}"], ["-hf", "acme/tiny:Q4"],
        ),
        (
            {
                "image": "x", "command": ["llama-server"], "args": ["--port", "9000", "-m", "/a"],
                "ports": [{"containerPort": 9000}],
            },
            ["llama-server", "--port", "{port}"], ["-m", "/a"],
        ),
        (
            {"image": "lmsysorg/sglang", "command": ["python3", "-m", "sglang"], "args": ["--port=$(PORT)"]},
            ["python3", "-m", "sglang", "--port={port}"], None,
        ),
        (
            {"image": "x", "command": ["sh", "-c"], "args": ["warm && exec engine --port 8080 --x"]},
            ["sh", "-c", "warm && exec engine --port {port} --x"], None,
        ),
    ],
)  # fmt: skip
def test_engine_other_than_vllm_becomes_a_command_with_a_port_placeholder(
    container: dict[str, object], command: list[str], args: list[str] | None
) -> None:
    found = spec_of(service(container))
    assert (found["engine"], found["command"], found.get("args")) == ("command", command, args)


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"image": "gcr.io/acme/web"}, "no LLM engine was recognized"),
        ({"image": "x", "command": ["engine"]}, "command: the port was not found"),
        ({"image": "vllm/vllm-openai"}, "args: the model was not found"),
    ],
)
def test_service_without_a_known_engine_port_or_model_is_rejected(container: dict[str, object], message: str) -> None:
    taken = service(container)
    assert taken.document is None
    assert message in taken.refused


def test_second_container_unknown_keys_and_amd_gpus_are_reported() -> None:
    container: dict[str, object] = {
        "image": "vllm/vllm-openai", "args": ["--model=a/b"], "ports": [{"containerPort": 8000}], "odd": 1,
        "resources": {"limits": {"amd.com/gpu": 1}}, "envFrom": [{"secretRef": {"name": "x"}}],
        "readinessProbe": {"exec": {"command": ["x"]}},
    }  # fmt: skip
    taken = service(container, containers=[{"name": "proxy", "image": "p"}, container], dnsPolicy="None")
    assert {
        "container proxy", "resources.amd.com/gpu", "readinessProbe", "spec.template.spec.dnsPolicy",
        "spec.template.spec.containers.1.odd", "spec.template.spec.containers.1.envFrom",
    } <= dict(taken.notes).keys()  # fmt: skip
    assert spec_of(taken)["gpu"] == {"count": 0}


def test_kubernetes_objects_other_than_knative_services_are_skipped() -> None:
    other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n"
    assert [one.what for one in knative.convert_services([("s", f"{other}---{VLLM}")])] == ["Model llama-8b"]
    with pytest.raises(DocumentError, match=r"^s: document 1: kind: expected Service"):
        knative.convert_services([("s", "a: 1")])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("timeoutSeconds: 600", "timeoutSeconds: x", "spec.template.spec.timeoutSeconds: expected a whole number"),
        ("name: llama-8b", "title: x", "metadata.name: missing; expected text"),
        ('nvidia.com/gpu: "1"', "nvidia.com/gpu: some", "resources.limits.nvidia.com/gpu: expected a whole number"),
        ("template:\n    metadata:", "template:\n    metadata: 1\n    x:", "spec.template.metadata: expected keys"),
    ],
)
def test_invalid_service_is_rejected_with_the_path_of_the_wrong_key(before: str, after: str, message: str) -> None:
    assert before in VLLM
    with pytest.raises(DocumentError) as caught:
        knative.convert_services([("s.yaml", VLLM.replace(before, after, 1))])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9000) | st.sampled_from(["", "a", "8000", "vllm", "-x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "value", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["args", "command", "env", "image", "ports", "resources", "volumeMounts", "x"])


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(
    container=st.dictionaries(KEYS, VALUES, max_size=5),
    revision=st.dictionaries(
        st.sampled_from(["containerConcurrency", "timeoutSeconds", "volumes", "tolerations", "odd"]), VALUES, max_size=3
    ),
)
def test_any_service_yields_a_valid_document_a_rejection_or_an_error(
    container: dict[str, object], revision: dict[str, object]
) -> None:
    try:
        taken = service(container, **revision)
    except DocumentError:
        return  # named by its key; see the tests above
    assert (taken.document is None) == bool(taken.refused)
    parse_documents([("printed", to_yaml([taken]))])
