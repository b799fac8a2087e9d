"""Permissions that the chart grants to autoscalers: exactly this list, so that additions are deliberate decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import helm_python
import pytest

from autoscaler.drivers.kubernetes.adoption.objects import COST, INTENT, REPLICA, SHOWN
from autoscaler.kubernetes.rbac import Scope, list_required_rights
from autoscaler.spec.capacity import kinds_of
from pilotlight.models.document_loading import load_settings
from tests.support.chart import SETS, Object, Values, objects, of_kind, pod_specs

READ = ("get", "list", "watch")
LEASE = "pl-pilotlight"
CONFIG_MAPS = ("nvidia-device-plugin", "time-slicing-config", "time-slicing-config-all")


class Grant(NamedTuple):
    """One verb on one resource, in the whole cluster or one namespace; `name`: on that object only."""

    where: str
    group: str
    resource: str
    verb: str
    name: str = ""


def grants(where: str, group: str, resource: str, verbs: tuple[str, ...], name: str = "") -> set[Grant]:
    return {Grant(where, group, resource, verb, name) for verb in verbs}


def documents(where: str) -> set[Grant]:
    return {
        *grants(where, "pilotlight.dev", "models", READ),
        *grants(where, "pilotlight.dev", "models/status", ("get", "patch")),
        *grants(where, "", "events", ("create", "patch")),
        *grants(where, "coordination.k8s.io", "leases", ("create",)),
        *grants(where, "coordination.k8s.io", "leases", ("get", "list", "update"), "models.pilotlight.dev"),
    }


def adoption(where: str) -> set[Grant]:
    return {
        *grants(where, "apps", "deployments", READ),
        *grants(where, "apps", "statefulsets", READ),
        *grants(where, "apps", "deployments/scale", ("get", "patch")),
        *grants(where, "apps", "statefulsets/scale", ("get", "patch")),
        *grants(where, "apps", "deployments/status", ("patch",)),
        *grants(where, "apps", "statefulsets/status", ("patch",)),
        *grants(where, "autoscaling", "horizontalpodautoscalers", ("list", "watch")),
        *grants(where, "keda.sh", "scaledobjects", ("list", "watch")),
    }


def adopted(where: str) -> set[Grant]:
    return adoption(where) | grants(where, "", "pods", ("patch",)) | grants(where, "", "events", ("list",))


def home(engines: str) -> set[Grant]:
    return {
        *grants(engines, "", "pods", (*READ, "create", "patch", "delete")),
        *grants(engines, "policy", "poddisruptionbudgets", READ),
        *grants(engines, "", "events", ("list",)),
        *grants(engines, "", "resourcequotas", READ),
        *grants(engines, "", "limitranges", ("list", "watch")),
        *grants("home", "coordination.k8s.io", "leases", ("create",)),
        *grants("home", "coordination.k8s.io", "leases", (*READ, "update"), LEASE),
        *grants("home", "", "pods", READ),
    }


CLUSTER = {
    *grants("*", "", "nodes", READ),
    *grants("*", "", "pods", READ),
    *grants("*", "authentication.k8s.io", "tokenreviews", ("create",)),
    *grants("*", "pilotlight.dev", "tenants", READ),
    *(one for name in CONFIG_MAPS for one in grants("*", "", "configmaps", READ, name)),
    *documents("*"),
    *grants("*", "resource.k8s.io", "resourceslices", ("list", "watch")),
    *grants("*", "resource.k8s.io", "resourceclaims", ("list", "watch")),
    *home("pilotlight-engines"),
    *grants("pilotlight-engines", "resource.k8s.io", "resourceclaims", ("get", "create", "patch", "delete")),
}
CORDON = grants("*", "", "nodes", ("patch",))
CUTTING = grants("gpu-operator", "", "configmaps", ("create",)) | grants(
    "gpu-operator", "", "configmaps", ("get", "patch"), "pilotlight-mig"
)
VOLUMES = grants("*", "", "persistentvolumes", ("create", "patch")) | grants(
    "pilotlight-engines", "", "persistentvolumeclaims", ("create", "patch")
)
KUEUE = {Grant("pilotlight-engines", "kueue.x-k8s.io", resource, "get") for resource in ("localqueues", "workloads")}
QUEUED = {
    *grants(
        "pilotlight-engines", "autoscaling.x-k8s.io", "provisioningrequests",
        ("get", "list", "create", "patch", "delete"),
    ),
    *grants("pilotlight-engines", "", "podtemplates", ("get", "list", "create", "patch", "delete")),
}  # fmt: skip
FABRIC = grants(
    "*", "cro.hpsys.ibm.ie.com", "composabilityrequests", ("list", "watch", "create", "patch", "delete")
) | grants("*", "cro.hpsys.ibm.ie.com", "composableresources", ("list", "watch", "patch"))
ADDED = (
    grants("*", "karpenter.sh", "nodepools", ("get",))
    | grants("*", "karpenter.sh", "nodeclaims", ("get", "list", "create", "patch", "delete"))
    | grants("*", "", "nodes", ("patch",))
)
GROUPS = grants("*", "cluster.x-k8s.io", "machinedeployments", ("list",)) | {
    Grant("*", group, "machinesets", "list") for group in ("cluster.x-k8s.io", "machine.openshift.io")
}
CAPACITY = {
    "fabric": ("cro",), "nodes": ("karpenter", "clusterAutoscaler"), "composed": ("redfish",),
    "published": ("redfish", "publish"),
    "queued": ("provisioningRequest",), "kueue": ("kueue",),
}  # fmt: skip
LEARNT = grants("home", "", "configmaps", ("create",)) | grants(
    "home", "", "configmaps", ("get", "patch"), "pilotlight-learnt"
)
COMPOSED = grants("home", "", "configmaps", ("get", "patch"), "pilotlight-fabric")
PUBLISHED = (
    grants("*", "resource.k8s.io", "resourceslices", ("create", "patch", "delete"))
    | grants("*", "resource.k8s.io", "resourceclaims", ("get",))
    | grants("*", "resource.k8s.io", "resourceclaims/status", ("patch",))
    | grants("*", "resource.k8s.io", "resourceclaims/driver", ("arbitrary-node:patch",), "fabric.pilotlight.dev")
)
WANTED: dict[str, set[Grant]] = {
    "defaults": CLUSTER,
    "minimal": CLUSTER,
    "everything": CLUSTER | CORDON | CUTTING | adopted("*") | VOLUMES,
    "agents": CLUSTER | VOLUMES,
    "fabric": CLUSTER | FABRIC | GROUPS | LEARNT | CORDON,
    "nodes": CLUSTER | ADDED | GROUPS | LEARNT,
    "composed": CLUSTER | COMPOSED | GROUPS | LEARNT | CORDON,
    "published": CLUSTER | COMPOSED | PUBLISHED | GROUPS | LEARNT | CORDON,
    "queued": CLUSTER | QUEUED | GROUPS | LEARNT,
    "kueue": CLUSTER | KUEUE | GROUPS | LEARNT,
    "kubeai": CLUSTER | grants("*", "kubeai.org", "models", READ),
    "adopting": CLUSTER | adopted("team-a") | adopted("team-b"),
    "namespaced": documents("home") | adoption("home") | home("home"),
    "namespaced and minimal": documents("home") | home("home"),
}


def given(values: Values) -> Iterator[Grant]:
    """Return the rules of the rendered roles, with the scope in which they apply."""
    for role in of_kind(values, "ClusterRole", "Role"):
        where = role["metadata"].get("namespace", "*")
        for rule in role["rules"]:
            assert rule.keys() <= {"apiGroups", "resources", "verbs", "resourceNames"}
            names = rule.get("resourceNames", [""])
            for group, resource, verb, name in product(rule["apiGroups"], rule["resources"], rule["verbs"], names):
                yield Grant(where, group, resource, verb, name)


@pytest.mark.parametrize("name", WANTED)
def test_rbac_rules_rendered_for_each_value_set_are_exactly_as_expected(name: str) -> None:
    found = list(given(SETS[name]))
    assert set(found) == WANTED[name]
    assert len(found) == len(set(found)), "listed once"


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_every_rendered_role_is_bound_only_to_the_autoscaler_account(values: Values) -> None:
    def key(one: Object) -> tuple[str, str, str]:
        return one["kind"].removesuffix("Binding"), one["metadata"].get("namespace", ""), one["metadata"]["name"]

    bindings = of_kind(values, "RoleBinding", "ClusterRoleBinding")
    for binding in bindings:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (key(binding)[0], key(binding)[2])
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "home")
        assert subject["name"].endswith("-autoscaler")
    assert {key(one) for one in of_kind(values, "Role", "ClusterRole")} == {key(one) for one in bindings}


@pytest.mark.parametrize(
    ("name", "scope", "where", "cordons"),
    [
        ("defaults", "cluster", (), False), ("everything", "cluster", None, True),
        ("fabric", "cluster", (), False), ("nodes", "cluster", (), False), ("composed", "cluster", (), False),
        ("published", "cluster", (), False),
        ("queued", "cluster", (), False), ("kueue", "cluster", (), False),
        ("adopting", "cluster", ("team-a", "team-b"), False), ("namespaced", "namespace", ("home",), False),
    ],
)  # fmt: skip
def test_doctor_checks_exactly_the_permissions_that_the_chart_grants(
    name: str, scope: Scope, where: tuple[str, ...] | None, cordons: bool
) -> None:
    place = {"cluster": "*", "home": "home", "engines": "pilotlight-engines" if scope == "cluster" else "home"}
    asked = {
        Grant(one.namespace or place[one.where], one.group, one.resource, verb, LEASE if one.named else one.name)
        for one in list_required_rights(
            scope,
            where,
            cordons=cordons,
            cutting=("gpu-operator", "pilotlight-mig") if cordons else None,
            volumes=cordons,
            capacity=CAPACITY.get(name, ()),
        )
        for verb in one.verbs
    }
    assert asked == WANTED[name]


@pytest.mark.parametrize("name", CAPACITY)
def test_doctor_checks_the_provider_kinds_listed_in_settings(name: str, tmp_path: Path) -> None:
    (text,) = (
        one["data"]["settings.yaml"] for one in of_kind(SETS[name], "ConfigMap") if "settings.yaml" in one["data"]
    )
    (file := tmp_path / "settings.yaml").write_text(text)
    (spec,) = (spec for part, spec in pod_specs(SETS[name]) if part == "doctor")
    named = [one for one in spec["containers"][0]["args"] if one.startswith("--capacity=")]
    assert named == [f"--capacity={kind}" for kind in sorted(kinds_of(load_settings(file).capacity))]


SETTINGS_OPTION = "--settings=/documents/settings.yaml"


@pytest.mark.parametrize(
    ("name", "scaler", "doctor"),
    [
        ("defaults", ["--no-adoption"], []),
        ("everything", [], ["--adoption", "--cordon", "--cutting=gpu-operator/pilotlight-mig", "--volumes"]),
        ("adopting", ["--adopt-in=team-a", "--adopt-in=team-b"], ["--adopt-in=team-a", "--adopt-in=team-b"]),
        ("fabric", ["--no-adoption"], ["--capacity=cro", SETTINGS_OPTION]),
        ("nodes", ["--no-adoption"], ["--capacity=clusterAutoscaler", "--capacity=karpenter", SETTINGS_OPTION]),
        ("composed", ["--no-adoption"], ["--capacity=redfish", SETTINGS_OPTION]),
        ("published", ["--no-adoption"], ["--capacity=publish", "--capacity=redfish", SETTINGS_OPTION]),
        ("queued", ["--no-adoption"], ["--capacity=provisioningRequest", SETTINGS_OPTION]),
        ("kueue", ["--no-adoption"], ["--capacity=kueue", SETTINGS_OPTION]),
        ("namespaced", ["--adopt-in=home"], ["--adopt-in=home"]),
    ],
)
def test_doctor_command_line_matches_the_features_of_the_autoscaler(
    name: str, scaler: list[str], doctor: list[str]
) -> None:
    for component, wanted in (("autoscaler", scaler), ("doctor", doctor)):
        (spec,) = (spec for part, spec in pod_specs(SETS[name]) if part == component)
        words = [
            one
            for one in spec["containers"][0]["args"]
            if re.match("--((no-)?adopt|cordon|cutting|volumes|capacity|settings)", one)
        ]
        assert words == wanted


@pytest.mark.parametrize("values", [{"everywhere": True}, {"namespaces": ["home", "team-a"]}])
def test_namespace_scope_rejects_adoption_in_other_namespaces(values: Values) -> None:
    with pytest.raises(helm_python.HelmError, match=r"scope namespace: adoption\."):
        objects({"scope": "namespace", "adoption": values})


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_no_rendered_role_allows_wildcards_or_access_to_secrets(values: Values) -> None:
    for grant in given(values):
        assert "*" not in (grant.group, grant.resource, grant.verb)
        assert grant.resource not in {"secrets", "pods/exec", "serviceaccounts", "clusterroles", "roles"}


@pytest.mark.parametrize("name", ["namespaced", "namespaced and minimal"])
def test_namespace_scope_renders_all_objects_in_one_namespace(name: str) -> None:
    for one in objects(SETS[name]):
        assert one["metadata"].get("namespace") == "home", one["kind"]


def test_repartitioning_may_patch_nodes_and_only_the_configured_config_map() -> None:
    settings = {"cutting": {"namespace": "nvidia", "configMap": "mine"}}
    found = set(given({"cutting": {"enabled": True}, "settings": settings}))
    assert found == CLUSTER | CORDON | grants("nvidia", "", "configmaps", ("create",)) | grants(
        "nvidia", "", "configmaps", ("get", "patch"), "mine"
    )
    assert set(given({"scope": "namespace", "cutting": {"enabled": True}})) <= WANTED["namespaced"]


@pytest.mark.parametrize(
    ("mount", "agents", "made"),
    [
        ("auto", True, True),
        ("volume", True, True),
        ("image", True, False),
        ("hostPath", True, False),
        ("auto", False, False),
    ],
)
def test_volume_permissions_exist_only_if_agents_mount_weights_as_volumes(mount: str, agents: bool, made: bool) -> None:
    values = {"agent": {"enabled": agents, "storePath": "/data/"}, "settings": {"weights": {"mount": mount}}}
    assert set(given(values)) >= VOLUMES if made else not VOLUMES & set(given(values))
    policies = of_kind(values, "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    assert len(policies) == (2 if made else 0)
    if made:
        policy, binding = policies
        assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
        path, *_ = (one["expression"] for one in policy["spec"]["validations"])
        assert "object.spec.local.path == '/data/weights'" in path
        (who,) = (one["expression"] for one in policy["spec"]["matchConditions"])
        assert who == "request.userInfo.username == 'system:serviceaccount:home:pl-pilotlight-autoscaler'"


@pytest.mark.parametrize(
    ("adoption", "made"),
    [({}, False), ({"kubeai": True}, False), ({"namespaces": ["a"]}, True), ({"everywhere": True}, True)],
)
def test_adoption_in_namespaces_adds_policies_that_limit_the_autoscaler(adoption: Values, made: bool) -> None:
    found = of_kind({"adoption": adoption}, "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    assert len(found) == (4 if made else 0)
    for policy, binding in zip(found[::2], found[1::2], strict=True):
        assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
        assert policy["spec"]["failurePolicy"] == "Fail"
        who = policy["spec"]["matchConditions"][0]["expression"]
        assert who == "request.userInfo.username == 'system:serviceaccount:home:pl-pilotlight-autoscaler'"
    if made:
        own = found[0]["spec"]["variables"][0]["expression"]
        assert own == str([REPLICA, INTENT, COST]).replace(", ", ",")
        assert SHOWN in found[2]["spec"]["validations"][-1]["expression"]


def test_engine_namespace_is_privileged_only_with_host_path_mounts() -> None:
    def enforced(mount: str) -> str:
        found = of_kind({"settings": {"weights": {"mount": mount}}}, "Namespace")
        label: str = found[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        return label

    assert [enforced(mount) for mount in ("auto", "volume", "image", "hostPath")] == 3 * ["restricted"] + ["privileged"]


def test_agents_may_read_only_the_configured_pull_secrets() -> None:
    values = {**SETS["agents"], "agent": {**SETS["agents"]["agent"], "pullSecrets": ["ghcr"]}}
    rules = [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["ghcr"], "verbs": ["get"]}]
    for of, wanted in ((SETS["agents"], []), (values, [rules])):
        roles = [one for one in of_kind(of, "Role") if one["metadata"]["name"].endswith("-agent")]
        assert [one["rules"] for one in roles] == wanted
        assert all(one["metadata"]["namespace"] == "pilotlight-engines" for one in roles)
        ((_, spec),) = [one for one in pod_specs(of) if one[0] == "agent"]
        assert spec["automountServiceAccountToken"] is bool(wanted)
        assert ("--pull-secrets=pilotlight-engines" in spec["containers"][0]["args"]) is bool(wanted)
        assert "--store=/var/lib/pilotlight/weights" in spec["containers"][0]["args"]


def test_doctor_pod_mounts_settings_and_provider_secrets() -> None:
    (spec,) = (spec for part, spec in pod_specs(SETS["composed"]) if part == "doctor")
    (scaler,) = (spec for part, spec in pod_specs(SETS["composed"]) if part == "autoscaler")
    mounts = {one["mountPath"]: one["name"] for one in spec["containers"][0]["volumeMounts"]}
    secrets = [one for one in scaler["volumes"] if one["name"].startswith("secret-")]
    assert [one for one in spec["volumes"] if one["name"].startswith("secret-")] == secrets
    assert secrets
    assert {f"/secrets/{one['secret']['secretName']}" for one in secrets} | {"/documents"} == set(mounts)
    (plain,) = (spec for part, spec in pod_specs(SETS["defaults"]) if part == "doctor")
    assert "volumes" not in plain
