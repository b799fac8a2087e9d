"""On the PYTHONPATH of `serve`. While the file `FAULT` exists, every decision about the Model `faulty` raises; if the
file contains `document`, every decoding of its document raises instead.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from autoscaler.demand import desired_replicas
from autoscaler.documents import parse
from autoscaler.spec.model import Model
from autoscaler.state.world import World

_wanted, _model = desired_replicas.compute_desired_replicas, parse._model


def fault() -> str | None:
    """The content of the file; None: it does not exist."""
    path = Path(os.environ["FAULT"])
    return path.read_text() if path.exists() else None


def decoded(value: dict[str, Any]) -> Model:
    """As the product's function, except for one Model."""
    if value["metadata"]["name"] == "faulty" and fault() == "document":
        raise LookupError(f"injected into process {os.getpid()} at {time.monotonic()}")
    return _model(value)


def wanted(world: World, model: Model, now_s: float) -> desired_replicas.DesiredReplicas:
    """As the product's function, except for one Model."""
    if model.name == "faulty" and fault() == "":
        raise LookupError("injected")
    return _wanted(world, model, now_s)


desired_replicas.compute_desired_replicas = wanted
parse._model = decoded
