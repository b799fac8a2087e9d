"""Which requests arrive in which order, and in which order nodes stand, for one seed of the experiment.

Owns the experiment's rules (FGD's simulator, `pkg/simulator/core.go`): all pods shuffled, then more drawn with
replacement until the next one's milli *of one GPU* would pass TUNE of the capacity, or random ones deleted until the
demand is below it; no departures, no second try. Its generator of random numbers is ours, so single seeds differ from
those published; means over ten seeds do not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from bench.packing.openb import Kind, NodeRow, capacity_milli

TUNE = 1.3


class Round(NamedTuple):
    """One seed's input, the same for every policy."""

    nodes: tuple[NodeRow, ...]
    """In the order in which ties are decided: the first wins."""
    arrivals: tuple[Kind, ...]
    seed: int


def arrange(nodes: Sequence[NodeRow], pods: Sequence[Kind], seed: int, tune: float = TUNE) -> Round:
    """The round of a seed. Raises ValueError where nobody asks for a GPU."""
    if not any(one.total_milli for one in pods):
        raise ValueError("no pod of the workload asks for a GPU")
    rng = random.Random(seed)
    arrivals = list(pods)
    rng.shuffle(arrivals)
    most, total = tune * capacity_milli(nodes), sum(one.total_milli for one in arrivals)
    if total > most:
        while total > most:
            total -= arrivals.pop(rng.randrange(len(arrivals))).total_milli
    else:
        while True:
            more = pods[rng.randrange(len(pods))]
            if total + more.milli > most:
                break
            total += more.total_milli
            arrivals.append(more)
    ordered = list(nodes)
    rng.shuffle(ordered)
    return Round(tuple(ordered), tuple(arrivals), seed)
