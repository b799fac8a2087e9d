"""A replica as a pod: the manifest with its affinity, and the interpretation of the status of a pod."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autoscaler import engines
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.drivers.kubernetes.objects.pod_overrides import APART, NEAR, PREFERRED, apply_overrides, merge_resources
from autoscaler.queries.unschedulable_replicas import is_unschedulable
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.slicing.vendors import RESOURCES
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.pod import GPU, OURS, Pod, Resources, SecretName, Toleration
from autoscaler.spec.settings import PriorityClass, Settings
from autoscaler.state.resources import HostAmount
from autoscaler.state.world import Replica, ReplicaResources, SliceId

TEXT = """
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: %s}
spec:
  engine: command
  image: engine:1
  command: [serve, "{host}", "{port}"]
%s
"""


def model(text: str = "", name: str = "ada") -> Model:
    lines = "\n".join("  " + line for line in text.splitlines())
    return parse_documents([("a.yaml", TEXT % (name, lines))]).models[0]


def replica(of: Model, *slices: str, id: str = "") -> Replica:
    return Replica(
        id=ReplicaId(id or f"{of.name}-{of.spec_hash()}-0123456789"),
        model=of.name,
        spec_hash=of.spec_hash(),
        intent="0123456789",
        slots=3,
        resources=ReplicaResources(slices=tuple(map(SliceId, slices)), memory_bytes=5, compute_percent=10),
    )


def manifest(of: Model, *slices: str, defaults: Pod | None = None, ranked: str | None = None) -> dict[str, Any]:
    one = replica(of, *slices)
    launch = engines.build_launch_command(of, None, pods.HOST, pods.assign_engine_port(one.id), {}, gpus=True)
    return pods.build_pod_manifest(one, of, launch, "engine:1", defaults, None, ranked)


@pytest.mark.parametrize("resource", sorted({GPU, *RESOURCES}))
def test_pod_tolerates_taint_named_after_its_device_resource(resource: str) -> None:
    """As the ExtendedResourceToleration admission plug-in of Kubernetes does where it is enabled."""
    taints = [{"key": resource, "effect": "NoSchedule"}, {"key": "team", "effect": "NoSchedule"}]
    seen = nodes.read_node({"metadata": {"name": "n1"}, "spec": {"taints": taints}, "status": {}})
    assert [one.key for one in seen.taints] == ["team"]
    one, requested = replica(model(), "n1/gpu0"), PodFields(limits={resource: "1"})
    launch = engines.build_launch_command(model(), None, pods.HOST, pods.assign_engine_port(one.id), {}, gpus=True)
    tolerated = pods.build_pod_manifest(one, model(), launch, "engine:1", asks=requested)["spec"]["tolerations"]
    assert {"key": resource, "operator": "Exists"} in tolerated
    assert len(tolerated) == len({GPU, resource})


def alive(pod: dict[str, Any], **status: object) -> dict[str, Any]:
    """The pod as the API server returns it."""
    pod["metadata"] |= {"uid": "u1", "namespace": "ns", "resourceVersion": "7"}
    return pod | {"status": status}


def test_pod_requests_planned_devices_and_sets_no_cpu_limit() -> None:
    pod = manifest(model(), "n1/gpu0", "n1/gpu1")
    (engine,) = pod["spec"]["containers"]
    assert engine["resources"] == {"requests": {"cpu": "100m"}, "limits": {"nvidia.com/gpu": "2"}}
    port = engine["ports"][0]["containerPort"]
    assert engine["command"] == ["serve", "$(POD_IP)", str(port)]
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert pod["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/model": "ada",
        "pilotlight.dev/intent": "0123456789",
    }  # fmt: skip
    assert "ownerReferences" not in pod["metadata"], "the garbage collector would not let it drain"


def test_pod_blocks_node_removal_unless_its_model_overrides() -> None:
    notes = manifest(model(), "n1/gpu0")["metadata"]["annotations"]
    disrupt, evict = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
    assert (notes[disrupt], notes[evict]) == ("true", "false")
    own = model('pod: {annotations: {karpenter.sh/do-not-disrupt: "4h"}}')
    notes = manifest(own, "n1/gpu0")["metadata"]["annotations"]
    assert (notes[disrupt], notes[evict]) == ("4h", "false")


def test_pod_of_a_replica_without_slices_has_no_node_affinity() -> None:
    pod = manifest(model("gpu: {count: 0}"))
    assert not pod["spec"].keys() & {"affinity", "tolerations"}
    assert pod["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "100m"}}
    seen = pod_state.read_replica_pod(alive(pod))
    assert seen is not None
    assert seen.slices == ()


def test_pod_of_a_replica_is_read_back_with_its_full_replica_state() -> None:
    of = model("tls: {serverName: engine.example}")
    found = pod_state.read_replica_pod(alive(manifest(of, "n1/gpu0"), podIP="10.0.0.1"))
    assert found is not None
    assert found[:12] == (
        "ns", f"ada-{of.spec_hash()}-0123456789", "u1", f"ada-{of.spec_hash()}-0123456789", "ada", of.spec_hash(),
        "0123456789", ("n1/gpu0",), 5, 10, 3, "/health",
    )  # fmt: skip
    assert (found.tls_name, found.ip, found.port) == (
        "engine.example",
        "10.0.0.1",
        pods.assign_engine_port(found.replica),
    )
    assert found.cpu_memory == HostAmount(100)
    assert pod_state.is_pod_of_replica(found, replica(of, "n1/gpu0"))
    assert not pod_state.is_pod_of_replica(found, replica(of, "n1/gpu1"))
    assert not pod_state.is_pod_of_replica(found._replace(leaving=True), replica(of, "n1/gpu0"))


@pytest.mark.parametrize("spoilt", [{"slots": "many"}, {"memory-bytes": ""}, {"intent": ""}])
def test_pod_with_invalid_annotations_is_ignored(spoilt: dict[str, str]) -> None:
    pod = alive(manifest(model(), "n1/gpu0"))
    pod["metadata"]["annotations"] |= {f"pilotlight.dev/{name}": value for name, value in spoilt.items()}
    assert pod_state.read_replica_pod(pod) is None


@pytest.mark.parametrize("named", [{"replica": "victim-h-i"}, {"replica": ""}])
def test_pod_is_ignored_only_if_its_annotation_names_another_replica(named: dict[str, str]) -> None:
    """Without the annotation the pod's own name is its replica's."""
    pod = alive(manifest(model(), "n1/gpu0"))
    pod["metadata"]["annotations"] |= {f"pilotlight.dev/{name}": value for name, value in named.items()}
    found = pod_state.read_replica_pod(pod)
    assert (found is None) is bool(named["replica"])
    assert found is None or found.replica == pod["metadata"]["name"]


@pytest.mark.parametrize(
    ("name", "label", "pod"),
    [
        ("ada", "ada", "ada-h-i"),
        ("Llama_3.1", "Llama_3.1", "llama-3-1-h-i"),
        ("team/ada:8b", "team-ada-8b-7f7cf43b", "team-ada-8b-h-i"),
        ("a" * 70, "a" * 48 + "-cc9d3a2b", "a" * 70 + "-h-i"),
        ("a.-b", "a.-b", "a-b-h-i"),
    ],
)
def test_model_name_is_converted_to_a_valid_label_and_pod_name(name: str, label: str, pod: str) -> None:
    assert pods.format_model_label(ModelName(name))[:-8] == label[:-8]
    assert len(pods.format_model_label(ModelName(name))) <= 63
    assert pods.format_pod_name(ReplicaId(f"{name}-h-i")) == pod


def test_most_replicas_get_different_ports_below_the_ephemeral_range() -> None:
    ports = [pods.assign_engine_port(ReplicaId(f"ada-0011223344-{n:010x}")) for n in range(1000)]
    assert set(ports) <= set(pods.PORTS)
    assert len(set(ports)) > 900, "by chance some share one"
    assert pods.PORTS[-1] < 32_768


def test_port_of_pod_from_earlier_version_is_read_from_its_container() -> None:
    pod = alive(manifest(model(), "n1/gpu0"))
    pod["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]
    found = pod_state.read_replica_pod(pod)
    assert found is not None
    assert found.port == 8000
    pod["spec"]["containers"][0]["ports"] = []
    assert pod_state.read_replica_pod(pod) is None


def test_env_value_from_a_secret_or_field_is_passed_to_the_pod() -> None:
    of = model(
        "env: {TOKEN: {valueFrom: {secretKeyRef: {name: hub, key: token}}}, A: b, "
        "N: {valueFrom: {fieldRef: {fieldPath: metadata.name}}}}"
    )
    env = manifest(of)["spec"]["containers"][0]["env"]
    assert env == [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": pods.HOME},
        {"name": "A", "value": "b"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": False}}},
        {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]


def test_pod_fields_of_the_model_override_default_pod_fields() -> None:
    of = model(
        "pullSecret: regcred\n"
        "resources: {requests: {cpu: 2, memory: 1Gi}, limits: {memory: 2Gi}}\n"
        "pod:\n"
        "  nodeSelector: {disk: fast}\n"
        "  tolerations: [{key: nvidia.com/gpu, operator: Exists}, {key: team}]\n"
        "  affinity: {podAntiAffinity: {x: 1}}\n"
        "  labels: {team: ml}\n"
        "  volumes: [{name: cache, emptyDir: {}}]\n"
        "  volumeMounts: [{name: cache, mountPath: /cache}]\n"
        "  resources: {limits: {rdma/hca: 1}}\n"
        "  securityContext: {runAsUser: 0}\n"
    )
    defaults = Pod(
        node_selector={"disk": "slow", "zone": "a"}, image_pull_secrets=(SecretName(name="all"),),
        volumes=({"name": "cache", "hostPath": {"path": "/x"}},), priority_class_name="low",
    )  # fmt: skip
    pod = manifest(of, "n1/gpu0", defaults=defaults)
    spec, engine = pod["spec"], pod["spec"]["containers"][0]
    assert spec["nodeSelector"] == {"disk": "fast", "zone": "a"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "team"}]
    assert set(spec["affinity"]) == {"podAntiAffinity", "nodeAffinity"}
    assert spec["imagePullSecrets"] == [{"name": "regcred"}, {"name": "all"}]
    assert spec["volumes"] == [{"name": "cache", "emptyDir": {}}]
    assert engine["volumeMounts"] == [{"name": "cache", "mountPath": "/cache"}]
    assert engine["resources"] == {
        "requests": {"cpu": "2", "memory": "1Gi"},
        "limits": {"nvidia.com/gpu": "1", "memory": "2Gi", "rdma/hca": "1"},
    }
    assert (spec["securityContext"], spec["priorityClassName"]) == ({"runAsUser": 0}, "low")
    assert pod["metadata"]["labels"]["team"] == "ml"


@pytest.mark.parametrize(
    ("priority", "name"), [(-5, None), (0, "usual"), (99, "usual"), (100, "urgent"), (1_000_000, "urgent")]
)
def test_priority_selects_the_class_with_the_highest_threshold_reached(priority: int, name: str | None) -> None:
    table = Settings(priority_classes=(PriorityClass(least=100, name="urgent"), PriorityClass(least=0, name="usual")))
    ranked = table.priority_class(priority)
    assert (None if ranked is None else ranked.name) == name
    assert Settings().priority_class(priority) is None


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("[{least: 1, name: a}, {least: 1, name: b}]", "priorityClasses[1].least: 1 occurs twice"),
        ("[{least: 1, name: A_}]", "priorityClasses[0].name: expected a Kubernetes object name"),
        ("[{least: 1, name: a, hamiPriority: 2}]", "priorityClasses[0].hamiPriority: expected"),
    ],
)
def test_invalid_priority_class_table_is_rejected(table: str, line: str) -> None:
    text = f"apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\npriorityClasses: {table}"
    with pytest.raises(DocumentError) as caught:
        parse_documents([("a.yaml", text)])
    assert line in str(caught.value)


def test_priority_class_name_in_document_overrides_mapped_class() -> None:
    assert "priorityClassName" not in manifest(model())["spec"]
    assert manifest(model(), ranked="usual")["spec"]["priorityClassName"] == "usual"
    own = model("pod: {priorityClassName: mine}")
    assert manifest(own, ranked="usual", defaults=Pod(priority_class_name="all"))["spec"]["priorityClassName"] == "mine"
    assert (
        manifest(model(), ranked="usual", defaults=Pod(priority_class_name="all"))["spec"]["priorityClassName"] == "all"
    )


def test_explicit_cpu_limit_replaces_default_cpu_request() -> None:
    assert merge_resources({"requests": {"cpu": "100m"}}, Resources(limits={"cpu": 4})) == {"limits": {"cpu": "4"}}


def test_applying_pod_overrides_leaves_the_input_pod_unchanged() -> None:
    pod = manifest(model(), "n1/gpu0")
    before = msgspec.json.encode(pod)
    apply_overrides(
        pod, Pod(labels={"a": "b"}, tolerations=(Toleration(key="x"),), resources=Resources(limits={"y": 1}))
    )
    assert msgspec.json.encode(pod) == before


def status(state: dict[str, Any], name: str = "engine") -> list[dict[str, Any]]:
    return [{"name": "sidecar", "state": {"running": {}}}, {"name": name, "state": state}]


def first(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Status of a pod whose engine waits for an injected init container."""
    waits = {"waiting": {"reason": "PodInitializing"}}
    return {
        "initContainerStatuses": [{"name": "istio-proxy", "state": state, **more}],
        "containerStatuses": [{"name": "engine", "state": waits}],
    }


@pytest.mark.parametrize(
    ("of", "ended", "waits", "patience_s"),
    [
        ({}, "", "it is not scheduled yet", None),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                             "message": "0/1 nodes are available"}]},
            "", "Unschedulable: 0/1 nodes are available", None,
        ),
        (
            {"containerStatuses": status({"waiting": {"reason": "ErrImagePull", "message": "no such image"}})},
            "", "ErrImagePull: no such image", 60.0,
        ),
        *(
            ({"containerStatuses": status({"waiting": {"reason": reason}})}, "", reason, limit_s)
            for reason, limit_s in (
                ("ImagePullBackOff", 60.0), ("ImageInspectError", 60.0), ("RegistryUnavailable", 60.0),
                ("SignatureValidationFailed", 60.0),
                ("CreateContainerConfigError", 60.0), ("CreateContainerError", 60.0), ("RunContainerError", 60.0),
                ("InvalidImageName", 0.0), ("ErrImageNeverPull", 0.0)
            )
        ),
        (
            {"containerStatuses": status({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})},
            "was killed for lack of memory (OOMKilled): raise resources.limits.memory, or use a node with more memory",
            "", None,
        ),
        ({"containerStatuses": status({"terminated": {"exitCode": 137, "reason": "Error"}})},
         "was killed by SIGKILL", "", None),
        ({"containerStatuses": status({"terminated": {"exitCode": 3, "reason": "Error", "message": "no GPU"}})},
         "ended with status 3: no GPU", "", None),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory", "", None),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                             "message": '0/1 nodes are available: persistentvolumeclaim "w" not found'}]},
            "", 'Unschedulable: 0/1 nodes are available: persistentvolumeclaim "w" not found', 60.0,
        ),
        ({"phase": "Failed"}, "was ended by its node", "", None),
        (first({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}),
         "", "ImagePullBackOff: init container istio-proxy: not found", 60.0),
        (first({"waiting": {"reason": "CrashLoopBackOff"}}), "", "CrashLoopBackOff: init container istio-proxy", 60.0),
        (first({"waiting": {"reason": "PodInitializing"}}), "", "it is not scheduled yet", None),
        (first({"running": {}}, restartCount=2), "", "CrashLoopBackOff: init container istio-proxy", 60.0),
        (first({"running": {}}, restartCount=1), "", "CrashLoopBackOff: init container istio-proxy", 60.0),
        (first({"terminated": {"exitCode": 1}}), "", "CrashLoopBackOff: init container istio-proxy", 60.0),
        (first({"terminated": {"exitCode": 0}}, restartCount=2), "", "it is not scheduled yet", None),
        (first({"running": {}}), "", "init container istio-proxy has not finished", 60.0),
        ({"phase": "Failed", **first({"terminated": {"exitCode": 1, "reason": "Error", "message": "no iptables"}})},
         "init container istio-proxy ended with status 1: no iptables", "", None),
        ({"phase": "Failed", **first({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})},
         "init container istio-proxy ended with status 137: OOMKilled", "", None),
        ({"containerStatuses": status({"running": {"startedAt": "2026-01-01T00:00:00Z"}})}, "", "", None),
    ],
)  # fmt: skip
def test_pod_status_gives_the_exit_or_wait_reason_and_its_time_limit(
    of: dict[str, Any], ended: str, waits: str, patience_s: float | None
) -> None:
    found = pod_state.read_replica_pod(alive(manifest(model(), "n1/gpu0"), **of))
    assert found is not None
    assert (found.ended, found.waits, found.patience_s) == (ended, waits, patience_s)


@pytest.mark.parametrize(
    ("container", "waits"),
    [
        ({"state": {"running": {}}, "started": False}, "init container istio-proxy has not started"),
        ({"state": {"running": {}}, "started": True}, "it is not scheduled yet"),
        ({"state": {"running": {}}, "started": True, "ready": True, "restartCount": 3}, "it is not scheduled yet"),
        ({"state": {"running": {}}, "restartCount": 1}, "CrashLoopBackOff: init container istio-proxy"),
    ],
)  # fmt: skip
def test_pod_reports_waiting_until_its_native_sidecar_has_started(container: dict[str, Any], waits: str) -> None:
    """For at most 60 s: a webhook has injected it."""
    pod = alive(manifest(model(), "n1/gpu0"), initContainerStatuses=[{"name": "istio-proxy", **container}])
    pod["spec"]["initContainers"] = [{"name": "istio-proxy", "restartPolicy": "Always"}]
    found = pod_state.read_replica_pod(pod)
    assert found is not None
    assert found.waits == waits
    assert found.patience_s == (60.0 if "istio-proxy" in waits else None)


@pytest.mark.parametrize(
    ("of", "is_over"),
    [
        ({"phase": "Running", "containerStatuses": status({"terminated": {"exitCode": 0}})}, False),
        ({"phase": "Failed", "containerStatuses": status({"terminated": {"exitCode": 0}})}, False),  # its sidecar runs
        ({"phase": "Failed", "containerStatuses": status({"terminated": {"exitCode": 0}})[1:]}, True),
        ({"phase": "Failed", **first({"terminated": {"exitCode": 1}})}, True),
        ({"phase": "Failed"}, True),
    ],
)
def test_pod_has_ended_only_if_phase_is_final_and_no_container_runs(of: dict[str, Any], is_over: bool) -> None:
    found = pod_state.read_replica_pod(alive(manifest(model(), "n1/gpu0"), **of))
    assert found is not None
    assert found.is_over is is_over


@pytest.mark.parametrize(
    ("type_", "reason"),
    [("DisruptionTarget", "EvictionByEvictionAPI"), ("TerminationTarget", "WorkloadEvictedDueToPreempted")],
)
def test_pod_evicted_by_kubernetes_or_kueue_has_its_disruption_reason(type_: str, reason: str) -> None:
    fields = {"type": type_, "status": "True", "reason": reason, "message": "drained"}
    found = pod_state.read_replica_pod(alive(manifest(model()), conditions=[fields]))
    assert found is not None
    assert found.disrupted == f"{reason}: drained"


@pytest.mark.parametrize(("drains_s", "seconds"), [(600, 590), (12, 6), (1, 1)])
def test_pre_stop_sleep_is_shorter_than_a_grace_period_above_one_second(drains_s: int, seconds: int) -> None:
    pod = manifest(model(f"drainSecondsMax: {drains_s}"))
    before = pod_state.read_replica_pod(alive(pod))
    pods.add_pre_stop_sleep(pod)
    assert pod["spec"]["terminationGracePeriodSeconds"] == drains_s
    assert pod["spec"]["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": seconds}}}
    after = pod_state.read_replica_pod(alive(pod))
    assert before is not None
    assert after is not None
    assert (before.lingers, after.lingers) == (False, True)


def test_scheduling_gated_pod_counts_as_unschedulable() -> None:
    message = "Scheduling is blocked due to non-empty scheduling gates"
    fields = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": message}
    pod = alive(manifest(model()), conditions=[fields])
    pod["spec"].pop("nodeName", None)
    pod["status"].pop("containerStatuses", None)
    found = pod_state.read_replica_pod(pod)
    assert found is not None
    assert found.waits == f"SchedulingGated: {message}"
    assert is_unschedulable(found.waits)


def test_pod_for_a_declared_node_is_scheduled_by_node_labels_only() -> None:
    of = model("pod: {nodeSelector: {zone: z}}")
    launch = engines.build_launch_command(of, None, pods.HOST, pods.PORTS[0], {}, gpus=True)
    spec = pods.build_pod_manifest(replica(of, "nodes[0]/gpu0"), of, launch, "engine:1", None, {"pool": "t4"})["spec"]
    assert (spec["nodeSelector"], "affinity" in spec) == ({"pool": "t4", "zone": "z"}, False)
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(("ready", "usable", "lost"), [("True", True, False), ("False", False, False),
                                                       ("Unknown", False, True)])  # fmt: skip
def test_node_is_lost_only_if_its_ready_status_is_unknown(ready: str, usable: bool, lost: bool) -> None:
    node = {"metadata": {"name": "n"}, "spec": {}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}
    seen = nodes.read_node(node)
    assert (seen.usable, seen.lost, nodes.build_slices([seen])) == (usable, lost, ())


RACK, HOST = "topology.kubernetes.io/rack", "kubernetes.io/hostname"
CPU = "gpu: {count: 0}\n"


def liked(of: Model, *slices: str) -> dict[str, list[tuple[str, int, str]]]:
    """Kind of affinity -> (topology key, weight, Model of the selected pods)."""
    found: dict[str, Any] = manifest(of, *slices)["spec"].get("affinity", {})
    return {
        kind: [
            (term["topologyKey"], one["weight"], term["labelSelector"]["matchLabels"][OURS + "model"])
            for one in expected.get(PREFERRED, ())
            if "labelSelector" in (term := one.get("podAffinityTerm", {}))
        ]
        for kind, expected in found.items()
    }


def test_near_and_spread_of_a_cpu_model_become_pod_affinity_terms() -> None:
    assert liked(model(CPU)) == {}
    assert liked(model(CPU + f"spread: {RACK}")) == {"podAntiAffinity": [(RACK, APART, "ada")]}
    assert liked(model(CPU + f"near: {RACK}")) == {"podAffinity": [(RACK, NEAR, "ada")]}
    both = liked(model(CPU + f"near: {RACK}\nspread: {HOST}"))
    assert both == {"podAffinity": [(RACK, NEAR, "ada")], "podAntiAffinity": [(HOST, APART, "ada")]}


def test_near_and_spread_become_preferred_affinity_not_required() -> None:
    spec = manifest(model(CPU + f"near: {RACK}\nspread: {HOST}"))["spec"]
    assert all(fields.keys() == {PREFERRED} for fields in spec["affinity"].values())


def test_pod_on_planned_node_has_no_preferred_pod_affinity() -> None:
    assert liked(model(f"spread: {RACK}"), "n1/gpu0") == {"nodeAffinity": []}


def test_affinity_from_the_model_spec_is_kept_next_to_generated_terms() -> None:
    other = {"weight": 3, "podAffinityTerm": {"topologyKey": HOST}}
    term = f"{PREFERRED}: [{{weight: 3, podAffinityTerm: {{topologyKey: {HOST}}}}}]"
    laid = f"pod: {{affinity: {{podAntiAffinity: {{{term}}}}}}}\n"
    spec = manifest(model(CPU + laid + f"spread: {RACK}"))["spec"]
    mine, own = spec["affinity"]["podAntiAffinity"][PREFERRED]
    assert (mine, own["podAffinityTerm"]["topologyKey"]) == (other, RACK)


def test_affinity_ignores_pods_of_other_installations() -> None:
    of, owner = model(CPU + f"near: {RACK}\nspread: {HOST}"), Ownership("blue-1")
    one = replica(of)
    launch = engines.build_launch_command(of, None, pods.HOST, pods.assign_engine_port(one.id), {}, gpus=True)
    pod = pods.build_pod_manifest(one, of, launch, "engine:1", owner=owner)
    affinity = pod["spec"]["affinity"]
    terms = [term["podAffinityTerm"] for kind in affinity.values() for term in kind[PREFERRED]]
    selected = [term["labelSelector"]["matchLabels"] for term in terms]
    assert [labels[INSTALLATION] for labels in selected] == ["blue-1", "blue-1"]
    assert all(labels.items() <= pod["metadata"]["labels"].items() for labels in selected)
