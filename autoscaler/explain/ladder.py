"""The ladder for one Model as people read it: an eviction, then Offers, each with time and price, chosen or why not.

Asks the same functions as the ledger (`autoscaler.provisioning.provisioner`) and the packer, so that there is no second
truth; what is under way is told by the last Plan. Pure; decides nothing.
"""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

from autoscaler.capacity.lead_times import NO_LEARNT, estimate_lead_time
from autoscaler.explain.eviction import Evicted, Eviction, explain_eviction
from autoscaler.placement.learning.expected_demand import build_restart_costs
from autoscaler.placement.model.bins import build_placement_request
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.placement.simulate import SimulationContext
from autoscaler.provisioning.offer_filter import compute_deadline_s
from autoscaler.provisioning.offer_selection import RatedOffer, choose_offer, rate_offer
from autoscaler.provisioning.provisioner import evaluate_offers
from autoscaler.queries.stranded_pods import list_avoided_nodes
from autoscaler.spec.model import Model
from autoscaler.state.actions import Plan
from autoscaler.state.capacity_orders import Lease, Offer
from autoscaler.state.world import Fact, World
from autoscaler.text import format_duration


class Step(Fact, frozen=True):
    """One rung of the ladder."""

    says: str
    kind: Literal["evict", "offer"] = "offer"
    """Whose place it takes on what is there, or what is added."""
    provider: str = ""
    offer: str = ""
    """Which of its Offers; both are empty where somebody is evicted."""
    chosen: bool = False
    """It is what is done for one more Replica, or would be now."""
    under_way: bool = False
    """It is being done: they leave, or it was ordered and is on its way."""
    why_not: str = ""
    """Why it is not chosen; empty: it is."""
    expected_seconds: float | None = None
    """Half of such come sooner; of an eviction, until they may leave; None: nobody can say, or it would not do."""
    in_time: float | None = None
    """How likely a Replica on it is ready before the first waiting Call gives up; None: that is not reckoned."""
    cost: float | None = None
    """For a surge, in the Settings' currency: what is there costs none."""
    victims: tuple[Evicted, ...] = ()
    """Who would be evicted; what that costs is the time to start them again."""


def explain_ladder(world: World, plan: Plan, model: Model, force: EvictionLevel, now_s: float) -> tuple[Step, ...]:
    """Every rung for one more Replica, which may evict by that force: the eviction first, then of the Offers the
    chosen, those that would do, and the others. Nothing where nobody could leave and nothing is offered.
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
        needless = f"{next(one.lease.id.provider for one in coming if one.unmet)} brings it already"
    chosen = (
        None
        if needless
        else choose_offer([one for _, one in found if isinstance(one, RatedOffer)], world.capacity.hedges)
    )
    taken = {} if chosen is None else {one.offer.id: one for one in (chosen.rung, chosen.beside) if one is not None}
    ordered = {one.lease.offer.id for one in coming}
    steps = [_ordered(world, model, one, now_s) for one in coming]
    rest = [(offer, one) for offer, one in found if offer.id not in ordered]
    steps += [_step(offer, one, needless, chosen=offer.id in taken) for offer, one in rest]
    steps.sort(key=lambda one: (not one.chosen, one.expected_seconds is None, one.provider, one.offer))
    return (_evict(first), *steps)


class _Coming(NamedTuple):
    """A Lease on its way. `unmet`: it is what the Plan says that the Replica waits for; else another for the Model."""

    lease: Lease
    unmet: bool


def _coming(world: World, plan: Plan, model: Model, now_s: float) -> list[_Coming]:
    """What is on its way for it."""
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
    why_not = needless or "another comes surely enough and costs less, or comes more surely"
    return Step(
        provider=offer.provider, offer=offer.name, says=found.says(), chosen=chosen,
        why_not="" if chosen else why_not,
        expected_seconds=p50_s if p50_s < inf else None, in_time=found.in_time, cost=found.cost,
    )  # fmt: skip


def describe_ladder(world: World, model: Model, now_s: float, steps: tuple[Step, ...]) -> list[str]:
    """What was ordered for a Model, then the ladder, one sentence each."""
    mine = (one for one in world.capacity.leases.values() if one.owner == model.name)
    told = [_lease(one, now_s) for one in sorted(mine, key=lambda one: one.id)]
    told += [f"{_HEADS[one.kind]}{one.says}: {one.why_not or _CHOSEN[one.under_way]}." for one in steps]
    return told + [f"Provider {name} {says}." for name, says in world.capacity.wrong()]


_HEADS = {"evict": "", "offer": "Offer of "}
_CHOSEN = {True: "chosen, and under way", False: "chosen"}


def _lease(lease: Lease, now_s: float) -> str:
    """`Ordered of rack 12 s ago: 1 x A100 on w1; it is coming.`"""
    where = f" on {lease.offer.node}" if lease.offer.node else ""
    if lease.leaving:
        state = f"it is being given back{', by force' * lease.forced}: {lease.why or 'nobody says why'}"
    elif lease.here_s is not None:
        state = (
            "it is used"
            if lease.in_use
            else f"it is idle, and was here after {format_duration(lease.here_s - lease.asked_s)}"
        )
    elif lease.listed is None:
        state = "its provider has not shown it yet"
    else:
        state = f"it is {lease.listed.phase}"
    says = f" ({lease.listed.says})" if lease.listed is not None and lease.listed.says else ""
    what = f"{lease.devices} x {lease.offer.product}{where}"
    return f"Ordered of {lease.id.provider} {format_duration(now_s - lease.asked_s)} ago: {what}; {state}{says}."
