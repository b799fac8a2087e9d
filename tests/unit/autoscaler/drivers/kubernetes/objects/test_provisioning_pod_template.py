"""The template used to request capacity in advance contains the pod's scheduling fields and nothing else."""

from __future__ import annotations

import json

from msgspec.structs import replace

from autoscaler.drivers.kubernetes.objects.provisioning_pod_template import build_pod_template
from autoscaler.spec.model import Gpu, Model, ModelSpec
from autoscaler.spec.pod import GPU, Pod, Resources, Toleration
from autoscaler.spec.settings import PriorityClass, Settings
from tests.support.builders.worlds import model


def asks(of: Model, settings: Settings | None = None) -> dict[str, object]:
    found: dict[str, object] = build_pod_template(of, settings or Settings())
    return found


def spec(of: Model, **fields: object) -> ModelSpec:
    return replace(of.spec, **fields)


def test_provisioning_pod_template_has_the_scheduling_fields_of_its_model() -> None:
    of = model("a", 16)
    pod = Pod(
        node_selector={"zone": "b"}, tolerations=(Toleration(key="queued", operator="Exists"),),
        runtime_class_name="nvidia", scheduler_name="kai", labels={"team": "x"},
    )  # fmt: skip
    resources = Resources(requests={"cpu": "4", "memory": "16Gi"})
    settings = Settings(priority_classes=(PriorityClass(least=0, name="serving"),))
    found = asks(replace(of, spec=spec(of, pod=pod, resources=resources, image="vllm:1")), settings)
    assert found["metadata"] == {"labels": {"pilotlight.dev/model": "a", "team": "x"}}
    inner = found["spec"]
    assert isinstance(inner, dict)
    assert inner["nodeSelector"] == {"zone": "b"}
    assert inner["tolerations"] == [{"key": "queued", "operator": "Exists"}, {"key": GPU, "operator": "Exists"}]
    assert (inner["runtimeClassName"], inner["schedulerName"], inner["priorityClassName"]) == (
        "nvidia",
        "kai",
        "serving",
    )
    assert inner["containers"] == [
        {"name": "engine", "image": "vllm:1", "resources": {"requests": {"cpu": "4", "memory": "16Gi"}}}
    ]


def test_provisioning_pod_template_has_no_env_annotations_or_command() -> None:
    of = model("a", 16)
    env = {"TOKEN": "s3cret"}
    pod = Pod(image_pull_secrets=(), annotations={"note": "x"}, service_account_name="engine")
    text = json.dumps(asks(replace(of, spec=spec(of, env=env, pod=pod, gpu=Gpu(count=2)))))
    for word in ("s3cret", "note", "serviceAccountName", GPU + '": "', "intent", "ports", "command"):
        assert word not in text
