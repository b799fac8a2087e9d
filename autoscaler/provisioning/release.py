"""Decides which capacity orders to release and why, and tracks how long releases take. Pure.

An overdue order is given up, an order without waiting requests is withdrawn before its delivery, and an idle one is
released when keeping it costs more than it is worth. Nothing is released while a replica uses it or demand is unknown.
A release is forced only if an operator drains by force, and only after a normal release was tried.

`Leaving` records the start of each release, and which releases are stuck. An order records only the time of its last
release request, and followers send no release requests. Therefore metrics and Events each have a `Leaving`, which
receives every `World`. An order in use is not stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Final

from autoscaler.capacity.agent_device_requests import explain_attach_failure
from autoscaler.capacity.delivered_slices import has_replica_on_node, is_release_blocked, slices_of
from autoscaler.capacity.interruptions import is_lease_ending, is_on_unneeded_node
from autoscaler.capacity.lead_times import DUE_S, NO_LEARNT, WAIT_WORTH, estimate_lead_time
from autoscaler.placement.capacity_simulation import SimulationContext
from autoscaler.provisioning.fabric_device_claims import CLAIM_S
from autoscaler.queries.gateway_reports import is_demand_complete
from autoscaler.queries.operator_orders import is_force_drained
from autoscaler.spec.capacity import provider_keep_seconds
from autoscaler.state.actions import ReleaseLease
from autoscaler.state.capacity import Capacity, LeadTimeStats, Lease, LeaseId, ReleaseOrder
from autoscaler.state.pending_claims import is_claim_owner
from autoscaler.text import format_duration

KEPT_S = (30.0, 1800.0)
"""Bounds of how long idle capacity is kept, with few observations."""

GAPS_MIN = 3
"""With fewer observed gaps, the time for which idle capacity is kept is the reorder cost. Otherwise it is computed from
the gaps."""


STUCK_S: Final = 300.0
"""Seconds after which a release is stuck and a person must act; the alert uses the same number. A fabric releases a GPU
in seconds, and a cloud releases a machine in minutes. The request is sent seven times in STUCK_S."""


def is_leaving(lease: Lease) -> bool:
    """Whether its release was requested, or its provider is withdrawing it."""
    return lease.leaving or (lease.listed is not None and lease.listed.phase == "leaving")


class Leaving:
    """Tracks releases in progress. Call `look` with every `World`."""

    def __init__(self) -> None:
        self._since_s: Mapping[LeaseId, float] = {}
        self._now_s = 0.0

    def look(self, capacity: Capacity, now_s: float) -> None:
        """Update from the current orders."""
        before = self._since_s
        self._since_s = {
            id: before.get(id, now_s) for id, one in capacity.leases.items() if is_leaving(one) and not one.in_use
        }
        self._now_s = now_s

    def longest_s(self) -> Mapping[str, float]:
        """By provider with releases in progress: the age of the oldest one."""
        found: dict[str, float] = {}
        for id, since_s in self._since_s.items():
            found[id.provider] = max(found.get(id.provider, 0.0), self._now_s - since_s)
        return found

    def stuck(self) -> frozenset[LeaseId]:
        """Orders that still exist more than STUCK_S after their release began."""
        return frozenset(id for id, since_s in self._since_s.items() if self._now_s - since_s > STUCK_S)


WITHDRAW_S = 10.0
"""Minimum age at which an order is withdrawn, since its requests may have disappeared for only a moment."""
STRAY_S = 10.0
"""Capacity that is delivered without waiting requests is released if it is not used within this time."""
RETRY_S = (10.0, 60.0)
"""First and maximum interval between release requests; it doubles each time."""
FORCED = "; a normal release had no effect, so it is detached by force"


def plan_releases(
    ground: SimulationContext, wanted: Collection[LeaseId], kept: Collection[LeaseId], later: Callable[[float], None]
) -> Iterator[ReleaseLease]:
    """Return releases in order of IDs. `wanted`: orders that requests or claims wait for; `kept`: headroom.
    `later` is called with each time at which the result changes even without a new observation.
    """
    return _Returning(ground, wanted, kept, later).all()


class _Returning:
    """The releases of one plan."""

    def __init__(
        self,
        ground: SimulationContext,
        wanted: Collection[LeaseId],
        kept: Collection[LeaseId],
        later: Callable[[float], None],
    ) -> None:
        self.world, self.now_s, self.taken = ground.world, ground.now_s, ground.taken
        self.capacity, self.wanted, self.kept, self.later = ground.world.capacity, wanted, kept, later

    def all(self) -> Iterator[ReleaseLease]:
        """Yield the releases; see `plan_releases`."""
        demand_known = is_demand_complete(self.world, self.now_s)
        for lease in sorted(self.capacity.leases.values(), key=lambda one: one.id):
            if lease.leaving:
                why, uncommitted = self._again(lease), lease.uncommitted
            elif any(one.id in self.taken for one in slices_of(self.world, lease)):
                continue
            elif lease.here_s is not None and not (lease.failed and not lease.in_use):
                sure = (demand_known or (is_claim_owner(lease.owner) and not lease.used)) and lease.id not in self.kept
                why, uncommitted = self._idle(lease) if sure else "", False
            else:
                why, uncommitted = self._late(lease)
                if (
                    not why
                    and (demand_known or is_claim_owner(lease.owner))
                    and lease.id not in {*self.wanted, *self.kept}
                ):
                    why, uncommitted = self._unwanted(lease), True
            if why:
                force = lease.leaving and self._forced(lease)  # the first attempt is a normal release
                released = ReleaseOrder(id=lease.id, epoch=self.world.epoch, uncommitted=uncommitted, force=force)
                yield ReleaseLease(order=released, reason=f"{why}{FORCED if force else ''}")

    def _forced(self, lease: Lease) -> bool:
        return is_force_drained(self.world, lease) and not has_replica_on_node(self.world, lease)

    def _again(self, lease: Lease) -> str:
        since_s = lease.release_s if lease.release_s is not None else self.now_s
        due_s = since_s + min(RETRY_S[0] * 2.0 ** max(0, lease.releases - 1), RETRY_S[1])
        self.later(due_s)
        return lease.why or "it is released" if self.now_s >= due_s else ""

    def _late(self, lease: Lease) -> tuple[str, bool]:
        """Why it failed or is overdue, and whether to release it only if it is not delivered meanwhile."""
        listed = lease.listed
        if listed is not None and listed.phase == "failed":
            return f"it failed: {listed.says or 'no reason was given'}", False
        due_s = lease.given_up_s
        self.later(due_s)
        if self.now_s < due_s:
            return "", False
        shown = self.capacity.listed_s.get(lease.id.provider, -inf) >= due_s
        unseen = explain_attach_failure(lease, self.world.nodes.agents, self.world.settings)
        if unseen:
            return f"it failed: {unseen}", False
        return f"not delivered after {format_duration(self.now_s - lease.asked_s)}", not (shown and lease.committed)

    def _unwanted(self, lease: Lease) -> str:
        """Why to withdraw it; empty once it is committed, since it must be paid for."""
        if lease.committed:
            return ""
        due_s = lease.asked_s if lease.hedge else lease.asked_s + WITHDRAW_S
        self.later(due_s)
        return "no request waits for it any more" if self.now_s >= due_s else ""

    def _idle(self, lease: Lease) -> str:
        since_s, mine = lease.idle_since_s, slices_of(self.world, lease)
        if is_force_drained(self.world, lease) and not any(self.world.by_slice.get(one.id) for one in mine):
            return "an operator drains it by force"  # even if pods of others are on it
        if lease.in_use or since_s is None:
            return ""
        idle_s, learnt = self.now_s - since_s, self.capacity.learnt.get(lease.offer.kind, NO_LEARNT)
        attach_s = estimate_lead_time(lease.offer, learnt).p50_s
        said = provider_keep_seconds(self.world.settings.capacity, lease.id.provider)
        kept_s = keep_s(learnt, min(attach_s, DUE_S[1]), idle_s) if said == "auto" else said
        kept_s = STRAY_S if lease.stray and not lease.used else kept_s
        unclaimed = is_claim_owner(lease.owner) and not lease.used
        kept_s = CLAIM_S if unclaimed else kept_s
        if is_lease_ending(self.world, lease):
            return "it is being withdrawn and is not in use"
        with_node = is_on_unneeded_node(self.world, lease)
        kept_s = min(kept_s, STRAY_S) if with_node else kept_s
        self.later(since_s + kept_s)
        self.later(
            since_s + min((gap for gap in learnt.gaps_s if gap > idle_s), default=inf)
        )  # then the expected value of keeping it decreases
        if idle_s < kept_s or is_release_blocked(self.world, lease):
            return ""
        if with_node:
            return f"it is not in use, and node {lease.offer.node} will be removed as unneeded"
        if unclaimed:
            return f"it was not allocated to any ResourceClaim within {format_duration(idle_s)}"
        why = "it is worth keeping for" if said == "auto" else "its provider's keepSeconds is"
        return f"idle for {format_duration(idle_s)}, and {why} {format_duration(kept_s)}"


def keep_s(learnt: LeadTimeStats, attach_s: float, idle_s: float) -> float:
    """Total time for which capacity idle since `idle_s` is kept. `attach_s`: its lead time.

    With few observations, this is the cost of a reorder, at most twice the optimum (ski rental). Otherwise capacity is
    kept while P(reused within h) x reorder cost exceeds the expected idle time within h, for some h.
    """
    cost_s = min(max(attach_s * (1.0 + WAIT_WORTH), KEPT_S[0]), KEPT_S[1])
    if len(learnt.gaps_s) < GAPS_MIN:
        return cost_s
    left = sorted(gap - idle_s for gap in learnt.gaps_s if gap > idle_s)
    worth = [h for h in left if h < inf and _gain(left, h, cost_s) > 0]
    return idle_s + max(worth) if worth else 0.0


def _gain(left: Sequence[float], horizon_s: float, cost_s: float) -> float:
    reused = sum(gap <= horizon_s for gap in left) / len(left)
    return reused * cost_s - sum(min(gap, horizon_s) for gap in left) / len(left)
