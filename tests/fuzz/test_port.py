"""Responses of an operations port, and the commands that read them. Those of other servers: test_fuzz."""

from __future__ import annotations

import pytest

from tests.fuzz import port


@pytest.mark.parametrize("data", port.SEEDS, ids=[" ".join(command) for command in port.COMMANDS])
def test_seed_responses_of_the_operations_port_are_displayed(data: bytes) -> None:
    port.port(data)
