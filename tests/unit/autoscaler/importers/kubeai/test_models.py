"""Conversion of KubeAI Models: every key is converted or noted, and the result is a valid document."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.importers.kubeai import models
from autoscaler.importers.kubeai.config import CHART
from autoscaler.importers.result import ConversionResult, refuse_duplicate_names, to_yaml
from autoscaler.spec.decode import WrongKeyError
from tests.support.builders.converted_documents import spec_of
from tests.support.example_budget import examples

CHAT = """
apiVersion: kubeai.org/v1
kind: Model
metadata:
  name: chat-8b
  namespace: ai
  labels: {team: search, app.kubernetes.io/managed-by: Helm}
  annotations: {kubectl.kubernetes.io/last-applied-configuration: "{}", note: ours}
spec:
  features: [TextGeneration]
  owner: acme
  url: hf://acme/chat-8b-fp8
  engine: VLLM
  args: [--max-model-len=16384, --max-num-seqs, "32", --tensor-parallel-size=2, --enforce-eager]
  env: {VLLM_USE_V1: "1"}
  resourceProfile: nvidia-gpu-l4:2
  minReplicas: 1
  maxReplicas: 3
  replicas: 2
  scaleDownDelaySeconds: 45
  targetRequests: 64
  priorityClassName: urgent
  loadBalancing: {strategy: PrefixHash}
  files: [{path: /etc/template, content: x}]
  adapters: [{name: sql, url: "hf://acme/sql"}]
  surprise: 1
"""
REQUESTS = {"cpu": "12", "memory": "48Gi"}
TOKEN = {"valueFrom": {"secretKeyRef": {"name": "kubeai-huggingface", "key": "token", "optional": True}}}


def spec(**keys: object) -> dict[str, object]:
    """A KubeAI Model with these keys added to the minimal spec."""
    least = {"engine": "VLLM", "url": "hf://acme/tiny", "features": ["TextGeneration"], "resourceProfile": "cpu:1"}
    return {
        "apiVersion": "kubeai.org/v1", "kind": "Model", "metadata": {"name": "tiny"}, "spec": least | keys,
    }  # fmt: skip


def convert(*texts: str) -> list[ConversionResult]:
    return models.convert_models([(f"{number}.yaml", text) for number, text in enumerate(texts)])


def test_kubeai_model_for_vllm_is_converted_with_image_and_devices() -> None:
    (taken,) = convert(CHAT)
    assert taken.document == {
        "apiVersion": "pilotlight.dev/v1alpha1",
        "kind": "Model",
        "metadata": {
            "name": "chat-8b", "namespace": "ai", "labels": {"team": "search"}, "annotations": {"note": "ours"},
        },
        "spec": {
            "engine": "vllm",
            "artifact": "hf://acme/chat-8b-fp8",
            "image": CHART.images["VLLM"]["default"],
            "args": ["--enforce-eager"],
            "env": {"HF_TOKEN": TOKEN, "VLLM_USE_V1": "1"},
            "contextTokens": 16384,
            "gpu": {"count": 2, "models": ["*[- ]l4", "*[- ]l4-*"]},
            "resources": {"requests": REQUESTS},
            "replicas": {"min": 1, "max": 3},
            "slots": 32,
            "idleSeconds": 45,
            "pod": {"priorityClassName": "urgent"},
        },
    }  # fmt: skip
    notes = dict(taken.notes)
    assert notes.keys() == {
        "spec.features", "spec.owner", "spec.loadBalancing", "spec.files", "spec.surprise", "spec.targetRequests",
        "spec.adapters[0]",
    }  # fmt: skip
    assert "chat-8b:sql, not chat-8b_sql" in notes["spec.adapters[0]"]


def test_every_key_of_a_kubeai_model_is_converted_or_noted() -> None:
    """Each key alone changes the document or is noted by name."""
    every: dict[str, object] = {
        "args": ["--x"], "env": {"A": "b"}, "envFrom": [{"secretRef": {"name": "s"}}], "image": "engine:1",
        "owner": "acme", "files": [{"path": "/a", "content": "b"}], "cacheProfile": "shared", "minReplicas": 1,
        "maxReplicas": 2, "autoscalingDisabled": True, "targetRequests": 7, "scaleDownDelaySeconds": 9,
        "priorityClassName": "high", "loadBalancing": {"strategy": "PrefixHash"}, "url": "hf://acme/other",
        "adapters": [{"name": "a", "url": "hf://x/y"}], "resourceProfile": "cpu:2", "features": [],
    }  # fmt: skip
    before = models.convert_model(spec())
    for key, value in every.items():
        after = models.convert_model(spec(**{key: value}))
        assert (after.document, after.notes) != (before.document, before.notes), key
    known = {field.encode_name for field in msgspec.structs.fields(models.Spec)}
    assert known == {*every, "engine", "replicas"}, "an engine is another Model; replicas are KubeAI's own count"


def test_kubeai_ollama_model_is_converted_to_a_command_with_its_name() -> None:
    (taken,) = convert(yaml.safe_dump(spec(engine="OLlama", url="ollama://gemma:2b", targetRequests=3)))
    found = spec_of(taken)
    assert found["engine"] == "command"
    assert found["readinessPath"] == "/v1/models/tiny"
    assert found["gpu"] == {"count": 0}
    assert found["slots"] == 3
    assert found["resources"] == {"requests": {"cpu": "1", "memory": "2Gi"}}
    command = found["command"]
    assert isinstance(command, list)
    assert "ollama pull gemma:2b && ollama run gemma:2b hi && ollama cp gemma:2b tiny" in command[-1]
    quiet = spec_of(
        models.convert_model(spec(engine="OLlama", url="ollama://e:1?pull=false", features=["TextEmbedding"]))
    )
    assert "done; ollama cp e:1 tiny;" in str(quiet["command"])


@pytest.mark.standard
@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_ollama_shell_command_exits_on_pull_failure_and_sigterm(tmp_path: Path) -> None:
    """A fake Ollama records its calls; `serve` runs until SIGTERM."""
    calls = tmp_path / "calls"
    stand_in = tmp_path / "ollama"
    stand_in.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\n"
        f"os.write(os.open({str(calls)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), "
        "(' '.join(sys.argv[1:]) + '\\n').encode())\n"
        "os.environ['FAILS'] in sys.argv and sys.exit(1)\n"
        "sys.argv[1] == 'serve' and signal.pause()\n"
    )
    stand_in.chmod(0o755)
    found = spec_of(models.convert_model(spec(engine="OLlama", url="ollama://gemma:2b")))
    command = found["command"]
    assert isinstance(command, list)
    words = [word.replace("{host}", "127.0.0.1").replace("{port}", "1") for word in command]

    def started(fails: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
        return subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)

    assert started("pull").wait(60) != 0, "a model that cannot be had ends it"
    calls.unlink()
    runs = started("nothing")
    try:
        for _ in range(9000):
            if calls.exists() and "cp gemma:2b tiny\n" in calls.read_text():
                break
            time.sleep(0.01)
        runs.send_signal(signal.SIGTERM)
        runs.wait(60)
    finally:
        runs.kill()
    clients = [line for line in calls.read_text().splitlines() if line != "serve"]  # `serve` runs in parallel
    assert clients == ["list", "pull gemma:2b", "run gemma:2b hi", "cp gemma:2b tiny"]


def test_kubeai_model_on_a_pvc_is_converted_with_a_volume_mount() -> None:
    (taken,) = convert(yaml.safe_dump(spec(url="pvc://weights/llama/8b")))
    found = spec_of(taken)
    assert found["artifact"] == "file:///model"
    assert found["pod"] == {
        "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "weights"}}],
        "volumeMounts": [{"name": "model", "mountPath": "/model", "subPath": "llama/8b"}],
    }
    ollama = spec_of(models.convert_model(spec(engine="OLlama", url="pvc://weights?model=gemma:2b")))
    assert ollama["env"] == {"OLLAMA_KEEP_ALIVE": "-1", "OLLAMA_MODELS": "/model"}
    assert "pull" not in str(ollama["command"])


def test_kubeai_model_for_infinity_is_converted_to_a_command() -> None:
    found = spec_of(models.convert_model(spec(engine="Infinity", url="hf://acme/embed", features=["TextEmbedding"])))
    assert found["command"] == ["infinity_emb", "v2", "--host", "{host}", "--port", "{port}"]
    env = found["env"]
    assert isinstance(env, dict)
    assert env["INFINITY_MODEL_ID"] == "acme/embed"
    assert env["INFINITY_SERVED_MODEL_NAME"] == "tiny"
    assert found["image"] == CHART.images["Infinity"]["cpu"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "FasterWhisper"}, "spec.engine: FasterWhisper uses"),
        ({"url": "gs://bucket/a"}, "spec.url: gs:// is not supported yet"),
        ({"url": "ollama://gemma"}, "spec.url: this engine does not support ollama://"),
        ({"url": "tiny"}, "spec.url: expected SCHEME://"),
        ({"engine": "OLlama", "url": "ollama://a;reboot"}, "spec.url: expected ollama://MODEL"),
        ({"resourceProfile": "amd-gpu-mi300x:1"}, "needs amd.com/gpu"),
        ({"resourceProfile": "mine:1"}, "profile mine is neither in the given files"),
        (
            {"args": ["--max-model-len=" + "9" * 5000]},
            "spec.args --max-model-len: expected a whole number of at most 15",
        ),
        ({"args": ["--max-num-seqs", "9" * 5000]}, "spec.args --max-num-seqs: expected a whole number of at most 15"),
        ({"minReplicas": 5, "maxReplicas": 2}, "spec.replicas.min: expected at most replicas.max"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "spec.env.CUDA_VISIBLE_DEVICES: is set by Pilotlight"),
        ({"env": {"PILOTLIGHT_X": "1"}}, "spec.env.PILOTLIGHT_X: selects devices or changes their limits"),
        ({"env": {"NEURON_RT_VISIBLE_CORES": "0"}}, "spec.env.NEURON_RT_VISIBLE_CORES: selects devices"),
    ],
)
def test_kubeai_model_that_cannot_be_converted_is_rejected_with_a_reason(keys: dict[str, object], message: str) -> None:
    taken = models.convert_model(spec(**keys))
    assert taken.document is None
    assert message in taken.refused
    assert models.convert_live_model(spec(**keys))[:2] == (None, taken.refused)


def test_component_label_of_a_kubeai_model_is_dropped() -> None:
    """A pod with the gateways' labels would receive their requests."""
    metadata = {"name": "tiny", "labels": {"app.kubernetes.io/component": "gateway", "team": "search"}}
    taken = models.convert_model(spec() | {"metadata": metadata})
    assert taken.document is not None
    assert taken.document["metadata"] == metadata | {"labels": {"team": "search"}}
    live, refused, _ = models.convert_live_model(spec() | {"metadata": metadata})
    assert live is not None, refused
    assert not live.spec.pod.labels


def test_fixed_replica_count_is_kept_when_autoscaling_is_disabled() -> None:
    fixed = spec_of(models.convert_model(spec(autoscalingDisabled=True, replicas=2)))
    assert fixed["replicas"] == {"min": 2, "max": 2}
    none = spec_of(models.convert_model(spec(autoscalingDisabled=True, replicas=0)))
    assert none["paused"] is True
    assert spec_of(models.convert_model(spec(replicas=7)))["replicas"] == {"min": 0, "max": 1000}


def test_pipeline_parallel_model_sets_tensor_parallel_size_explicitly() -> None:
    """By default Pilotlight passes the number of GPUs to vLLM, which is too high with pipeline parallelism."""
    found = spec_of(
        models.convert_model(spec(resourceProfile="nvidia-gpu-h100:4", args=["--pipeline-parallel-size=4"]))
    )
    assert found["args"] == ["--pipeline-parallel-size=4", "--tensor-parallel-size=1"]
    kept = ["--pipeline-parallel-size=2", "--tensor_parallel_size=2"]
    assert spec_of(models.convert_model(spec(resourceProfile="nvidia-gpu-h100:4", args=kept)))["args"] == kept


@pytest.mark.parametrize(
    ("profile", "products"),
    [
        ("nvidia-gpu-t4", ["*[- ]t4", "*[- ]t4-*"]),
        ("nvidia-gpu-l40s", ["*l40s*"]),
        ("nvidia-gpu-a100-80gb", ["*a100*80gb*"]),
        ("nvidia-gpu-rtx4070-8gb", ["*4070*"]),
        ("nvidia-gpu-gh200", ["*gh200*"]),
    ],
)
def test_resource_profile_name_selects_device_products(profile: str, products: list[str]) -> None:
    assert spec_of(models.convert_model(spec(resourceProfile=f"{profile}:1")))["gpu"] == {
        "count": 1,
        "models": products,
    }


VALUES = """
resourceProfiles:
  nvidia-gpu-l4: {nodeSelector: {cloud.example/gpu: l4}}
  big:
    imageName: special
    requests: {nvidia.com/gpu: 2, cpu: 0.5, example.com/disk: 1}
  wide:
    imageName: special
    limits: {nvidia.com/gpu: "2", memory: 10Gi}
    tolerations: [{key: nvidia.com/gpu, operator: Exists}, {key: spot, operator: Exists}]
    affinity: {nodeAffinity: {}, podAntiAffinity: {}}
    runtimeClassName: nvidia
modelServers: {VLLM: {images: {special: "registry.example/vllm:1"}}}
"""
CONFIG_MAP = yaml.safe_dump(
    {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kubeai-config"},
        "data": {"system.yaml": VALUES + "secretNames: {huggingface: hub}\n"},
    }
)  # fmt: skip


@pytest.mark.parametrize("settings_text", [VALUES, CONFIG_MAP])
def test_custom_kubeai_resource_profiles_set_devices_image_and_pod_fields(settings_text: str) -> None:
    wide, l4, big = convert(
        yaml.safe_dump_all(
            spec(resourceProfile=profile) | {"metadata": {"name": profile.partition(":")[0]}}
            for profile in ("wide:2", "nvidia-gpu-l4:1", "big:1")
        ),
        settings_text,
    )
    found = spec_of(wide)
    assert found["gpu"] == {"count": 4}
    assert found["resources"] == {"limits": {"memory": "20Gi"}}
    assert found["image"] == "registry.example/vllm:1"
    assert found["pod"] == {
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "runtimeClassName": "nvidia",
    }
    assert "resourceProfiles.wide.affinity.nodeAffinity" in dict(wide.notes)
    assert spec_of(l4)["pod"] == {"nodeSelector": {"cloud.example/gpu": "l4"}}
    assert "needs example.com/disk" in big.refused


def test_kubeai_catalog_is_converted_to_its_enabled_models_only() -> None:
    entry = spec()["spec"]
    assert isinstance(entry, dict)
    catalogue = {"catalog": {"on": {"enabled": True, **entry}, "off": {"enabled": False, **entry}, "quiet": entry}}
    assert [taken.what for taken in convert(yaml.safe_dump(catalogue))] == ["Model on"]
    assert len(convert(yaml.safe_dump({"all": {"enabled": True}} | catalogue))) == 3


def test_kubectl_list_of_kubeai_models_is_converted() -> None:
    several = {"apiVersion": "v1", "kind": "List", "items": [spec(), spec() | {"metadata": {"name": "two"}}]}
    assert [taken.what for taken in convert(yaml.safe_dump(several))] == ["Model tiny", "Model two"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "Pod", "metadata": {"name": "p"}}, "0.yaml: Pod p: kind: expected Model (kubeai.org/v1), or values"),
        ({"kind": "Model", "apiVersion": "v1"}, "0.yaml: document 1: apiVersion: expected kubeai.org/v1"),
        (spec(url=7), "0.yaml: Model tiny: spec.url: expected text (put it in quotes)"),
        (spec(engine="TGI"), "0.yaml: Model tiny: spec.engine: expected one of FasterWhisper, Infinity"),
        (spec(resourceProfile="cpu"), "0.yaml: Model tiny: spec.resourceProfile: expected NAME:COUNT"),
        (spec(args="--x"), "0.yaml: Model tiny: spec.args: expected a list"),
        ([1], "0.yaml: document 1: expected keys with values"),
    ],
)
def test_invalid_kubeai_document_is_rejected_with_a_one_line_error(value: object, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        convert(yaml.safe_dump(value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_second_kubeai_model_of_the_same_name_is_rejected() -> None:
    first, second = refuse_duplicate_names(convert(CHAT, CHAT.replace("namespace: ai", "namespace: lab")))
    assert first.document is not None
    assert "`chat-8b` is already a name of Model chat-8b" in second.refused


WORDS = st.sampled_from(["", "a", "hf://a/b", "ollama://x:1", "pvc://c/d?model=m", "cpu:1", "nvidia-gpu-l4:2", "--x=1"])
VALUE = st.one_of(WORDS, st.integers(-1, 3), st.booleans(), st.none(), st.lists(WORDS, max_size=3))
KEYS = sorted(
    {"engine", "url", "args", "env", "features", "image", "owner", "files", "replicas", "minReplicas", "adapters"}
    | {"resourceProfile", "targetRequests", "scaleDownDelaySeconds", "autoscalingDisabled", "loadBalancing", "odd"}
)
ENGINES = st.sampled_from(["VLLM", "OLlama", "Infinity", "FasterWhisper"])


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(engine=ENGINES, keys=st.dictionaries(st.sampled_from(KEYS), st.one_of(VALUE, st.dictionaries(WORDS, VALUE))))
def test_any_kubeai_model_yields_a_valid_document_or_a_rejection(engine: str, keys: dict[str, object]) -> None:
    try:
        taken = models.convert_model(spec(**({"engine": engine} | keys)))
    except WrongKeyError:
        return  # named by its key; see the tests above
    assert (taken.document is None) == bool(taken.refused)
    documents = parse_documents([("printed", to_yaml([taken]))])
    assert [model.name for model in documents.models] == ([] if taken.refused else ["tiny"])
