"""Responses of an operations port, of Pilotlight and of other servers, and the commands that read them."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz import port
from tests.kit.budget import examples


@pytest.mark.parametrize("data", port.SEEDS, ids=[" ".join(command) for command in port.COMMANDS])
def test_responses_of_pilotlight_are_shown(data: bytes) -> None:
    port.port(data)


def test_responses_of_other_servers_are_errors_of_one_line() -> None:
    for number in range(examples(1_500)):
        port.port(port.case(Random(number)))
