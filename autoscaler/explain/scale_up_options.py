"""Lists the options for one more replica of a Model: an eviction, then capacity offers, with time, cost and reason.

Pure. Uses the functions of the provisioner (`autoscaler.provisioning.provisioner`) and of the packer, so that the
explanation matches the decisions. Operations in progress are read from the last Plan. Decides nothing.

For an eviction the packer runs up to three times: now, after the end of all residencies, and then with the highest
priority. The first run that finds victims counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from typing import Final, Literal, NamedTuple

from autoscaler.capacity.lead_times import NO_LEARNT, estimate_lead_time
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.capacity_simulation import SimulationContext
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index_cache import IndexCache
from autoscaler.placement.learning.expected_demand import build_restart_costs
from autoscaler.placement.model.predicates import can_evict, describe_occupant
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, Occupant, PlacementRequest, Victim
from autoscaler.placement.packer import pack
from autoscaler.provisioning.offer_selection import RatedOffer, choose_offer, compute_deadline_s, rate_offer
from autoscaler.provisioning.provisioner import evaluate_offers
from autoscaler.queries.unschedulable_replicas import list_avoided_nodes
from autoscaler.spec.model import Model
from autoscaler.state import StateRecord
from autoscaler.state.actions import DrainReplica, Plan, StartReplica
from autoscaler.state.capacity import Lease, Offer
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, SliceId, World
from autoscaler.text import format_duration

ANY_PRIORITY: Final = 1_000_000_001
"""Above every priority that a Model can have."""
LATER_S: Final = 31_536_000.0
"""A time after the end of every residency, in seconds."""
FITS_NOW: Final = "it fits on free capacity"
STOPPING: Final = frozenset({S.DRAINING, S.STOPPING, S.SCRUBBING})


class Evicted(StateRecord, frozen=True):
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


class Step(StateRecord, frozen=True):
    """One option for one more replica."""

    says: str
    kind: Literal["evict", "offer"] = "offer"
    """Whether it evicts replicas or orders capacity."""
    provider: str = ""
    offer: str = ""
    """Name of the offer. `provider` and `offer` are empty for an eviction."""
    chosen: bool = False
    """Whether it is in progress, or the next plan chooses it."""
    under_way: bool = False
    """Whether it is in progress: the victims are stopping, or the capacity was ordered."""
    why_not: str = ""
    """Why it is not chosen. Empty: it is chosen."""
    expected_seconds: float | None = None
    """Seconds until the capacity arrives (median), or until the victims can be evicted. None: unknown, or the offer
    does not fit.
    """
    in_time: float | None = None
    """Probability that a replica on it is ready before the first queued request times out. None: not computed."""
    cost: float | None = None
    """Cost of the capacity for one surge of demand, in the Settings' currency. Existing capacity costs nothing."""
    victims: tuple[Evicted, ...] = ()
    """The victims of the eviction. Its cost is the time that they take to restart."""


def explain_ladder(world: World, plan: Plan, model: Model, force: EvictionLevel, now_s: float) -> tuple[Step, ...]:
    """Return every option for one more replica with this eviction level; empty if there is neither a victim nor an
    offer. Order: the eviction, the chosen offers, other offers that fit, and the rest.
    """
    want = build_placement_request(
        model, 0, now_s, force, "", world.settings.pod, list_avoided_nodes(world, model.name, now_s)
    )
    first, coming = explain_eviction(world, plan, want, now_s), _coming(world, plan, model, now_s)
    offers = world.capacity.offers
    if not (first.victims or coming or any(offers.values())):
        return ()
    found = evaluate_offers(SimulationContext(world, build_restart_costs(world), now_s), want)
    needless = first.room
    if first.victims and not first.why_not:
        needless = "an eviction makes room for it"
    elif any(one.unmet for one in coming):
        needless = f"capacity was already ordered from {next(one.lease.id.provider for one in coming if one.unmet)}"
    chosen = (
        None
        if needless
        else choose_offer([one for _, one in found if isinstance(one, RatedOffer)], world.capacity.hedges)
    )
    taken = {} if chosen is None else {one.offer.id: one for one in (chosen.rung, chosen.hedge) if one is not None}
    ordered = {one.lease.offer.id for one in coming}
    steps = [_ordered(world, model, one, now_s) for one in coming]
    rest = [(offer, one) for offer, one in found if offer.id not in ordered]
    steps += [_step(offer, one, needless, chosen=offer.id in taken) for offer, one in rest]
    steps.sort(key=lambda one: (not one.chosen, one.expected_seconds is None, one.provider, one.offer))
    return (_evict(first), *steps)


class _Coming(NamedTuple):
    """A capacity order in progress. `unmet`: it is for the next replica; otherwise for another one of the Model."""

    lease: Lease
    unmet: bool


def _coming(world: World, plan: Plan, model: Model, now_s: float) -> list[_Coming]:
    """Return capacity orders in progress for the Model."""
    waits = {one.lease for one in plan.unmet if one.model == model.name}
    leases = (one for _, one in sorted(world.capacity.leases.items()) if one.coming(now_s))
    return [_Coming(one, one.id in waits) for one in leases if one.owner == model.name or one.id in waits]


def _evict(found: Eviction) -> Step:
    chosen = bool(found.victims) and not found.why_not
    return Step(
        kind="evict", says=found.says(), chosen=chosen, under_way=found.under_way, why_not=found.why_not,
        expected_seconds=found.wait_s, cost=0.0 if found.victims else None, victims=found.victims,
    )  # fmt: skip


def _ordered(world: World, model: Model, one: _Coming, now_s: float) -> Step:
    lease = one.lease
    due = estimate_lead_time(lease.offer, world.capacity.learnt.get(lease.offer.kind, NO_LEARNT))
    left_s, ago_s = lease.asked_s + due.p50_s - now_s, now_s - lease.asked_s
    found = rate_offer(
        lease.offer, lease.devices, due, compute_deadline_s(world, model.name, now_s) - lease.asked_s, 0.0
    )
    where = f" on {lease.offer.node}" if lease.offer.node else ""
    return Step(
        provider=lease.offer.provider,
        offer=lease.offer.name,
        chosen=True,
        under_way=True,
        says=(
            f"{lease.offer.provider}: {lease.devices} x {lease.offer.product}{where}, "
            f"ordered {format_duration(ago_s)} ago"
        ),
        expected_seconds=max(0.0, left_s) if left_s < inf else None,
        cost=found.cost,
    )


def _step(offer: Offer, found: RatedOffer | str, needless: str, *, chosen: bool) -> Step:
    if isinstance(found, str):
        where = f" on {offer.node}" if offer.node else ""
        return Step(
            provider=offer.provider, offer=offer.name, says=f"{offer.provider}: {offer.product}{where}", why_not=found
        )
    p50_s = found.expected.p50_s
    why_not = needless or "another offer is more reliable, or reliable enough and cheaper"
    return Step(
        provider=offer.provider, offer=offer.name, says=found.says(), chosen=chosen,
        why_not="" if chosen else why_not,
        expected_seconds=p50_s if p50_s < inf else None, in_time=found.in_time, cost=found.cost,
    )  # fmt: skip


def describe_ladder(world: World, model: Model, now_s: float, steps: tuple[Step, ...]) -> list[str]:
    """Describe the capacity orders of a Model, its options, and problems of providers, one sentence each."""
    mine = (one for one in world.capacity.leases.values() if one.owner == model.name)
    sentences = [_lease(one, now_s) for one in sorted(mine, key=lambda one: one.id)]
    sentences += [f"{_HEADS[one.kind]}{one.says}: {one.why_not or _CHOSEN[one.under_way]}." for one in steps]
    return sentences + [f"Provider {name} {says}." for name, says in world.capacity.wrong()]


_HEADS = {"evict": "", "offer": "Offer from "}
_CHOSEN = {True: "chosen, in progress", False: "chosen"}


def _lease(lease: Lease, now_s: float) -> str:
    """Format an order: `Ordered from rack 12 s ago: 1 x A100 on w1; in use.`"""
    where = f" on {lease.offer.node}" if lease.offer.node else ""
    if lease.leaving:
        state = f"being released{' by force' * lease.forced}: {lease.why or 'no reason was recorded'}"
    elif lease.here_s is not None:
        state = "in use" if lease.in_use else f"idle; its delivery took {format_duration(lease.here_s - lease.asked_s)}"
    elif lease.listed is None:
        state = "not listed by the provider yet"
    else:
        state = f"phase {lease.listed.phase}"
    says = f" ({lease.listed.says})" if lease.listed is not None and lease.listed.says else ""
    what = f"{lease.devices} x {lease.offer.product}{where}"
    return f"Ordered from {lease.id.provider} {format_duration(now_s - lease.asked_s)} ago: {what}; {state}{says}."
