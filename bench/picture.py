"""Plots the last run in standalone SVG files next to the README, with `loadtest.report.plots`.

Has the colours and the legend. The figures on the screen are the results; pictures only show their distribution.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from loadtest.report.plots import LEFT, TOP, Series, render_plot

__all__ = ["Series", "picture"]

FOLDER = Path(__file__).parent / "plots"
COLOURS = ("#6b7280", "#d97706", "#2563eb", "#059669", "#dc2626", "#7c3aed", "#0891b2")
NAMES_PER_ROW = 4
STYLE = (
    "svg{background:#fff;font:12px sans-serif}text{fill:#374151}.grid{stroke:#e5e7eb}"
    ".dots{fill:none;stroke-width:5;stroke-linecap:round}polyline{fill:none;stroke-width:2}"
)


def picture(name: str, x_label: str, y_label: str, series: Sequence[Series]) -> None:
    """Write plots/NAME.svg, unless there is nothing to plot."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return
    colours = "".join(f"--series-{number}:{colour};" for number, colour in enumerate(COLOURS))
    svg = render_plot(x_label, y_label, drawn).partition("</svg>")[0]
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = svg.partition(">")
    names = ""
    for place, one in enumerate(drawn):
        row, column = divmod(place, NAMES_PER_ROW)
        where = f'x="{LEFT + 12 + 150 * column}" y="{TOP + 10 + 16 * row}" style="fill:{COLOURS[one.colour]}"'
        names += f"<text {where}>● {html.escape(one.name)}</text>"
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(f"{head}><style>:root{{{colours}}}{STYLE}</style>{rest}{names}</svg>\n")
