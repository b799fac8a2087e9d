"""A model for Triton's Python backend whose load fails."""

from __future__ import annotations


class TritonPythonModel:
    """The class that the backend searches."""

    def initialize(self, _: dict[str, str]) -> None:
        """Fails."""
        raise RuntimeError("the weights are damaged")
