"""Starts that were refused, for reasons that no other start of the same spec can do anything about: no storm of tries.

Owns for how long that is in the way of the next ones. Time is an argument.
"""

from __future__ import annotations

from autoscaler.contract import ModelName
from autoscaler.model import Model

REFUSED_S = 60.0


class Refused:
    """The last such reason of each Model."""

    def __init__(self) -> None:
        self._known: dict[ModelName, tuple[str, float, str]] = {}
        """Model -> (spec hash, until when, why)."""

    def note(self, model: ModelName, spec_hash: str, reason: str, now_s: float) -> None:
        """A start of that spec was refused."""
        self._known[model] = (spec_hash, now_s + REFUSED_S, reason)

    def reason(self, model: Model, now_s: float) -> str:
        """What stands in the way of it as it is now; empty: nothing is known."""
        spec_hash, until_s, reason = self._known.get(model.name, ("", 0.0, ""))
        return reason if spec_hash == model.spec_hash() and now_s < until_s else ""
