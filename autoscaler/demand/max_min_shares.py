"""Divides slots by weighted max-min, and splits a share among consumers. Pure arithmetic.

`autoscaler.routing.slots` uses it twice: over (priority, tenant), and over the gateways of each tenant. Results are
deterministic: ties are broken by the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=str)


class Claimant(NamedTuple):
    """A claimant of slots. `attained`: service received so far, in slot-seconds per weight."""

    wants: int
    weight: float = 1.0
    attained: float = 0.0


def max_min(claimants: Mapping[Key, Claimant], slots: int) -> dict[Key, int]:
    """Divide `slots` by weighted max-min: no claimant gets more than it wants, and the rest goes to the others.

    Remainders go to those with the least attained service (as in weighted fair queueing, where the least virtual time
    goes next), so that shares even out over time even with one slot.
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
    """Return the attained service of a returning key: at least the minimum of the active ones, so that idle time earns
    no credit.

    If none was active, it is the maximum of all: using otherwise idle slots incurs no debt. Sources: the virtual time
    of an idle server in Start-time Fair Queuing (Goyal et al. 1996); for inference, Sheng et al., Fairness in Serving
    Large Language Models (OSDI 2024), algorithm 2.
    """
    least = min((attained[other] for other in active if other in attained), default=None)
    floor = max(attained.values(), default=0.0) if least is None else least
    return max(floor, attained.get(key, 0.0))


class ShareDemand(NamedTuple):
    """Demand of one consumer: its number of requests, and when the oldest waiting one arrived."""

    wants: int
    oldest_s: float


def split_share(parts: Mapping[Key, ShareDemand], share: int) -> dict[Key, int]:
    """Split `share` in proportion to demand; remainders go to the consumer whose request has waited longest."""
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
