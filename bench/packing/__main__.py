"""Packing: the experiment of FGD (USENIX ATC'23) with Pilotlight and five other policies on the same rounds; then MIG.

Prints a table for each workload and draws plots/packing.svg. The last line is one JSON object (interfaces, section 10).
The trace is read from the folder that `OPENB` names. `QUICK=1` omits the peers that only the table shows.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench.kit import Figures, quantile, say, spread, title
from bench.packing import lost, mig, openb, published
from bench.packing.field import LEARN, POLICIES, Field, Task, folder, mean, nodes
from bench.packing.replay import Outcome
from bench.parts import machine, quick

SEEDS = range(100, 110)
"""The seeds on which Pilotlight is judged. Its constants were chosen on those of `published`."""
KEYS = (
    "fgd_default_100", "fgd_default_130", "gain_100", "gain_130", "worst_gain", "workloads", "decision_ms_p50",
    "decision_ms_p99", "elastic_gain_130", "mig_gap_closed", "elastic_grant_mean", "fgd_error_points_max",
)  # fmt: skip

Outcomes = Mapping[str, Mapping[str, Sequence[Outcome]]]
"""Workload -> policy -> one outcome per seed, in order."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.packing", description=__doc__)
    parser.add_argument("workload", nargs="*", help="names of workloads; default: all in the folder")
    asked = parser.parse_args()
    place = folder()
    try:
        openb.read_nodes(nodes(place))
        found = sorted(openb.workloads(place))
    except (FileNotFoundError, ValueError, csv.Error) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"no {openb.PREFIX}*.csv in {place.name}/: set OPENB to the folder that has the workloads")
    unknown = sorted(set(asked.workload) - set(found))
    if unknown:
        parser.error(f"no workload is named {', '.join(unknown)}; there are {', '.join(found)}")
    say(machine())
    chosen = asked.workload or found
    figures: Figures = dict.fromkeys(KEYS)
    policies = ["LRV", "Elastic", "FGD"] if quick() else list(POLICIES)
    with Field(place) as field:
        known = [workload for workload in chosen if workload in published.FGD]
        figures |= harness(_outcomes(field, [Task(w, "FGD", seed) for w in known for seed in published.SEEDS]))
        if (figures["fgd_error_points_max"] or 0) > published.ERROR_POINTS_MAX:
            say("this is not the published experiment, so no policy is judged by it")
            say(json.dumps(figures))
            return
        for done, workload in enumerate(field.learn(chosen), 1):
            say(f"(learned {workload}: {done} of {len(chosen) * len(LEARN)})")
        outcomes = _outcomes(field, [Task(w, policy, seed) for w in chosen for policy in policies for seed in SEEDS])
    print_tables(outcomes)
    lost.draw(outcomes)
    figures |= judged(outcomes)
    figures |= elastic(outcomes)
    figures |= mig.figures()
    say(json.dumps(figures))


def _outcomes(field: Field, tasks: Sequence[Task]) -> Outcomes:
    """Run all replays and print the progress."""
    found: dict[Task, Outcome] = {}
    for task, outcome in field.play(tasks):
        found[task] = outcome
        if not len(found) % 50:
            say(f"({len(found)} of {len(tasks)} replays)")
    sorted_: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for task in tasks:
        sorted_[task.workload][task.policy].append(found[task])
    return sorted_


def harness(outcomes: Outcomes) -> Figures:
    """Return the difference between FGD here and as published. No policy is judged unless it is small."""
    title(f"FGD here and as published, {len(published.SEEDS)} seeds: percent of GPU in use")
    say("when the pods that have arrived request 100 and 130 % of all GPUs")
    errors: list[float] = []
    for workload, by_policy in outcomes.items():
        ours = [mean(by_policy["FGD"], key) for key in (100, 130)]
        there = published.FGD[workload]
        errors += [abs(one - other) for one, other in zip(ours, there, strict=True)]
        say(f"{workload:<12} {ours[0]:6.2f} {ours[1]:6.2f}   published {there[0]:6.2f} {there[1]:6.2f}")
    if not errors:
        return {}
    say(f"largest difference {max(errors):.2f} percentage points   (at most {published.ERROR_POINTS_MAX})")
    figures: Figures = {"fgd_error_points_max": max(errors)}
    if "default" in outcomes:
        default = outcomes["default"]["FGD"]
        figures |= {"fgd_default_100": mean(default, 100), "fgd_default_130": mean(default, 130)}
    return figures


def print_tables(outcomes: Outcomes) -> None:
    """Print a table for each workload."""
    for workload, by_policy in outcomes.items():
        title(f"{workload}: {len(SEEDS)} seeds")
        head = f"{'policy':<12} {'at 100 %':<20} {'at 130 %':<20} {'idle GPUs':>9} {'in parts':>9}"
        say(f"{head} {'us p50':>9} {'p99':>6}")
        for policy, runs in by_policy.items():
            times_s = [one for run in runs for one in run.decisions_s]
            used = [spread([run.used[key] for run in runs], 2) for key in (100, 130)]
            idle = statistics.fmean(run.idle_whole for run in runs), statistics.fmean(run.idle_parts for run in runs)
            say(
                f"{policy:<12} {used[0]:<20} {used[1]:<20} {idle[0]:>9.0f} {idle[1]:>9.0f}"
                f" {quantile(times_s, 0.5) * 1e6:>9.0f} {quantile(times_s, 0.99) * 1e6:>6.0f}"
            )


def _gained(by_policy: Mapping[str, Sequence[Outcome]], policy: str, gains: Mapping[int, list[float]]) -> str:
    """Add the gain of a policy over FGD on one workload to `gains`, by percent arrived; return it as text."""
    columns: list[str] = []
    for key, found in gains.items():
        pairs = zip(by_policy[policy], by_policy["FGD"], strict=True)
        by_seed = [ours.used[key] - theirs.used[key] for ours, theirs in pairs]
        found.append(statistics.fmean(by_seed))
        columns.append(f"at {key} % {found[-1]:+.2f} [{min(by_seed):+.2f} to {max(by_seed):+.2f}]")
    return "   ".join(columns)


def judged(outcomes: Outcomes) -> Figures:
    """Compare Pilotlight with FGD on the same rounds."""
    title("Pilotlight minus FGD, in percentage points of GPU in use, on the same rounds")
    gains: dict[int, list[float]] = {100: [], 130: []}
    for workload, by_policy in outcomes.items():
        gains_text = _gained(by_policy, "LRV", gains)
        say(f"{workload:<12} {gains_text}")
    at_100, at_130 = (statistics.fmean(found) for found in gains.values())
    worst = min(min(found) for found in gains.values())
    say(f"mean {at_100:+.2f} and {at_130:+.2f} (at least +0.9), the worst workload {worst:+.2f} (at least 0)")
    times_s = [one for by_policy in outcomes.values() for run in by_policy["LRV"] for one in run.decisions_s]
    middle_ms, late_ms = (1000 * quantile(times_s, share) for share in (0.5, 0.99))
    say(f"a decision takes {middle_ms:.3f} ms, p99 {late_ms:.3f} ms (at most 0.3 and 2)")
    return {
        "gain_100": at_100, "gain_130": at_130, "worst_gain": worst, "workloads": len(outcomes),
        "decision_ms_p50": middle_ms, "decision_ms_p99": late_ms,
    }  # fmt: skip


def elastic(outcomes: Outcomes) -> Figures:
    """Measure, separately from the other policies, the gain if each sharing request may get a little less."""
    title("elastic minus FGD, in percentage points of GPU requested and accepted")
    say("granted: the lowest of all seeds; the mean share over requests, and over thousandths of a GPU")
    gains: dict[int, list[float]] = {100: [], 130: []}
    least = 1.0
    for workload, by_policy in outcomes.items():
        gains_text = _gained(by_policy, "Elastic", gains)
        grants = [min(run.grants[way] for run in by_policy["Elastic"]) for way in (0, 1)]
        least = min(least, *grants)
        say(f"{workload:<12} {gains_text}   granted {grants[0]:.4f} and {grants[1]:.4f}")
    at_100, at_130 = (statistics.fmean(found) for found in gains.values())
    say(f"mean {at_100:+.2f} and {at_130:+.2f} (at least +2.3), grants at least {least:.4f} (at least 0.95)")
    times_s = [one for by_policy in outcomes.values() for run in by_policy["Elastic"] for one in run.decisions_s]
    say(f"a decision takes {1000 * quantile(times_s, 0.5):.3f} ms, p99 {1000 * quantile(times_s, 0.99):.3f} ms")
    return {"elastic_gain_130": at_130, "elastic_grant_mean": least}


if __name__ == "__main__":
    main()
