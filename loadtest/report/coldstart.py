"""The HTML report of a cold-start measurement: the duration of each round and of its phases. Pure.

Selects the plots and tables. The report contains no prompts or generated text.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.coldstart import ColdStarts
from loadtest.report.page_layout import list_outcome_figures, render_errors, render_page, render_spreads, render_table
from loadtest.report.plots import Series, render_plot

COLOURS = 5
"""Number of colours that a page defines (`--series-0` ...)."""


def as_html(target: str, rounds: int, starts: ColdStarts) -> str:
    """Return the page of `starts`, out of `rounds` requested rounds."""
    made = len(starts.rounds)
    first = starts.spreads_ms.get("first byte")
    return render_page(
        "Cold starts",
        f"{rounds} cold starts of {starts.model}, one request each",
        target,
        starts.verdict,
        said=f"ended after {made} of {rounds} rounds: {starts.ended}" if starts.ended else "",
        figures=[
            *list_outcome_figures(starts.verdict, "rounds"),
            ("no cold start reported", str(starts.warm)),
            ("ms, median first byte", "-" if first is None else f"{first.median:.1f}"),
        ],
        sections=[
            ("Time to first byte, by round", _by_round(starts)),
            ("Time by phase, by round", _phases(starts)),
            ("Times", render_spreads(starts.spreads_ms, 1)),
            ("Rounds", _rounds(starts)),
            ("Errors", render_errors(starts.verdict)),
        ],
    )


def _by_round(starts: ColdStarts) -> str:
    series = []
    for name, cold, colour in (("cold start reported", True, 0), ("no cold start reported", False, 1)):
        series.append(_dots(name, [one.first_byte_ms if one.cold is cold else None for one in starts.rounds], colour))
    return render_plot("round", "first byte after, ms", series)


def _phases(starts: ColdStarts) -> str:
    names = dict.fromkeys(name for one in starts.rounds for name in one.phases_ms)
    series = [
        _dots(name, [one.phases_ms.get(name) for one in starts.rounds], position % COLOURS)
        for position, name in enumerate(names)
    ]
    return render_plot("round", "ms", series)


def _dots(name: str, values_ms: Sequence[float | None], colour: int) -> Series:
    """Return one point per round that has a value."""
    points = [(float(number), value) for number, value in enumerate(values_ms, 1) if value is not None]
    return Series(name, points, colour, dots=True)


def _rounds(starts: ColdStarts) -> str:
    head = ("round", "waited for zero, s", "outcome", "cold", "first byte, ms", "total, ms")
    lines = (
        (
            str(number), f"{one.waited_s:.1f}", f"{one.ending} ({one.code})" if one.code else str(one.ending),
            "yes" if one.cold else "no", _figure(one.first_byte_ms), _figure(one.total_ms),
        )
        for number, one in enumerate(starts.rounds, 1)
    )  # fmt: skip
    return render_table(head, lines)


def _figure(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:.1f}"
