"""Which weights a node's store brings, and which an engine fetches itself. Pure.

Owns that line for a cluster. What an engine is told by name, of the Hub, it fetches with its own login into its own
pod, and needs no agent; a pattern of its files (`?include=`) no engine knows.
"""

from __future__ import annotations

from autoscaler.spec.artifact import is_stored
from autoscaler.spec.engines import ENGINES, fetches
from autoscaler.spec.model import Model


def stored(artifact: str | None, engine: str) -> bool:
    """Whether such weights of a Model with that engine are to be in a node's store."""
    return is_stored(artifact) and not fetches(artifact or "", ENGINES[engine])


def lying(model: Model) -> str | None:
    """Where a Model's weights lie that its engine does not fetch itself; None: it does, or there are none."""
    artifact = model.spec.artifact
    return None if artifact is None or fetches(artifact, ENGINES[model.spec.engine]) else artifact
