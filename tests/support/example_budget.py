"""Budgets of property tests: all examples in the deep tier (`--hypothesis-profile=deep`), a share of them elsewhere."""

from __future__ import annotations

from hypothesis import settings

SHARE = 5
"""Outside the deep tier a property test runs one in SHARE examples."""
EXAMPLES_MIN = 5


def is_deep() -> bool:
    """Whether this run has the budgets of the deep tier."""
    return settings.get_current_profile_name() == "deep"


def examples(deep: int) -> int:
    """Number of examples of a property test that has `deep` of them in the deep tier."""
    return deep if is_deep() else max(EXAMPLES_MIN, deep // SHARE)
