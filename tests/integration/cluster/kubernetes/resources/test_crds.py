"""Our CustomResourceDefinitions on a real API server: its rejections match those of files, with the same messages."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml

from autoscaler.documents.document_rules import KEYS, MESSAGE
from autoscaler.documents.parse import read_document
from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.schema.cel_rules import RULES
from autoscaler.schema.crds import LATER, MODEL, TENANT
from autoscaler.schema.pod_types import TYPES
from autoscaler.slicing.slicers import AMOUNTS_BEGIN, CHOICES, CHOICES_BEGIN, NETWORK_BEGIN
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.model import ModelSpec
from autoscaler.spec.pod import QUEUE, RESERVED
from pilotlight.doctor import cluster_checks
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.control_plane.custom_resources import (
    API_VERSION,
    FOLDER,
    GROUP,
    SERVED_S_MAX,
    TENANTS,
    document,
    model,
    models,
    tenant,
)

pytestmark = pytest.mark.standard

HASH = "ab" * 32


def adapted(artifact: str) -> Object:
    adapters = [{"name": "x", "artifact": artifact}]
    return model("a", engine="vllm", command=[], artifact="hf://a/b", adapters=adapters)


def pod(**fields: object) -> Object:
    return model("a", pod=fields)


WRONG: list[tuple[str, Object]] = [
    ("range", model("a", replicas={"min": 2})),
    ("window", model("a", replicas={"schedule": [{"cron": "0 8 * * *", "seconds": 3600, "min": 2}]})),
    ("artifact", model("a", engine="llama.cpp", command=[])),
    ("artifact or hub", model("a", engine="vllm", command=[])),
    ("hub", model("a", engine="vllm", command=[], artifact="hf://a/b/c")),
    ("bucket", model("a", engine="llama.cpp", command=[], artifact="s3://Bucket/a")),
    ("registry", model("a", engine="vllm", command=[], artifact="oci://x")),
    ("registry of another", model("a", engine="ollama", command=[], artifact="oci://r.io/a:1")),
    ("claim", model("a", engine="vllm", command=[], artifact="pvc://claim/../a")),
    ("scheme of another", model("a", engine="ollama", command=[], artifact="hf://a/b")),
    ("installation", model("a", installation="pilotlight")),
    ("path", model("a", artifact="models/a.gguf")),
    ("no path", model("a", artifact="file:///")),
    ("command", model("a", engine="ollama")),
    ("no port", model("a", command=["engine"])),
    ("no command", model("a", command=[])),
    ("path placeholder", model("a", command=["{port}", "{model_path}"])),
    ("context placeholder", model("a", command=["{port}", "{context_tokens}"])),
    ("no adapters", model("a", engine="ollama", command=[], adapters=[{"name": "x", "artifact": "file:///x"}])),
    ("adapter's name", model("a", adapters=[{"name": "x:", "artifact": "file:///x"}])),
    ("adapter's scheme", model("a", adapters=[{"name": "x", "artifact": "pvc://x"}])),
    ("adapter's registry", adapted("oci://r.io/X:1")),
    ("adapter's hub", adapted("hf://a/b/c")),
    ("adapter's bucket", adapted("s3://b")),
    ("adapter's store", model("a", adapters=[{"name": "x", "artifact": "hf://a/b"}])),
    ("adapter's path", model("a", adapters=[{"name": "x", "artifact": "file:///x,y"}])),
    (
        "adapters' names",
        model(
            "a",
            aliases=[f"n{number}" for number in range(64)],
            adapters=[{"name": f"x{number}", "artifact": "file:///x"} for number in range(16)],
        ),
    ),
    ("no product", model("a", gpu={"models": ["*h100*", ""]})),
    ("own name", model("a", aliases=["a"])),
    ("alias", model("a", aliases=["-"])),
    ("readiness path", model("a", readinessPath="health")),
    ("server name", model("a", tls={"serverName": "a_b"})),
    ("inputs of Triton", model("a", triton={"backend": "vllm"})),
    ("requests", model("a", resources={"requests": {"nvidia.com/gpu": 1}})),
    ("labels", model("a", pod={"labels": {"pilotlight.dev/model": "x"}})),
    ("annotations", model("a", pod={"annotations": {"app.kubernetes.io/managed-by": "x"}})),
    ("label of a selector", pod(labels={"app.kubernetes.io/component": "gateway"})),
    ("amount of devices", model("a", resources={"limits": {"amd.com/gpu": 1}})),
    ("amount beside them", pod(resources={"requests": {"nvidia.com/gpumem": 80000}})),
    ("amount by its beginning", pod(resources={"limits": {"nvidia.com/mig-1g.5gb": 1}})),
    ("amount by its domain", pod(resources={"limits": {"gpu.intel.com/millicores": 100}})),
    ("choice of devices", pod(annotations={"nvidia.com/use-gpuuuid": "GPU-1"})),
    ("choice by its beginning", pod(annotations={"hami.io/vgpu-node": "n"})),
    ("reserved volume", pod(volumes=[{"name": "pilotlight-weights", "emptyDir": {}}])),
    ("no source", pod(volumes=[{"name": "x"}])),
    ("mount of no volume", pod(volumeMounts=[{"name": "pilotlight-weights", "mountPath": "/all"}])),
    ("node affinity", pod(affinity={"nodeAffinity": {}})),
    (
        "args",
        model(
            "a", engine="llama.cpp", command=[], artifact="file:///a", args=["--lora_scaled=1"],
            adapters=[{"name": "x", "artifact": "file:///x"}],
        ),
    ),
]  # fmt: skip


TERM: Object = {
    "topologyKey": "kubernetes.io/hostname", "namespaces": ["a"], "matchLabelKeys": ["pod-template-hash"],
    "labelSelector": {
        "matchLabels": {"app": "a"}, "matchExpressions": [{"key": "b", "operator": "In", "values": ["c"]}]
    },
}  # fmt: skip
MADE_OF_ALL: Object = {
    "env": {"A": "b", "C": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}},
    "pod": {
        "affinity": {
            "podAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": TERM}]
            },
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
        },
        "volumes": [
            {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            {"name": "size", "emptyDir": {"sizeLimit": 1000}},
            {"name": "secret", "secret": {"secretName": "s", "items": [{"key": "k", "path": "p", "mode": 256}]}},
            {"name": "config", "configMap": {"name": "c", "optional": True}},
            {"name": "claim", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            {"name": "host", "hostPath": {"path": "/dev/dri", "type": "Directory"}},
            {"name": "nfs", "nfs": {"server": "s", "path": "/p"}},
            {"name": "image", "image": {"reference": "r.io/a:1", "pullPolicy": "IfNotPresent"}},
            {"name": "driver", "csi": {"driver": "d", "volumeAttributes": {"a": "b"}}},
            {"name": "down", "downwardAPI": {"items": [{"path": "p", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
            {"name": "projected", "projected": {"sources": [
                {"serviceAccountToken": {"path": "t", "audience": "a", "expirationSeconds": 600}},
                {"downwardAPI": {"items": [{"path": "c", "resourceFieldRef": {"resource": "limits.cpu"}}]}},
            ]}},
            {"name": "template", "ephemeral": {"volumeClaimTemplate": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "fast",
                    "resources": {"requests": {"storage": "10Gi"}},
                },
            }}},
        ],
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/scratch", "subPath": "a"},
            {"name": "host", "mountPath": "/dev/dri", "readOnly": True, "mountPropagation": "None"},
        ],
        "securityContext": {
            "runAsUser": 1000, "fsGroup": 1000, "supplementalGroups": [44], "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"}, "sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}],
        },
        "labels": {"app": "a", "app.kubernetes.io/part-of": "b"},
        "annotations": {"example.com/gpu-memory": "1", "nvidia.com/other": "x"},
        "resources": {"limits": {"rdma/hca": 1, "cpu": "4", "nvidia.com/hostdev": "1"}},
    },
}  # fmt: skip
"""A spec with every part of a pod that a Model may set."""

LENIENT: list[tuple[str, Object]] = [
    *(
        (f"the name of a variable, {name}", model("a", env={name: "0"}))
        for name in (
            "CUDA_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "NEURON_RT_VISIBLE_CORES",
            "ONEAPI_DEVICE_SELECTOR",
            "GPU_DEVICE_ORDINAL",
            "PILOTLIGHT_X",
            "POD_IP",
            "CUDA_MPS_PIPE",
            "A=B",
        )
    ),
    ("a variable that is a number", model("a", env={"A": 1})),
    ("a variable that is a boolean", model("a", env={"A": True})),
    ("a variable of two sources", model("a", env={"A": {"valueFrom": {}}})),
    ("the form of a label", pod(labels={"a": "b c"})),
    ("the form of a node's label", pod(nodeSelector={"a b": "c"})),
    ("the form of an amount", pod(resources={"limits": {"cpu": "many"}})),
    ("the name of an object", pod(serviceAccountName="A B")),
    ("an unknown placeholder", model("a", command=["{port}", "{unknown}"])),
    (
        "an adapter called as another name",
        model("a", aliases=["a:x"], adapters=[{"name": "x", "artifact": "file:///x"}]),
    ),
]
"""Pilotlight rejects these and the API server accepts them: CEL cannot express the rules, or they cost too much."""

STRICTER: list[tuple[str, Object]] = [
    ("a mount without a path", pod(volumes=[{"name": "x", "emptyDir": {}}], volumeMounts=[{"name": "x"}])),
    ("an amount of another type", pod(volumes=[{"name": "x", "emptyDir": {"sizeLimit": []}}])),
    ("a field of another type", pod(securityContext={"runAsUser": "root"})),
    ("an empty value", pod(volumes=[{"name": "x", "emptyDir": None}])),
    ("a name longer than Kubernetes' own", pod(volumes=[{"name": "x" * 64, "emptyDir": {}}])),
]
"""The API server rejects these and Pilotlight does not check them: the types of Kubernetes.
Such a pod could not be created, except with an empty value.
"""


def sentence(wrong: Object) -> WrongKeyError:
    """The error with which a file with it is rejected."""
    with pytest.raises(WrongKeyError) as caught:
        read_document(wrong)
    return caught.value


async def refusal(api: Api, path: str, body: Object) -> str:
    with pytest.raises(ApiError) as caught:
        await api.create(path, body)
    assert caught.value.status == 422, caught.value
    return caught.value.message


async def test_invalid_model_is_rejected_by_crd_and_file_with_the_same_message(served: Api, namespace: str) -> None:
    for what, wrong in WRONG:
        message = await refusal(served, models(namespace), wrong)
        expected = sentence(wrong)
        assert expected.message.partition(", which")[0] in message, what
        assert ".".join(map(str, expected.path[:2])) in message, what
        assert message.count("expected") + message.count("needs") <= 2, f"{what}: no rule speaks for another: {message}"


async def test_remote_weights_and_adapters_are_accepted_in_files_and_by_the_crd(served: Api, namespace: str) -> None:
    of_registry = model("a", engine="vllm", command=[], artifact=f"oci://r.io/a@sha256:{HASH}")
    for name, taken in enumerate(
        (of_registry, *map(adapted, (f"oci://r.io/a@sha256:{HASH}", "hf://a/b", "s3://abc/d/")))
    ):
        taken["metadata"]["name"] = f"a{name}"
        assert isinstance(read_document(taken).spec, ModelSpec), "no file is refused for it"
        await served.create(models(namespace), taken)


async def test_api_server_keeps_every_pod_field_and_variable_of_a_valid_model(served: Api, namespace: str) -> None:
    written = model("a", **MADE_OF_ALL)
    assert isinstance(read_document(written).spec, ModelSpec)
    made = await served.create(f"{models(namespace)}?fieldValidation=Strict", written)
    for key in ("affinity", "volumes", "volumeMounts", "securityContext", "labels", "annotations"):
        assert made["spec"]["pod"][key] == written["spec"]["pod"][key], key
    assert made["spec"]["env"] == written["spec"]["env"]
    assert read_document(document("Model", "a", spec=made["spec"])) == read_document(written)


async def test_each_listed_document_passes_only_one_of_file_check_and_crd(served: Api, namespace: str) -> None:
    for what, wrong in LENIENT:
        assert sentence(wrong), what
        await served.create(f"{models(namespace)}?dryRun=All", wrong)
    for what, wrong in STRICTER:
        assert isinstance(read_document(wrong).spec, ModelSpec), what
        assert "spec.pod." in await refusal(served, models(namespace), wrong), what


AMOUNTS = (
    "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "amd.com/gpu", "amd.com/gpumem-percentage",
    "volcano.sh/vgpu-memory-percentage", "metax-tech.com/vcore", "metax-tech.com/vmemory", "cambricon.com/mlu",
    "cambricon.com/mlu.smlu.vmemory", "cambricon.com/mlu.smlu.vcore", "mthreads.com/sgpu-memory",
    "mthreads.com/sgpu-core", "iluvatar.ai/MR-V100.vCore", "iluvatar.ai/MR-V100.vMem", "kunlunxin.com/vxpu-memory",
    "enflame.com/vgcu", "aws.amazon.com/neuroncore", "gpu.intel.com/millicores", "gpu.intel.com/tiles",
    "gpu.intel.com/memory.max", "birentech.com/1-2-gpu",
)  # fmt: skip
CHOICES_LISTED = (
    "nvidia.com/vgpu-mode", "cambricon.com/dsmlu-profile", "mthreads.com/gpu-index", "gas-allow", "gas-container-cards",
)  # fmt: skip


async def test_reserved_device_resources_are_rejected_in_files_and_crds(served: Api, namespace: str) -> None:
    amounts = dict.fromkeys((*AMOUNTS, *(f"{begin}x" for begin in AMOUNTS_BEGIN)), True)
    amounts |= dict.fromkeys(("cpu", "rdma/hca", "volcano.sh/other", *(f"{begin}x" for begin in NETWORK_BEGIN)), False)
    for name, is_reserved in amounts.items():
        for at in ("requests", "limits"):
            await agree(served, namespace, model("a", resources={at: {name: 1}}), is_reserved=is_reserved)
    choices = dict.fromkeys((*CHOICES, *CHOICES_LISTED, *(f"{begin}x" for begin in CHOICES_BEGIN)), True)
    for name, is_reserved in (choices | {"example.com/note": False, "nvidia.com/other": False}).items():
        await agree(served, namespace, pod(annotations={name: "1"}), is_reserved=is_reserved)


async def test_names_of_capacity_orders_are_rejected_in_files_and_crds(served: Api, namespace: str) -> None:
    for name in RESERVED:
        await agree(served, namespace, pod(annotations={name: "1"}), is_reserved=True)
        await agree(served, namespace, pod(labels={name: "1"}), is_reserved=True)
    await agree(served, namespace, pod(labels={QUEUE: "serving"}), is_reserved=False)


async def agree(api: Api, namespace: str, written: Object, *, is_reserved: bool) -> None:
    """Checks that both reject it with the same message, or both accept it."""
    path = f"{models(namespace)}?dryRun=All"
    if is_reserved:
        assert sentence(written).message in await refusal(api, path, written)
    else:
        assert isinstance(read_document(written).spec, ModelSpec)
        await api.create(path, written)


def nested(levels: int) -> msgspec.Raw:
    return msgspec.Raw(b'{"a":' * levels + b"1" + b"}" * levels)


DEEP: list[tuple[str, Callable[[msgspec.Raw], Object]]] = [
    ("affinity", lambda value: {"affinity": {"podAffinity": value}}),
    ("its parts", lambda value: {"affinity": value}),
    ("volumes", lambda value: {"volumes": [{"name": "x", "emptyDir": value}]}),
    ("their parts", lambda value: {"volumes": [{"name": "x", "emptyDir": {}, "a": value}]}),
    (
        "mounts",
        lambda value: {
            "volumes": [{"name": "x", "emptyDir": {}}],
            "volumeMounts": [{"name": "x", "mountPath": "/x", "a": value}],
        },
    ),
    ("securityContext", lambda value: {"securityContext": {"seLinuxOptions": value}}),
]


@pytest.mark.parametrize(("what", "fields"), DEEP, ids=[what for what, _ in DEEP])
async def test_deeply_nested_values_are_rejected_if_strict_else_dropped(
    served: Api, namespace: str, what: str, fields: Callable[[msgspec.Raw], Object]
) -> None:
    deep = pod(**fields(nested(1_100)))
    with pytest.raises(ApiError, match="unknown field") as caught:
        await served.create(f"{models(namespace)}?fieldValidation=Strict", deep)
    assert caught.value.status == 400
    made = await served.create(models(namespace), deep)  # the response can be decoded: unknown fields are dropped
    assert read_document(document("Model", "a", spec=made["spec"])), what


@pytest.mark.parametrize(
    "value", [nested(1_100), msgspec.Raw(b"[" * 1_100 + b"]" * 1_100), {"valueFrom": nested(1_100)}]
)
async def test_nested_environment_variable_value_is_rejected(served: Api, namespace: str, value: object) -> None:
    path = f"{models(namespace)}?fieldValidation=Strict"
    with pytest.raises(ApiError, match=r"spec\.env\.A|unknown field"):
        await served.create(path, model("a", env={"A": value}))


async def test_valid_request_policy_is_kept_and_deeper_nesting_is_rejected(served: Api, namespace: str) -> None:
    policy = {
        "defaults": {"temperature": 0.5, "seed": 1, "stop": ["a"], "user": None},
        "forced": {"chat_template_kwargs": {"a": {"b": {"c": {"d": True}}}}, "x": [[[[1]]]]},
        "caps": {"max_tokens": 4096},
        "removed": ["tools"],
        "forcedByName": {"a:b": {"top_k": 1}},
        "requestCheck": {"url": "https://guard.example/", "failOpen": True},
        "answerCheck": {"url": "https://guard.example/", "streams": "skip", "timeoutSeconds": 1},
    }
    written = model("a", aliases=["a:b"], policy=policy)
    made = await served.create(f"{models(namespace)}?fieldValidation=Strict", written)
    assert read_document(document("Model", "a", spec=made["spec"])).spec.policy == read_document(written).spec.policy
    for value in (nested(5), nested(1_100), msgspec.Raw(b"[[[[[1]]]]]"), msgspec.Raw(b"[" * 1_100 + b"]" * 1_100)):
        for wrong in ({"forced": {"x": value}}, {"defaults": {"x": value}}, {"forcedByName": {"b": {"x": value}}}):
            message = await refusal(served, f"{models(namespace)}?dryRun=All", model("b", policy=wrong))
            assert "spec.policy." in message
    no_streams = {"answerCheck": {"url": "https://guard.example/"}}
    assert "spec.policy.answerCheck.streams" in await refusal(served, models(namespace), model("b", policy=no_streams))


async def test_pod_field_types_equal_those_of_the_api_server_schema(api: Api) -> None:
    """Another version of Kubernetes may have more fields, which would be dropped."""
    found = (await api.get("/openapi/v3/api/v1"))["components"]["schemas"]
    by_name = {name.rpartition(".")[2]: schema for name, schema in found.items() if ".v1." in name}
    for name, fields in TYPES.items():
        if name not in {"Affinity", "Metadata"}:
            schema = by_name[name]
            required = schema.get("required", ())
            expected = {f"{key}!" if key in required else key: kind_of(of) for key, of in schema["properties"].items()}
            assert fields == expected, name


def kind_of(schema: Object) -> str:
    """Converts an OpenAPI schema to the notation of `pod_types`."""
    schema = schema["allOf"][0] if "allOf" in schema else schema
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition(".")[2]
        return "Metadata" if name == "ObjectMeta" else name
    if schema["type"] == "array":
        return f"{kind_of(schema['items'])}[]"
    if schema["type"] == "object":
        return f"{kind_of(schema['additionalProperties'])}{{}}"
    return {"boolean": "bool", "integer": str(schema.get("format"))}.get(schema["type"], str(schema["type"]))


def test_message_of_each_crd_rule_occurs_for_an_invalid_test_document() -> None:
    """Each message of the rules occurs in an example above."""
    seen = [sentence(wrong).message for _, wrong in WRONG]
    for rules in RULES.values():
        for rule in rules:
            words = max(re.findall(r"'((?:[^'\\]|\\.)*)'", rule.message), key=len) if rule.says else rule.message
            words = words.replace("\\'", "'").strip()
            assert any(words in message for message in seen), rule


async def test_reserved_spec_fields_are_rejected_instead_of_dropped(served: Api, namespace: str) -> None:
    values = {"string": "x", "boolean": True, "number": 1, "array": [], "object": {}}
    for kind, path, make in ((MODEL, models(namespace), model), (TENANT, TENANTS, tenant)):
        for key in KEYS[kind.name]:
            value: object = values[str(LATER.get(key, {"type": "object"})["type"])]
            *above, last = key.removeprefix("spec.").split(".")
            spec: Object = {last: value}
            for part in reversed(above):
                spec = {part: spec}
            message = await refusal(served, path, make("later", **spec))
            assert key in message
            assert MESSAGE in message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"aliases": ["x", "x"]}, 'spec.aliases[1]: Duplicate value: "x"'),
        ({"adapters": [{"name": "x", "artifact": "file:///x"}] * 2}, "spec.adapters[1]: Duplicate value"),
        ({"engine": "external"}, 'spec.engine: Unsupported value: "external"'),
        ({"queue": {"bytesMax": "1GB"}}, "spec.queue.bytesMax"),
        ({"idleSeconds": "soon"}, "spec.idleSeconds"),
        ({"idleSeconds": -1}, "spec.idleSeconds"),
        ({"start": {"secondsMax": 0}}, "spec.start.secondsMax"),
        ({"gpu": {"isolation": "good"}}, "spec.gpu.isolation"),
        ({"env": ["A=b"]}, "spec.env"),
    ],
)
async def test_invalid_value_of_a_model_field_is_rejected_with_its_path(
    served: Api, namespace: str, spec: Object, message: str
) -> None:
    assert message in await refusal(served, models(namespace), model("a", **spec))


async def test_invalid_or_duplicate_tenant_keys_are_rejected(served: Api) -> None:
    assert "spec.keys[0].sha256" in await refusal(served, TENANTS, tenant("a", keys=[{"sha256": "secret"}]))
    twice = [{"sha256": HASH}, {"sha256": HASH}]
    assert "spec.keys[1]: Duplicate value" in await refusal(served, TENANTS, tenant("a", keys=twice))
    late = [{"sha256": HASH, "expiresAt": "tomorrow"}]
    assert "spec.keys[0].expiresAt" in await refusal(served, TENANTS, tenant("a", keys=late))


async def test_api_server_defaults_do_not_change_the_meaning_of_a_model(served: Api, namespace: str) -> None:
    sizes = {"gpu": {"memory": "20Gi"}, "queue": {"bytesMax": 1000}, "idleSeconds": 5}
    written = model("a", aliases=["org/name:tag"], tls={}, env={"A": "b", "C": {"valueFrom": {}}}, **sizes)
    made = await served.create(models(namespace), written)
    spec = made["spec"]
    assert spec["replicas"] == {"min": 0, "max": 1, "schedule": []}
    assert "slots" not in spec, "that is the engine's"
    assert (spec["queue"]["waitSecondsMax"], spec["residencySeconds"]) == (540, "auto")
    del spec["env"]["C"], written["spec"]["env"]["C"]
    assert read_document(document("Model", "a", spec=spec)) == read_document(written)


async def test_unknown_spec_fields_are_rejected_only_with_strict_validation(served: Api, namespace: str) -> None:
    with pytest.raises(ApiError, match=r'unknown field "spec.gpu.memori"') as caught:
        await served.create(f"{models(namespace)}?fieldValidation=Strict", model("a", gpu={"memori": "1Gi"}))
    assert caught.value.status == 400
    made = await served.create(models(namespace), model("a", gpu={"memori": "1Gi"}))
    assert "memori" not in made["spec"]["gpu"], "else it is dropped, as everywhere in Kubernetes"


async def test_status_update_ignores_spec_and_spec_update_ignores_status(served: Api, namespace: str) -> None:
    path = models(namespace)
    made = await served.create(path, model("a") | {"status": {"observedGeneration": 7}})
    assert "status" not in made
    ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": "2027-01-31T12:00:00Z"}  # fmt: skip  # noqa: E501
    learned = {"startSeconds": [1.5], "tries": 1, "retryAt": "2027-01-31T12:00:00.5Z"}
    status = {
        "observedGeneration": 1, "replicas": {"ready": 2, "fallingAsleep": 1}, "demand": {"waiting": 3, "running": 4},
        "conditions": [ready], "lastStart": {"seconds": 2.5, "phases": {"load": 2.0}, "reason": "3 waiting"},
        "learned": learned,
    }  # fmt: skip
    body = {"spec": {"slots": 9}, "status": status}
    after = await served.patch(f"{path}/a/status", body, MERGE, fieldValidation="Strict")
    assert after["status"] == status
    nested: dict[str, object] = {"status": {"learned": {"more": {"x": {"y": {}}}}}}
    assert (await served.patch(f"{path}/a/status", nested, MERGE))["status"] == status
    assert "slots" not in after["spec"]
    assert after["metadata"]["generation"] == 1
    changed = await served.patch(f"{path}/a", body, MERGE)
    assert (changed["metadata"]["generation"], changed["spec"]["slots"]) == (2, 9)


async def test_conditions_of_two_writers_are_merged_by_type(served: Api, namespace: str) -> None:
    path = models(namespace)
    await served.create(path, model("a"))
    for owner, kind in (("one", "Ready"), ("two", "Adopted")):
        condition = {
            "type": kind, "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2027-01-31T12:00:00Z",
        }  # fmt: skip
        await served.apply(f"{path}/a/status", document("Model", "a", status={"conditions": [condition]}), owner)
    found = await served.get(f"{path}/a")
    assert [one["type"] for one in found["status"]["conditions"]] == ["Ready", "Adopted"]


async def listed(api: Api) -> list[Object]:
    """The resources of our group, as the server lists them."""
    found: list[Object] = (await api.get(f"/apis/{API_VERSION}"))["resources"]
    return found


async def test_installed_crd_serves_printer_columns_short_names_and_selectors(
    served: Api, plane: Plane, namespace: str
) -> None:
    path = models(namespace)
    await served.create(path, model("a"))
    await served.create(path, model("b", engine="ollama", command=[], paused=True))
    ready = {"type": "Ready", "status": "False", "reason": "Waiting", "message": "for a GPU", "lastTransitionTime": "2027-01-31T12:00:00Z"}  # fmt: skip  # noqa: E501
    status = {"replicas": {"ready": 2}, "demand": {"waiting": 3, "running": 4}, "conditions": [ready]}
    await served.patch(f"{path}/a/status", {"status": status}, MERGE)
    server = await load_api_access(plane.kubeconfig)
    headers = await server.headers() | {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(server.server + path, headers=headers, ssl=server.tls()) as answer,
    ):
        table = await answer.json()
    columns = [(column["name"], column["priority"]) for column in table["columnDefinitions"]]
    assert columns == [("Name", 0), *((name, priority) for name, _, _, priority in MODEL.columns)]
    first = table["rows"][0]["cells"]
    assert first[:5] == ["a", 2, 3, 4, "Waiting"]
    assert first[6:] == ["command", "for a GPU"]
    for selector in ("spec.engine=ollama", "spec.paused=true"):
        found = await served.get(path, fieldSelector=selector)
        assert [item["metadata"]["name"] for item in found["items"]] == ["b"]
    async with asyncio.timeout(SERVED_S_MAX):  # a kind is listed shortly after it is served
        while not {"models", "tenants"} <= {one["name"] for one in await listed(served)}:
            await asyncio.sleep(0.05)
    resources = await listed(served)
    short = {one["name"]: (one.get("shortNames"), one["namespaced"]) for one in resources if "/" not in one["name"]}
    assert short == {"models": (["plm"], True), "tenants": (["plt"], False)}
    assert not any(one["name"].endswith("/scale") for one in resources), "Replicas are the autoscaler's"


async def test_tenant_without_a_spec_gets_defaults(served: Api) -> None:
    name = f"t-{uuid.uuid4().hex[:8]}"
    made = await served.create(TENANTS, document("Tenant", name))
    assert made["spec"] == {"weight": 1, "keys": [], "priorityMax": 0, "policy": {"removed": []}}
    await served.delete(f"{TENANTS}/{name}")


def of_group(file: Path, group: str) -> Object:
    """One of our definitions for another group, so that the installed one stays as it is."""
    found: Object = yaml.safe_load(file.read_text().replace(GROUP, group))
    return found


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
async def test_crd_fits_the_annotation_size_limit_of_kubectl_apply(api: Api, file: Path) -> None:
    """`kubectl apply` keeps the whole object in an annotation, and all annotations have at most 262,144 bytes."""
    one = of_group(file, f"g{uuid.uuid4().hex[:8]}.example")
    kept = json.dumps(one, separators=(",", ":")) + "\n"
    one["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": kept}
    assert len(kept) < 262_144
    made = await api.create(f"{cluster_checks.CRDS}?dryRun=All", one)
    assert made["metadata"]["annotations"] == one["metadata"]["annotations"]


async def test_doctor_warns_of_fields_that_an_older_installed_crd_lacks(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"g{uuid.uuid4().hex[:8]}.example"
    monkeypatch.setattr(cluster_checks, "GROUP", group)
    scene = cluster_checks.Scene(engines="default", home="default", scope="namespace")
    older, now = of_group(FOLDER / "models.yaml", group), of_group(FOLDER / "models.yaml", group)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["residencySeconds"], spec["queue"]["properties"]["bytesMax"]
    await custom_resources.install_one(api, older)
    (found,) = await cluster_checks.definitions(api, scene)
    assert (found.grade, found.fix) == ("warning", cluster_checks.CRDS_FIX)
    assert found.says == "another version is installed, without spec.queue.bytesMax, spec.residencySeconds"
    await custom_resources.install_one(api, now)
    (found,) = await cluster_checks.definitions(api, scene)
    assert (found.grade, found.says) == ("ok", "installed, with all fields of this version of Pilotlight")
    await api.delete(custom_resources.definition("models", group))
