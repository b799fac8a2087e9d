"""What became of orders for capacity from one World to the next, to be counted, and what is there of them. Pure.

Owns the words of metrics `pilotlight_offers_total` and `pilotlight_leases`. Of the first: ordered; came, and after how
long; failed (refused, or it did not come); returned; lost (it was here, and is gone without having been leaving).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.provisioning.release import leaves
from autoscaler.state.device_claims import is_claims
from autoscaler.state.leases import Capacity, Lease


class Counted(NamedTuple):
    """One of them."""

    provider: str
    result: str
    took_s: float | None = None
    """From the order until it could be used, where it came."""


def counted(before: Capacity, after: Capacity) -> Iterator[Counted]:
    """All that happened between them."""
    if before is after:
        return
    for id, lease in after.leases.items():
        was = before.leases.get(id)
        if was is None and not lease.found:
            yield Counted(id.provider, "ordered")
        if lease.here_s is not None and (was is None or was.here_s is None) and not lease.found:
            yield Counted(id.provider, "came", lease.here_s - lease.asked_s)
    for id, lease in before.leases.items():
        if id not in after.leases and lease.here_s is not None:
            yield Counted(id.provider, "returned" if leaves(lease) else "lost")
    for offer, barred in after.barred.items():
        known = before.barred.get(offer)
        if not is_claims(ModelName(offer.name)) and (known is None or barred.times > known.times):
            yield Counted(offer.provider, "failed")


def state_of(lease: Lease) -> tuple[str, str]:
    """Its provider, and in a word what is with it: coming, idle, used or leaving."""
    if leaves(lease):
        return lease.id.provider, "leaving"
    return lease.id.provider, "coming" if lease.here_s is None else "used" if lease.in_use else "idle"
