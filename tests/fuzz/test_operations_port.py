"""Fuzzed responses of an operations port, and the commands that read them. Those of other servers are in test_fuzz."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import operations_port


@pytest.mark.parametrize("data", operations_port.SEEDS, ids=[" ".join(command) for command in operations_port.COMMANDS])
def test_seed_responses_of_operations_port_are_displayed_without_error(data: bytes) -> None:
    operations_port.port(data)
