"""Two plots as SVG: the phases of cold starts as stacked bars, and memory of the device over time as lines."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 320, 150, 40, 46
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#6b7280", "#be185d")

Point = tuple[float, float]


def bars(path: Path, title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Draw one horizontal bar per row, stacked from its parts."""
    if not rows:
        return
    most = max(sum(parts.values()) for parts in rows.values()) or 1.0
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    step, drawn = (HEIGHT - TOP - BOTTOM) / len(rows), [_text(LEFT, 16, title, bold=True)]
    for number, (label, parts) in enumerate(rows.items()):
        at, y = float(LEFT), TOP + 18 + number * step
        drawn.append(_text(LEFT - 8, y + step / 2, label, end=True))
        for name, value in parts.items():
            width = value / most * (WIDTH - LEFT - 90)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn.append(
                f'<rect x="{at:.1f}" y="{y:.1f}" width="{width:.1f}" height="{step * 0.7:.1f}" fill="{colour}"/>'
            )
            at += width
        drawn.append(_text(at + 6, y + step / 2, f"{sum(parts.values()):.2f} {unit}"))
    drawn += _legend(names)
    path.write_text(_svg(drawn))


def lines(path: Path, title: str, axes: tuple[str, str], series: Mapping[str, Sequence[Point]],
          marks: Sequence[tuple[float, str]] = ()) -> None:  # fmt: skip
    """Draw one line per series; `marks`: times with a label each."""
    points = [point for one in series.values() for point in one]
    if not points:
        return
    most_x, most_y = max(x for x, _ in points) or 1.0, max(y for _, y in points) * 1.1 or 1.0

    def place(x: float, y: float) -> Point:
        return (LEFT + x / most_x * (WIDTH - LEFT - 30), HEIGHT - BOTTOM - y / most_y * (HEIGHT - BOTTOM - TOP - 18))

    drawn = [_text(LEFT, 16, title, bold=True), _text(WIDTH - 30, HEIGHT - 6, axes[0], end=True)]
    for part in range(5):
        x, y = place(0, most_y * part / 4)
        drawn.append(f'<path d="M{x:.0f} {y:.0f}H{WIDTH - 30}" stroke="#e5e7eb"/>')
        drawn.append(_text(x - 8, y + 4, f"{most_y * part / 4:.3g} {axes[1]}", end=True))
    for part in range(6):
        x, y = place(most_x * part / 5, 0)
        drawn.append(_text(x, y + 16, f"{most_x * part / 5:.3g}"))
    for number, one in enumerate(series.values()):
        path_words = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in one))
        drawn.append(f'<polyline points="{path_words}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
    for at, word in marks:
        x, y = place(at, most_y)
        drawn.append(f'<path d="M{x:.1f} {y:.1f}V{HEIGHT - BOTTOM}" stroke="#9ca3af" stroke-dasharray="3 3"/>')
        drawn.append(_text(x + 3, y + 10, word))
    path.write_text(_svg(drawn + _legend(list(series))))


def _legend(names: Sequence[str]) -> list[str]:
    found, at = [], float(LEFT)
    for number, name in enumerate(names):
        found.append(f'<rect x="{at:.0f}" y="26" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>')
        found.append(_text(at + 14, 35, name))
        at += 30 + 7 * len(name)
    return found


def _text(x: float, y: float, text: str, *, end: bool = False, bold: bool = False) -> str:
    more = ' text-anchor="end"' if end else ""
    more += ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(text)}</text>'


def _svg(drawn: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    style = "<style>svg{background:#fff;font:12px sans-serif}text{fill:#374151}</style>"
    return head + style + "\n".join(drawn) + "</svg>\n"
