"""What a check of `pilotlight doctor` finds: one line with its fix. Owns the form, for people and for programs.

A check is a function with the name of what it looks at; `pilotlight.doctor.machine` and `checks_cluster` have them, and
a list there says which are made. A check never raises for what it finds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Grade = Literal["ok", "info", "warning", "blocker"]


class Finding(msgspec.Struct, frozen=True):
    """One prerequisite."""

    check: str
    grade: Grade
    says: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""


def has_blocker(findings: list[Finding]) -> bool:
    """Whether something cannot work."""
    return any(one.grade == "blocker" for one in findings)
