"""Small plots as inline SVG: dots and lines over two linear axes, without a library or external resources. Pure.

Draws axes, ticks and legend. Colours are CSS variables (--series-0 ...) defined by the page, so that plots are readable
in light and dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 44
POINTS_MAX = 4000
"""Maximum number of points per series; more are thinned out evenly."""


class Series(NamedTuple):
    """A series of (x, y), drawn as dots if `dots`, else as a line. `colour` is the number of a --series variable."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dots: bool = False


def render_plot(x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Return an <svg> of all series that have points, or a sentence if there are none."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return '<p class="empty">nothing to plot</p>'
    x_max = max(x for one in drawn for x, _ in one.points) or 1.0
    y_max = max(y for one in drawn for _, y in one.points) or 1.0
    x_ticks, y_ticks = choose_ticks(x_max), choose_ticks(y_max)
    x_scale = (WIDTH - LEFT - RIGHT) / max(x_max, x_ticks[-1])
    y_scale = (HEIGHT - TOP - BOTTOM) / max(y_max, y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x * x_scale, HEIGHT - BOTTOM - y * y_scale

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(f"{y_label} over {x_label}")}">']
    for value in y_ticks:
        _, y = place(0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(f'x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end"', f"{value:g}"))
    for value in x_ticks:
        x, _ = place(value, 0)
        parts.append(_text(f'x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"', f"{value:g}"))
    parts.append(_text(f'x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle"', x_label))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(f'transform="translate(14 {middle}) rotate(-90)" text-anchor="middle"', y_label))
    for one in drawn:
        step = math.ceil(len(one.points) / POINTS_MAX)
        kept = [*one.points[:-1:step], one.points[-1]]
        placed = [place(x, y) for x, y in kept]
        parts.append(_dots(placed, one.colour) if one.dots else _line(placed, one.colour))
    return "".join([*parts, "</svg>", render_legend(drawn)])


def choose_ticks(highest: float) -> list[float]:
    """Return about five round numbers from 0 to at least `highest`."""
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [round(index * step, 12) for index in range(math.ceil(highest / step - 1e-9) + 1)]


def render_legend(series: Sequence[Series]) -> str:
    """Return the names and colours of the series."""
    items = "".join(
        f'<li><i style="background:var(--series-{s.colour})"></i>{html.escape(s.name)}</li>' for s in series
    )
    return f'<ul class="legend">{items}</ul>'


def _text(where: str, what: str) -> str:
    return f"<text {where}>{html.escape(what)}</text>"


def _dots(points: Sequence[tuple[float, float]], colour: int) -> str:
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
    return f'<path class="dots" style="stroke:var(--series-{colour})" d="{dots}"/>'


def _line(points: Sequence[tuple[float, float]], colour: int) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline style="stroke:var(--series-{colour})" points="{corners}"/>'
