"""Rules over several keys of one document; the tests of the documents contain more of them."""

from __future__ import annotations

import re

import pytest

from autoscaler.documents import document_rules
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents, read_document
from autoscaler.spec.decode import WrongKeyError, format_path
from autoscaler.spec.model import Model
from pilotlight.processes.cluster_documents import decode_custom_resource, decode_kubeai_model


@pytest.mark.parametrize(
    ("engine", "artifact", "line"),
    [
        (
            "llama.cpp",
            "oci://r.io/A:1",
            "expected oci://registry/repository:tag or ...@sha256:DIGEST, the repository in lower case",
        ),
        ("vllm", "pvc://a/b", "pvc:// is not supported yet in this version for adapters"),
        ("command", "oci://r.io/a:1", "oci:// is not supported yet in this version for adapters of engine command"),
        ("llama.cpp", "file:///a,b", "expected an absolute path such as file:///models/support.gguf; a comma, a colon"),
        ("llama.cpp", "s3://models/a.gguf", ""),
        ("vllm", "hf://a/b@main?include=*.safetensors", ""),
    ],
)
def test_adapter_artifact_is_accepted_only_in_a_form_its_engine_supports(engine: str, artifact: str, line: str) -> None:
    command = ", command: ['{port}']" if engine == "command" else ""
    adapters = f"adapters: [{{name: x, artifact: '{artifact}'}}]"
    spec = f"{{engine: {engine}, artifact: 'file:///m.gguf', {adapters}{command}}}"
    text = f"apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{name: a}}\nspec: {spec}\n"
    if not line:
        assert parse_documents([("a.yaml", text)]).models[0].spec.adapters[0].artifact == artifact
        return
    with pytest.raises(DocumentError, match=re.escape(f"a.yaml: Model a: spec.adapters[0].artifact: {line}")):
        parse_documents([("a.yaml", text)])


@pytest.mark.parametrize(
    ("scaling", "spec", "line"),
    [
        ("{engineQueue: 4}", "{engine: vllm, artifact: 'hf://a/b'", ""),
        ("{kvCachePercent: 80}", "{engine: command, command: ['{port}']", ""),
        ("{engineQueue: 4}", "{engine: triton, artifact: 'file:///m'", ""),
        ("{prometheus: {query: up, target: 2}}", "{engine: ollama", ""),
        (
            "{kvCachePercent: 80}",
            "{engine: triton, artifact: 'file:///m'",
            "spec.scaling.kvCachePercent: engine triton reports no such metric: remove it",
        ),
        (
            "{tokensPerSecond: 80}",
            "{engine: ollama",
            "spec.scaling.tokensPerSecond: engine ollama reports no such metric: remove it",
        ),
        (
            "{engineQueue: 4}",
            "{engine: sglang, artifact: 'hf://a/b'",
            "spec.scaling.engineQueue: engine sglang has no metrics by default: add --enable-metrics to spec.args",
        ),
        ("{engineQueue: 4}", "{engine: sglang, artifact: 'hf://a/b', args: [--enable-metrics]", ""),
        ("{kvCachePercent: 0}", "{engine: vllm, artifact: 'hf://a/b'", "spec.scaling.kvCachePercent: expected"),
        ("{prometheus: {query: up}}", "{engine: ollama", "spec.scaling.prometheus.target: missing"),
    ],
)  # fmt: skip
def test_scaling_signal_is_accepted_only_if_the_engine_reports_it(scaling: str, spec: str, line: str) -> None:
    head = "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\n"
    text = f"{head}spec: {spec}, scaling: {scaling}}}\n"
    if not line:
        assert parse_documents([("a.yaml", text)]).models[0].spec.scaling.targets()
        return
    with pytest.raises(DocumentError, match=re.escape(f"a.yaml: Model a: {line}")):
        parse_documents([("a.yaml", text)])


def test_prometheus_url_in_settings_must_be_an_http_url() -> None:
    head = "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\n"
    text = head + "prometheus: {url: 'http://prometheus.monitoring:9090'}\n"
    assert parse_documents([("s.yaml", text)]).settings.prometheus.url == "http://prometheus.monitoring:9090"
    for url in ("prometheus:9090", "ftp://prometheus", "http://user@prometheus"):
        with pytest.raises(DocumentError, match=re.escape("prometheus.url: expected a URL")):
            parse_documents([("s.yaml", f"{head}prometheus: {{url: '{url}'}}\n")])


def document(namespace: str, **spec: object) -> dict[str, object]:
    return {
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": {"name": "a", "namespace": namespace},
        "spec": {"engine": "ollama", **spec},
    }  # fmt: skip


def model(namespace: str, **spec: object) -> Model:
    message = read_document(document(namespace, **spec))
    assert isinstance(message, Model)
    return message


def kubeai(namespace: str, url: str) -> dict[str, object]:
    spec = {"engine": "VLLM", "url": url, "resourceProfile": "cpu:1"}
    return {
        "apiVersion": "kubeai.org/v1", "kind": "Model", "metadata": {"name": "a", "namespace": namespace}, "spec": spec,
    }  # fmt: skip


def env(**source: object) -> dict[str, object]:
    return {"env": {"TOKEN": {"valueFrom": source}}}


def volume(**source: object) -> dict[str, object]:
    return {"pod": {"volumes": [{"name": "first", "emptyDir": {}}, {"name": "x", **source}]}}


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("spec.env.TOKEN.valueFrom.secretKeyRef", env(secretKeyRef={"name": "s", "key": "k", "optional": True})),
        ("spec.env.TOKEN.valueFrom.configMapKeyRef", env(configMapKeyRef={"name": "s", "key": "k"})),
        ("spec.pullSecret", {"pullSecret": "registry"}),
        ("spec.artifact", {"artifact": "pvc://theirs/llama"}),
        ("spec.pod.volumes[1].secret", volume(secret={"secretName": "s"})),
        ("spec.pod.volumes[1].configMap", volume(configMap={"name": "s"})),
        ("spec.pod.volumes[1].projected", volume(projected={"sources": [{"secret": {"name": "s"}}]})),
        ("spec.pod.volumes[1].persistentVolumeClaim", volume(persistentVolumeClaim={"claimName": "weights"})),
        ("spec.pod.volumes[1].ephemeral", volume(ephemeral={"volumeClaimTemplate": {}})),
        ("spec.pod.volumes[1].csi", volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "s"}})),
        ("spec.pod.volumes[1].secret", volume(emptyDir={}, secret={"secretName": "s"})),
        ("spec.pod.imagePullSecrets", {"pod": {"imagePullSecrets": [{"name": "registry"}]}}),
        ("spec.pod.serviceAccountName", {"pod": {"serviceAccountName": "somebody"}}),
    ],
)
def test_model_of_other_namespace_cannot_use_objects_of_the_pod_namespace(path: str, spec: dict[str, object]) -> None:
    with pytest.raises(WrongKeyError, match="create the Model in namespace engines, or remove this key") as caught:
        document_rules.check_namespace_access(model("team-a", **spec), "engines")
    assert format_path(caught.value.path) == path
    document_rules.check_namespace_access(model("engines", **spec), "engines")


def test_model_in_another_namespace_that_uses_no_secret_or_claim_is_valid() -> None:
    pod = {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "downwardAPI": {}}], "nodeSelector": {"a": "b"}}
    sources = {"POD": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, "PLAIN": "text"}
    document_rules.check_namespace_access(model("team-a", pod=pod, env=sources), "engines")


def test_custom_resource_outside_the_pod_namespace_cannot_use_its_secrets() -> None:
    assert decode_custom_resource("engines", document("team-a")).name == "a"
    with pytest.raises(WrongKeyError, match="pods' namespace"):
        decode_custom_resource("engines", document("team-a", pullSecret="registry"))
    assert decode_custom_resource("team-a", document("team-a", pullSecret="registry")).name == "a"


def test_kubeai_model_of_another_namespace_gets_no_token_and_no_claim() -> None:
    at_home, wrong, notes = decode_kubeai_model("kubeai", kubeai("kubeai", "hf://acme/tiny"))
    assert at_home is not None
    assert ("HF_TOKEN" in at_home.spec.env, wrong, notes) == (True, "", ())
    elsewhere, wrong, (note,) = decode_kubeai_model("engines", kubeai("kubeai", "hf://acme/tiny"))
    assert elsewhere is not None
    assert ("HF_TOKEN" in elsewhere.spec.env, wrong) == (False, "")
    assert note.startswith("HF_TOKEN: KubeAI's Secret is used only in the pods' namespace")
    none, wrong, _ = decode_kubeai_model("engines", kubeai("kubeai", "pvc://weights/a"))
    assert none is None
    assert wrong.startswith("spec.pod.volumes[0].persistentVolumeClaim: uses the pods' namespace")
