"""What clusters demand of pods: OpenShift, dual stack, workload identity, quotas that demand limits, umbrella charts."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.kit.chart import SETS, named, of_kind, pod_specs, texts

OPENSHIFT, LABELLED = SETS["openshift"], SETS["labelled"]
USERS = {"runAsUser", "runAsGroup", "fsGroup"}


def test_on_openshift_pods_set_no_user_but_the_agents_that_need_root() -> None:
    users = {part: USERS & spec["securityContext"].keys() for part, spec in pod_specs(OPENSHIFT)}
    assert {part for part, found in users.items() if found} == {"agent"}
    assert all(spec["securityContext"]["runAsNonRoot"] for part, spec in pod_specs(OPENSHIFT) if part != "agent")
    assert all(USERS <= spec["securityContext"].keys() for part, spec in pod_specs({}) if part != "agent")


def dns_ports(values: dict[str, Any]) -> set[int]:
    """Of the first rule of each policy, which is DNS."""
    policies = [one for one in of_kind(values, "NetworkPolicy") if "Egress" in one["spec"]["policyTypes"]]
    found = [{port["port"] for port in one["spec"]["egress"][0]["ports"]} for one in policies]
    assert len(found) >= 3
    assert all(ports == found[0] for ports in found)
    return found[0]


def test_dns_may_have_other_ports() -> None:
    assert dns_ports({}) == {53}
    assert dns_ports({"openshift": True}) == {53, 5353}
    assert dns_ports(OPENSHIFT) == {53, 1053, 5353}


def test_pods_have_labels_and_annotations_of_their_own() -> None:
    for kind, name, label in (
        ("Deployment", "pl-pilotlight-gateway", "team"), ("Deployment", "pl-pilotlight-autoscaler", "team"),
        ("DaemonSet", "pl-pilotlight-agent", "azure.workload.identity/use"),
    ):  # fmt: skip
        made = named(LABELLED, kind, name)
        labels = made["spec"]["template"]["metadata"]["labels"]
        assert label in labels
        assert made["spec"]["selector"]["matchLabels"].items() <= labels.items()
    agent = named(LABELLED, "DaemonSet", "pl-pilotlight-agent")["spec"]["template"]
    assert agent["metadata"]["annotations"] == {"a": "b"}
    assert agent["spec"]["priorityClassName"] == "system-node-critical"
    assert agent["spec"]["affinity"] == {"nodeAffinity": {}}


def test_labels_that_select_pods_cannot_be_changed() -> None:
    changed = {"gateway": {"podLabels": {"app.kubernetes.io/component": "other"}}}
    labels = named(changed, "Deployment", "pl-pilotlight-gateway")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "gateway"


def test_the_service_may_be_of_two_families_and_of_a_class() -> None:
    spec = named(LABELLED, "Service", "pl-pilotlight-gateway")["spec"]
    assert (spec["ipFamilyPolicy"], spec["loadBalancerClass"]) == ("PreferDualStack", "service.k8s.aws/nlb")
    assert not {"ipFamilyPolicy", "loadBalancerClass"} & named({}, "Service", "pl-pilotlight-gateway")["spec"].keys()


def test_the_pod_of_helm_test_can_have_limits_that_a_quota_demands() -> None:
    (spec,) = (spec for part, spec in pod_specs(LABELLED) if part == "doctor")
    assert spec["containers"][0]["resources"]["limits"] == {"cpu": "100m", "memory": "256Mi"}


def test_agents_reach_the_metadata_servers_of_clouds() -> None:
    (policy,) = [one for one in of_kind(SETS["agents"], "NetworkPolicy") if "agent" in one["metadata"]["name"]]
    rules = [rule for rule in policy["spec"]["egress"] if "169.254.169.254/32" in str(rule)]
    assert [{port["port"] for port in rule["ports"]} for rule in rules] == [{80, 988}]


@pytest.mark.parametrize("values", [{"enabled": True}, {"enabled": False}, {"global": {"a": {"b": 1}}}])
def test_values_of_an_umbrella_chart_are_accepted(values: dict[str, Any]) -> None:
    assert texts(values)


def test_other_values_are_refused() -> None:
    with pytest.raises(helm_python.HelmError, match="enable"):
        texts({"enable": True})
