"""Allowed connections, checked on the objects, since the test plane has no network plug-in that enforces policies."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from cryptography import x509

from autoscaler.spec.installation_ownership import INSTALLATION, installation_id
from pilotlight.agent.weights.peers import CERTIFIED
from tests.support.chart import AGENTS_NAME, EVERYTHING, SETS, Object, Values, named, of_kind, pod_specs


def policy(values: Values, name: str) -> Object:
    (found,) = [one for one in of_kind(values, "NetworkPolicy") if one["metadata"]["name"].endswith(f"-{name}")]
    spec: Object = found["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    return spec


DNS = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_network_policy_limits_gateway_egress_to_known_destinations(values: Values) -> None:
    spec = policy({**values, "adoption": {}}, "gateway")
    assert spec["ingress"][0] == {"ports": [{"protocol": "TCP", "port": "http"}]}, "clients from anywhere"
    dns, engines, autoscalers = spec["egress"]
    assert dns == DNS
    labels = {"app.kubernetes.io/managed-by": "pilotlight"}
    own = {"matchLabels": {**labels, INSTALLATION: installation_id("home", "pl-pilotlight")}}
    unlabelled = {"matchLabels": labels, "matchExpressions": [{"key": INSTALLATION, "operator": "DoesNotExist"}]}
    place = {"matchLabels": {"kubernetes.io/metadata.name": "pilotlight-engines"}}
    assert engines["to"] == [{"namespaceSelector": place, "podSelector": one} for one in (own, unlabelled)]
    (engines, *_) = [one for one in policy({**values, "adoption": {}}, "autoscaler")["egress"] if "to" in one]
    assert engines["to"] == [{"namespaceSelector": place, "podSelector": one} for one in (own, unlabelled)]
    (autoscaler,) = autoscalers["to"]
    assert autoscaler["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "autoscaler"
    assert autoscalers["ports"] == [{"protocol": "TCP", "port": 8443}]


def test_policies_allow_adopted_pods_only_in_configured_namespaces() -> None:
    for name in ("gateway", "autoscaler"):
        assert {"to": [{"namespaceSelector": {}}]} in policy(EVERYTHING, name)["egress"]
        assert {"namespaceSelector": {}} not in [to for one in policy({}, name)["egress"] for to in one.get("to", [])]
        places = [to for one in policy(SETS["adopting"], name)["egress"] for to in one.get("to", [])]
        for namespace in ("team-a", "team-b"):
            assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}} in places
    for values in SETS.values():
        for one in of_kind(values, "NetworkPolicy"):
            if not one["metadata"]["name"].endswith(("-engines", "-agent")):
                assert "ipBlock" not in str(one), "a gateway reaches no address outside of the cluster"


@pytest.mark.parametrize("name", ["gateway", "autoscaler"])
def test_configured_egress_rules_are_added_to_the_network_policy(name: str) -> None:
    rule = {"ports": [{"port": 443}], "to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]}
    assert policy({"networkPolicy": {f"{name}sEgress": [rule]}}, name)["egress"] == [*policy({}, name)["egress"], rule]


def test_engine_egress_is_dns_only_unless_configured() -> None:
    assert policy({}, "engines")["egress"] == [DNS]
    rule = {"ports": [{"port": 443}]}
    assert policy(EVERYTHING, "engines")["egress"] == [DNS, rule]
    (who,) = policy({}, "engines")["ingress"]
    parts = {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in who["from"]}
    assert parts == {"gateway", "autoscaler"}


def test_only_gateways_and_agents_can_reach_the_autoscaler_api_port() -> None:
    for values, wanted in (({}, {"gateway"}), (SETS["agents"], {"gateway", "agent"})):
        reports, _ = policy(values, "autoscaler")["ingress"]
        parts = {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in reports["from"]}
        assert (parts, reports["ports"]) == (wanted, [{"protocol": "TCP", "port": "contract"}])


def test_configured_sources_can_read_metrics_of_all_components() -> None:
    who = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values = {**SETS["agents"], "networkPolicy": {"metricsFrom": who}}
    for name in ("gateway", "autoscaler", "agent"):
        assert policy(values, name)["ingress"][-1] == {"from": who, "ports": [{"protocol": "TCP", "port": "health"}]}


def test_only_agents_of_the_release_can_reach_the_peer_port() -> None:
    spec = policy(SETS["agents"], "agent")
    agents = {"podSelector": spec["podSelector"]}
    assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "pl"
    (asked,) = [one for one in spec["ingress"] if one["ports"] == [{"protocol": "TCP", "port": "peers"}]]
    assert asked["from"] == [agents]
    assert {"to": [agents], "ports": [{"protocol": "TCP", "port": 8484}]} in spec["egress"]
    metrics = [one for one in spec["ingress"] if one is not asked]
    assert [one["ports"] for one in metrics] == [[{"protocol": "TCP", "port": "health"}]]


def test_disabled_peering_removes_peer_port_and_certificates() -> None:
    agent = SETS["agents"]["agent"]
    values = {**SETS["agents"], "agent": {**agent, "peers": {"enabled": False}}}
    assert "8484" not in str(policy(values, "agent"))
    ((_, pod),) = [one for one in pod_specs(values) if one[0] == "agent"]
    assert "peer" not in str(pod)
    assert not [one for one in of_kind(values, "Secret") if one["metadata"]["name"].endswith("-peers")]


def test_agent_peer_certificate_has_its_own_ca_unless_a_secret_is_named() -> None:
    made = named(SETS["agents"], "Secret", f"{AGENTS_NAME}-agent-peers")
    assert made["metadata"]["namespace"] == "pilotlight-agents"
    assert set(made["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    others = [one["data"]["ca.crt"] for one in of_kind(SETS["agents"], "Secret") if one != made and one.get("data")]
    assert made["data"]["ca.crt"] not in others
    cert = x509.load_pem_x509_certificate(base64.b64decode(made["data"]["tls.crt"]))
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [CERTIFIED]
    agent = SETS["agents"]["agent"]
    given = {**SETS["agents"], "agent": {**agent, "peers": {"secret": "mine"}}}
    ((_, pod),) = [one for one in pod_specs(given) if one[0] == "agent"]
    assert [one["secret"]["secretName"] for one in pod["volumes"] if one["name"] == "peers"] == ["mine"]
    assert not [one for one in of_kind(given, "Secret") if one["metadata"]["name"].endswith("-peers")]


def test_engine_network_policy_selects_only_pods_of_its_installation() -> None:
    """The policy selects the labels that autoscalers set."""
    for values in ({}, {"scope": "namespace"}, {"fullnameOverride": "a" * 60}):
        words = pod_words(values)
        (policy,) = [one for one in of_kind(values, "NetworkPolicy") if one["metadata"]["name"].endswith("-engines")]
        label = installation_id(words["home"], words["lease"])
        assert policy["spec"]["podSelector"]["matchLabels"][INSTALLATION] == label


def pod_words(values: dict[str, Any]) -> dict[str, str]:
    """Return the options of the autoscaler: name -> value."""
    ((_, spec),) = [one for one in pod_specs(values) if one[0] == "autoscaler"]
    words = (word.removeprefix("--").partition("=") for word in spec["containers"][0]["args"])
    return {name: value for name, _, value in words}


def test_disabled_network_policies_are_not_rendered() -> None:
    assert not list(of_kind({**SETS["agents"], "networkPolicy": {"enabled": False}}, "NetworkPolicy"))


def test_engine_namespace_is_restricted_and_agent_namespace_privileged() -> None:
    labels = named({}, "Namespace", "pilotlight-engines")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    agents = named(SETS["agents"], "Namespace", "pilotlight-agents")["metadata"]["labels"]
    assert agents["pod-security.kubernetes.io/enforce"] == "privileged"
    for one in of_kind(SETS["agents"], "Namespace"):
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
