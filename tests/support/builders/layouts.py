"""Four nodes of ten devices with a given layout of replicas, for tests of defragmentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bin_builder import build_bins
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest, RestartCosts, Unplaced
from autoscaler.planner.plan import plan
from autoscaler.rearrange.defragmentation import Defragmented, defragment
from autoscaler.rearrange.replica_migration import MigrationContext
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.actions import StartReplica
from autoscaler.state.world import NodeId, Replica, Slice, World
from tests.support.builders.worlds import T0, Scene, device, model, replace_fields, replica, world

NODES, DEVICES = 4, 10
BIG = 8
"""Devices of the Model that is added last."""
Laid = dict[int, list[int]]
"""Node -> the devices of each replica there."""


def slices(*, shared: bool = True, many: int = DEVICES) -> list[Slice]:
    """All Slices, empty."""
    return [device(f"n{node}-g{at}", 80, f"n{node}", shared=shared) for node in range(NODES) for at in range(many)]


def wide(name: str, devices: int, low: int = 1, **spec: Any) -> Model:
    """A Model that is kept ready on that many whole devices."""
    return model(name, 70, low=low, gpu=Gpu(count=devices), **({"idle_seconds": 5.0} | spec))


def big(**spec: Any) -> Model:
    """The Model that is added last."""
    return wide("big", BIG, **spec)


def laid(at: Laid, *, others: Iterable[Model] = (), shared: bool = True, **fields: Any) -> World:
    """Replicas in that layout, each the only one of a Model `n0-a`, `n0-b` ...; and `big` is wanted."""
    models, there = list(others or [big()]), []
    for node, sizes in at.items():
        first = 0
        for letter, size in zip("abcdefghij", sizes, strict=False):
            models.append(wide(f"n{node}-{letter}", size))
            on = [f"n{node}-g{one}" for one in range(first, first + size)]
            there.append(replica(models[-1], f"{models[-1].name}-r", on))
            first += size
    return world(models, slices(shared=shared), there, **fields)


def no_requests(_now_s: float, _scene: Scene) -> list[tuple[str, int, int]]:
    """No demand."""
    return []


def changed(at: World, id: str, **fields: Any) -> World:
    """The `World` with one replica changed."""
    after = replace_fields(at.replicas[ReplicaId(id)], **fields)
    return rebuild_indices(replace(at, replicas={**at.replicas, after.id: after}), T0)


def reason(at: World, now_s: float = T0) -> str:
    """Why `big` has no placement."""
    return next(unmet.reason for unmet in plan(at, now_s).unmet if unmet.model == "big")


def moved(scene: Scene) -> list[tuple[float, Replica]]:
    """Replacement replicas, and when they were started."""
    return [(at_s, a.replica) for at_s, a in scene.actions if isinstance(a, StartReplica) and a.replica.move]


def node_of(at: World, of: Replica) -> NodeId:
    """The replica's node."""
    return at.nodes.slices[of.resources.slices[0]].node


def free(at: World) -> dict[NodeId, int]:
    """Unused whole devices of each node."""
    counts: dict[NodeId, int] = {}
    for slice_ in at.nodes.slices.values():
        counts[slice_.node] = counts.get(slice_.node, 0) + (not at.by_slice.get(slice_.id))
    return counts


def asked(at: World, of: Model | None = None) -> PlacementRequest:
    """A placement request for a Model that is wanted but has no queued requests."""
    return build_placement_request(of or big(), 0, T0, EvictionLevel.LOWER, "it is wanted", at.settings.pod)


def looked(
    at: World, now_s: float, want: PlacementRequest | None = None, starts: dict[str, float] | None = None
) -> Defragmented:
    """What defragmentation does for an unmet PlacementRequest, regardless of the rest of the Plan."""
    outlook = RestartCosts(start_s={ModelName(name): start_s for name, start_s in (starts or {}).items()})
    ground = MigrationContext(at, SliceIndex(build_bins(at, now_s)), outlook, now_s)
    return defragment([Unplaced(want or asked(at), "no room")], ground)


def names(found: Defragmented) -> list[str]:
    """Models in the order in which they are moved."""
    return [step.home.want.model for step in found.steps]
