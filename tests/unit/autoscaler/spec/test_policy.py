"""Request policies in documents: valid ones, errors with the key to change, and the message for gateways."""

from __future__ import annotations

import json

import msgspec
import pytest
import yaml

from autoscaler.contract import PolicyCheck, PolicyEntry
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents, read_document
from autoscaler.documents.partial_decoding import read_known_keys
from autoscaler.documents.render import to_yaml
from autoscaler.routing.catalogue import front_settings, model_entry, tenant_entry
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.policy import MEMBERS_MAX

URL = "https://guard.example/check"


def model(**policy: object) -> dict[str, object]:
    spec = {"engine": "command", "command": ["x", "{port}"], "aliases": ["m:high"], "policy": policy}
    return {"apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": {"name": "m"}, "spec": spec}


def tenant(**policy: object) -> dict[str, object]:
    return {
        "apiVersion": "pilotlight.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "t"},
        "spec": {"policy": policy},
    }


def settings(**checks: object) -> dict[str, object]:
    return {"apiVersion": "pilotlight.dev/v1alpha1", "kind": "Settings", "checks": checks}


def refusal(document: object) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_documents([("f", yaml.safe_dump(document))])
    return str(caught.value)


def test_policy_survives_a_yaml_round_trip_and_is_sent_to_gateways() -> None:
    value = model(
        defaults={"temperature": 0.7, "stop": ["a"]},
        forced={"chat_template_kwargs": {"a": {"b": [1, None, True]}}, "user": "ü"},
        caps={"max_tokens": 4096},
        removed=["tools", "timestamp_granularities[]"],
        forcedByName={"m:high": {"reasoning_effort": "high"}, "m": {"seed": 1}},
        requestCheck={"url": URL, "timeoutSeconds": 2, "failOpen": True},
        answerCheck={"url": "http://[2001:db8::1]:8080/x?y=1", "streams": "reject"},
    )
    documents = parse_documents([("f", yaml.safe_dump(value))])
    assert parse_documents([("f", to_yaml(documents))]) == documents
    assert model_entry(documents.models[0]).policy == PolicyEntry(
        defaults={"temperature": "0.7", "stop": '["a"]'},
        forced={"chat_template_kwargs": '{"a":{"b":[1,null,true]}}', "user": '"ü"'},
        caps={"max_tokens": 4096},
        removed=("tools", "timestamp_granularities[]"),
        forced_by_name={"m:high": {"reasoning_effort": '"high"'}, "m": {"seed": "1"}},
        request_check=PolicyCheck(url=URL, timeout_s=2, fail_open=True),
        answer_check=PolicyCheck(url="http://[2001:db8::1]:8080/x?y=1", rejects_streams=True),
    )
    assert read_known_keys(value).policy == documents.models[0].spec.policy


def test_empty_policy_is_not_sent_to_gateways() -> None:
    documents = parse_documents([("f", yaml.safe_dump_all([model(), tenant(removed=[])]))])
    assert model_entry(documents.models[0]).policy is None
    assert tenant_entry(documents.tenants[0]).policy is None
    assert b"policy" not in msgspec.json.encode(model_entry(documents.models[0]))


@pytest.mark.parametrize(
    ("policy", "path", "text"),
    [
        ({"forced": {"model": "x"}}, "forced.model", "a policy cannot change this member"),
        ({"defaults": {"Stream": True}}, "defaults.Stream", "a policy cannot change this member"),
        ({"caps": {"id_slot": 1}}, "caps.id_slot", "a policy cannot change this member"),
        ({"removed": ["a", "messages"]}, "removed[1]", "a policy cannot change this member"),
        ({"removed": ["prompt"]}, "removed[0]", "a policy cannot change this member"),
        ({"removed": ["input"]}, "removed[0]", "a policy cannot change this member"),
        ({"removed": [""]}, "removed[0]", "expected the name of a member"),
        ({"forced": {"a.b": 1}}, "forced.a.b", "at the top level"),
        ({"forced": {'a"': 1}}, 'forced.a"', "expected the name of a member"),
        ({"forced": {"a" * 65: 1}}, "forced.", "expected the name of a member"),
        ({"caps": {"n": -1}}, "caps.n", "expected a number, at least 0"),
        ({"caps": {"n": "1"}}, "caps.n", "expected a number"),
        ({"caps": {"n": float("inf")}}, "caps.n", "expected a finite number"),
        ({"forced": {"n": float("nan")}}, "forced.n", "expected a finite number"),
        ({"forced": {"n": 1 << 63}}, "forced.n", "expected a value of JSON"),
        ({"forced": {"a": [[[[[1]]]]]}}, "forced.a[0][0][0][0]", "at most 4 nested lists or maps"),
        ({"forced": {"max_tokens": 1, "n_predict": 2}}, "forced.n_predict", "has the same meaning as max_tokens"),
        ({"forced": {f"a{number}": 1 for number in range(MEMBERS_MAX + 1)}}, "forced", "expected at most 64"),
        ({"removed": ["a"] * (MEMBERS_MAX + 1)}, "removed", "expected at most 64"),
        ({"forced": {"a": "x" * 20_000}}, "", "expected at most 16384"),
        ({"remove": ["a"]}, "remove", "did you mean removed?"),
        ({"requestCheck": {}}, "requestCheck.url", "missing"),
        ({"requestCheck": {"url": "ftp://x/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "https://u:p@x/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "https:///x"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://127.1/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://2130706433/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://0177.0.0.1/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://x:99999/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://x\\@y/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://x/\ny"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://x/#y"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": "http://[::1/"}}, "requestCheck.url", "expected a URL"),
        ({"requestCheck": {"url": URL, "timeoutSeconds": 0}}, "requestCheck.timeoutSeconds", "above 0 and at most 60"),
        ({"requestCheck": {"url": URL, "streams": "skip"}}, "requestCheck.streams", "unknown key"),
        ({"answerCheck": {"url": URL}}, "answerCheck.streams", "missing; expected one of reject, skip"),
        ({"answerCheck": {"url": URL, "streams": "check"}}, "answerCheck.streams", "expected one of reject, skip"),
    ],
)
def test_invalid_policy_is_rejected_with_its_key_in_one_line(policy: dict[str, object], path: str, text: str) -> None:
    for document in (model(**policy), tenant(**policy)):
        message = refusal(document)
        assert f"spec.policy{'.' * bool(path)}{path}" in message
        assert text in message
        assert "\n" not in message


def test_forced_by_name_accepts_only_names_of_the_model() -> None:
    message = refusal(model(forcedByName={"other": {"seed": 1}}))
    assert "spec.policy.forcedByName.other: is not a name of this Model" in message
    assert "spec.policy.forcedByName: unknown key" in refusal(tenant(forcedByName={"m": {"seed": 1}}))
    assert "forcedByName.m.stream: a policy cannot" in refusal(model(forcedByName={"m": {"stream": True}}))


@pytest.mark.parametrize("value", ["\ud800", ["a", "\udfff"], {"\ud800": 1}])
def test_policy_value_with_an_unpaired_surrogate_is_rejected(value: object) -> None:
    with pytest.raises(WrongKeyError, match="expected a value of JSON") as caught:
        read_document(model(forced={"user": value}))
    assert caught.value.path[:4] == ("spec", "policy", "forced", "user")


def test_check_hosts_and_networks_are_sent_to_gateways_unless_invalid() -> None:
    value = settings(hosts=["guard.svc.cluster.local", "127.0.0.1", "::1"], serviceNetworks=["10.96.0.0/12"])
    found = front_settings(parse_documents([("f", yaml.safe_dump(value))]).settings, ())
    assert found.check_hosts == ("guard.svc.cluster.local", "127.0.0.1", "::1")
    assert found.service_networks == ("10.96.0.0/12",)
    assert "checks.hosts[0]: expected a host name or address" in refusal(settings(hosts=["http://x"]))
    for network in ("10.96.0.1/12", "10.96.0.0", "x"):
        assert "checks.serviceNetworks[0]: expected a network" in refusal(settings(serviceNetworks=[network]))


def test_model_with_an_invalid_policy_is_available_to_no_tenant() -> None:
    assert read_known_keys(model(forced={"model": "x"})).tenants == ()
    assert read_known_keys(model(forced=json.loads("[" * 50 + "]" * 50))).tenants == ()
    assert read_known_keys(model(removed=["tools"])).tenants is None
