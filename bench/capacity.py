"""Capacity: GenTD26's requests on a cluster with its own devices for 60 % of their peak; and surges.

`points`: our provisioner and the rules of others order the missing capacity. It reports the cost, waits and energy of
each rule on each market, with pictures. For each point of the other rules it reports our cheapest point whose p95 wait
is not longer. Figures are means over several seeds of provider behaviour, which are the same for every rule. Abandoned
requests and violations of invariants (by any rule) are counted over all seeds. The trace is in the folder that
`GENTD26` names.

`surges`: ten thousand surges with faults; counts capacity that was supplied twice, capacity that was kept although
nothing needed it, and other violations of invariants. `QUICK=1`: two days of the trace, and 200 surges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import inf
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.kit import BenchError, Figures, say, title
from bench.parts import Part, main
from bench.picture import Series, picture
from tests.simulation import surges
from tests.simulation.trace_replay import capacity_policies, replay, request_arrivals
from tests.simulation.trace_replay.capacity_market import MARKETS
from tests.simulation.trace_replay.capacity_policies import OURS, RULES, Policy
from tests.simulation.trace_replay.replay import SHARE, Outcome
from tests.simulation.trace_replay.request_arrivals import Arrival

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "traces" / "gentd26"
"""The folder of the trace, unless the environment variable `GENTD26` names another. It is not shipped."""
QUICK_DAYS, SURGES, QUICK_SURGES = 2, 10_000, 200
SEEDS = (1, 2, 3, 4)
BATCH = 20
KEYS = (
    "cost_ratio_max", "cost_ratio_max_default", "energy_ratio", "points", "points_matched", "points_below_default",
    "wait_s_p95", "calls_given_up", "broken", "surges", "double_supply", "orphans", "other", "hedges",
)  # fmt: skip
TOLERANCE_S = 0.5
"""Waits that differ by less than this count as equal: a plan can wait longer than this for a gateway's next report."""


class Mean(NamedTuple):
    """One rule on one market, over all seeds. For the amounts see Bill."""

    policy: str
    cost: float
    device_hours: float
    kwh: float
    waits_s: tuple[float, float, float]
    """The 50th, 95th and 99th percentile."""
    gave_up: int = 0
    costs: tuple[float, ...] = ()
    """The cost by seed."""
    broken: tuple[str, ...] = ()

    @property
    def p95_s(self) -> float:
        """The 95th percentile of the waits."""
        return self.waits_s[1]


Point = tuple[Policy, Mean]


class Judged(NamedTuple):
    """The comparison with one point of another rule: our point, and the ratios of cost and energy."""

    by: str
    cost: float
    energy: float


async def points(place: Path, *, quick: bool) -> Figures:
    """Run each rule on each market."""
    del place
    calls = _calls(QUICK_DAYS if quick else None)
    chosen = {one.name: one for one in capacity_policies.points()}
    peak = request_arrivals.peak(calls)
    say(f"{len(calls)} requests, at most {peak} at once; {round(SHARE * peak)} devices are owned")
    runs: dict[tuple[str, str], list[Outcome]] = {(market, name): [] for market in MARKETS for name in chosen}
    with ProcessPoolExecutor(initializer=_load, initargs=(calls,)) as pool:
        tasks = [pool.submit(_play, *key, seed) for seed in SEEDS for key in runs]
        for number, done in enumerate(as_completed(tasks), 1):
            outcome = done.result()
            runs[outcome.market, outcome.policy].append(outcome)
            say(f"({number} of {len(tasks)}: {outcome.market}, {outcome.policy})")
    figures: Figures = {"points": 0, "points_matched": 0, "points_below_default": 0, "calls_given_up": 0}
    figures["broken"] = sum(len(one.broken) for outcomes in runs.values() for one in outcomes)
    ratios: list[Judged] = []
    default: list[float] = []
    for market in MARKETS:
        played = [(policy, mean(runs[market, name])) for name, policy in chosen.items()]
        draw(market, played)
        ours, others = [one for one in played if one[0].ours], [one for one in played if not one[0].ours]
        judgements = [judged(ours, one) for _, one in others]
        plain = [judged([one for one in ours if one[0] == OURS], one) for _, one in others]
        print_table(market, played, dict(zip((policy.name for policy, _ in others), judgements, strict=True)))
        ratios += [one for one in judgements if one is not None]
        default += [one.cost for one in plain if one is not None]
        figures["points"] = (figures["points"] or 0) + len(others)
        figures["calls_given_up"] = (figures["calls_given_up"] or 0) + sum(
            one.gave_up for one in runs[market, OURS.name]
        )
    figures |= {"points_matched": len(ratios), "points_below_default": len(default)}
    if ratios:
        figures |= {
            "cost_ratio_max": max(one.cost for one in ratios),
            "energy_ratio": max(one.energy for one in ratios),
        }
    if default:
        figures["cost_ratio_max_default"] = max(default)
    figures["wait_s_p95"] = max(mean(runs[market, OURS.name]).p95_s for market in MARKETS)
    return figures


def mean(runs: Sequence[Outcome]) -> Mean:
    """Return the mean over all seeds."""
    bills = [one.bill for one in runs]
    cost, hours, kwh = (fmean(amounts) for amounts in zip(*bills, strict=True))
    p50_s, p95_s, p99_s = (fmean(one.p(share) for one in runs) for share in (0.5, 0.95, 0.99))
    return Mean(
        runs[0].policy, cost, hours, kwh, (p50_s, p95_s, p99_s), sum(one.gave_up for one in runs),
        tuple(sorted(one.cost for one in bills)), tuple(line for one in runs for line in one.broken),
    )  # fmt: skip


def judged(ours: Iterable[Point], other: Mean) -> Judged | None:
    """Return our cheapest point whose p95 wait is not longer. None: all our points have longer waits."""
    able = [one for _, one in ours if one.p95_s <= other.p95_s + TOLERANCE_S]
    best = min(able, key=lambda one: one.cost, default=None)
    if best is None:
        return None
    return Judged(best.policy, _ratio(best.cost, other.cost), _ratio(best.kwh, other.kwh))


def _ratio(one: float, other: float) -> float:
    return one / other if other else (1.0 if not one else inf)


def print_table(market: str, played: Sequence[Point], judgements: dict[str, Judged | None]) -> None:
    """Print a table."""
    title(f"{market}: cost (least and most of the seeds), GPU hours and energy of added capacity, waits of requests")
    heads = (
        f"{'rule':<30} {'cost':>8} {'of the seeds':>17} {'hours':>7} {'kWh':>7} {'p50 s':>6} {'p95 s':>6} {'p99 s':>6}"
    )
    say(f"{heads} {'left':>5} Pilotlight / this rule: cost, energy (best setting)")
    for policy, one in played:
        against = judgements.get(policy.name)
        comparison = "" if against is None else f"{against.cost:.2f}, energy {against.energy:.2f} ({against.by})"
        if against is None and not policy.ours:
            comparison = "each setting of Pilotlight has a longer p95 wait"
        waits = " ".join(f"{wait_s:>6.1f}" for wait_s in one.waits_s)
        say(
            f"{policy.name:<30} {one.cost:>8.2f} {one.costs[0]:>8.2f} {one.costs[-1]:>8.2f}"
            f" {one.device_hours:>7.1f} {one.kwh:>7.1f} {waits} {one.gave_up:>5}  {comparison}"
        )
        for line in one.broken[:3]:
            say(f"    {line}")


def draw(market: str, played: Sequence[Point]) -> None:
    """Write plots/capacity-MARKET.svg: cost over p95 wait, a dot for each point."""
    groups: dict[str, list[tuple[float, float]]] = {"ours": [], **{rule: [] for rule in RULES}}
    for policy, one in played:
        groups[policy.name.partition(",")[0]].append((one.p95_s, one.cost))
    series = [Series(name, dots, number, dots=True) for number, (name, dots) in enumerate(groups.items())]
    picture(f"capacity-{market.replace(' ', '-')}", "seconds that requests wait, p95", "cost of added capacity", series)


async def surged(place: Path, *, quick: bool) -> Figures:
    """Run surges with faults, from the first seed on."""
    del place
    many = int(os.environ.get("SURGES", QUICK_SURGES if quick else SURGES))
    title(f"{many} surges with faults")
    totals = dict.fromkeys(("surges", "double_supply", "orphans", "hedges", "orders", "released", "other"), 0)
    said_s = time.monotonic()
    for number, one in _surges(many):
        double, orphans = one.many(surges.DOUBLE), one.many(surges.ORPHAN)
        counts = (1, double, orphans, one.hedges, one.orders, one.released, len(one.broken) - double - orphans)
        totals = {key: totals[key] + more for key, more in zip(totals, counts, strict=True)}
        for line in one.broken[:3]:
            say(f"seed {number}: {line}")
        if time.monotonic() > said_s + 30.0:
            said_s = time.monotonic()
            say(f"({totals['surges']} of {many})")
    say(", ".join(f"{key} {value}" for key, value in totals.items()))
    return {key: totals[key] for key in ("surges", "double_supply", "orphans", "other", "hedges")}


def _surges(many: int) -> Iterator[tuple[int, surges.Result]]:
    with ProcessPoolExecutor() as pool:
        tasks = [pool.submit(_surge, range(seed, min(seed + BATCH, many + 1))) for seed in range(1, many + 1, BATCH)]
        for done in as_completed(tasks):
            yield from done.result()


def _surge(seeds: Sequence[int]) -> list[tuple[int, surges.Result]]:
    return [(seed, surges.play(seed, planned_twice=False)) for seed in seeds]


def _calls(days: int | None) -> list[Arrival]:
    place = Path(os.environ.get("GENTD26") or FOLDER)
    try:
        return request_arrivals.gentd26(place, days)
    except (FileNotFoundError, ValueError):
        what = f"no {request_arrivals.FILE} of GenTD26 in {place.name}/"
        raise BenchError(f"{what}: set GENTD26 to the folder that has it") from None


_loaded: list[Arrival] = []


def _load(calls: Sequence[Arrival]) -> None:
    _loaded[:] = calls


def _play(market: str, policy: str, seed: int) -> Outcome:
    chosen = next(one for one in capacity_policies.points() if one.name == policy)
    return replay.play(_loaded, MARKETS[market], chosen, seed=seed)


PARTS: dict[str, Part] = {"points": points, "surges": surged}

if __name__ == "__main__":
    main("capacity", __doc__, KEYS, PARTS)
