"""Ports for those who are told theirs before they bind it.

Owns which: each once in a run of the tests, in an order of its own, and below those that the kernel takes for outgoing
connections, one of which could have it in between.
"""

from __future__ import annotations

import itertools
import random
import socket

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


_ours = Ports(range(10_240, 20_480))
"""Engines of `pilotlight serve` have those above (autoscaler/drivers/ports.py)."""


def free_port() -> int:
    """One of them."""
    return _ours.take(1)[0]
