"""Ports for those who are told theirs before they bind it.

Owns which: each once in a run of the tests, in an order of its own, below those that the kernel takes for outgoing
connections, one of which could have it in between, and no port of a process of tests that runs beside this one.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Mapping

HOST = "127.0.0.1"


class Ports:
    """Of a range."""

    def __init__(self, among: range) -> None:
        self._order = itertools.cycle(random.sample(among, len(among)))

    def take(self, number: int) -> list[int]:
        """Such that are free now, and that nobody else was given, who may not have bound his yet."""
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
    """Those of one worker of pytest-xdist, which says who it is of how many; without it all."""
    number = int(environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return among[number :: max(number + 1, int(environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]


_ours = Ports(part(range(10_240, 20_480), os.environ))
"""Engines of `pilotlight serve` have those above (autoscaler/drivers/local/ports.py)."""


def free_port() -> int:
    """One of them."""
    return _ours.take(1)[0]
