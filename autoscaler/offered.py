"""The ladder of Offers for one Model as people read it: each with time and price, which is chosen, or why it is not.

Asks the same functions as the ledger (`autoscaler.deficits`), so that there is no second truth. Pure; decides nothing.
"""

from __future__ import annotations

from math import inf

from autoscaler.deficits import judged
from autoscaler.ladder import Rung, choose
from autoscaler.leases import Lease, Offer
from autoscaler.model import Model
from autoscaler.outlook import outlook
from autoscaler.packing import Force
from autoscaler.shelves import want_of
from autoscaler.stranded import avoided
from autoscaler.tryout import Ground
from autoscaler.words import seconds
from autoscaler.world import Fact, World


class Step(Fact, frozen=True):
    """One Offer of the ladder."""

    provider: str
    offer: str
    says: str
    chosen: bool = False
    """It is what would be ordered now, had one more Replica no room."""
    why_not: str = ""
    """Why it is not; empty: it is."""
    expected_seconds: float | None = None
    """Half of such come sooner; None: nobody can say, or it would not do."""
    in_time: float | None = None
    """How likely a Replica on it is ready before the first waiting Call gives up."""
    cost: float | None = None
    """For a surge, in the Settings' currency."""


def ladder(world: World, model: Model, now_s: float) -> tuple[Step, ...]:
    """Every Offer for one more Replica, the chosen first, then those that would do, then the others."""
    if not world.capacity.offers:
        return ()
    want = want_of(model, 0, now_s, Force.BUSY, "", world.settings.pod, avoided(world, model.name, now_s))
    found = judged(Ground(world, outlook(world), now_s), want)
    chosen = choose([one for _, one in found if isinstance(one, Rung)], world.capacity.hedges)
    taken = {} if chosen is None else {one.offer.id: one for one in (chosen.rung, chosen.beside) if one is not None}
    steps = [_step(offer, one, chosen=offer.id in taken) for offer, one in found]
    return tuple(sorted(steps, key=lambda one: (not one.chosen, one.expected_seconds is None, one.provider, one.offer)))


def _step(offer: Offer, found: Rung | str, *, chosen: bool) -> Step:
    if isinstance(found, str):
        where = f" on {offer.node}" if offer.node else ""
        return Step(
            provider=offer.provider, offer=offer.name, says=f"{offer.provider}: {offer.product}{where}", why_not=found
        )
    p50_s = found.expected.p50_s
    return Step(
        provider=offer.provider, offer=offer.name, says=found.says(), chosen=chosen,
        why_not="" if chosen else "another comes surely enough and costs less, or comes more surely",
        expected_seconds=p50_s if p50_s < inf else None, in_time=found.in_time, cost=found.cost,
    )  # fmt: skip


def sentences(world: World, model: Model, now_s: float, steps: tuple[Step, ...]) -> list[str]:
    """What was ordered for a Model, then the ladder, one sentence each."""
    mine = (one for one in world.capacity.leases.values() if one.owner == model.name)
    told = [_lease(one, now_s) for one in sorted(mine, key=lambda one: one.id)]
    told += [f"Offer of {one.says}: {one.why_not or 'chosen'}." for one in steps]
    return told + [f"Provider {name} {says}." for name, says in world.capacity.wrong()]


def _lease(lease: Lease, now_s: float) -> str:
    """`Ordered of rack 12 s ago: 1 x A100 on w1; it is coming.`"""
    where = f" on {lease.offer.node}" if lease.offer.node else ""
    if lease.leaving:
        state = f"it is being given back: {lease.why or 'nobody says why'}"
    elif lease.here_s is not None:
        state = (
            "it is used" if lease.in_use else f"it is idle, and was here after {seconds(lease.here_s - lease.asked_s)}"
        )
    elif lease.listed is None:
        state = "its provider has not shown it yet"
    else:
        state = f"it is {lease.listed.phase}"
    says = f" ({lease.listed.says})" if lease.listed is not None and lease.listed.says else ""
    what = f"{lease.devices} x {lease.offer.product}{where}"
    return f"Ordered of {lease.id.provider} {seconds(now_s - lease.asked_s)} ago: {what}; {state}{says}."
