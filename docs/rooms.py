"""Writes what is generated in ARCHITECTURE.md: the table of states, one line per module. Run `python -m docs.rooms`.

Owns the two blocks between `<!-- states -->`, `<!-- rooms -->` and their ends. A module's line is the first sentence of
its docstring; whether it is pure is what tests/test_tidy.py holds it to. tests/test_docs.py checks both blocks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from autoscaler.states import diagram
from tests.test_tidy import PACKAGES, SOURCES, name, pure

PAGE = Path(__file__).parent.parent / "ARCHITECTURE.md"
ABOUT = {
    "gateway": "The data plane: N equal processes that know nothing but what they are told.",
    "autoscaler": "The control plane: one process that decides.",
    "artifacts": "Weights: where they lie, what they consist of, what they say of themselves.",
    "loadtest": "A black box that knows only the inference port.",
    "pilotlight": "The front door: the command line, and the one place that composes processes.",
}


def first_sentence(path: Path) -> str:
    """What a module says of itself first, without its last full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"\. (?=[A-Z`])", paragraph, maxsplit=1)[0].removesuffix(".")


def rooms() -> str:
    """One list per package."""
    lines: list[str] = []
    for package in ("gateway", "autoscaler", "artifacts", "loadtest", "pilotlight"):
        lines += [f"**{package}/** {ABOUT[package]}", ""]
        for path in SOURCES:
            if name(path).split("/")[0] == package and path.read_text():
                mark = " \\*" if pure(path) else ""
                lines.append(f"* `{name(path)}.py`{mark}: {first_sentence(path)}.")
        lines.append("")
    return "\n".join(lines)


def states() -> str:
    """The table of states as a fenced block."""
    return f"```\n{diagram()}\n```\n"


def between(text: str, mark: str, content: str) -> str:
    """`text` with `content` between `<!-- mark -->` and `<!-- /mark -->`."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE.name} has no block {mark}")
    return head + begin + content + end + tail


if __name__ == "__main__":
    if set(ABOUT) != set(PACKAGES):
        raise SystemExit("ABOUT must have every package")
    page = between(PAGE.read_text(), "states", states())
    PAGE.write_text(between(page, "rooms", rooms()))
