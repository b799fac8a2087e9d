"""Fuzzed responses of an operations port, and the commands that read them. Those of other servers are in test_fuzz."""

from __future__ import annotations

import pytest

from tests.fuzz import port


@pytest.mark.parametrize("data", port.SEEDS, ids=[" ".join(command) for command in port.COMMANDS])
def test_seed_responses_of_operations_port_are_displayed_without_error(data: bytes) -> None:
    port.port(data)
