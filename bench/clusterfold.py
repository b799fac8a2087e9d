"""Parsed objects per second that the fold processes: Pilotlight's own pods as the driver reads them, in watch batches.

JSON parsing and watches are not included (they alone process about 9,100 events a second).
"""

from __future__ import annotations

import time
from pathlib import Path

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.fold.indices import rebuild_indices
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import World
from bench import kit
from bench.kit import Figures, say, spread
from bench.plan import NOW_S, build

BATCH = 100
"""Objects per turn of the event loop: a watch that lags delivers them in pieces of 64 KiB."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return folded_per_s."""
    del place
    rounds, world = (3 if quick else 10), build(500, 1250, 0.9, 0)
    seen = changes(world)
    kit.title(
        f"advance(world, batch): pods folded per second; {len(seen)} parsed pods in batches of {BATCH}, {rounds} rounds"
    )
    rates = [_round(world, seen) for _ in range(rounds)]
    say(f"{'folded':<26} {spread(rates, 0):<28} (at least 20000)")
    return {"folded_per_s": min(rates)}


def changes(world: World) -> list[ReplicaSeen]:
    """Return observations that make each replica unready and ready again: each one changes a state."""
    return [
        ReplicaSeen(
            id=ReplicaId(replica.id), model=ModelName(replica.model), spec_hash=replica.spec_hash,
            intent=replica.intent, slices=replica.resources.slices, memory_bytes=replica.resources.memory_bytes,
            slots=replica.slots, address="10.244.1.2:8000", seen=state,
        )
        for state in (Seen.UNREADY, Seen.READY) * 5
        for replica in world.replicas.values()
    ]  # fmt: skip


def _round(world: World, seen: list[ReplicaSeen]) -> float:
    world, begun_s = rebuild_indices(world, NOW_S), time.perf_counter()
    fold_all(world, seen)
    return len(seen) / (time.perf_counter() - begun_s)


def fold_all(world: World, seen: list[ReplicaSeen]) -> None:
    """Fold all observations, in batches."""
    for at in range(0, len(seen), BATCH):
        world, _ = advance(world, seen[at : at + BATCH], NOW_S)
