"""Reads ResourceQuotas that limit the GPUs of a namespace, and computes the unused number. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from autoscaler.kubernetes.api import Object
from autoscaler.spec.pod import GPU
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import Replica

DEVICES_MAX = 1000
"""Maximum number of devices that are assumed for a quota if the Settings declare no nodes."""


_HARD = f"requests.{GPU}"


class Quota(NamedTuple):
    """The limit on GPUs of a ResourceQuota."""

    name: str
    hard: int
    used: int


def read_quota(found: Object) -> Quota | None:
    """Parse a ResourceQuota; None if it does not limit GPUs, or limits only those of some pods."""
    spec, used = found["spec"], found.get("status", {}).get("used", {})
    if _HARD not in spec.get("hard", {}) or spec.get("scopes") or spec.get("scopeSelector"):
        return None
    return Quota(found["metadata"]["name"], _count(spec["hard"][_HARD]), _count(used.get(_HARD, "0")))


def _count(amount: object) -> int:
    return int(text) if (text := str(amount)).isdecimal() and len(text) < 10 else 0


def _hard(quotas: Sequence[Quota]) -> int:
    """Return how many devices every quota allows."""
    return min((quota.hard for quota in quotas), default=DEVICES_MAX)


def _left(quotas: Sequence[Quota], holders: Iterable[Replica]) -> tuple[float, str]:
    """Return (devices that every quota still allows, message if there are none)."""
    ours = sum(replica.state is not ReplicaState.SCRUBBING for replica in holders)  # SCRUBBING: its pod is gone
    left = [(quota.hard - max(quota.used, ours), quota) for quota in quotas]
    if not left:
        return inf, ""
    least, quota = min(left)
    return least, f"ResourceQuota {quota.name} allows {quota.hard} {GPU}, and all are in use"
