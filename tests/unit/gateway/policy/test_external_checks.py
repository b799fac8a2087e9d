"""External checks without a network: allowed addresses, messages and verdicts."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from gateway.errors import CallError
from gateway.http.response_reader import ResponseHead
from gateway.policy.external_check_addresses import AddressRules
from gateway.policy.external_checks import (
    CheckFailedError,
    CheckMessage,
    read_answer_body,
    read_request_body,
    read_verdict,
    render_check,
)

HOST = "guard.example"
ALWAYS_FORBIDDEN = [
    "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "0.1.2.3", "::", "169.254.169.254", "fe80::1", "fe80::1%eth0",
    "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "fec0::1", "100.100.100.200", "168.63.129.16",
    "fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0.0.0.0", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "localhost", "",
]  # fmt: skip
PRIVATE = ["10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "fd00::1", "::ffff:10.1.2.3", "64:ff9b::a01:203"]
PUBLIC = ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", ALWAYS_FORBIDDEN)
def test_loopback_link_local_or_metadata_address_is_rejected_by_default(address: str) -> None:
    for rules in (AddressRules(), AddressRules(service_networks=["10.96.0.0/12"], service_address="10.96.0.1")):
        assert not rules.allows(HOST, address)
    assert AddressRules([HOST]).allows("Guard.Example.", address)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_address_is_rejected_in_a_cluster_of_unknown_service_cidr(address: str) -> None:
    assert AddressRules().allows(HOST, address)
    assert not AddressRules(service_address="10.96.0.1").allows(HOST, address)
    assert AddressRules(service_networks=["10.96.0.0/12"], service_address="10.96.0.1").allows(HOST, address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_allowed_with_any_cluster_service_address(address: str) -> None:
    for rules in (AddressRules(), AddressRules(service_address="10.96.0.1"), AddressRules(service_address="fd00::1")):
        assert rules.allows(HOST, address)


def test_address_in_a_cluster_service_network_is_rejected() -> None:
    rules = AddressRules(service_networks=["10.96.0.0/12", "fd00:1::/108"])
    assert not any(rules.allows(HOST, one) for one in ("10.96.0.1", "10.111.255.255", "::ffff:10.96.0.1", "fd00:1::5"))
    assert rules.allows(HOST, "10.112.0.1")
    public = AddressRules(service_address="34.118.224.1")
    assert not public.allows(HOST, "34.118.224.9")
    assert public.allows(HOST, "34.119.0.1")


def test_address_in_the_settings_is_allowed_for_each_host() -> None:
    rules = AddressRules(["127.0.0.1", "0:0::1"])
    assert rules.allows("127.0.0.1", "127.0.0.1")
    assert rules.allows(HOST, "127.0.0.1")
    assert rules.allows(HOST, "::1")
    assert not rules.allows(HOST, "127.0.0.2")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"null", b'{"allow":1}', b'{"allow":null}', b'{"allow":true,"reason":1}', b"\xff", b"[" * 99_999],
)
def test_check_response_without_a_valid_decision_raises_an_error(content: bytes) -> None:
    with pytest.raises(CheckFailedError):
        read_verdict(200, content)


def test_verdict_reason_is_made_printable_and_cut_to_200_characters() -> None:
    assert read_verdict(200, b'{"allow":false,"reason":"a\\nb\\u001b[1m"}').reason == "a b [1m"
    assert len(read_verdict(200, b'{"allow":false,"reason":"%b"}' % (b"x" * 5000)).reason) == 200


@pytest.mark.parametrize("status", [201, 204, 301, 403, 500])
def test_check_response_with_a_status_other_than_200_raises_an_error(status: int) -> None:
    with pytest.raises(CheckFailedError, match=f"status {status}"):
        read_verdict(status, b'{"allow":true}')


def test_request_body_that_is_not_valid_json_is_rejected() -> None:
    for valid in (b'{"a":"\xc3\xa4"}', b'{"a":"\\ud83d"}', b'{"a":"\\\\ud83d"}'):
        assert bytes(read_request_body(valid)) == valid
    for invalid in (b"{", b'{"a":[1,,2]}', b'{"a":"\xff"}', b"[" * 99_999):
        with pytest.raises(CallError):
            read_request_body(invalid)


def head(kind: bytes, fields: bytes = b"") -> ResponseHead:
    return ResponseHead(200, False, 0, True, kind, fields)


def test_response_body_is_sent_to_a_check_as_json_text_or_null() -> None:
    def sent(kind: bytes, content: bytes, fields: bytes = b"") -> object:
        body = read_answer_body(head(kind, fields), content)
        return json.loads(render_check(CheckMessage("answer", "m", "t", "id", "/v1/x", body)))["body"]

    assert sent(b"application/json; charset=utf-8", b'{"a":1}') == {"a": 1}
    assert sent(b"application/json", b'{"a":') == '{"a":'
    assert sent(b"text/plain", b"a\xff") == "a\ufffd"
    assert sent(b"text/event-stream", b"data: x\n\n") == "data: x\n\n"
    assert sent(b"audio/mpeg", b"\xff") is None
    assert sent(b"application/json", b"x", b"Content-Encoding: gzip\r\n") is None
    assert bytes(read_answer_body(head(b"application/json"), b"[]")) == bytes(Raw(b"[]"))
