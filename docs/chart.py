"""Generates the Settings schema in the chart's values.schema.json, and the table of values in chart-values.md.

The schema is derived from the type `Settings`, the table from values.yaml and its comments. After a change of either,
run `.venv/bin/python -m docs.chart`. tests/chart compares the files with the generated text.
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
"""Keys of the Settings document that the chart sets itself, or that apply to one machine only."""
MARKS = ("<!-- values -->\n", "<!-- /values -->")
_KEY = re.compile(r"^( *)([A-Za-z]+):(?: (.*))?$")


class Value(NamedTuple):
    """One key of values.yaml."""

    path: str
    default: str
    """The default as values.yaml writes it; empty if the key has subkeys."""
    meaning: str
    """The comment above the key."""


def values(text: str) -> Iterator[Value]:
    """Yield all keys with their comments, in order."""
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
    """Return a Markdown table of the values without subkeys."""
    rows = [f"| `{one.path}` | `{one.default}` | {one.meaning} |" for one in values(text) if one.default]
    return "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *rows, ""])


def settings() -> dict[str, Any]:
    """Return the JSON schema of the value `settings`."""
    schema: dict[str, Any] = json.loads(render_schemas()["settings.json"])
    kept = {key: value for key, value in schema["properties"].items() if key not in NOT_HERE}
    return {"type": "object", "additionalProperties": False, "properties": kept}


def schema(text: str) -> str:
    """Return values.schema.json with the current schema of the Settings."""
    whole = json.loads(text)
    whole["properties"]["settings"] = settings()
    return json.dumps(whole, indent=2) + "\n"


def page(text: str) -> str:
    """Return chart-values.md with the current table."""
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + table(VALUES.read_text()) + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    SCHEMA.write_text(schema(SCHEMA.read_text()))
    if PAGE.exists():
        PAGE.write_text(page(PAGE.read_text()))
