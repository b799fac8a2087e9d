"""The report of a run as JSON, and as one self-contained HTML page with plots. Pure.

Selects the contents and plots. The report contains no prompts, generated text or keys, and loads no external resources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import msgspec

from loadtest.report.page_layout import list_outcome_figures, render_errors, render_page, render_spreads
from loadtest.report.plots import Series, render_plot
from loadtest.result import Ending, Result
from loadtest.run_verdict import Spread, Verdict, compute_spread, judge_run

_NOT_ASCII = re.compile(r"[^\n -~]")


class CallLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request in the report, in seconds."""

    model: str
    at_s: float
    ending: Ending
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    code: str = ""
    broken: str = ""
    cold: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run. Times are seconds since each request's planned time."""

    target: str
    plan: str
    planned: int
    """Planned requests; more than in the verdict only if the run was interrupted."""
    interrupted: bool
    verdict: Verdict
    first_byte_s: Spread | None
    last_byte_s: Spread | None
    lateness_s: Spread | None
    """Lateness of the client itself: if it is large, the client was too slow for the plan."""
    completed_per_s: float
    cold: int
    resent: int
    by_model: dict[str, Spread]
    """First byte of completed requests."""
    calls: tuple[CallLine, ...]


def build_report(
    target: str, plan: str, planned: int, results: Sequence[Result], *, interrupted: bool = False
) -> Report:
    """Build the report of a run of `planned` requests; for an interrupted run it covers those sent. Spreads cover only
    completed requests.
    """
    completed = [result for result in results if result.ending is Ending.COMPLETED]
    ends = [result.at_s + result.last_byte_s for result in completed if result.last_byte_s is not None]
    models = dict.fromkeys(result.model for result in completed)
    by_model = {model: compute_spread(_first_bytes(r for r in completed if r.model == model)) for model in models}
    return Report(
        target=target,
        plan=plan,
        planned=planned,
        interrupted=interrupted,
        verdict=judge_run(len(results) if interrupted else planned, results),
        first_byte_s=compute_spread(_first_bytes(iter(completed))),
        last_byte_s=compute_spread(result.last_byte_s for result in completed if result.last_byte_s is not None),
        lateness_s=compute_spread(result.lateness_s for result in results),
        completed_per_s=len(completed) / max(max(ends, default=0.0), 1e-9) if ends else 0.0,
        cold=sum(result.cold for result in results),
        resent=sum(result.resent for result in results),
        by_model={model: found for model, found in by_model.items() if found is not None},
        calls=tuple(_line(result) for result in results),
    )


def describe_interruption(report: Report) -> str:
    """Return the note that accompanies the verdict of an interrupted run."""
    sent = f"{report.verdict.admitted} of {report.planned} requests were sent"
    return f"interrupted: {sent}, and those in flight were abandoned"


def _first_bytes(results: Iterator[Result]) -> Iterator[float]:
    return (result.first_byte_s for result in results if result.first_byte_s is not None)


def _line(result: Result) -> CallLine:
    return CallLine(
        model=result.model,
        at_s=round(result.at_s, 6),
        ending=result.ending,
        first_byte_s=result.first_byte_s,
        last_byte_s=result.last_byte_s,
        code=result.code,
        broken=result.broken,
        cold=result.cold,
    )


def as_json(report: msgspec.Struct) -> bytes:
    """Return a report as ASCII JSON: texts of servers may contain control characters."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text).encode()


def as_html(report: Report) -> str:
    """Return the report as an HTML page."""
    verdict = report.verdict
    return render_page(
        "Load test",
        report.plan,
        report.target,
        verdict,
        said=describe_interruption(report) if report.interrupted else "",
        figures=[*list_outcome_figures(verdict, "requests"), ("completed per s", f"{report.completed_per_s:.1f}")],
        sections=[
            ("Time to first byte, by arrival", _by_arrival(report)),
            ("Cumulative share of completed requests, by time since arrival", _shares(report)),
            ("Requests in flight", _in_flight(report)),
            ("Times", _times(report)),
            ("Errors", render_errors(verdict)),
        ],
    )


_COLOURS = {Ending.COMPLETED: 0, Ending.FAILED: 1, Ending.ABANDONED: 2, Ending.LOST: 3}


def _by_arrival(report: Report) -> str:
    series = []
    for ending, colour in _COLOURS.items():
        points = [(c.at_s, c.first_byte_s) for c in report.calls if c.ending is ending and c.first_byte_s is not None]
        series.append(Series(str(ending), sorted(points), colour, dots=True))
    return render_plot("planned arrival, s", "first byte after, s", series)


def _shares(report: Report) -> str:
    done = [call for call in report.calls if call.ending is Ending.COMPLETED]
    first = sorted(call.first_byte_s for call in done if call.first_byte_s is not None)
    last = sorted(call.last_byte_s for call in done if call.last_byte_s is not None)
    steps = [
        Series(name, [(0.0, 0.0), *((value, 100 * (i + 1) / len(values)) for i, value in enumerate(values))], colour)
        for name, values, colour in (("first byte", first, 0), ("last byte", last, 4))
        if values
    ]
    return render_plot("seconds", "% of completed requests", steps)


def _in_flight(report: Report) -> str:
    changes = [(call.at_s, 1) for call in report.calls if call.last_byte_s is not None]
    changes += [(call.at_s + call.last_byte_s, -1) for call in report.calls if call.last_byte_s is not None]
    points: list[tuple[float, float]] = []
    level = 0
    for at_s, change in sorted(changes):
        points.append((at_s, level))
        level += change
        points.append((at_s, level))
    return render_plot("seconds", "requests", [Series("waiting or in progress", points, 0)])


def _times(report: Report) -> str:
    rows = {"first byte": report.first_byte_s, "last byte": report.last_byte_s, "client's lateness": report.lateness_s}
    if len(report.by_model) > 1:
        rows |= {f"first byte of {model}": found for model, found in report.by_model.items()}
    return render_spreads({name: found for name, found in rows.items() if found is not None}, 1000)
