"""The result of a check of `pilotlight doctor`: one line with its fix, for people and for programs.

A check is a function named after what it checks, in `pilotlight.doctor.machine_checks` or
`pilotlight.doctor.cluster_checks`, which also list the checks to run. A check never raises for a problem that it finds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Grade = Literal["ok", "info", "warning", "blocker"]


class Finding(msgspec.Struct, frozen=True):
    """The result for one prerequisite."""

    check: str
    grade: Grade
    says: str
    fix: str = ""
    """How to fix the problem; empty if there is nothing to fix."""


def has_blocker(findings: list[Finding]) -> bool:
    """Return whether a finding prevents Pilotlight from working."""
    return any(one.grade == "blocker" for one in findings)
