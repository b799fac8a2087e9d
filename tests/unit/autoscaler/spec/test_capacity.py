"""`capacity:` in Settings: each invalid key is reported in one line that names it."""

from __future__ import annotations

import pytest

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.spec.capacity import KINDS, PROVIDERS_MAX, Cro, ProviderSettings, Redfish, check_providers
from autoscaler.spec.decode import WrongKeyError, decode_value
from autoscaler.spec.pod import API_VERSION

NO_URLS = [
    "http://f", "https://", "https://user:hunter2@f", "f", "https://f?a=b", "https://f/redfish/v1", "https://f:99999",
    "https://f:0", "https://:8443", "https://a b",
]  # fmt: skip
URLS = ["https://f/", "https://f.example:65535", "https://[fd00::1]:8443"]
REDFISH = "redfish: {url: 'https://fabric', systems: {w1: /redfish/v1/Systems/1}}"


def wrong(*entries: str) -> str:
    text = f"apiVersion: {API_VERSION}\nkind: Settings\ncapacity: [{', '.join(entries)}]"
    with pytest.raises(DocumentError) as caught:
        parse_documents([("s.yaml", text)], {})
    return str(caught.value).removeprefix("s.yaml: Settings: ")


def test_capacity_entry_is_parsed_to_its_provider_kind_and_keep_seconds() -> None:
    text = f"apiVersion: {API_VERSION}\nkind: Settings\ncapacity: [{{name: rack, cro: {{model: A100}}, hedge: true}}]"
    (entry,) = parse_documents([("s.yaml", text)], {}).settings.capacity
    assert (entry.name, entry.kinds, entry.cro, entry.hedge) == ("rack", ("cro",), Cro(model="A100"), True)
    assert entry.keep_seconds == "auto"
    (entry,) = parse_documents([("s.yaml", text.replace("hedge: true", "keepSeconds: 0"))], {}).settings.capacity
    assert entry.keep_seconds == 0.0
    (entry,) = parse_documents([("s.yaml", text.replace("cro: {model: A100}", REDFISH))], {}).settings.capacity
    assert entry.redfish == Redfish(url="https://fabric", systems={"w1": "/redfish/v1/Systems/1"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{cro: {model: a}}", "capacity[0].name: missing; expected text"),
        ("{name: 'a b', cro: {model: a}}", "capacity[0].name: "),
        ("{name: 'team/gpu:t4', karpenter: {nodePool: a}}", "capacity[0].name: expected 1 to 63 characters"),
        ("{name: a}", f"capacity[0]: expected exactly one of {', '.join(KINDS)}; found none"),
        ("{name: a, cro: {model: a}, kueue: {localQueue: q}}", "capacity[0]: expected exactly one of "),
        ("{name: a, crow: {model: a}}", "capacity[0].crow: unknown key (did you mean cro?)"),
        ("{name: a, cro: {}}", "capacity[0].cro.model: missing"),
        ("{name: a, cro: {model: ''}}", "capacity[0].cro.model: expected"),
        ("{name: a, cro: {model: a}, expectedSeconds: 0}", "capacity[0].expectedSeconds: expected"),
        ("{name: a, cro: {model: a}, hedge: 1}", "capacity[0].hedge: expected"),
        ("{name: a, cro: {model: a}, keepSeconds: -1}", "capacity[0].keepSeconds: expected"),
        ("{name: a, cro: {model: a}, keepSeconds: never}", "capacity[0].keepSeconds: expected"),
        ("{name: a, cro: {model: a}, headroom: -1}", "capacity[0].headroom: expected"),
        (
            "{name: a, kueue: {localQueue: q}, headroom: 1}",
            "capacity[0].headroom: expected 0: a `kueue` provider orders capacity only for a Model that waits",
        ),
        ("{name: a, karpenter: {nodePool: A_B}}", "capacity[0].karpenter.nodePool: expected a Kubernetes object name"),
        ("{name: a, clusterAutoscaler: {}}", "capacity[0].clusterAutoscaler.nodeLabels: missing"),
        ("{name: a, clusterAutoscaler: {nodeLabels: {'a b': c}}}", "capacity[0].clusterAutoscaler.nodeLabels.a b: "),
        (
            "{name: a, clusterAutoscaler: {nodeLabels: {}, priorityClass: A_B}}",
            "capacity[0].clusterAutoscaler.priorityClass: expected a Kubernetes object name",
        ),
        ("{name: a, kueue: {localQueue: A_B}}", "capacity[0].kueue.localQueue: expected a Kubernetes object name"),
        ("{name: a, provisioningRequest: {maxRunSeconds: 1}}", "capacity[0].provisioningRequest.class: missing"),
        (
            "{name: a, provisioningRequest: {class: a/b}}",
            "capacity[0].provisioningRequest.class: expected a Kubernetes object name",
        ),
        (
            "{name: a, provisioningRequest: {class: a, maxRunSeconds: 0.5}}",
            "capacity[0].provisioningRequest.maxRunSeconds: expected at least 1",
        ),
        ("{name: a, provisioningRequest: {class: a, selector: {a b: c}}}", "capacity[0].provisioningRequest.selector"),
        ("{name: a, redfish: {url: 'https://f', systems: {}}}", "capacity[0].redfish.systems: expected at least one"),
        (
            "{name: a, redfish: {url: 'https://f', systems: {w1: /1}}}",
            "capacity[0].redfish.systems.w1: expected a path",
        ),
        (
            "{name: a, redfish: {url: 'https://f', systems: {w1: /redfish/v1/Systems/1, w2: /redfish/v1/Systems/1}}}",
            "capacity[0].redfish.systems.w2: is already the system of w1",
        ),
        (f"{{name: a, {REDFISH[:-1]}, caFile: ca.pem}}}}", "capacity[0].redfish.caFile: expected an absolute path"),
        (
            f"{{name: a, {REDFISH[:-1]}, secretRef: A_B}}}}",
            "capacity[0].redfish.secretRef: expected a Kubernetes object name",
        ),
    ],
)
def test_invalid_capacity_entry_is_rejected_with_its_path(entry: str, message: str) -> None:
    assert wrong(entry).startswith(message)


@pytest.mark.parametrize("url", NO_URLS)
def test_invalid_redfish_url_is_rejected_and_its_password_not_repeated(url: str) -> None:
    line = wrong(f"{{name: a, redfish: {{url: '{url}', systems: {{w1: /redfish/v1/Systems/1}}}}}}")
    assert line.startswith("capacity[0].redfish.url: expected https://HOST")
    assert "hunter2" not in line


@pytest.mark.parametrize("url", URLS)
def test_https_redfish_url_with_a_host_and_no_path_is_accepted(url: str) -> None:
    check_providers([ProviderSettings(name="a", redfish=Redfish(url=url, systems={"w1": "/redfish/v1/Systems/1"}))])


@pytest.mark.parametrize("name", ["rack/a", "rack:1"])
def test_redfish_provider_name_that_is_no_configmap_key_is_rejected(name: str) -> None:
    assert wrong(f"{{name: '{name}', {REDFISH}}}").startswith("capacity[0].name: expected only letters, digits, ")
    check_providers([ProviderSettings(name=name, cro=Cro(model="a"))])


def test_duplicate_provider_name_or_too_many_providers_are_rejected() -> None:
    entry = {"name": "a", "cro": {"model": "A100"}}
    check_providers([decode_value(entry, ProviderSettings)])
    with pytest.raises(WrongKeyError, match="`a` occurs twice"):
        check_providers([decode_value(entry, ProviderSettings)] * 2)
    with pytest.raises(WrongKeyError, match=f"at most {PROVIDERS_MAX}"):
        check_providers([decode_value(entry, ProviderSettings)] * (PROVIDERS_MAX + 1))


def test_redfish_system_of_two_providers_is_rejected_unless_one_is_closing() -> None:
    one = f"{{name: a, {REDFISH}}}"
    two = "name: b, redfish: {url: 'https://FABRIC/', systems: {n0: /redfish/v1/Systems/0, n1: /redfish/v1/Systems/1/}}"
    refused = (
        "capacity[1].redfish.systems.n1: provider `a` also lists this Redfish system: list it for one provider only, "
        "or retire one of them with `closing: true`"
    )
    assert wrong(one, f"{{{two}}}") == refused
    text = f"apiVersion: {API_VERSION}\nkind: Settings\ncapacity: [{one}, {{{two}, closing: true}}]"
    assert len(parse_documents([("s.yaml", text)], {}).settings.capacity) == 2


def test_redfish_provider_with_publish_and_an_invalid_name_is_rejected() -> None:
    fabric = Redfish(url="https://fabric.example", systems={"w1": "/redfish/v1/Systems/1"}, publish=True)
    check_providers([ProviderSettings(name="pod2", redfish=fabric)])
    with pytest.raises(WrongKeyError) as caught:
        check_providers([ProviderSettings(name="Pod_2", redfish=fabric)])
    assert caught.value.path == ("capacity", 0, "name")
