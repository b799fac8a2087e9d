"""One replay: requests arrive one by one; a policy places each, or it is rejected for good; measures the GPUs in use.

The measure is that of the experiment: after each arrival (used, arrived) in percent of the capacity, including rejected
requests. The value at x is the mean over all times at which the arrived percent rounds to x (half to even).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import numpy as np

from bench.packing.arrivals import Round
from bench.packing.cluster import Cluster
from bench.packing.openb import MILLI, Kind
from bench.packing.policy import Chooser


class Outcome(NamedTuple):
    """The result of a replay."""

    used: dict[int, float]
    """The percent of GPU in use, by percent arrived."""
    refused: int
    idle_whole: int
    idle_parts: float
    """The free amount of GPUs in partial use, in GPUs."""
    decisions_s: list[float]
    """The seconds that each call of `choose` took, including the time to recompute cached scores."""
    grants: tuple[float, float] = (1.0, 1.0)
    """The granted share of sharing requests: the mean over requests, and over milli."""


LEAST, MEAN = 0.9, 0.95
"""The minimum that an elastic policy grants: to each request, and in the mean at the end."""
Make = Callable[[Cluster], Chooser]


def replay(round: Round, make: Make) -> Outcome:
    """Run a round with a policy."""
    cluster = Cluster(round.nodes)
    policy = make(cluster)
    capacity = int(cluster.gpus.sum()) * MILLI
    arrived = used = refused = 0
    sums, counts = defaultdict[int, float](float), defaultdict[int, int](int)
    decisions_s: list[float] = []
    grants: list[tuple[int, int]] = []
    for kind in round.arrivals:
        arrived += kind.total_milli
        began_s = time.perf_counter()
        found = policy.choose(kind)
        decisions_s.append(time.perf_counter() - began_s)
        if found is None:
            refused += 1
            _check_refused(cluster, kind)
        else:
            node, gpu = found[0], found[1]
            placed = kind if len(found) == 2 else _granted(kind, found[2])
            _check(cluster, placed, node, gpu)
            cluster.place(placed, node, gpu)
            used += kind.total_milli
            if kind.shares:
                grants.append((kind.milli, placed.milli))
        at = round_half_even(arrived, capacity)
        sums[at] += 100 * used / capacity
        counts[at] += 1
    whole, parts = cluster.idle()
    means = {key: sums[key] / counts[key] for key in counts}
    return Outcome(means, refused, whole, parts, decisions_s, _means(grants))


def round_half_even(arrived: int, capacity: int) -> int:
    """Return the percent, rounded like Go's `math.RoundToEven` and Python's `round`."""
    return round(100 * arrived / capacity)


def _check_refused(cluster: Cluster, kind: Kind) -> None:
    """Raise if the request fits: a policy may not reject it."""
    if cluster.feasible(kind, np.arange(len(cluster.cpu))).any():
        raise AssertionError(f"there is room for {kind}, which was rejected")


def _check(cluster: Cluster, kind: Kind, node: int, gpu: int) -> None:
    """Raise if the request does not fit: a policy may not overcommit."""
    there = not kind.shares or cluster.left[node, gpu] >= kind.milli
    if not there or not cluster.feasible(kind, np.array([node]))[0]:
        raise AssertionError(f"node {node} has no room for {kind}")


def _granted(kind: Kind, milli: int) -> Kind:
    """Return the request as placed. Only a sharing request may get less, and not much less."""
    if milli != kind.milli and not (kind.shares and LEAST * kind.milli <= milli < kind.milli):
        raise AssertionError(f"a grant of {milli} thousandths of a GPU is not allowed for {kind}")
    return kind._replace(milli=milli)


def _means(grants: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the means of (requested, granted), see Outcome."""
    if not grants:
        return 1.0, 1.0
    means = fmean(got / asked for asked, got in grants), sum(got for _, got in grants) / sum(one for one, _ in grants)
    if min(means) < MEAN:
        raise AssertionError(f"grants are {means[0]:.4f} and {means[1]:.4f} of what was asked for")
    return means
