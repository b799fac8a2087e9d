"""Models built from annotations, and parsing of workloads and pods, without a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.adoption.annotations import (
    AnnotationError,
    Hand,
    Others,
    find_manual_scaling,
    read_model,
    set_naming_time,
)
from autoscaler.drivers.kubernetes.adoption.objects import (
    WorkloadKey,
    WorkloadSeen,
    read_pod,
    read_scaler,
    read_workload,
)
from autoscaler.spec.document_names import Origin, resolve_model_conflicts
from autoscaler.spec.engines import default_slots
from autoscaler.spec.model import ADOPTED_HASH, Adopted, Model, ModelSpec, ReplicaRange
from tests.support.builders.adoption_workload import KEY, annotated

# --- annotations ------------------------------------------------------------------------------------------------------


def test_several_annotated_names_become_one_model_with_aliases() -> None:
    model = read_model(annotated({"pilotlight.dev/models": "ada, babbage,ada ,"}))
    assert (model.name, model.spec.aliases, model.namespace) == ("ada", ("babbage",), "default")
    assert model.adopted == Adopted(
        kind="Deployment", namespace="default", name="ada", message="Pilotlight scales Deployment default/ada"
    )
    assert (model.spec.gpu.count, model.spec_hash(), model.created_unix_s) == (0, ADOPTED_HASH, 100)


def test_annotated_workload_has_the_replicas_slots_and_idle_time_it_sets() -> None:
    notes = {"models": "ada", "replicas-min": "1", "replicas-max": "5", "slots": "32", "idle-seconds": "90"}
    model = read_model(annotated({f"pilotlight.dev/{name}": value for name, value in notes.items()}))
    assert (model.spec.replicas.min, model.spec.replicas.max) == (1, 5)
    assert (model.slots, model.spec.idle_seconds) == (32, 90.0)


def test_workload_without_scaling_annotations_has_default_settings() -> None:
    model = read_model(annotated())
    assert (model.spec.replicas, model.slots) == (ReplicaRange(), default_slots(model.spec.engine))


def test_workload_with_lingo_annotations_has_lingo_defaults() -> None:
    model = read_model(annotated({"lingo.substratus.ai/models": "ada"}))
    assert (model.spec.replicas.min, model.spec.replicas.max, model.slots) == (0, 3, 100)
    notes = {"lingo.substratus.ai/models": "ada", "lingo.substratus.ai/min-replicas": "1",
             "lingo.substratus.ai/max-replicas": "7", "pilotlight.dev/slots": "8"}  # fmt: skip
    model = read_model(annotated(notes))
    assert (model.spec.replicas.min, model.spec.replicas.max, model.slots) == (1, 7, 8)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pilotlight.dev/models", " ,", "expected 1 to 65 names, comma separated"),
        ("pilotlight.dev/models", "a b", "letters, digits or ._:/- that begin and end with a letter or digit"),
        ("pilotlight.dev/slots", "many", "expected a whole number from 1 to 100000"),
        ("pilotlight.dev/slots", "9" * 5000, "expected a whole number from 1 to 100000"),
        ("pilotlight.dev/slots", "0", "expected a whole number from 1 to 100000"),
        ("pilotlight.dev/replicas-min", "2", "expected at most 1, its maximum"),
        ("pilotlight.dev/replicas-max", "-1", "expected a whole number from 1 to 1000"),
        ("pilotlight.dev/port", "70000", "expected a whole number from 1 to 65535"),
        ("pilotlight.dev/idle-seconds", "soon", "expected `auto` or seconds from 0 to 31536000"),
        ("pilotlight.dev/idle-second", "9", "unknown (did you mean pilotlight.dev/idle-seconds?)"),
    ],
)
def test_invalid_annotation_error_names_object_and_annotation(name: str, value: str, message: str) -> None:
    notes = {"pilotlight.dev/models": "ada", "pilotlight.dev/replicas-max": "1", name: value}
    with pytest.raises(AnnotationError) as error:
        read_model(annotated(notes))
    line = str(error.value)
    assert line.startswith(f"Deployment default/ada: annotation {name}: ")
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["pilotlight.dev/replica", "pilotlight.dev/intent"])
def test_pod_template_with_an_annotation_of_the_autoscaler_is_rejected(name: str) -> None:
    found = deployment(**{"pilotlight.dev/models": "ada"})
    found["spec"]["template"]["metadata"] = {"annotations": {name: "victim", "other": "x"}}
    seen = read_workload("Deployment", found)
    assert isinstance(seen, WorkloadSeen)
    with pytest.raises(AnnotationError, match=f"annotation {name}: remove it from spec.template"):
        read_model(seen)


# --- who controls the scale -------------------------------------------------------------------------------------------


def test_first_seen_replica_count_is_not_manual_scaling() -> None:
    assert find_manual_scaling(None, annotated(replicas=0), None, 200.0) is None
    assert find_manual_scaling(None, annotated(replicas=3), None, 200.0) is None


def test_kubectl_scale_before_the_first_observation_is_manual_scaling() -> None:
    scaled = annotated(replicas=3, scaled_by="kubectl", since_adopted=True, scaled_unix_s=150.0)
    assert find_manual_scaling(None, scaled, None, 200.0) == Hand(3, "kubectl", 150.0)


@pytest.mark.parametrize("written_s", [150.0, 9000.0, -9000.0])
def test_manual_scaling_of_a_known_workload_is_dated_by_our_own_clock(written_s: float) -> None:
    scaled = annotated(replicas=3, scaled_by="kubectl", since_adopted=True, scaled_unix_s=written_s)
    assert find_manual_scaling(annotated(), scaled, None, 200.0) == Hand(3, "kubectl", 200.0)


def test_manual_scaling_time_in_the_future_is_set_to_now() -> None:
    scaled = annotated(replicas=3, scaled_by="kubectl", since_adopted=True, scaled_unix_s=9000.0)
    assert find_manual_scaling(None, scaled, None, 200.0) == Hand(3, "kubectl", 200.0)


def test_patch_to_zero_without_field_owner_is_manual_scaling() -> None:
    before = annotated(replicas=1, ours=True, scaled_by="")
    after = annotated(replicas=0, scaled_by="", scaled_unix_s=None)
    assert find_manual_scaling(before, after, None, 200.0) == Hand(0, "", 200.0)


def test_scaling_by_pilotlight_or_an_hpa_is_not_manual_scaling() -> None:
    assert (
        find_manual_scaling(annotated(), annotated(replicas=1, ours=True, scaled_by=""), Hand(0, "kubectl", 1.0), 200.0)
        is None
    )
    by_hpa = annotated(replicas=2, scaled_by="kube-controller-manager", since_adopted=True)
    assert find_manual_scaling(annotated(), by_hpa, None, 200.0) is None


def test_manual_scaling_is_kept_while_the_scale_is_unchanged() -> None:
    hand = Hand(3, "kubectl", 150.0)
    assert find_manual_scaling(annotated(replicas=3), annotated(replicas=3, version=2), hand, 200.0) is hand


def test_manual_scale_sets_min_and_max_and_zero_pauses_the_model() -> None:
    three = read_model(annotated(), Others("", Hand(3, "kubectl", 0.0), 600.0))
    assert (three.spec.replicas.min, three.spec.replicas.max, three.spec.paused) == (3, 3, False)
    assert three.adopted is not None
    assert (three.adopted.held, three.adopted.reason) == (True, "ScaledByHand")
    assert three.adopted.message == "scaled to 3 by kubectl; holds until 1970-01-01T00:10:00Z"
    zero = read_model(annotated(), Others("", Hand(0, "", 0.0), 600.0))
    assert zero.spec.paused


def test_workload_with_an_hpa_is_marked_as_scaled_by_another_autoscaler() -> None:
    model = read_model(annotated(), Others("HorizontalPodAutoscaler ada"))
    assert model.adopted is not None
    assert (model.adopted.toggled, model.adopted.reason) == (True, "ScaledByAnother")
    found = {"metadata": {"namespace": "default", "name": "h"}, "spec": {"scaleTargetRef": {"name": "ada"}}}
    scaler = read_scaler("ScaledObject", found)
    assert scaler is not None
    assert (scaler.target, scaler.title) == (KEY, "ScaledObject h")


# --- parsing ----------------------------------------------------------------------------------------------------------


def deployment(**annotations: str) -> dict[str, Any]:
    """A Deployment as the API server returns it."""
    managed = [
        {"manager": "helm", "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "kubectl", "time": "2026-01-02T00:00:00Z", "subresource": "scale",
         "fieldsV1": {"f:spec": {"f:replicas": {}}}},
    ]  # fmt: skip
    return {
        "metadata": {"namespace": "default", "name": "ada", "uid": "u", "resourceVersion": "7",
                     "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": annotations,
                     "managedFields": managed},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "ada"}, "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["a", "b"]}, {"key": "x", "operator": "Exists"}]},
            "template": {"spec": {"containers": [{"name": "engine"}]}}},
    }  # fmt: skip


def test_annotated_workload_is_read_with_the_last_writer_of_its_scale() -> None:
    assert read_workload("Deployment", deployment()) is None
    seen = read_workload("Deployment", deployment(**{"pilotlight.dev/models": "ada", "other": "x"}))
    assert isinstance(seen, WorkloadSeen)
    assert (seen.key, seen.version, seen.replicas, seen.ours) == (KEY, 7, 2, False)
    assert (seen.scaled_by, seen.since_adopted) == ("kubectl", True)
    assert seen.selector == "app=ada,tier in (a,b),x"
    assert seen.notes == (("pilotlight.dev/models", "ada"),)


def test_scaling_older_than_the_annotation_counts_as_before_adoption() -> None:
    found = deployment(**{"pilotlight.dev/models": "ada"})
    fields: dict[str, Any] = {"f:metadata": {"f:annotations": {"f:pilotlight.dev/models": {}}}}
    found["metadata"]["managedFields"].append(
        {"manager": "kubectl", "time": "2026-01-03T00:00:00Z", "fieldsV1": fields}
    )
    seen = read_workload("Deployment", found)
    assert isinstance(seen, WorkloadSeen)
    assert (seen.scaled_by, seen.since_adopted) == ("kubectl", False)
    assert seen.named_unix_s == datetime(2026, 1, 3, tzinfo=UTC).timestamp(), "it is as old as its annotation"


def test_name_conflict_keeps_the_name_for_the_model_that_used_it_first() -> None:
    """A later edit keeps the time at which the name was first used; a new name gets a new time."""
    old = set_naming_time(None, annotated({"pilotlight.dev/models": "ada"}, named_unix_s=300), 900.0)
    again = set_naming_time(
        old, annotated({"pilotlight.dev/models": "ada", "pilotlight.dev/slots": "7"}, named_unix_s=500), 900.0
    )
    other = set_naming_time(again, annotated({"pilotlight.dev/models": "bert"}, named_unix_s=700), 900.0)
    unsaid = set_naming_time(None, annotated(named_unix_s=0), 900.0)
    assert [one.named_unix_s for one in (old, again, other, unsaid)] == [300, 300, 700, 900]
    has = Model(name=ModelName("bert"), spec=ModelSpec(engine="command"), namespace="n", created_unix_s=500)
    settled = resolve_model_conflicts(
        [], {Origin("Model", "n", "bert"): has, Origin("Deployment", "default", "ada"): read_model(other)}
    )
    assert [model.name for model in settled.models] == ["bert", "default/bert"]


def pod_object(
    container: dict[str, Any], status: dict[str, Any], owner: str = "ReplicaSet", name: str = "ada-5c7"
) -> dict[str, Any]:
    """A pod as the API server returns it."""
    return {
        "metadata": {"name": "ada-1", "uid": "p1", "creationTimestamp": "2026-01-01T00:00:00Z",
                     "labels": {"pod-template-hash": "5c7"},
                     "ownerReferences": [{"kind": owner, "name": name, "controller": True}]},
        "spec": {"containers": [{"name": "proxy"}, {"name": "engine", **container}]},
        "status": status,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, (8080, 8080, None, False)),
        ({"ports": [{"containerPort": 9000}]}, (9000, 9000, None, False)),
        ({"ports": [{"containerPort": 1}, {"name": "http", "containerPort": 9000}]}, (9000, 9000, None, False)),
        ({"ports": [{"containerPort": 9000, "name": "http"}],
          "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}}}, (9000, 9000, "/ready", False)),
        ({"readinessProbe": {"httpGet": {"port": 9100}}}, (8080, 9100, "/", False)),
        ({"readinessProbe": {"tcpSocket": {"port": 9100}}}, (8080, 9100, None, False)),
        ({"readinessProbe": {"exec": {"command": ["true"]}}}, (8080, 8080, None, True)),
        ({"readinessProbe": {"tcpSocket": {"port": 9100}, "initialDelaySeconds": 30}}, (8080, 8080, None, True)),
        ({"readinessProbe": {"httpGet": {"port": 9100}, "successThreshold": 2}}, (8080, 8080, None, True)),
        ({"readinessProbe": {"httpGet": {"port": 9100, "httpHeaders": [{"name": "A", "value": "b"}]}}},
         (8080, 8080, None, True)),
        ({"ports": [{"containerPort": 9000, "name": "http"}],  # rewritten by Istio for probes
          "readinessProbe": {"httpGet": {"path": "/app-health/engine/readyz", "port": 15020}}},
         (9000, 15020, "/app-health/engine/readyz", False)),
        ({"ports": [{"containerPort": 9000, "name": "http"}],  # a port name that does not exist
          "readinessProbe": {"httpGet": {"path": "/ready", "port": "htpp"}}}, (9000, 9000, "/ready", True)),
        ({"livenessProbe": {"httpGet": {"port": 9100}}}, (8080, 8080, None, False)),
    ],
)  # fmt: skip
def test_adopted_pod_is_probed_like_its_readiness_probe_or_by_the_kubelet(
    container: dict[str, Any], expected: tuple[int, int, str | None, bool]
) -> None:
    seen = read_pod(pod_object(container, {}), KEY, "engine")
    assert seen is not None
    assert (seen.port, seen.probe_port, seen.path, seen.kubelet_decides) == expected


READY, WAITS = {"name": "proxy", "ready": True}, {"name": "proxy", "ready": False}
STARTED = {"name": "engine", "started": True}
PROBED = {"startupProbe": {"httpGet": {"port": 8080}}}
GATE = {"readinessGates": [{"conditionType": "example.com/attached"}]}
SIDECAR = {"initContainers": [{"name": "mesh", "restartPolicy": "Always"}, {"name": "first"}]}


@pytest.mark.parametrize(
    ("container", "spec", "status", "held"),
    [
        ({}, {}, {"containerStatuses": [READY]}, False),
        ({}, {}, {"containerStatuses": [WAITS]}, True),
        ({}, {}, {}, True),
        (PROBED, {}, {"containerStatuses": [READY, {**STARTED, "started": False}]}, True),
        (PROBED, {}, {"containerStatuses": [READY]}, True),
        (PROBED, {}, {"containerStatuses": [READY, STARTED]}, False),
        ({}, GATE, {"containerStatuses": [READY]}, True),
        ({}, GATE, {"containerStatuses": [READY],
                    "conditions": [{"type": "example.com/attached", "status": "True"}]}, False),
        ({}, SIDECAR, {"containerStatuses": [READY], "initContainerStatuses": [{**WAITS, "name": "mesh"}]}, True),
        ({}, SIDECAR, {"containerStatuses": [READY], "initContainerStatuses": [{**READY, "name": "mesh"}]}, False),
    ],
)  # fmt: skip
def test_pod_is_not_ready_until_all_its_readiness_conditions_are_met(
    container: dict[str, Any], spec: dict[str, Any], status: dict[str, Any], held: bool
) -> None:
    found = pod_object(container, status)
    seen = read_pod({**found, "spec": {**found["spec"], **spec}}, KEY, "engine")
    assert seen is not None
    assert seen.held == held


@pytest.mark.parametrize("name", ["vault-agent-init", "linkerd-init", "istio-validation"])
@pytest.mark.parametrize(
    ("state", "waits"),
    [({"waiting": {"reason": "ErrImagePull", "message": "not found"}}, "ErrImagePull: init container {}: not found"),
     ({"waiting": {"reason": "CrashLoopBackOff"}}, "CrashLoopBackOff: init container {}")],
)  # fmt: skip
def test_failing_init_container_is_named_and_may_retry_for_a_minute(
    name: str, state: dict[str, Any], waits: str
) -> None:
    status = {
        "initContainerStatuses": [{"name": name, "state": state}],
        "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    seen = read_pod(pod_object({}, status), KEY, "engine")
    assert seen is not None
    assert (seen.waits, seen.patience_s) == (waits.format(name), 60.0)


def test_init_container_of_the_template_has_a_longer_limit_than_injected() -> None:
    found = deployment(**{"pilotlight.dev/models": "ada"})
    found["spec"]["template"]["spec"]["initContainers"] = [{"name": "download"}]
    workload = read_workload("Deployment", found)
    assert isinstance(workload, WorkloadSeen)
    for name, patience_s in (("download", 900.0), ("vault-agent-init", 60.0)):
        pod = pod_object({}, {"initContainerStatuses": [{"name": name, "state": {"running": {}}}]})
        seen = read_pod(pod, KEY, "engine", own=workload.init_containers)
        assert seen is not None
        assert (seen.waits, seen.patience_s) == (f"init container {name} has not finished", patience_s)


AGAIN = {"waiting": {"reason": "CrashLoopBackOff"}}


@pytest.mark.parametrize(
    ("engine", "ended"),
    [
        (
            {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            "was killed for lack of memory (OOMKilled)",
        ),
        ({"state": AGAIN, "lastState": {"terminated": {"exitCode": 3}}}, "ended with status 3"),
        ({"state": {"running": {}}, "ready": True}, ""),
    ],
)
def test_container_with_annotated_port_decides_readiness_and_crashes(engine: dict[str, Any], ended: str) -> None:
    """The first container has a port named http, another probe, and crashes or not."""
    get = {"httpGet": {"path": "/web", "port": "http"}}
    web = {"name": "web", "ports": [{"name": "http", "containerPort": 80}], "readinessProbe": get}
    crashed = {"name": "web", "ready": True, "state": {} if ended else AGAIN}
    container = {"ports": [{"name": "api", "containerPort": 9000}],
                 "readinessProbe": {"httpGet": {"path": "/ready", "port": "api"}}}  # fmt: skip
    found = pod_object(container, {"containerStatuses": [crashed, {"name": "engine", **engine}, READY]})
    found["spec"]["containers"].insert(0, web)
    seen = read_pod(found, KEY, "gone", 9000)
    assert seen is not None
    assert (seen.port, seen.probe_port, seen.path, seen.ended) == (9000, 9000, "/ready", ended)
    assert not seen.held


def test_annotated_port_selects_the_engine_container_of_a_workload() -> None:
    for port, name in (("80", "web"), ("9000", "engine"), ("7", "web")):
        found = deployment(**{"pilotlight.dev/models": "ada", "pilotlight.dev/port": port})
        found["spec"]["template"]["spec"]["containers"] = [
            {"name": "proxy", "ports": [{"containerPort": 1}]},
            {"name": "web", "ports": [{"name": "http", "containerPort": 80}]},
            {"name": "engine", "ports": [{"containerPort": 9000}]},
        ]
        seen = read_workload("Deployment", found)
        assert isinstance(seen, WorkloadSeen)
        assert seen.container == name


def test_pod_owned_by_a_job_is_ignored() -> None:
    assert read_pod(pod_object({}, {}, owner="Job"), KEY, "engine") is None


@pytest.mark.parametrize(
    ("key", "owner", "is_its"),
    [
        (KEY, "ada-5c7", True),
        (KEY, "ada-canary-5c7", False),
        (KEY._replace(name="ada-canary"), "ada-5c7", False),
        (KEY._replace(name="ada-canary"), "ada-canary-5c7", True),
        (KEY._replace(kind="StatefulSet"), "ada", True),
        (KEY._replace(kind="StatefulSet"), "ada-canary", False),
    ],
)
def test_pod_counts_only_for_its_owning_workload_if_selectors_overlap(
    key: WorkloadKey, owner: str, is_its: bool
) -> None:
    """Selectors may overlap: {app: x} also selects the pods of {app: x, track: canary}."""
    kind = "ReplicaSet" if key.kind == "Deployment" else key.kind
    assert (read_pod(pod_object({}, {}, kind, owner), key, "engine") is not None) is is_its


def test_engine_in_crash_loop_backoff_or_evicted_has_ended() -> None:
    again = {"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff"}},
             "lastState": {"terminated": {"exitCode": 3}}}  # fmt: skip
    seen = read_pod(pod_object({}, {"containerStatuses": [{"name": "proxy"}, again]}), KEY, "engine")
    assert seen is not None
    assert (seen.ended, seen.over) == ("ended with status 3", False)
    evicted = read_pod(pod_object({}, {"phase": "Failed", "reason": "Evicted", "message": "disk"}), KEY, "engine")
    assert evicted is not None
    assert (evicted.ended, evicted.over) == ("Evicted: disk", True)
