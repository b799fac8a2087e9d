"""MIG, dynamic: profiles start and stop at random on 100 H100 at 90 % load; the share of the requested work accepted.

Run `python -m bench.packing.mig`; `QUICK=1` simulates a shorter time on the same seeds. Three policies get the same
arrivals (paired by seed): Pilotlight (`autoscaler.slicing.mig_placement`, which knows the mix), best fit, and a pool
without geometry. Starts are a Poisson process, lives are exponential with mean 1; a rejected request is not retried.
Work is compute slices times life. Load is the work that arrives per unit of time, relative to all compute slices.
Arrivals before the fleet has filled (WARM lives) are simulated and not counted.

Best fit: the shortest run of free slices that fits, on the device with the least free, at its lowest start. The
variant with the highest start is reported, too: it leaves slices 0 to 3 to `4g`, and is a stronger competitor.
The pool accepts a request if its free compute and memory slices suffice, wherever they are: no policy can beat it.
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import NamedTuple, Protocol

from autoscaler.slicing.mig_geometry import GEOMETRIES, MEMO_MAX, Cut, Geometry, Layout, free_slices, list_starts
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.state.world import DeviceId
from bench.kit import Figures, say, spread, title
from bench.parts import machine, quick

H100 = GEOMETRIES["H100-80"]
DEVICES, LOAD = 100, 0.9
WARM = 10.0
COUNTED, COUNTED_QUICK = 100.0, 30.0
"""The number of mean lives that are counted."""
SEEDS = range(100, 110)
MIXES: dict[str, Mapping[str, float]] = {
    "all alike": {"1g.10gb": 1, "2g.20gb": 1, "3g.40gb": 1, "4g.40gb": 1, "7g.80gb": 1},
    "alike in work": {"1g.10gb": 8, "2g.20gb": 4, "3g.40gb": 2, "4g.40gb": 2, "7g.80gb": 1},
    "with 1g.20gb": {"1g.10gb": 4, "1g.20gb": 2, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 0.5},
    "mostly large": {"1g.10gb": 1, "2g.20gb": 1, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 2},
    "without 7g": {"1g.10gb": 5, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 2},
}
KEYS = ("mig_gap_closed", "mig_gap_closed_worst_mix", "mig_gap_closed_of_highest_start")


class Arrival(NamedTuple):
    """One start."""

    at: float
    profile: str
    life: float


class Chooser(Protocol):
    """A policy. Its placements are passed to it again when they stop."""

    def start(self, profile: str) -> tuple[DeviceId, Cut] | None:
        """Return the location. None: rejected."""

    def stop(self, device: DeviceId, cut: Cut) -> None:
        """Remove the placement."""


class Ours:
    """`autoscaler.slicing.mig_placement`."""

    def __init__(self, mix: Mapping[str, float], devices: int) -> None:
        self._fleet = Fleet(mix)
        for number in range(devices):
            self._fleet.add(_device(number), H100)

    def start(self, profile: str) -> tuple[DeviceId, Cut] | None:
        """See Chooser."""
        found = self._fleet.start(profile)
        return (found.device, found.cut) if isinstance(found, MigPlacement) else None

    def stop(self, device: DeviceId, cut: Cut) -> None:
        """See Chooser. The partition is removed at once, as DRA does; kept idle it would count as free as well."""
        self._fleet.stop(device, cut)
        self._fleet.undo(device, cut)


class BestFit:
    """The tightest (start, size). `order`: 1 prefers the lowest start, -1 the highest."""

    def __init__(self, devices: int, order: int) -> None:
        self._order = order
        self._alike: dict[Layout, list[DeviceId]] = {(): [_device(number) for number in range(devices)]}
        self._on: dict[DeviceId, Layout] = dict.fromkeys(self._alike[()], ())

    def start(self, profile: str) -> tuple[DeviceId, Cut] | None:
        """See Chooser."""
        fits = (
            (run(H100, on, Cut(profile, start)), free_slices(H100, on), self._order * start, ids[0])
            for on, ids in self._alike.items()
            for start in list_starts(H100, on, profile)
        )
        best = min(fits, default=None)
        if best is None:
            return None
        device, cut = best[-1], Cut(profile, self._order * best[2])
        self._becomes(device, tuple(sorted((*self._on[device], cut))))
        return device, cut

    def stop(self, device: DeviceId, cut: Cut) -> None:
        """See Chooser."""
        self._becomes(device, tuple(each for each in self._on[device] if each != cut))

    def _becomes(self, device: DeviceId, on: Layout) -> None:
        ids = self._alike[self._on[device]]
        ids.remove(device)
        if not ids:
            del self._alike[self._on[device]]
        self._alike[on] = sorted((*self._alike.get(on, ()), device))
        self._on[device] = on


class Pool:
    """One device with the size of all devices together; a partition of it can start anywhere."""

    def __init__(self, devices: int) -> None:
        self._compute, self._memory = H100.compute * devices, H100.size * devices

    def start(self, profile: str) -> tuple[DeviceId, Cut] | None:
        """See Chooser."""
        one = H100.profile(profile)
        if one.compute > self._compute or one.size > self._memory:
            return None
        self._compute, self._memory = self._compute - one.compute, self._memory - one.size
        return DeviceId("all"), Cut(profile, 0)

    def stop(self, device: DeviceId, cut: Cut) -> None:
        """See Chooser."""
        del device  # there is only one
        one = H100.profile(cut.profile)
        self._compute, self._memory = self._compute + one.compute, self._memory + one.size


POLICIES = ("ours", "best fit", "highest start", "pool")


def chooser(policy: str, mix: Mapping[str, float], devices: int) -> Chooser:
    """Return the policy of a name in POLICIES."""
    if policy == "ours":
        return Ours(mix, devices)
    return Pool(devices) if policy == "pool" else BestFit(devices, 1 if policy == "best fit" else -1)


def _device(number: int) -> DeviceId:
    return DeviceId(f"gpu-{number:05}")


@lru_cache(maxsize=MEMO_MAX)
def run(geometry: Geometry, on: Layout, cut: Cut) -> int:
    """Return the length of the run of free memory slices in which `cut` would be made."""
    taken = {one.start + index for one in on for index in range(geometry.profile(one.profile).size)}
    first, last = cut.start, cut.start + geometry.profile(cut.profile).size - 1
    while first > 0 and first - 1 not in taken:
        first -= 1
    while last < geometry.size - 1 and last + 1 not in taken:
        last += 1
    return last - first + 1


def arrivals(mix: Mapping[str, float], seed: int, lives: float, devices: int = DEVICES) -> list[Arrival]:
    """Return the starts within this number of mean lives, the same for every policy."""
    rng = random.Random(seed)
    profiles, shares = list(mix), list(mix.values())
    work = sum(share * H100.profile(name).compute for name, share in mix.items()) / sum(shares)
    rate, at, found = LOAD * H100.compute * devices / work, 0.0, list[Arrival]()
    while True:
        at += rng.expovariate(rate)
        if at > lives:
            return found
        found.append(Arrival(at, rng.choices(profiles, shares)[0], rng.expovariate(1.0)))


def accepted(policy: Chooser, asked: Sequence[Arrival], warm: float) -> float:
    """Return the percent of the work requested after `warm` that was accepted."""
    ends: list[tuple[float, DeviceId, Cut]] = []
    work = total = 0.0
    for at, profile, life in asked:
        while ends and ends[0][0] <= at:
            policy.stop(*heapq.heappop(ends)[1:])
        placed = policy.start(profile)
        if placed is not None:
            heapq.heappush(ends, (at + life, *placed))
        if at > warm:
            one = H100.profile(profile).compute * life
            total += one
            work += 0.0 if placed is None else one
    return 100 * work / total


def closed(ours: Sequence[float], best_fit: Sequence[float], pool: Sequence[float]) -> float:
    """Return the position of Pilotlight between best fit (0) and the pool (1), from the means over all seeds."""
    low = statistics.fmean(best_fit)
    return (statistics.fmean(ours) - low) / (statistics.fmean(pool) - low)


class _Task(NamedTuple):
    mix: str
    seed: int
    lives: float


def _play(task: _Task) -> list[float]:
    mix = MIXES[task.mix]
    asked = arrivals(mix, task.seed, task.lives)
    return [accepted(chooser(policy, mix, DEVICES), asked, WARM) for policy in POLICIES]


def figures() -> Figures:
    """Run all mixes, print each, and return KEYS."""
    lives = WARM + (COUNTED_QUICK if quick() else COUNTED)
    title(
        f"percent of work accepted, {DEVICES} H100 at {LOAD:.0%} load, {len(SEEDS)} seeds of "
        f"{lives - WARM:.0f} mean lifetimes: median [least-most]; "
        "then the share of the gap to the pool that Pilotlight closes"
    )
    say(f"{'mix':<14}" + "".join(f" {policy:<20}" for policy in POLICIES) + " gap from best fit; from highest start")
    shares, others = list[float](), list[float]()
    with ProcessPoolExecutor() as processes:
        tasks = [_Task(mix, seed, lives) for mix in MIXES for seed in SEEDS]
        found = iter(processes.map(_play, tasks))
        for mix in MIXES:
            by_policy = dict(zip(POLICIES, zip(*(next(found) for _ in SEEDS), strict=True), strict=True))
            ours, pool = by_policy["ours"], by_policy["pool"]
            shares.append(closed(ours, by_policy["best fit"], pool))
            others.append(closed(ours, by_policy["highest start"], pool))
            cells = "".join(f" {spread(by_policy[policy], 2):<20}" for policy in POLICIES)
            say(f"{mix:<14}{cells} {shares[-1]:.0%}; {others[-1]:.0%}")
            gains = [one - other for one, other in zip(ours, by_policy["best fit"], strict=True)]
            say(f"{'':<14} Pilotlight minus best fit, paired by seed: {spread(gains, 2)} points")
    return dict(zip(KEYS, (statistics.fmean(shares), min(shares), statistics.fmean(others)), strict=True))


def main() -> None:
    say(machine())
    say(json.dumps(figures()))


if __name__ == "__main__":
    main()
