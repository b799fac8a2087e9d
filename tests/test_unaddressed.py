"""What others say is told without addresses."""

from __future__ import annotations

import pytest

from autoscaler.capacity.base import RefusedError
from autoscaler.capacity.bookings import Condition
from autoscaler.capacity.places import accepts
from autoscaler.capacity.server import SAID_MAX, AnswerError
from autoscaler.words import unaddressed


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('Post "https://fm.lab.example.com:8443/v1?x=1": EOF', 'Post "(address)": EOF'),
        ("dial tcp 10.96.0.1:443: connect: connection refused", "dial tcp (address): connect: connection refused"),
        ("from 192.168.1.20, again", "from (address), again"),
        ("dial tcp [fd00::1]:443: i/o timeout", "dial tcp (address): i/o timeout"),
        ("lookup webhook.cro-system.svc:443 failed", "lookup (address) failed"),
        ("there is no free device in the fabric", "there is no free device in the fabric"),
        ("pods 3.5.2 of GPU-1234-ab are at 12:30:45", "pods 3.5.2 of GPU-1234-ab are at 12:30:45"),
        (
            'composabilityrequests.cro.hpsys.ibm.ie.com "x" not found',
            'composabilityrequests.cro.hpsys.ibm.ie.com "x" not found',
        ),
    ],
)
def test_an_address_is_taken_out_and_all_else_stays(said: str, told: str) -> None:
    assert unaddressed(said) == told


def test_what_an_api_server_says_is_told_so() -> None:
    assert "10.0.0.7" not in str(
        AnswerError(500, "InternalError", 'failed calling webhook: Post "https://10.0.0.7:9443"')
    )


def test_what_is_refused_is_told_so() -> None:
    assert (
        str(RefusedError("pool g4 is not ready: dial tcp 10.0.0.7:443")) == "pool g4 is not ready: dial tcp (address)"
    )


def test_no_address_is_cut_in_half_and_not_known_any_more() -> None:
    message = "x" * (SAID_MAX - len("X: 10.96.0")) + " 10.96.0.1:443"
    assert "10.96" not in Condition(True, "X", message, 0.0).says()
    queue = {"status": {"conditions": [{"type": "Active", "status": "False", "reason": "X", "message": message}]}}
    assert "10.96" not in accepts(queue)
