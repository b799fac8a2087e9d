"""A picture of the experiment: the share of the GPUs that could be in use and is not, while requests arrive.

The measure is percent arrived, at most 100, less percent in use, as the mean over workloads and seeds. A policy without
losses would be on the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from bench.packing.replay import Outcome
from bench.picture import Series, picture


def curve(runs: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Return (percent arrived, points lost), for each percent that all runs passed."""
    passed = sorted(set.intersection(*(set(run.used) for run in runs)))
    return [(at, fmean(min(at, 100) - run.used[at] for run in runs)) for at in passed]


def draw(outcomes: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> None:
    """Write plots/packing.svg, with the policies that ran on every workload."""
    policies = dict.fromkeys(policy for by_policy in outcomes.values() for policy in by_policy)
    series = [
        Series(policy, curve([run for by_policy in outcomes.values() for run in by_policy[policy]]), number)
        for number, policy in enumerate(policies)
    ]
    across = "requested by arrived pods, percent of all GPUs"
    picture("packing", across, "percent of all GPUs that could be in use and are not", series)
