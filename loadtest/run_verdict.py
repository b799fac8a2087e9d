"""The verdict on a run: whether every request had exactly one outcome and no stream was silently truncated. Pure.

The rule of all load tests: admitted = completed + failed (one error each) + abandoned, and truncated streams = 0. Any
other request counts as lost, and then the verdict does not hold.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.result import Ending, Result


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of values; p95 and p99 are observed values (nearest rank)."""

    count: int
    min: float
    median: float
    p95: float
    p99: float
    max: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of all requests of a run."""

    admitted: int
    completed: int
    failed: int
    abandoned: int
    lost: int
    truncated: int
    unclear: int
    """Failures without an error object. Reported but not held against the run, since proxies also cause them."""
    codes: dict[str, int]
    """Number of errors by code."""
    broken: dict[str, int]
    """Number of lost requests by reason."""
    holds: bool

    def line(self) -> str:
        """Return the verdict as one line."""
        if not self.admitted and self.holds:
            return "no verdict: nothing was measured"
        counts = f"{self.completed} completed, {self.failed} failed, {self.abandoned} abandoned, {self.lost} lost"
        word = "holds" if self.holds else "DOES NOT HOLD"
        requests = "1 request" if self.admitted == 1 else f"{self.admitted} requests"
        return f"verdict {word}: {requests}, {counts}, {self.truncated} truncated"


def judge_run(admitted: int, results: Sequence[Result]) -> Verdict:
    """Judge a run of `admitted` requests by their Results; a request without one is lost."""
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
    """Return the reason for a lost request."""
    return result.broken or ("more than one outcome" if result.errors else "no answer")


def compute_spread(values: Iterable[float]) -> Spread | None:
    """Return the spread of the values, or None if there are none."""
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
