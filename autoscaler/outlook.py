"""What the packer may expect: which shapes of Wants come how often, and what a restart of each Model costs.

Owns the Outlook of a World. The demand lately of a Model is the Replicas that its most Calls at once need, fading since
the last Call; declared Models that nobody calls count for nothing. Promises: the same World gives the same Outlook
whatever order things were observed in, and its size is bounded. It places nothing; `autoscaler.packer` does.
"""

from __future__ import annotations

from math import exp2, inf

from autoscaler.contract import ModelName
from autoscaler.demand import NO_HISTORY, NO_LOAD, median_start_s
from autoscaler.model import Model
from autoscaler.packing import Outlook, Shape
from autoscaler.world import History, Load, World

HALF_LIFE_S = 3600.0
"""A Model last called so long ago counts half."""
SHAPES_MAX = 256
"""Shapes in the histogram: the most wanted ones. The rest is left out of it."""
_PARTS = 1 << 20
"""Weights are whole parts of a Replica, because sums of floats depend on their order."""


def outlook(world: World, now_s: float) -> Outlook:
    """What may be expected at `now_s`, as far as demand and starts are remembered."""
    costs: dict[ModelName, float] = {}
    for name in world.by_model:
        median_s = median_start_s(world.histories.get(name, NO_HISTORY))
        if median_s is not None:
            costs[name] = median_s
    return Outlook(histogram=histogram(world, now_s), start_s=costs)


def histogram(world: World, now_s: float) -> dict[Shape, float]:
    """Shape -> its share of the demand lately, the largest first; they sum to 1. Empty while nobody has called."""
    histories, loads = world.histories, world.loads
    parts: dict[tuple[int, int, int], int] = {}
    for name, model in world.models.items():
        history, load = histories.get(name, NO_HISTORY), loads.get(name, NO_LOAD)
        if history is NO_HISTORY and load is NO_LOAD and not model.spec.replicas.min:
            continue  # as most are
        weight = int(_PARTS * wanted_lately(model, history, load, now_s))
        if weight:
            gpu = model.spec.gpu
            shape = (gpu.count, model.memory_bytes, gpu.compute_percent or 0)
            parts[shape] = parts.get(shape, 0) + weight
    most = sorted(parts, key=lambda shape: (-parts[shape], shape))[:SHAPES_MAX]
    total = sum(parts[shape] for shape in most)
    return {Shape(*shape): parts[shape] / total for shape in most}


def wanted_lately(model: Model, history: History, load: Load, now_s: float) -> float:
    """How many Replicas the Model needed when it was last called, fading since then; never below its minimum."""
    spec = model.spec
    if spec.paused:
        return 0.0
    low, high = spec.replicas.min, spec.replicas.max
    calls, age_s = load.waiting + load.running, 0.0
    if not calls:
        called_s = max(history.last_activity_s or -inf, history.refused_cold_s or -inf)
        if called_s == -inf:
            return low
        age_s = max(0.0, now_s - called_s)
    for _, peak in history.peaks:
        calls = max(calls, peak)
    needed = min(max(1, -(-calls // model.slots)), high)
    return max(float(low), needed * exp2(-age_s / HALF_LIFE_S))
