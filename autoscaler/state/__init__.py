"""The `World`, its records, and the observations that change it. Types only."""

from __future__ import annotations

import msgspec


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records of the `World`, of observations and of explanations."""
