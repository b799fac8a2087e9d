"""The table that is printed during the run, and result.json, which is rewritten after every step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

Value = object


class Report:
    """Rows by step, figures with their limits, and facts about the machine."""

    def __init__(self, path: Path, facts: Mapping[str, Value]) -> None:
        self._path, self._began_s = path, time.monotonic()
        self.facts = dict(facts)
        self.steps: dict[str, dict[str, Value]] = {}
        self.figures: list[dict[str, Value]] = []

    def say(self, text: str) -> None:
        """Print one line, with the seconds since the run began."""
        print(f"{time.monotonic() - self._began_s:7.1f} s  {text}", flush=True)

    def row(self, step: str, what: str, value: Value, unit: str = "", note: str = "") -> None:
        """Add one measured value."""
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        self.say(f"{step:<10} {what:<52} {shown:>12} {unit:<6} {note}".rstrip())
        self.steps.setdefault(step, {})[what] = value

    def figure(self, step: str, what: str, value: float | None, limit: str, *, holds: bool | None) -> None:
        """Add one value that must hold; `holds` None: it is reported only, or could not be measured."""
        verdict = {True: "holds", False: "MISSED", None: "reported"}[holds]
        shown = "not measured" if value is None else f"{value:.4g}"
        self.say(f"{step:<10} {what:<52} {shown:>12}        {limit}: {verdict}")
        self.figures.append({"step": step, "figure": what, "value": value, "limit": limit, "holds": holds})

    def keep(self, step: str, name: str, value: Value) -> None:
        """Add a value to result.json without printing it."""
        self.steps.setdefault(step, {})[name] = value

    def failed(self, step: str, why: str) -> None:
        """Record a step that failed."""
        self.say(f"{step:<10} FAILED: {why}")
        self.steps.setdefault(step, {})["failed"] = why

    def skipped(self, step: str, why: str) -> None:
        """Record a step that was skipped."""
        self.say(f"{step:<10} skipped: {why}")
        self.steps.setdefault(step, {})["skipped"] = why

    def took(self, step: str, seconds: float) -> None:
        """Record how long a step took."""
        self.steps.setdefault(step, {})["seconds"] = round(seconds, 2)

    @property
    def good(self) -> bool:
        """Whether no step failed and no figure was missed."""
        return all("failed" not in step for step in self.steps.values()) and all(
            one["holds"] is not False for one in self.figures
        )

    def verdict(self) -> str:
        """One line: the failed and skipped steps, and the missed and unmeasured figures."""
        named = {
            "failed": [name for name, step in self.steps.items() if "failed" in step],
            "missed": [f"{one['step']}: {one['figure']}" for one in self.figures if one["holds"] is False],
            "skipped": [name for name, step in self.steps.items() if "skipped" in step],
            "not measured": [f"{one['step']}: {one['figure']}" for one in self.figures if one["value"] is None],
        }
        said = [f"{what}: {', '.join(names)}" for what, names in named.items() if names]
        begin = "all figures that were measured hold" if self.good else "not all figures hold"
        return "; ".join([begin, *said])

    def write(self) -> None:
        """Write the current result.json, atomically replacing the file."""
        text = {"facts": self.facts, "figures": self.figures, "steps": self.steps}
        new = self._path.with_suffix(".tmp")
        new.write_text(json.dumps(text, indent=1, default=str) + "\n")
        new.replace(self._path)
        sys.stdout.flush()
