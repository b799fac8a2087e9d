"""Explains the first option for one more replica: which eviction makes room for it, or why none does. Pure.

Uses the packer itself: the victims now, else after all residencies have ended, else with any priority.
`autoscaler.placement.model.predicates` supplies the reasons, from the rules that decide. Decides nothing.
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
HERE: Final = "there is room for it"
GOES: Final = frozenset({S.DRAINING, S.STOPPING, S.SCRUBBING})


class Evicted(Fact, frozen=True):
    """One replica that would be evicted, or is being evicted."""

    replica: ReplicaId
    model: ModelName
    slices: tuple[SliceId, ...]
    restart_seconds: float
    """The expected time of its Model's next start: the cost of the eviction."""
    stays: str = ""
    """Why it cannot be evicted, as text. Empty: it can."""


class Eviction(NamedTuple):
    """The option of an eviction."""

    victims: tuple[Evicted, ...] = ()
    under_way: bool = False
    """Whether the victims are already stopping for it."""
    why_not: str = ""
    """Why there is no eviction. Empty: it is in progress, or it would happen now."""
    room: str = ""
    """Why neither an eviction nor an order is needed: there is room, or there will be. Empty: there is none."""
    wait_s: float | None = None
    """The time after which the victims can be evicted if they get no requests, in seconds. None: unknown."""

    def says(self) -> str:
        """Format the option: `Eviction of b (r1 on gpu0), which takes 4 s to start again`."""
        if not self.victims:
            return "Eviction"
        who = ", ".join(f"{one.model} ({one.replica} on {', '.join(one.slices)})" for one in self.victims)
        restart_s = sum(one.restart_seconds for one in self.victims)
        take = "takes" if len(self.victims) == 1 else "take"
        return f"Eviction of {who}, which {take} {format_duration(restart_s)} to start again"


def explain_eviction(world: World, plan: Plan, want: PlacementRequest, now_s: float) -> Eviction:
    """Explain the eviction for one more replica; `want` is its request, with the allowed eviction level."""
    going = tuple(_told(world, one) for one in _leave_for(world, plan, want.model))
    if going:
        return Eviction(going, under_way=True)
    if any(isinstance(one, StartReplica) and one.replica.model == want.model for one in plan.actions):
        return Eviction(why_not=HERE, room=HERE)
    yard = IndexCache().yard(world, now_s)
    bold = want._replace(urgency=want.urgency._replace(force=EvictionLevel.BUSY, priority=ANY_PRIORITY))
    missing = None
    for one, at_s in ((want, now_s), (want, now_s + LATER_S), (bold, now_s + LATER_S)):
        packing = pack([one], yard, world.nodes.copies, build_restart_costs(world), at_s)
        if packing.victims:
            return _judged(world, plan, want, _incumbents(world, yard, packing.victims), now_s)
        missing = next(iter(packing.unmet), None)
        if missing is None or missing.promised:
            room = HERE if missing is None else f"it {missing.reason}"
            return Eviction(why_not=room, room=room)
    return Eviction(why_not="" if missing is None else missing.reason)


def _incumbents(world: World, yard: SliceIndex, victims: Iterable[Victim]) -> Iterator[Occupant]:
    """Return the victims as the packer's occupants."""
    for victim in victims:
        shelves = (yard.shelf(id) for id in world.replicas[victim.replica].resources.slices if id in yard.shelves)
        there = (one for shelf in shelves for one in shelf.incumbents if one.replica == victim.replica)
        yield from islice(there, 1)


def _judged(world: World, plan: Plan, want: PlacementRequest, victims: Iterable[Occupant], now_s: float) -> Eviction:
    """Return the victims with the reasons that protect them."""
    told: list[Evicted] = []
    waits: list[float | None] = []
    for one in victims:
        told.append(_told(world, world.replicas[one.replica], _stays(want, one, now_s)))
        frees = can_evict(want, one, one.evictable_s)
        waits.append(max(0.0, one.evictable_s - now_s) if frees else None)
    known = [one for one in waits if one is not None]
    wait_s = max(known) if len(known) == len(waits) else None
    stays = "; ".join(dict.fromkeys(f"{one.model} is {one.stays}" for one in told if one.stays))
    unmet = next((one.reason for one in plan.unmet if one.model == want.model), "")
    return Eviction(tuple(told), why_not=stays or unmet, wait_s=wait_s)


def _stays(want: PlacementRequest, one: Occupant, now_s: float) -> str:
    """Return why the request cannot evict the occupant now. Empty: it can."""
    if can_evict(want, one, now_s):
        return ""
    words = describe_occupant(want, one, now_s)
    if one.priority == want.urgency.priority and not one.kept and now_s >= one.evictable_s:
        words += (
            f", and {want.model} is served"
            if want.urgency.force >= EvictionLevel.IDLE
            else f", and no Call waits for {want.model}"
        )
    return words


def _leave_for(world: World, plan: Plan, model: ModelName) -> Iterator[Replica]:
    """Yield replicas that were drained for the Model and have not stopped yet."""
    asked = {one.replica for one in plan.actions if isinstance(one, DrainReplica) and one.victim_of == model}
    for id, one in sorted(world.replicas.items()):
        if id in asked or (one.state in GOES and one.drain is not None and one.drain.victim_of == model):
            yield one


def _told(world: World, one: Replica, stays: str = "") -> Evicted:
    restart_s = build_restart_costs(world).restart_s(one.model)
    return Evicted(replica=one.id, model=one.model, slices=one.resources.slices, restart_seconds=restart_s, stays=stays)
