"""Rendered charts for many value sets: valid objects, restricted containers, and no unneeded argument."""

from __future__ import annotations

import base64
import importlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import helm_python
import jsonschema
import pytest
import yaml
from cryptography import x509

from autoscaler.documents import parse
from autoscaler.spec import quantity
from pilotlight.cli.main import cli
from pilotlight.processes import gateway
from tests.support.chart import (
    AGENTS_NAME,
    CHART,
    EVERY_SET,
    EVERYTHING,
    ROOT,
    SETS,
    Object,
    Values,
    named,
    objects,
    of_kind,
    pod_specs,
    texts,
)

validate = importlib.import_module("kubernetes_validate").validate  # it has no types
VERSIONS = ("1.30", "1.33", "1.36")
WHOLE = {
    "Namespace", "PriorityClass", "ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}  # fmt: skip
"""Kinds of cluster-scoped objects."""
OF_NODES = {"--weights-store"}
"""Arguments that name folders on nodes."""
SCHEMAS: dict[str, Object] = {
    "monitoring.coreos.com/v1 ServiceMonitor": {
        "required": ["selector", "endpoints"],
        "properties": {
            "selector": {"required": ["matchLabels"]}, "podTargetLabels": {"items": {"type": "string"}},
            "endpoints": {
                "items": {
                    "additionalProperties": False, "required": ["port", "path"],
                    "properties": {
                        "port": {"type": "string"}, "path": {"pattern": "^/"},
                        "interval": {"pattern": "^[0-9]+(ms|s|m)$"},
                    },
                }
            },
        },
    },
    "monitoring.coreos.com/v1 PodMonitor": {
        "required": ["selector", "podMetricsEndpoints"],
        "properties": {
            "selector": {"required": ["matchLabels"]}, "podTargetLabels": {"items": {"type": "string"}},
            "podMetricsEndpoints": {
                "items": {
                    "additionalProperties": False, "required": ["port", "path"],
                    "properties": {
                        "port": {"type": "string"}, "path": {"pattern": "^/"},
                        "interval": {"pattern": "^[0-9]+(ms|s|m)$"},
                        "relabelings": {
                            "items": {
                                "additionalProperties": False,
                                "properties": {"sourceLabels": {"type": "array"}, "targetLabel": {"type": "string"}},
                            }
                        },
                    },
                }
            },
        },
    },
    "monitoring.coreos.com/v1 PrometheusRule": {
        "required": ["groups"],
        "properties": {"groups": {"items": {"required": ["name", "rules"], "properties": {"rules": {"items": {
            "required": ["alert", "expr", "labels", "annotations"],
            "properties": {"annotations": {"required": ["summary", "description"]}},
        }}}}}},
    },
    "gateway.networking.k8s.io/v1 HTTPRoute": {
        "required": ["parentRefs", "rules"], "additionalProperties": False,
        "properties": {
            "parentRefs": {"minItems": 1, "items": {"required": ["name"]}}, "hostnames": {"items": {"type": "string"}},
            "rules": {"items": {
                "additionalProperties": False,
                "properties": {
                    "matches": {}, "timeouts": {"properties": {"request": {"const": "0s"}}},
                    "backendRefs": {"items": {"required": ["name", "port"]}},
                },
            }},
        },
    },
    "cert-manager.io/v1 Certificate": {
        "required": ["secretName", "issuerRef", "commonName"],
        "anyOf": [{"required": ["dnsNames"]}, {"required": ["isCA"]}],
        "properties": {
            "dnsNames": {"minItems": 1},
            "issuerRef": {"required": ["name", "kind"], "properties": {"kind": {"enum": ["Issuer", "ClusterIssuer"]}}},
        },
    },
    "cert-manager.io/v1 Issuer": {
        "minProperties": 1, "maxProperties": 1, "propertyNames": {"enum": ["selfSigned", "ca"]},
    },
}  # fmt: skip
"""The required fields of third-party kinds, by the documentation of their projects."""
each_set = pytest.mark.parametrize("values", EVERY_SET.values(), ids=EVERY_SET.keys())
each_unprivileged_set = pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())


@each_set
def test_helm_lint_of_each_value_set_reports_no_message(values: Values) -> None:
    reported = helm_python.lint(CHART, values, strict=True, kube_version="v1.36.0")
    assert (reported["messages"], reported["errors"]) == ([], [])


@each_set
def test_each_rendered_object_matches_its_kubernetes_schema(values: Values) -> None:
    for one in objects(values):
        kind = f"{one['apiVersion']} {one['kind']}"
        if kind in SCHEMAS:
            jsonschema.validate(one["spec"], SCHEMAS[kind])
            continue
        for version in VERSIONS:
            validate(one, version, strict=True)


@each_set
def test_each_namespaced_object_has_a_namespace_and_all_names_are_unique(values: Values) -> None:
    seen: set[tuple[str, ...]] = set()
    for one in objects(values):
        metadata = one["metadata"]
        whole = one["kind"] in WHOLE
        assert ("namespace" in metadata) is not whole, one["kind"]
        assert metadata["labels"]["app.kubernetes.io/instance"] == "pl"
        key = (one["apiVersion"], one["kind"], metadata.get("namespace", ""), metadata["name"])
        assert key not in seen, "two objects of one name"
        seen.add(key)


@each_unprivileged_set
def test_each_rendered_container_has_a_restricted_security_context(values: Values) -> None:
    for component, spec in pod_specs(values):
        agent = component == "agent"
        pod = spec["securityContext"]
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert agent == (pod.get("runAsUser") == 0)
        assert values.get("openshift") or "runAsUser" in pod
        assert agent or pod["runAsNonRoot"] is True
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
        assert agent or not any("hostPath" in volume for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }, component  # fmt: skip
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            limited = "cpu" in container["resources"].get("limits", {})
            assert not limited or component == "doctor", "a limit of CPU stalls streams"


@each_unprivileged_set
def test_only_the_autoscaler_account_has_api_server_access(values: Values) -> None:
    for one in of_kind(values, "ServiceAccount"):
        assert one["automountServiceAccountToken"] is False
    for component, spec in pod_specs(values):
        assert spec["automountServiceAccountToken"] is (component in {"autoscaler", "doctor"})
        for token in tokens(spec):
            assert token == {"audience": "pilotlight", "expirationSeconds": 3600, "path": "token"}
    bound = {
        subject["name"] for one in of_kind(values, "RoleBinding", "ClusterRoleBinding") for subject in one["subjects"]
    }
    assert {name.rpartition("-")[2] for name in bound} == {"autoscaler"}


def tokens(spec: Object) -> Iterator[Object]:
    """Yield the service account tokens of its projected volumes."""
    for volume in spec.get("volumes", ()):
        for source in volume.get("projected", {}).get("sources", ()):
            if "serviceAccountToken" in source:
                yield source["serviceAccountToken"]


@each_set
def test_every_container_command_line_is_accepted_by_the_program(values: Values) -> None:
    for component, spec in pod_specs(values):
        (container,) = spec["containers"]
        name, *words = (word.replace("$(POD_IP)", "127.0.0.1") for word in container["args"])
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, f"pilotlight {name} of the {component}"
        context = command.make_context(name, list(words))
        assert not context.args
        mounts = tuple(mount["mountPath"] for mount in container.get("volumeMounts", ()))
        for word in words:
            key, _, value = word.partition("=")
            there = key in OF_NODES or not value.startswith("/") or value.startswith(mounts)
            assert there, f"{word}: nothing is mounted there"
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes


@each_set
def test_rendered_settings_load_with_configured_or_default_values(values: Values) -> None:
    (settings,) = (one["data"] for one in of_kind(values, "ConfigMap") if "settings.yaml" in one["data"])
    loaded = parse.parse_documents([("settings.yaml", settings["settings.yaml"])]).settings
    wanted = values.get("settings", {})
    assert loaded.silent_seconds_max == wanted.get("silentSecondsMax", 50), "the chart's default"
    assert loaded.auth == wanted.get("auth", "keys")


@each_set
def test_keys_and_tokens_appear_only_in_secrets(values: Values) -> None:
    for one in objects(values):
        text = yaml.safe_dump(one)
        assert "PRIVATE KEY" not in text
        if one["kind"] != "Secret":
            assert not re.search(r"LS0tLS1CRUdJTi|eyJhbGciOi", text), "a key or token outside of a Secret"
    for _, spec in pod_specs(values):
        for variable in spec["containers"][0].get("env", ()):
            assert not re.search("(?i)secret|token|password", variable["name"])


@each_set
def test_rendered_selectors_match_exactly_the_pods_of_their_component(values: Values) -> None:
    pods = [(one["metadata"]["namespace"], one["spec"]["template"]["metadata"]["labels"])
            for one in of_kind(values, "Deployment", "DaemonSet")]  # fmt: skip
    for one in of_kind(values, "Service", "PodDisruptionBudget"):
        selector = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        found = [labels for namespace, labels in pods
                 if namespace == one["metadata"]["namespace"] and selector.items() <= labels.items()]  # fmt: skip
        same_namespace = values.get("agent", {}).get("namespace") == "home"
        metrics = 3 if same_namespace else 2
        assert len(found) == (metrics if one["metadata"]["name"].endswith("-metrics") else 1), one["metadata"]["name"]


def test_gateway_pod_grace_period_exceeds_its_request_drain_time() -> None:
    spec = named({}, "Deployment", "pl-pilotlight-gateway")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= sleeps + 600, "after a pause in which load balancers leave it"
    assert "--grace=600" in container["args"]


def test_limits_in_settings_are_passed_to_the_gateway_command_line() -> None:
    limits = {"bodyBytesMax": "32Mi", "memoryBytes": "auto", "idleSecondsMax": 30, "headerSecondsMax": 1.5}
    for size in ("32Mi", "1Gi", "2G", "500M", "12k", "33554432", 1048576):
        values = {"settings": {"limits": {**limits, "bodyBytesMax": size}}}
        (container,) = named(values, "Deployment", "pl-pilotlight-gateway")["spec"]["template"]["spec"]["containers"]
        (word,) = (word for word in container["args"] if word.startswith("--limits="))
        taken = gateway.parse_limits(word.removeprefix("--limits="))
        assert taken.body_bytes_max == quantity.parse_bytes(str(size))
        assert (taken.memory_bytes, taken.idle_seconds_max, taken.header_seconds_max) == (0, 30, 1.5)


def test_rendered_nginx_ingress_has_long_timeouts_and_no_buffering() -> None:
    annotations = named(EVERYTHING, "Ingress", "pl-pilotlight-gateway")["metadata"]["annotations"]
    nginx = {key.partition("/")[2]: value for key, value in annotations.items() if key.startswith("nginx.")}
    assert nginx["proxy-buffering"] == nginx["proxy-request-buffering"] == nginx["proxy-next-upstream"] == "off"
    assert int(nginx["proxy-read-timeout"]) > 600
    assert nginx["backend-protocol"] == "HTTPS", "the gateways have a certificate"
    assert annotations["a"] == "b"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nope": 1}, "additional properties 'nope' not allowed"),
        ({"gateway": {"replica": 1}}, "at '/gateway': additional properties 'replica' not allowed"),
        ({"gateway": {"replicas": "2"}}, "at '/gateway/replicas': got string, want integer"),
        ({"settings": {"silentSecondMax": 5}}, "at '/settings': additional properties 'silentSecondMax' not allowed"),
        ({"settings": {"devices": []}}, "additional properties 'devices' not allowed"),
        ({"scope": "all"}, "at '/scope': value must be one of 'cluster', 'namespace'"),
        ({"image": {"digest": "abc"}}, "at '/image/digest'"),
        ({"engines": {"namespace": "Big"}}, "at '/engines/namespace'"),
        ({"scope": "namespace", "contract": {"auth": "token"}}, "contract.auth: token requires scope: cluster"),
        (
            {"engines": {"namespace": "home"}},
            "engines.namespace: home is the release's namespace: with scope cluster, set another",
        ),
        ({"contract": {"certificates": "secret"}}, "contract.secret.client: set the name of the Secret"),
        ({"contract": {"certificates": "certManager"}}, "contract.issuer.name: set the name of the issuer"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: set the Gateway"),
        ({"settings": {"limits": {"bodyBytesMax": "1.5Gi"}}}, "settings.limits: 1.5Gi: expected a whole number"),
        ({"agent": {"trust": [{"configMap": "a", "secret": "b"}]}}, "at '/agent/trust/0': 'oneOf' failed"),
        ({"agent": {"trust": [{"configMap": "a/b"}]}}, "at '/agent/trust/0'"),
        (
            {"agent": {"enabled": True, "trust": [{"configMap": "a"}, {"secret": "a"}]}},
            "agent.trust: a, a: expected each name",
        ),
        *[
            (
                {"agent": {"enabled": True, "trust": [{"configMap": "b"}]}, "settings": {"weights": weights}},
                "settings.weights: /trust/a/one: add the ConfigMap a to agent.trust",
            )
            for weights in (
                {"caFile": "/trust/a/one"},
                {"signatures": {"keys": ["/trust/b/one", "/trust/a/one"]}},
                {"signatures": {"trustedRoot": "/trust/a/one"}},
            )
        ],
    ],
)
def test_invalid_chart_values_are_rejected_with_the_reason(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        texts(values)
    assert message in str(refused.value)


def words(values: Values, component: str) -> list[str]:
    """Return the command line of a component's container."""
    ((_, spec),) = [one for one in pod_specs(values) if one[0] == component]
    found: list[str] = spec["containers"][0]["args"]
    return found


AGENTS: Values = {"agent": {"enabled": True}}
SECRETS: Values = {"server": "a", "client": "b"}


def test_rendered_gateways_and_agents_have_separate_service_accounts() -> None:
    accounts = [word for word in words(AGENTS, "autoscaler") if "account" in word]
    assert accounts == [
        "--gateway-account=pl-pilotlight-gateway",
        f"--agent-account=pilotlight-agents:{AGENTS_NAME}-agent",
    ]


@pytest.mark.parametrize(
    ("contract", "secret", "named"),
    [
        ({}, f"{AGENTS_NAME}-contract-agent", True),
        (
            {"certificates": "certManager", "issuer": {"name": "i", "kind": "ClusterIssuer"}},
            f"{AGENTS_NAME}-contract-agent",
            True,
        ),
        ({"certificates": "secret", "secret": {**SECRETS, "agent": "c"}}, "c", True),
        ({"certificates": "secret", "secret": SECRETS}, "b", False),
    ],
)
def test_agents_mount_their_own_certificate_or_else_the_client_secret(
    contract: Values, secret: str, named: bool
) -> None:
    values = {**AGENTS, "contract": {**contract, "auth": "certificate"}}
    assert ("--agent-certificate-name=pilotlight-agent" in words(values, "autoscaler")) is named
    ((_, spec),) = [one for one in pod_specs(values) if one[0] == "agent"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "contract"]
    assert volume["secret"]["secretName"] == secret


def test_generated_certificates_have_the_name_of_their_role() -> None:
    values = {**AGENTS, "contract": {"auth": "certificate"}}
    sides = (("pl-pilotlight", "client", "pilotlight-gateway"), (AGENTS_NAME, "agent", "pilotlight-agent"))
    for prefix, side, name in sides:
        pem = base64.b64decode(named(values, "Secret", f"{prefix}-contract-{side}")["data"]["tls.crt"])
        names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert names.value.get_values_for_type(x509.DNSName) == [name]


def test_agents_with_token_auth_mount_only_the_ca_certificate() -> None:
    ((_, spec),) = [one for one in pod_specs(AGENTS) if one[0] == "agent"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "contract"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"]


def test_notes_of_an_installation_list_disabled_features_and_commands() -> None:
    notes = {name: texts(values)["NOTES.txt"] for name, values in SETS.items()}
    assert all("helm test pl -n home" in text and "curl" in text and "coldstart" in text for text in notes.values())
    assert "Disabled features" in notes["namespaced"]
    assert "TokenReview" in notes["namespaced"]
    assert "TokenReview" not in notes["defaults"]
    assert "pilotlight key new" in notes["defaults"]
    assert "Every client that reaches the gateway may send requests" in notes["local"]
    assert all("kubectl get models.pilotlight.dev " in text and "--rounds 3" in text for text in notes.values())
    assert all("in a clone, run .venv/bin/pilotlight" in text for text in notes.values())
    assert "KEY=YOUR_KEY pilotlight load coldstart --url http://" in notes["defaults"]
    assert "--ops http://127.0.0.1:8081 --key-env KEY" in notes["defaults"]
    assert "--key-env" not in notes["local"]


@pytest.mark.parametrize("where", ["docs/tutorials/kubernetes.md", "README.md", "NOTES"])
def test_documented_sed_command_sets_the_example_image_to_the_chart_image(where: str) -> None:
    digest = "sha256:" + 64 * "a"
    values = {"image": {"repository": "REGISTRY/pilotlight", "digest": digest}}
    text = texts(values)["NOTES.txt"] if where == "NOTES" else (ROOT / where).read_text()
    (command,) = re.findall(r'sed "([^"]*)" examples/tiny.yaml \| kubectl apply -n pilotlight-engines -f -', text)
    words = ["sed", command, "examples/tiny.yaml"]
    run = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    image = yaml.safe_load(run.stdout)["spec"]["image"]
    assert image == ("REGISTRY/pilotlight@" + digest if where == "NOTES" else "REGISTRY/pilotlight:0.1.0")


@pytest.mark.parametrize(
    ("name", "mounts"),
    [
        ("agents", {"pod-resources": "/var/lib/kubelet/pod-resources", "runtime": "/run/containerd"}),
        ("agents with certificates", {}),
    ],
)
def test_agent_mounts_only_configured_sockets_and_always_has_probes(name: str, mounts: dict[str, str]) -> None:
    ((_, spec),) = [one for one in pod_specs(SETS[name]) if one[0] == "agent"]
    (container,) = spec["containers"]
    folders = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    assert {name: path for name, path in folders.items() if name != "store"} == mounts
    assert all(one["readOnly"] for one in container["volumeMounts"] if one["name"] in mounts)
    assert ("--runtime=/runtime/containerd.sock" in container["args"]) is ("runtime" in mounts)
    assert "--health=0.0.0.0:8082" in container["args"]
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {"health"}
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [("health", 8082), ("peers", 8484)]


def test_agent_pod_mounts_files_named_by_weights_settings() -> None:
    ((_, spec),) = [one for one in pod_specs(EVERYTHING) if one[0] == "agent"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    mounts = spec["containers"][0]["volumeMounts"]
    there = {one["mountPath"]: volumes[one["name"]] for one in mounts if one.get("readOnly")}
    weights = parse.parse_documents([("settings.yaml", named(EVERYTHING, "ConfigMap", "pl-pilotlight-settings")["data"]
                               ["settings.yaml"])]).settings.weights  # fmt: skip
    assert weights.ca_file is not None
    assert there[weights.ca_file.rpartition("/")[0]]["configMap"]["name"] == "registry"
    (key,) = weights.signatures.keys
    assert there[key.rpartition("/")[0]]["secret"] == {"secretName": "signers", "defaultMode": 0o400}


def test_pod_monitor_exists_only_if_agents_and_metrics_are_enabled() -> None:
    monitor = named(EVERYTHING, "PodMonitor", f"{AGENTS_NAME}-agent")
    agents = named(EVERYTHING, "DaemonSet", f"{AGENTS_NAME}-node-agent")
    assert monitor["metadata"]["namespace"] == agents["metadata"]["namespace"], "which is the only one that it looks in"
    assert monitor["metadata"]["labels"]["release"] == "p"
    template = agents["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    alone: Values = {"metrics": {"serviceMonitor": {"enabled": True}}}
    assert [one["kind"] for one in objects(alone) if "monitoring" in one["apiVersion"]] == ["ServiceMonitor"]
    assert of_kind({"agent": {"enabled": True}}, "PodMonitor") == []


def test_agent_gets_the_configured_hugging_face_token_and_aws_role() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    whose = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}
    agent = {**SETS["agents"]["agent"], "env": [token], "annotations": whose}
    ((_, spec),) = [one for one in pod_specs({**SETS["agents"], "agent": agent}) if one[0] == "agent"]
    assert token in spec["containers"][0]["env"]
    account = named({**SETS["agents"], "agent": agent}, "ServiceAccount", f"{AGENTS_NAME}-agent")
    assert account["metadata"]["annotations"] == whose


def test_every_example_document_loads_without_error() -> None:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        if not path.name.startswith("values-"):
            parse.parse_documents([(path.name, path.read_text())])


def test_chart_requires_the_oldest_tested_kubernetes_version() -> None:
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
