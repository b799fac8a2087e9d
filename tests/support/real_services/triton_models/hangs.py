"""A model for Triton's Python backend whose load never ends."""

from __future__ import annotations

import threading


class TritonPythonModel:
    """The class that the backend searches."""

    def initialize(self, _: dict[str, str]) -> None:
        """Waits for ever."""
        threading.Event().wait()
