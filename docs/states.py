"""Writes the replica states into docs/reference/replica-states.md: run `python -m docs.states`.

The table is the block between `<!-- states -->` and its end. tests/project/test_docs.py checks that it is current.
"""

from __future__ import annotations

from pathlib import Path

from autoscaler.state.lifecycle import render_state_diagram

PAGE = Path(__file__).parent / "reference" / "replica-states.md"


def states() -> str:
    """The table of states as a fenced block."""
    return f"```\n{render_state_diagram()}\n```\n"


def between(text: str, mark: str, content: str) -> str:
    """`text` with `content` between `<!-- mark -->` and `<!-- /mark -->`. Raises ValueError."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE.name} has no block {mark}")
    return head + begin + content + end + tail


if __name__ == "__main__":
    PAGE.write_text(between(PAGE.read_text(), "states", states()))
