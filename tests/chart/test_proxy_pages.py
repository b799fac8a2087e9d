"""The values and objects on the pages about Ingresses, Gateways and load balancers fit the chart."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.support.chart import Object, Values, example, texts
from tests.support.how_to import HOW_TO, code_blocks

validate = importlib.import_module("kubernetes_validate").validate  # it has no types
ANSWER_S_MAX = 540 + 600
"""Default of the longest wait of a request and of its response together."""
NAME, NAMESPACE = "pilotlight", "pilotlight"
"""The release of the pages."""
PAGES = (
    "proxies-ingress-nginx.md",
    "proxies-gateway-api.md",
    "proxies-aws-alb.md",
    "proxies-gke.md",
    "proxies-service.md",
)


def documents(page: str) -> list[list[Object]]:
    """The documents of each YAML block of a page."""
    return [[*yaml.safe_load_all(block)] for block in code_blocks(page, "yaml")]


def values_of(page: str) -> list[Values]:
    """The blocks with values of the chart."""
    return [block[0] for block in documents(page) if "kind" not in block[0]]


def manifests_of(page: str) -> dict[str, Object]:
    """The objects of a page by kind."""
    found = [one for block in documents(page) for one in block if "kind" in one]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def rendered(values: Values) -> dict[str, Object]:
    """The objects that the chart renders for clients, by kind."""
    found = texts(values, name=NAME, namespace=NAMESPACE)
    objects = [one for path in ("gateway.yaml", "entry.yaml") for one in yaml.safe_load_all(found.get(path, ""))]
    return {one["kind"]: one for one in objects if one and one["kind"] in {"Service", "Ingress", "HTTPRoute"}}


def merged(*several: Values) -> Values:
    """The values that helm takes from several files, the last one first."""
    result: Values = {}
    for values in several:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def missing(wanted: Values, given: Values, at: str = "") -> Iterator[str]:
    """Yield the keys whose value is not the wanted one."""
    for key, value in wanted.items():
        if isinstance(value, dict):
            yield from missing(value, given.get(key, {}), f"{at}{key}.")
        elif given.get(key) != value:
            yield f"{at}{key}"


@pytest.mark.parametrize("page", PAGES)
def test_values_on_each_proxy_page_render_valid_kubernetes_objects(page: str) -> None:
    blocks = values_of(page)
    assert blocks, "the page has values"
    for values in (*blocks, merged(*blocks)):
        for kind, one in rendered(values).items():
            if kind != "HTTPRoute":
                validate(one, "1.36", strict=True)


@pytest.mark.parametrize(
    ("page", "file"), [("proxies-aws-alb.md", "values-eks.yaml"), ("proxies-gke.md", "values-gke-dws.yaml")]
)
def test_example_values_file_contains_the_first_values_of_its_proxy_page(page: str, file: str) -> None:
    assert [*missing(values_of(page)[0], example(file))] == []


def test_ingress_nginx_page_lists_exactly_the_annotations_of_the_chart() -> None:
    (values,) = values_of("proxies-ingress-nginx.md")
    ingress = rendered(merged(values, {"gateway": {"tls": {"secretName": "port"}}}))["Ingress"]
    page = (HOW_TO / "proxies-ingress-nginx.md").read_text()
    listed = {
        name: "3600" if "(3600)" in value else value.split("`")[1]
        for names, value in re.findall(r"^ +\| (`[^|]+`) \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", names)
    }
    prefix = "nginx.ingress.kubernetes.io/"
    assert {prefix + name: value for name, value in listed.items()} == ingress["metadata"]["annotations"]


def test_documented_gateway_object_accepts_the_http_route_of_the_chart() -> None:
    (values,) = values_of("proxies-gateway-api.md")
    route, gateway = rendered(values)["HTTPRoute"], manifests_of("proxies-gateway-api.md")["Gateway"]
    assert route["spec"]["parentRefs"] == [{key: gateway["metadata"][key] for key in ("name", "namespace")}]
    (listener,) = gateway["spec"]["listeners"]
    assert route["spec"]["hostnames"] == [listener["hostname"]]
    labels = listener["allowedRoutes"]["namespaces"]["selector"]["matchLabels"]
    assert labels == {"kubernetes.io/metadata.name": route["metadata"]["namespace"]}


def test_documented_alb_idle_timeout_is_between_response_and_gateway_limit() -> None:
    values, with_tls = values_of("proxies-aws-alb.md")
    annotations = rendered(values)["Ingress"]["metadata"]["annotations"]
    aws = {key.partition("/")[2]: value for key, value in annotations.items() if key.startswith("alb.")}
    idle_s = int(aws["load-balancer-attributes"].removeprefix("idle_timeout.timeout_seconds="))
    assert ANSWER_S_MAX < idle_s < values["settings"]["limits"]["idleSecondsMax"]
    attributes = dict(pair.split("=") for pair in aws["target-group-attributes"].split(","))
    gateway = values["gateway"]
    assert (
        int(attributes["deregistration_delay.timeout_seconds"]) >= gateway["preStopSeconds"] + gateway["graceSeconds"]
    )
    both = rendered(merged(values, with_tls))["Ingress"]["metadata"]["annotations"]
    assert annotations.items() < both.items(), "the values with TLS add annotations and replace none"


def test_gke_page_ingress_has_no_class_and_uses_its_backend_config() -> None:
    values, _ = values_of("proxies-gke.md")
    found, config = rendered(values), manifests_of("proxies-gke.md")["BackendConfig"]
    assert "ingressClassName" not in found["Ingress"]["spec"], "the controller of GKE ignores such an Ingress"
    service = found["Service"]["metadata"]
    assert json.loads(service["annotations"]["cloud.google.com/backend-config"]) == {
        "default": config["metadata"]["name"]
    }
    assert config["metadata"]["namespace"] == service["namespace"]
    assert config["spec"]["timeoutSec"] > ANSWER_S_MAX


def test_gke_page_route_and_policies_refer_to_the_service_of_the_chart() -> None:
    _, values = values_of("proxies-gke.md")
    found, manifests = rendered(values), manifests_of("proxies-gke.md")
    assert "HTTPRoute" not in found
    service, route = found["Service"], manifests["HTTPRoute"]
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    ((rule,), (parent,)) = route["spec"]["rules"], route["spec"]["parentRefs"]
    assert rule == {"backendRefs": [{"name": name, "port": port["port"]}]}, "no timeouts, which GKE rejects"
    assert parent == {"name": manifests["Gateway"]["metadata"]["name"]}
    for kind in ("GCPBackendPolicy", "HealthCheckPolicy"):
        assert manifests[kind]["spec"]["targetRef"] == {"group": "", "kind": "Service", "name": name}
    assert manifests["GCPBackendPolicy"]["spec"]["default"]["timeoutSec"] > ANSWER_S_MAX
    namespaces = {one["metadata"]["namespace"] for one in (service, *manifests.values())}
    assert namespaces == {NAMESPACE}


def test_documented_service_idle_timeouts_exceed_the_longest_response_time() -> None:
    aws, azure, _ = values_of("proxies-service.md")
    service = rendered(aws)["Service"]
    (port,) = service["spec"]["ports"]
    key = f"service.beta.kubernetes.io/aws-load-balancer-listener-attributes.TCP-{port['port']}"
    name, _, idle_s = service["metadata"]["annotations"][key].partition("=")
    assert (name, int(idle_s) > ANSWER_S_MAX) == ("tcp.idle_timeout.seconds", True)
    (minutes,) = rendered(azure)["Service"]["metadata"]["annotations"].values()
    assert int(minutes) * 60 > ANSWER_S_MAX


@pytest.mark.parametrize("page", PAGES)
def test_kubectl_get_commands_on_each_proxy_page_name_rendered_objects(page: str) -> None:
    named = {
        f"{kind} {one['metadata']['namespace']} {one['metadata']['name']}".lower()
        for values in values_of(page)
        for kind, one in rendered(values).items()
    } | {
        f"{kind} {one['metadata']['namespace']} {one['metadata']['name']}".lower()
        for kind, one in manifests_of(page).items()
    }
    commands = re.findall(r"kubectl get (\S+) -n (\S+) (\S+)", "\n".join(code_blocks(page, "sh")))
    assert commands, "the page verifies an object"
    for kind, namespace, name in commands:
        assert f"{kind} {namespace} {name}" in named
