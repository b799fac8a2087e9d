"""Addresses are removed from texts of other programs."""

from __future__ import annotations

from time import process_time

import pytest

from autoscaler.providers.kubernetes_access import SAID_MAX, AnswerError
from autoscaler.providers.kueue.objects import queue_closed_reason
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.provisioning_request.objects import RequestCondition
from autoscaler.text import redact_addresses


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('Post "https://fm.lab.example.com:8443/v1?x=1": EOF', 'Post "(address)": EOF'),
        ("dial tcp 10.96.0.1:443: connect: connection refused", "dial tcp (address): connect: connection refused"),
        ("from 192.168.1.20, again", "from (address), again"),
        ("dial tcp [fd00::1]:443: i/o timeout", "dial tcp (address): i/o timeout"),
        ("lookup webhook.cro-system.svc:443 failed", "lookup (address) failed"),
        ("no route to host fd00:10::5", "no route to host (address)"),
        ("from fe80::1%eth0: reset, ::ffff:10.0.0.1 too", "from (address): reset, (address) too"),
        ("2001:db8:0:1:2:3:4:5 (or 2001:db8::/32), ::1.", "(address) (or (address)/32), (address)."),
        (
            'Post "https://fm.rack.example/x": dial tcp: lookup fm.rack.example on 10.96.0.10:53: no such host',
            'Post "(address)": dial tcp: lookup (address) on (address): no such host',
        ),
        (
            "x509: certificate is valid for 2001:db8::17, 192.0.2.1, *.lab.example, not fm.rack.example: gpu.count=1",
            "x509: certificate is valid for (address), (address), (address), not (address): gpu.count=1",
        ),
        ("the lookup of gpu.count, not gpu.model, failed", "the lookup of gpu.count, not gpu.model, failed"),
        ("GPU 0000:18:00.0 (00000000:18:00.0) of a:b", "GPU 0000:18:00.0 (00000000:18:00.0) of a:b"),
        ("image a@sha256:0123456789abcdef0123", "image a@sha256:0123456789abcdef0123"),
        ("8c7f0a5e-1d2b-4c3d-9e8f-001122334455", "8c7f0a5e-1d2b-4c3d-9e8f-001122334455"),
        ("std::bad_alloc of node::gpu :: 2026-11-27T12:30:45Z", "std::bad_alloc of node::gpu :: 2026-11-27T12:30:45Z"),
        ("there is no free device in the fabric", "there is no free device in the fabric"),
        ("pods 3.5.2 of GPU-1234-ab are at 12:30:45", "pods 3.5.2 of GPU-1234-ab are at 12:30:45"),
        (
            'composabilityrequests.cro.hpsys.ibm.ie.com "x" not found',
            'composabilityrequests.cro.hpsys.ibm.ie.com "x" not found',
        ),
    ],
)
def test_network_addresses_in_a_text_are_redacted_and_the_rest_is_kept(message: str, expected: str) -> None:
    assert redact_addresses(message) == expected


@pytest.mark.parametrize(
    "piece", ["a", "a+", "a:", "a.", "[:", ":", "::", "1.", "f:f:f:f:f:f:f:x", "0::", "lookup a.", "a.b, not "]
)
def test_redaction_of_a_long_text_takes_linear_time(piece: str) -> None:
    """A quadratic implementation would take minutes for some of these texts instead of at most a second."""
    long = piece * (150_000 // len(piece))
    began_s = process_time()
    for text in (long, f"[{long}", f"lookup {long}x", f"certificate is valid for {long}"):
        redact_addresses(text)
    assert process_time() - began_s < 10.0


def test_address_in_an_api_server_error_is_redacted() -> None:
    assert "10.0.0.7" not in str(
        AnswerError(500, "InternalError", 'failed calling webhook: Post "https://10.0.0.7:9443"')
    )


def test_address_in_a_provider_refusal_is_redacted() -> None:
    assert (
        str(RefusedError("pool g4 is not ready: dial tcp 10.0.0.7:443")) == "pool g4 is not ready: dial tcp (address)"
    )


def test_truncated_message_contains_no_partial_address() -> None:
    message = "x" * (SAID_MAX - len("X: 10.96.0")) + " 10.96.0.1:443"
    assert "10.96" not in RequestCondition(True, "X", message, 0.0).says()
    queue = {"status": {"conditions": [{"type": "Active", "status": "False", "reason": "X", "message": message}]}}
    assert "10.96" not in queue_closed_reason(queue)
