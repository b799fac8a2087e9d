"""On the PYTHONPATH of `serve`: every decision about the Model `faulty` raises."""

from __future__ import annotations

from autoscaler import demand
from autoscaler.model import Model
from autoscaler.world import World

_wanted = demand.wanted


def wanted(world: World, model: Model, now_s: float) -> demand.Wanted:
    """As the product's, but for one Model."""
    if model.name == "faulty":
        raise LookupError("injected")
    return _wanted(world, model, now_s)


demand.wanted = wanted
