"""Runs the demo and draws docs/demo.svg from its output: `python docs/record_demo.py`.

The image shows the first start of each model, all lines from the moment when both get requests at once, and the
last two lines. A line of dots replaces omitted lines.
"""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
MOVE = re.compile(r"\d\d:\d\d:\d\d\.\d{3}  \S.*")
BOTH = "both get requests at once"
FIRST_LINES = 14
WIDTH = 112
COLOURS = {
    r"\bstarting\b|\bparked\b": "yellow",
    r"\bready\b(?= )|\banswered\b": "green",
    r"\bdraining\b|\bstopping\b": "cyan",
    r"\bgone\b": "bright_black",
    r"\bfailed\b|SIGKILL +while it starts": "red",
    r"^\d\d:\d\d:\d\d\.\d{3}": "bright_black",
    r"^\$ .*|\d+ completed, 0 lost": "bold",
}
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>{styles} .{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; }} .{unique_id}-title {{ font-size: 15px;
font-family: system-ui, sans-serif; }}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""
"""Unlike rich's own format, this one loads no font over the network."""


def chosen(output: str) -> list[str]:
    """Return the lines to show. Raises SystemExit if the run is incomplete."""
    lines = [line for line in output.splitlines() if MOVE.match(line)]
    last = output.splitlines()[-2:]
    begin = next((i for i, line in enumerate(lines) if BOTH in line), None)
    if begin is None or not last[-1].startswith("demo: 40 calls, 40 completed"):
        raise SystemExit("the demo did not run to its end")
    return ["$ make demo", *lines[:FIRST_LINES], "...", *lines[begin:], *last]


def main() -> None:
    """Run the demo, select the lines, and draw the image."""
    command = [sys.executable, "-m", "examples.demo"]
    output = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True).stdout
    console = Console(record=True, width=WIDTH, file=StringIO(), color_system="standard")
    for line in chosen(output):
        text = Text(line, overflow="fold")
        for pattern, colour in COLOURS.items():
            text.highlight_regex(pattern, colour)
        console.print(text)
    HERE.joinpath("demo.svg").write_text(console.export_svg(title="make demo", code_format=FORMAT, unique_id="demo"))


if __name__ == "__main__":
    main()
