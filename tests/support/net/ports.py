"""Ports for processes that must know their port before they bind it.

Invariants: each port is returned once per test run, in random order. It is below the range of outgoing connections, one
of which could take it meanwhile, and outside the ranges of concurrent test processes.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Mapping

HOST = "127.0.0.1"


class Ports:
    """The ports of a range."""

    def __init__(self, among: range) -> None:
        self._order = itertools.cycle(random.sample(among, len(among)))

    def take(self, number: int) -> list[int]:
        """Returns ports that are free now and were not given to others, who may not have bound theirs yet."""
        found: list[int] = []
        while len(found) < number:
            port = next(self._order)
            with socket.socket() as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind((HOST, port))
                except OSError:
                    continue
            found.append(port)
        return found


def part(among: range, environ: Mapping[str, str]) -> range:
    """The part of the range that belongs to this worker of pytest-xdist; without workers all of it."""
    number = int(environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return among[number :: max(number + 1, int(environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]


_ours = Ports(part(range(10_240, 20_480), os.environ))
"""The engines of `pilotlight serve` use the ports above (autoscaler/drivers/local/ports.py)."""


def free_port() -> int:
    """Returns one free port."""
    return _ours.take(1)[0]
