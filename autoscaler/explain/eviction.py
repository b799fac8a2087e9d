"""Explains whether an eviction can make room for one more replica of a Model, and why not. Pure.

Runs the packer up to three times: now, after the end of all residencies, and then with the highest priority. The first
run that finds victims counts. `autoscaler.placement.model.predicates` explains what protects them. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index_cache import IndexCache
from autoscaler.placement.learning.expected_demand import build_restart_costs
from autoscaler.placement.model.predicates import can_evict, describe_occupant
from autoscaler.placement.model.types import EvictionLevel, Occupant, PlacementRequest, Victim
from autoscaler.placement.packer import pack
from autoscaler.state.actions import DrainReplica, Plan, StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Fact, Replica, SliceId, World
from autoscaler.text import format_duration

ANY_PRIORITY: Final = 1_000_000_001
"""Above every priority that a Model can have."""
LATER_S: Final = 31_536_000.0
"""A time after the end of every residency, in seconds."""
FITS_NOW: Final = "it fits on free capacity"
STOPPING: Final = frozenset({S.DRAINING, S.STOPPING, S.SCRUBBING})


class Evicted(Fact, frozen=True):
    """A victim: a replica that would be evicted, or is being evicted."""

    replica: ReplicaId
    model: ModelName
    slices: tuple[SliceId, ...]
    restart_seconds: float
    """Expected time of the next start of its Model: the cost of the eviction."""
    stays: str = ""
    """Why it cannot be evicted now. Empty: it can."""


class Eviction(NamedTuple):
    """The eviction that makes room for one more replica, if there is one."""

    victims: tuple[Evicted, ...] = ()
    under_way: bool = False
    """Whether the victims are already draining or stopping."""
    why_not: str = ""
    """Why nothing is evicted. Empty: the eviction is in progress, or the next plan orders it."""
    room: str = ""
    """Why neither an eviction nor a capacity order is needed. Empty: there is no room for the replica."""
    wait_s: float | None = None
    """Seconds until the victims can be evicted, provided that they become idle. None: unknown."""

    def says(self) -> str:
        """Format the option: `Eviction of b (r1 on gpu0), restart takes 4 s`."""
        if not self.victims:
            return "Eviction"
        names = ", ".join(f"{one.model} ({one.replica} on {', '.join(one.slices)})" for one in self.victims)
        restart_s = sum(one.restart_seconds for one in self.victims)
        take = "restart takes" if len(self.victims) == 1 else "restarts take"
        return f"Eviction of {names}, {take} {format_duration(restart_s)}"


def explain_eviction(world: World, plan: Plan, want: PlacementRequest, now_s: float) -> Eviction:
    """Explain the eviction for one more replica; `want`: its request, with the allowed eviction level."""
    stopping = tuple(_evicted(world, one) for one in _list_drained_for(world, plan, want.model))
    if stopping:
        return Eviction(stopping, under_way=True)
    if any(isinstance(one, StartReplica) and one.replica.model == want.model for one in plan.actions):
        return Eviction(why_not=FITS_NOW, room=FITS_NOW)
    index = IndexCache().update(world, now_s)
    strongest = want._replace(urgency=want.urgency._replace(force=EvictionLevel.BUSY, priority=ANY_PRIORITY))
    missing = None
    for one, at_s in ((want, now_s), (want, now_s + LATER_S), (strongest, now_s + LATER_S)):
        packing = pack([one], index, world.nodes.copies, build_restart_costs(world), at_s)
        if packing.victims:
            return _explain_victims(world, plan, want, _occupants(world, index, packing.victims), now_s)
        missing = next(iter(packing.unmet), None)
        if missing is None or missing.promised:
            room = FITS_NOW if missing is None else f"it {missing.reason}"
            return Eviction(why_not=room, room=room)
    return Eviction(why_not="" if missing is None else missing.reason)


def _occupants(world: World, index: SliceIndex, victims: Iterable[Victim]) -> Iterator[Occupant]:
    """Yield the victims as occupants of slices."""
    for victim in victims:
        bins = (index.shelf(id) for id in world.replicas[victim.replica].resources.slices if id in index.shelves)
        found = (one for shelf in bins for one in shelf.incumbents if one.replica == victim.replica)
        yield from islice(found, 1)


def _explain_victims(
    world: World, plan: Plan, want: PlacementRequest, victims: Iterable[Occupant], now_s: float
) -> Eviction:
    """Return the victims, each with the reason that protects it."""
    evicted: list[Evicted] = []
    waits: list[float | None] = []
    for one in victims:
        evicted.append(_evicted(world, world.replicas[one.replica], _protection_reason(want, one, now_s)))
        frees = can_evict(want, one, one.evictable_s)
        waits.append(max(0.0, one.evictable_s - now_s) if frees else None)
    known = [one for one in waits if one is not None]
    wait_s = max(known) if len(known) == len(waits) else None
    stays = "; ".join(dict.fromkeys(f"{one.model} is {one.stays}" for one in evicted if one.stays))
    unmet = next((one.reason for one in plan.unmet if one.model == want.model), "")
    return Eviction(tuple(evicted), why_not=stays or unmet, wait_s=wait_s)


def _protection_reason(want: PlacementRequest, one: Occupant, now_s: float) -> str:
    """Return why the request cannot evict the occupant now. Empty: it can."""
    if can_evict(want, one, now_s):
        return ""
    words = describe_occupant(want, one, now_s)
    if one.priority == want.urgency.priority and not one.kept and now_s >= one.evictable_s:
        words += (
            f", and {want.model} already has a replica"
            if want.urgency.force >= EvictionLevel.IDLE
            else f", and no request waits for {want.model}"
        )
    return words


def _list_drained_for(world: World, plan: Plan, model: ModelName) -> Iterator[Replica]:
    """Yield replicas that were drained for the Model and have not stopped yet."""
    drained = {one.replica for one in plan.actions if isinstance(one, DrainReplica) and one.victim_of == model}
    for id, one in sorted(world.replicas.items()):
        if id in drained or (one.state in STOPPING and one.drain is not None and one.drain.victim_of == model):
            yield one


def _evicted(world: World, one: Replica, stays: str = "") -> Evicted:
    restart_s = build_restart_costs(world).restart_s(one.model)
    return Evicted(replica=one.id, model=one.model, slices=one.resources.slices, restart_seconds=restart_s, stays=stays)
