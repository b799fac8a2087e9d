"""Who gets how many of a number of Slots: weighted max-min, and how a share is split where it is wanted.

Owns arithmetic only; it knows nothing of gateways, Models or versions. `autoscaler.routing.slots` asks it twice: once
over (priority, Tenant), once over the gateways of each Tenant. Everything is deterministic: ties end with the key
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=str)


class Claimant(NamedTuple):
    """Somebody who wants Slots. `attained` is service got so far, in slot-seconds per weight."""

    wants: int
    weight: float = 1.0
    attained: float = 0.0


def max_min(claimants: Mapping[Key, Claimant], slots: int) -> dict[Key, int]:
    """Divides `slots` by weighted max-min: nobody gets more than it wants, what is left over goes to the others.

    What does not divide goes to those who attained least for their weight (as in weighted fair queueing, where the
    least virtual time goes next), so that shares even out over time even with one Slot.
    """
    shares = {key: claimant.wants for key, claimant in claimants.items()}
    if sum(shares.values()) <= slots:
        return shares
    open_, left = dict(claimants), slots
    while open_:
        level = left / sum(claimant.weight for claimant in open_.values())
        sated = [key for key, claimant in open_.items() if claimant.wants <= level * claimant.weight]
        if not sated:
            break
        for key in sated:
            left -= open_.pop(key).wants
    for key, claimant in open_.items():
        shares[key] = int(level * claimant.weight)
    left -= sum(shares[key] for key in open_)
    for key in sorted(open_, key=lambda key: (open_[key].attained, key))[:left]:
        shares[key] += 1
    return shares


def lift_attained_service(attained: Mapping[Key, float], key: Key, active: Iterable[Key]) -> float:
    """What one that comes back has attained: no less than the least served active one, so that nobody saves up time.

    Where nobody was active it is the most that anybody attained: who used what nobody else wanted owes nothing for it
    (the virtual time of an idle server in Start-time Fair Queuing, Goyal et al. 1996; for inference Sheng et al.,
    Fairness in Serving Large Language Models, OSDI 2024, algorithm 2).
    """
    least = min((attained[other] for other in active if other in attained), default=None)
    floor = max(attained.values(), default=0.0) if least is None else least
    return max(floor, attained.get(key, 0.0))


class ShareDemand(NamedTuple):
    """A place where a share is wanted: how many Calls are there, and when the oldest of them that waits arrived."""

    wants: int
    oldest_s: float


def split_share(parts: Mapping[Key, ShareDemand], share: int) -> dict[Key, int]:
    """Splits `share` over places by what each wants; what does not divide goes where a Call has waited longest."""
    total = sum(part.wants for part in parts.values())
    if total <= share:
        return {key: part.wants for key, part in parts.items()}
    given = {key: part.wants * share // total for key, part in parts.items()}
    left = share - sum(given.values())
    for key in sorted(
        (key for key in parts if given[key] < parts[key].wants), key=lambda key: (parts[key].oldest_s, key)
    ):
        if not left:
            break
        given[key] += 1
        left -= 1
    return given
