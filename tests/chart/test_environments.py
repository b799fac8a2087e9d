"""Cluster requirements for pods: OpenShift, dual stack, workload identity, limit quotas, umbrella charts."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
import yaml

from tests.support.chart import AGENTS_NAME, SETS, named, objects, of_kind, pod_specs, texts

OPENSHIFT, LABELLED = SETS["openshift"], SETS["labelled"]
USERS = {"runAsUser", "runAsGroup", "fsGroup"}


def test_openshift_pods_set_no_user_except_the_agent() -> None:
    users = {part: USERS & spec["securityContext"].keys() for part, spec in pod_specs(OPENSHIFT)}
    assert {part for part, found in users.items() if found} == {"agent"}
    assert all(spec["securityContext"]["runAsNonRoot"] for part, spec in pod_specs(OPENSHIFT) if part != "agent")
    assert all(spec["securityContext"].keys() >= USERS for part, spec in pod_specs({}) if part != "agent")


def dns_ports(values: dict[str, Any]) -> set[int]:
    """Return the ports of the rule that allows DNS, which is the same in every policy with egress rules."""
    policies = [one for one in of_kind(values, "NetworkPolicy") if one["spec"].get("egress")]
    rules = [rule["ports"] for one in policies for rule in one["spec"]["egress"] if rule.keys() == {"ports"}]
    found = [ports for rule in rules if 53 in (ports := {port["port"] for port in rule})]
    assert len(found) == len(policies) >= 3
    assert all(ports == found[0] for ports in found)
    return found[0]


@pytest.mark.parametrize(
    ("pod", "context"),
    [
        ({}, {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}),
        ({"securityContext": {"runAsUser": 7}}, {"runAsUser": 7}),
    ],
)
def test_openshift_engines_set_no_user_unless_configured(pod: dict[str, Any], context: Any) -> None:
    values = {"openshift": True, "settings": {"pod": pod}}
    (made,) = [one for one in of_kind(values, "ConfigMap") if "settings.yaml" in one["data"]]
    assert yaml.safe_load(made["data"]["settings.yaml"])["pod"]["securityContext"] == context


def test_network_policies_allow_configured_and_openshift_dns_ports() -> None:
    assert dns_ports({}) == {53}
    assert dns_ports({"openshift": True}) == {53, 5353}
    assert dns_ports(OPENSHIFT) == {53, 1053, 5353}


def test_labels_and_annotations_in_values_are_set_on_pods() -> None:
    for kind, name, label in (
        ("Deployment", "pl-pilotlight-gateway", "team"), ("Deployment", "pl-pilotlight-autoscaler", "team"),
        ("DaemonSet", f"{AGENTS_NAME}-node-agent", "azure.workload.identity/use"),
    ):  # fmt: skip
        made = named(LABELLED, kind, name)
        metadata = made["spec"]["template"]["metadata"]
        assert label in metadata["labels"]
        assert made["spec"]["selector"]["matchLabels"].items() <= metadata["labels"].items()
        assert metadata["annotations"]["a"] == name.rpartition("-")[2]
    agent = named(LABELLED, "DaemonSet", f"{AGENTS_NAME}-node-agent")["spec"]["template"]
    assert agent["spec"]["priorityClassName"] == "system-node-critical"
    assert agent["spec"]["affinity"] == {"nodeAffinity": {}}


def test_every_pod_has_the_configured_image_digest_and_pull_secrets() -> None:
    digest, secrets = "sha256:" + 64 * "a", [{"name": "login"}]
    image = {"repository": "reg:5000/x", "tag": "ignored", "digest": digest, "pullSecrets": secrets}
    found = dict(pod_specs({"image": image, "agent": {"enabled": True}}))
    assert found.keys() == {"gateway", "autoscaler", "agent", "doctor"}
    for spec in found.values():
        assert [one["image"] for one in spec["containers"]] == [f"reg:5000/x@{digest}"]
        assert spec["imagePullSecrets"] == secrets


def test_pod_labels_in_values_do_not_override_selector_labels() -> None:
    changed = {"gateway": {"podLabels": {"app.kubernetes.io/component": "other"}}}
    labels = named(changed, "Deployment", "pl-pilotlight-gateway")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "gateway"


def test_service_is_dual_stack_only_if_values_set_a_family_policy() -> None:
    spec = named(LABELLED, "Service", "pl-pilotlight-gateway")["spec"]
    assert (spec["ipFamilyPolicy"], spec["loadBalancerClass"]) == ("PreferDualStack", "service.k8s.aws/nlb")
    assert not {"ipFamilyPolicy", "loadBalancerClass"} & named({}, "Service", "pl-pilotlight-gateway")["spec"].keys()


def test_helm_test_pod_has_configured_resource_limits() -> None:
    (spec,) = (spec for part, spec in pod_specs(LABELLED) if part == "doctor")
    assert spec["containers"][0]["resources"]["limits"] == {"cpu": "100m", "memory": "256Mi"}


def test_agent_network_policy_allows_egress_to_cloud_metadata_servers() -> None:
    (policy,) = [one for one in of_kind(SETS["agents"], "NetworkPolicy") if "agent" in one["metadata"]["name"]]
    rules = [rule for rule in policy["spec"]["egress"] if "169.254.169.254/32" in str(rule)]
    assert [{port["port"] for port in rule["ports"]} for rule in rules] == [{80, 988}]


@pytest.mark.parametrize("values", [{"enabled": True}, {"enabled": False}, {"global": {"a": {"b": 1}}}])
def test_chart_accepts_the_enabled_and_global_values_of_an_umbrella_chart(values: dict[str, Any]) -> None:
    assert texts(values)


def test_unknown_chart_value_is_rejected_with_its_name() -> None:
    with pytest.raises(helm_python.HelmError, match="enable"):
        texts({"enable": True})


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_each_value_set_renders_every_object_only_once(values: dict[str, Any]) -> None:
    keys = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects(values)]
    assert sorted(map(str, keys)) == sorted(map(str, set(keys)))


def test_agents_in_the_release_namespace_get_no_namespace_of_their_own() -> None:
    at_home = SETS["agents in the release's namespace"]
    assert [one["metadata"]["name"] for one in of_kind(at_home, "Namespace")] == ["pilotlight-engines"]
    assert named(at_home, "DaemonSet", "pl-pilotlight-node-agent")["metadata"]["namespace"] == "home"
    assert {one["spec"]["issuerRef"]["kind"] for one in of_kind(at_home, "Certificate")} == {"Issuer"}


def test_agents_are_rejected_in_an_engine_namespace_the_chart_creates() -> None:
    with pytest.raises(helm_python.HelmError, match=r"agent\.namespace: agents use host paths"):
        texts({"agent": {"enabled": True, "namespace": "pilotlight-engines"}})
    values = SETS["agents in the engines' namespace"]
    assert not of_kind(values, "Namespace")
    assert named(values, "DaemonSet", f"{AGENTS_NAME}-node-agent")["metadata"]["namespace"] == "shared"


def test_rendering_twice_with_cert_manager_or_secrets_is_identical() -> None:
    """Argo CD and Flux need this, because they have no `lookup`."""
    secrets = {"certificates": "secret", "secret": {"server": "a", "client": "b", "agent": "c"}}
    agents: dict[str, Any] = {"enabled": True}
    for contract, agent in (
        ({"certificates": "certManager", "issuer": {"name": "i", "kind": "ClusterIssuer"}}, agents),
        (secrets, agents | {"peers": {"secret": "d"}}),
    ):
        one, other = (texts({"contract": contract, "agent": agent}) for _ in range(2))
        assert one == other
    generated = [texts({"agent": agents}) for _ in range(2)]
    assert generated[0] != generated[1], "the test would see it"


def test_chart_with_cert_manager_has_a_separate_authority_for_agents() -> None:
    values = SETS["agents in the release's namespace"]
    issuers = {one["metadata"]["name"]: one["spec"] for one in of_kind(values, "Issuer")}
    signed = {
        one["metadata"]["name"]: one["spec"]
        for one in of_kind(values, "Certificate")
        if "peers" in one["metadata"]["name"]
    }
    name = "pl-pilotlight-agent-peers"
    assert issuers == {
        f"{name}-self-signed": {"selfSigned": {}},
        f"{name}-authority": {"ca": {"secretName": f"{name}-authority"}},
    }
    assert (signed[f"{name}-authority"]["isCA"], signed[f"{name}-authority"]["issuerRef"]["name"]) == (
        True,
        f"{name}-self-signed",
    )
    assert (signed[name]["dnsNames"], signed[name]["issuerRef"]["name"]) == (["pilotlight-agent"], f"{name}-authority")
    mounted = [
        one["secret"]["secretName"]
        for one in named(values, "DaemonSet", "pl-pilotlight-node-agent")["spec"]["template"]["spec"]["volumes"]
        if one["name"] == "peers"
    ]
    assert mounted == [name]


def test_helm_test_pod_has_configured_labels_and_annotations() -> None:
    (doctor,) = [one for one in of_kind(LABELLED, "Pod") if one["metadata"]["name"].endswith("-doctor")]
    assert doctor["metadata"]["labels"]["team"] == "ml"
    assert doctor["metadata"]["annotations"]["a"] == "b"
    assert doctor["metadata"]["annotations"]["helm.sh/hook"] == "test"


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"gateway": {"service": {"loadBalancerClass": "x"}}}, "loadBalancerClass: set gateway.service.type"),
        ({"listenHost": "::"}, "listenHost"),
    ],
)
def test_ipv6_listen_host_or_unused_load_balancer_class_is_rejected(values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(helm_python.HelmError, match=wrong):
        texts(values)
