"""On the PYTHONPATH of `serve`: every decision about the Model `faulty` raises while the file `FAULT` exists."""

from __future__ import annotations

import os
from pathlib import Path

from autoscaler.demand import desired_replicas
from autoscaler.spec.model import Model
from autoscaler.state.world import World

_wanted = desired_replicas.compute_desired_replicas


def wanted(world: World, model: Model, now_s: float) -> desired_replicas.DesiredReplicas:
    """As the product's function, except for one Model."""
    if model.name == "faulty" and Path(os.environ["FAULT"]).exists():
        raise LookupError("injected")
    return _wanted(world, model, now_s)


desired_replicas.compute_desired_replicas = wanted
