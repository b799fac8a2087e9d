"""The order of the arriving requests, and the order of the nodes, for one seed of the experiment.

The rules are those of the experiment (FGD's simulator, `pkg/simulator/core.go`). All pods are shuffled. If their
demand is above TUNE times the capacity, random pods are deleted until it is not. Otherwise more pods are drawn with
replacement, until the milli *of one GPU* of the next pod would raise the demand above that. There are no departures and
no second attempts. The random number generator differs, so single seeds differ from the published ones; means over ten
seeds do not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from bench.packing.openb import Kind, NodeRow, capacity_milli

TUNE = 1.3


class Round(NamedTuple):
    """The input of one seed, the same for every policy."""

    nodes: tuple[NodeRow, ...]
    """In the order that breaks ties: the first node wins."""
    arrivals: tuple[Kind, ...]
    seed: int


def arrange(nodes: Sequence[NodeRow], pods: Sequence[Kind], seed: int, tune: float = TUNE) -> Round:
    """Return the round of a seed. Raises ValueError if no pod requests a GPU."""
    if not any(one.total_milli for one in pods):
        raise ValueError("no pod of the workload requests a GPU")
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
