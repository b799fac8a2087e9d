"""The verdict of a run, counted at the client: every Call has one outcome, and none was cut silently.

Owns the rule of all load tests: admitted = completed + failed (one error each) + abandoned, and truncated streams = 0.
Pure. It must not forgive: what is none of the three is lost, and then the verdict does not hold.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.result import Ending, Result


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How values lie. p95 and p99 are values that occurred (nearest rank)."""

    count: int
    min: float
    median: float
    p95: float
    p99: float
    max: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all Calls of a run."""

    admitted: int
    completed: int
    failed: int
    abandoned: int
    lost: int
    truncated: int
    unclear: int
    """Failed, but the error was no error object. Told, not held against the run: proxies in between do it too."""
    codes: dict[str, int]
    """Of the errors, how often each."""
    broken: dict[str, int]
    """Of the Calls lost, why, how often each."""
    holds: bool

    def line(self) -> str:
        """The verdict as one line for people."""
        if not self.admitted and self.holds:
            return "no verdict: nothing was measured"
        counts = f"{self.completed} completed, {self.failed} failed, {self.abandoned} abandoned, {self.lost} lost"
        word = "holds" if self.holds else "DOES NOT HOLD"
        calls = "1 call" if self.admitted == 1 else f"{self.admitted} calls"
        return f"verdict {word}: {calls}, {counts}, {self.truncated} truncated"


def judge_run(admitted: int, results: Sequence[Result]) -> Verdict:
    """Judge a run of `admitted` Calls by their Results; a Call without one is lost."""
    endings = Counter(result.ending for result in results)
    missing = admitted - len(results)
    lost = endings[Ending.LOST] + missing
    truncated = sum(result.truncated for result in results)
    broken = Counter(explain_loss(result) for result in results if result.ending is Ending.LOST)
    if missing:
        broken["no result"] += missing
    kept = endings[Ending.COMPLETED] + endings[Ending.FAILED] + endings[Ending.ABANDONED]
    return Verdict(
        admitted=admitted,
        completed=endings[Ending.COMPLETED],
        failed=endings[Ending.FAILED],
        abandoned=endings[Ending.ABANDONED],
        lost=lost,
        truncated=truncated,
        unclear=sum(not result.clear for result in results if result.ending is Ending.FAILED),
        codes=dict(Counter(result.code for result in results if result.code)),
        broken=dict(broken),
        holds=admitted == kept and len(results) == admitted and truncated == 0,
    )


def explain_loss(result: Result) -> str:
    """One reason for a lost Call."""
    return result.broken or ("more than one outcome" if result.errors else "no answer")


def compute_spread(values: Iterable[float]) -> Spread | None:
    """The spread of values; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Spread(
        count=len(ordered),
        min=ordered[0],
        median=statistics.median(ordered),
        p95=rank(0.95),
        p99=rank(0.99),
        max=ordered[-1],
    )
