"""Keeps what is told of the chart true: the Settings in values.schema.json, and the table of values in chart-values.md.

Owns both: the first is made of the Settings' type, the second of values.yaml and its comments. Run it after a
change of either: `.venv/bin/python -m docs.chart`. tests/chart compares what is there with what it would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autoscaler.schema.json_schema import render_schemas

ROOT = Path(__file__).parent.parent
CHART = ROOT / "charts" / "pilotlight"
VALUES, SCHEMA = CHART / "values.yaml", CHART / "values.schema.json"
PAGE = ROOT / "docs" / "reference" / "chart-values.md"
NOT_HERE = ("apiVersion", "kind", "devices", "tls")
"""Keys of the Settings document that are the chart's own business, or one machine's."""
MARKS = ("<!-- values -->\n", "<!-- /values -->")
_KEY = re.compile(r"^( *)([A-Za-z]+):(?: (.*))?$")


class Value(NamedTuple):
    """One key of values.yaml."""

    path: str
    default: str
    """As it stands there; empty where keys follow."""
    meaning: str
    """The comment above it."""


def values(text: str) -> Iterator[Value]:
    """All keys with their comments, in order."""
    above: list[str] = []
    parents: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.lstrip("# "))
            continue
        found = _KEY.match(line)
        if found is not None:
            depth = len(found[1]) // 2
            parents[depth:] = [found[2]]
            yield Value(".".join(parents), found[3] or "", " ".join(above))
        above = []


def table(text: str) -> str:
    """The values that are leaves, as rows of a page."""
    rows = [f"| `{one.path}` | `{one.default}` | {one.meaning} |" for one in values(text) if one.default]
    return "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *rows, ""])


def settings() -> dict[str, Any]:
    """What the value `settings` may hold."""
    schema: dict[str, Any] = json.loads(render_schemas()["settings.json"])
    kept = {key: value for key, value in schema["properties"].items() if key not in NOT_HERE}
    return {"type": "object", "additionalProperties": False, "properties": kept}


def schema(text: str) -> str:
    """values.schema.json with these Settings."""
    whole = json.loads(text)
    whole["properties"]["settings"] = settings()
    return json.dumps(whole, indent=2) + "\n"


def page(text: str) -> str:
    """chart-values.md with this table."""
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + table(VALUES.read_text()) + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    SCHEMA.write_text(schema(SCHEMA.read_text()))
    if PAGE.exists():
        PAGE.write_text(page(PAGE.read_text()))
