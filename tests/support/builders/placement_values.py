"""Handmade placement values for tests: they need no training, and their effect is obvious."""

from __future__ import annotations

import numpy as np

from autoscaler.placement.index.residual_waste_tables import BINS, LEVELS, UNITS, WHOLE
from autoscaler.placement.learning.training import build_training_input
from autoscaler.state.world import History, PlacementValues, TrainingInput, World
from tests.support.builders.worlds import T0, device, model, world


def lesson(of: TrainingInput, faces: int, *, apart: bool = False) -> PlacementValues:
    """All free memory is worth the same; with `apart` none in nearly full Slices, so replicas avoid filling Slices."""
    values = np.zeros((faces + 1, BINS, LEVELS + 1), np.dtype("<i4"))
    if apart:
        values[:, :, : LEVELS // 4] = WHOLE * UNITS
    return PlacementValues(exercise=of, values=values.tobytes(), prices=bytes(4 * (faces + 1)))


def cluster(nodes: int = 3, *called: str, gi: float = 24.0) -> World:
    """Nodes of two devices, and Models a (8 GiB) and b (12 GiB) with recent requests."""
    models = [model("a", 8), model("b", 12)]
    slices = [device(f"g{at}", gi, f"n{at // 2}") for at in range(2 * nodes)]
    known = {name: History(last_activity_s=T0) for name in called or ("a", "b")}
    return world(models, slices, histories=known)


def exercise_of(one: World) -> TrainingInput:
    """The training input of the `World`, which must have one."""
    found = build_training_input(one, T0)
    assert found is not None
    return found
