"""Folds offers, capacity orders (`Lease`) and our Actions on them into the `World`, and learns from their outcomes.

Implements the life cycle of an order: ordered, listed, here, idle, released, gone. Provider lists are compared both
ways: capacity in a list that this leader did not order is adopted, as a stray after the first list; capacity missing
from LOST_LISTS consecutive lists is lost. A new leader trusts only lists. Never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from msgspec.structs import replace

from autoscaler.capacity import agent_device_requests
from autoscaler.capacity.capacity_reuse import record_release, record_reorder, record_reuse
from autoscaler.capacity.delivered_slices import is_slice_of_lease
from autoscaler.capacity.group_machines_in_flight import (
    adopt_group,
    count_nodes_with_devices,
    recount_growth,
    update_growth,
)
from autoscaler.capacity.lead_times import (
    DUE_S,
    NO_LEARNT,
    Expected,
    due_after_s,
    estimate_lead_time,
    record_delivery,
    record_failed_delivery,
)
from autoscaler.fold.draft import Draft
from autoscaler.state.actions import AcquireLease, ReleaseLease
from autoscaler.state.capacity import (
    BackedOffOffer,
    Capacity,
    GroupsSeen,
    LeadTimeStats,
    LearntSeen,
    Lease,
    LeaseId,
    LeaseRefused,
    LeasesSeen,
    Listed,
    Offer,
    OfferId,
    OfferKind,
    OffersSeen,
    ProvidersSeen,
    ProviderTroubled,
)
from autoscaler.state.pending_claims import AwaitedSeen, is_claim_owner
from autoscaler.state.world import NodeId, Slice

BARRED_S = (60.0, 960.0)
"""Back-off of an offer that was rejected or not delivered: the first, doubled each time in a row up to the second."""
LOST_LISTS = 2
KINDS_MAX = 1024
"""Maximum offer kinds with statistics; the most recently updated are kept."""
Seen = ProvidersSeen | OffersSeen | LeasesSeen | LeaseRefused | LearntSeen | ProviderTroubled | GroupsSeen | AwaitedSeen


def apply_lease_action(draft: Draft, action: AcquireLease | ReleaseLease) -> None:
    """Record that a capacity order or its release was decided."""
    if isinstance(action, ReleaseLease):
        _released(draft, action)
        return
    capacity, order, now_s = draft.world.capacity, action.order, draft.now_s
    known = capacity.leases.get(order.id)
    if known is not None:
        _put(draft, replace(known, sent_s=now_s))
        return
    _put(draft, Lease(
        id=order.id, offer=order.offer, devices=order.devices, owner=order.owner, epoch=order.epoch, hedge=order.hedge,
        asked_s=now_s, sent_s=now_s, due_s=order.due_s,
    ))  # fmt: skip
    learnt = capacity.learnt.get(order.offer.kind)
    if learnt is not None and learnt.idle_since_s is not None:
        _learn(draft, order.offer.kind, record_reorder(learnt, now_s))


def apply_capacity_observation(draft: Draft, seen: Seen) -> None:
    """Fold an observation about capacity."""
    capacity = draft.world.capacity
    match seen:
        case ProvidersSeen():
            kept = ("offers", "offered_s", "listed_s", "trouble", "unanswered", "closed")
            remaining = {
                field: {name: one for name, one in getattr(capacity, field).items() if name in seen.providers}
                for field in kept
            }
            _change(draft, providers=seen.providers, hedges=seen.hedges, **remaining)
        case OffersSeen():
            offers = {**capacity.offers, seen.provider: seen.offers}
            closed = _without(capacity.closed, seen.provider)
            closed |= {seen.provider: seen.closed} if seen.closed else {}
            offered_s = {**capacity.offered_s, seen.provider: draft.now_s}
            unanswered = _without(capacity.unanswered, seen.provider)
            _change(draft, offers=offers, offered_s=offered_s, closed=closed, unanswered=unanswered)
        case LeasesSeen():
            _listed(draft, seen)
        case ProviderTroubled():
            name = "trouble" if seen.listing else "unanswered"
            _change(draft, **{name: {**getattr(capacity, name), seen.provider: seen.says}})
        case LeaseRefused():
            _refused(draft, seen)
        case GroupsSeen():
            _grouped(draft, seen)
        case AwaitedSeen():
            _change(draft, awaited=seen.awaited)
        case LearntSeen():
            learnt = {kind: replace(one, idle_since_s=None) for kind, one in seen.learnt.items()}
            _change(draft, learnt={**capacity.learnt, **learnt})


def clear_unlisted_leases(draft: Draft) -> None:
    """At the start of leadership, forget orders that no list has shown: they may never have been placed."""
    capacity = draft.world.capacity
    if capacity.leases or capacity.listed_s:
        seen = {id: replace(one, missing=0) for id, one in capacity.leases.items() if one.listed is not None}
        _change(draft, leases=seen, listed_s={})


def update_leases(draft: Draft) -> None:
    """Update orders that became complete, used or idle, and groups whose nodes joined."""
    before = draft.before
    if draft.world.nodes.slices is not before.nodes.slices:
        groups = draft.world.capacity.groups
        _change(draft, groups={name: recount_growth(one, draft.world, draft.now_s) for name, one in groups.items()})
    world, leases = draft.world, draft.world.capacity.leases
    still = world.nodes.slices is before.nodes.slices and draft.by_slice.now is before.by_slice
    still = still and draft.agents.now is before.nodes.agents
    if not leases or (still and world.capacity is before.capacity):
        return
    nodes = {one.listed.node for one in leases.values() if one.listed is not None}
    there: dict[NodeId, list[Slice]] = {}
    for slice_ in world.nodes.slices.values():
        if slice_.node in nodes:
            there.setdefault(slice_.node, []).append(slice_)
    for lease in tuple(leases.values()):
        after = _looked(draft, lease, there)
        if after != lease:
            _put(draft, after)


def _looked(draft: Draft, lease: Lease, there: Mapping[NodeId, list[Slice]]) -> Lease:
    listed, now_s = lease.listed, draft.now_s
    if listed is None:
        return lease
    mine = [one for one in there.get(NodeId(listed.node), ()) if is_slice_of_lease(lease, one)]
    used = _used(draft, listed, mine)
    if lease.here_s is None:
        came = listed.phase == "here" and len({one.device for one in mine}) >= lease.devices
        # If a replica uses a failed order, the capacity was delivered before this leader first saw the order.
        if not came and not (lease.failed and used):
            return replace(lease, due_s=_due_s(draft, lease))
        if came and not lease.found:
            _learn(draft, lease.offer.kind, record_delivery(_learnt(draft, lease.offer), now_s - lease.asked_s))
            barred = draft.world.capacity.barred
            if lease.offer.id in barred:
                _change(draft, barred={id: one for id, one in barred.items() if id != lease.offer.id})
        lease = replace(lease, here_s=now_s, idle_since_s=now_s)
    if used and not lease.in_use:
        if lease.used and lease.idle_since_s is not None:
            _learn(draft, lease.offer.kind, record_reuse(_learnt(draft, lease.offer), now_s - lease.idle_since_s))
        return replace(lease, in_use=True, used=True, idle_since_s=None)
    if lease.in_use and not used:
        return replace(lease, in_use=False, idle_since_s=now_s)
    return lease


def _due_s(draft: Draft, lease: Lease) -> float:
    """When undelivered capacity is no longer counted on. A queued order can be overdue only once it is granted."""
    now_s = draft.now_s
    if now_s < lease.due_s and agent_device_requests.explain_attach_failure(
        lease, draft.agents.now, draft.world.settings
    ):
        return now_s
    if not lease.offer.queued:
        return lease.due_s
    return min(lease.due_s, now_s + DUE_S[1]) if lease.committed else inf


def _used(draft: Draft, listed: Listed, mine: Sequence[Slice]) -> bool:
    on = {id for one in mine for id in draft.by_slice.now.get(one.id, ())}
    if place := listed.marks.instead:  # a placeholder pod holds it: only the replica that replaces it counts
        return any(draft.replicas.now[id].runtime.marks.instead == place for id in on if id in draft.replicas.now)
    return bool(on) or (not listed.alone and any(draft.world.nodes.others.get(one.counted) for one in mine))


def _released(draft: Draft, action: ReleaseLease) -> None:
    lease = draft.world.capacity.leases.get(action.order.id)
    if lease is None:
        return
    if not lease.leaving and lease.here_s is not None and lease.idle_since_s is not None and not lease.stray:
        _learn(draft, lease.offer.kind, record_release(_learnt(draft, lease.offer), lease.idle_since_s))
    lapsed = lease.failed or draft.now_s >= lease.given_up_s
    if not lease.leaving and lease.here_s is None and not lease.found and lapsed:
        _bar(draft, lease.offer.id, action.reason)
        _learn(draft, lease.offer.kind, record_failed_delivery(_learnt(draft, lease.offer)))
    if not lease.leaving and lease.here_s is not None and is_claim_owner(lease.owner) and not lease.used:
        _bar(draft, OfferId(lease.id.provider, lease.owner), action.reason)
    changes = {"release_s": draft.now_s, "releases": lease.releases + 1, "uncommitted": action.order.uncommitted}
    changes["forced"] = lease.forced or action.order.force
    _put(draft, replace(lease, why=lease.why if lease.leaving else action.reason, **changes))


def _grouped(draft: Draft, seen: GroupsSeen) -> None:
    before, world, now_s = draft.world.capacity, draft.world, draft.now_s
    found = {}
    for one in seen.groups:
        known = before.groups.get(one.name) or (None if before.grouped else adopt_group(one, now_s))
        quiet = one.offer is None or (known is not None and not known.coming and one.wanted <= known.group.wanted)
        many = (0 if known is None else known.shown) if quiet else count_nodes_with_devices(world, one)
        found[one.name] = update_growth(known, one, many, now_s)
    _change(draft, groups=found, grouped=True)


def _listed(draft: Draft, seen: LeasesSeen) -> None:
    capacity = draft.world.capacity
    first = seen.provider not in capacity.listed_s
    if not first and seen.began_s < capacity.listed_s[seen.provider]:
        return  # a late, older list
    shown = {LeaseId(seen.provider, one.name): one for one in seen.leases}
    leases = {id: one for id, one in capacity.leases.items() if id.provider != seen.provider}
    lost: list[Lease] = []
    for id, lease in capacity.leases.items():
        if id.provider == seen.provider:
            after = _compared(lease, shown.get(id), seen.began_s)
            if after is not None:
                leases[id] = after
            elif lease.here_s is None and not lease.leaving and _given_up(lease):
                lost.append(lease)
    for id, listed in shown.items():
        if id not in capacity.leases:
            takes = estimate_lead_time(listed.offer, _learnt(draft, listed.offer))
            leases[id] = _found(id, listed, draft.now_s, takes, stray=not first)
    trouble = _without(capacity.trouble, seen.provider)
    _change(draft, trouble=trouble, leases=leases, listed_s={**capacity.listed_s, seen.provider: seen.began_s})
    for lease in lost:
        _bar(draft, lease.offer.id, "the ordered capacity was removed before it was delivered")
        _learn(draft, lease.offer.kind, record_failed_delivery(_learnt(draft, lease.offer)))


def _given_up(lease: Lease) -> bool:
    """Whether the provider withdrew undelivered capacity: it was never created, or is being deleted (Karpenter does so
    if the node has not joined in 15 minutes). Created capacity that is missing may have been removed by anyone.
    """
    return not lease.committed or (lease.listed is not None and lease.listed.phase == "leaving")


def _compared(lease: Lease, listed: Listed | None, began_s: float) -> Lease | None:
    """The order after comparison with a list; None: it no longer exists."""
    if listed is not None:
        some = listed.phase == "here" and len(listed.device_ids)  # devices still missing then are never delivered
        lease = replace(lease, listed=listed, missing=0, devices=some or lease.devices)
        came = lease.release_s is not None and lease.uncommitted and lease.committed and began_s > lease.release_s
        return replace(lease, release_s=None, uncommitted=False, releases=0, forced=False, why="") if came else lease
    if lease.release_s is not None:
        return None if began_s > lease.release_s else lease
    if lease.listed is None:
        return lease  # the request may be in progress, or lost
    return replace(lease, missing=lease.missing + 1) if lease.missing + 1 < LOST_LISTS else None


def _found(id: LeaseId, listed: Listed, now_s: float, takes: Expected, *, stray: bool) -> Lease:
    """Adopt listed capacity that an earlier leader ordered, or that was delivered after it was given up. Its delivery
    deadline is computed as if it were ordered now.
    """
    due_s = now_s + due_after_s(listed.offer, takes)
    lease = Lease(
        id=id, offer=listed.offer, devices=listed.devices, owner=listed.owner, asked_s=now_s, sent_s=now_s, due_s=due_s,
        epoch=listed.epoch, found=True, stray=stray, listed=listed,
    )  # fmt: skip
    return replace(lease, release_s=now_s, releases=1, why=listed.says) if listed.phase == "leaving" else lease


def _refused(draft: Draft, seen: LeaseRefused) -> None:
    lease = draft.world.capacity.leases.get(seen.id)
    if lease is None or lease.listed is not None:
        return  # it exists in spite of the rejection
    _bar(draft, lease.offer.id, seen.reason)
    _learn(draft, lease.offer.kind, record_failed_delivery(_learnt(draft, lease.offer)))
    _change(draft, leases={id: one for id, one in draft.world.capacity.leases.items() if id != seen.id})


def _without(entries: Mapping[str, str], provider: str) -> dict[str, str]:
    return {name: one for name, one in entries.items() if name != provider}


def _bar(draft: Draft, of: OfferId, why: str) -> None:
    """Back off from an offer, or from a claim that did not use the devices that the provider attached for it."""
    known = draft.world.capacity.barred.get(of)
    times = 1 if known is None else known.times + 1
    pause_s = min(BARRED_S[0] * 2.0 ** (times - 1), BARRED_S[1])
    others = {id: one for id, one in draft.world.capacity.barred.items() if draft.now_s < one.until_s + BARRED_S[1]}
    _change(draft, barred={**others, of: BackedOffOffer(until_s=draft.now_s + pause_s, times=times, why=why)})


def _learnt(draft: Draft, offer: Offer) -> LeadTimeStats:
    return draft.world.capacity.learnt.get(offer.kind, NO_LEARNT)


def _learn(draft: Draft, kind: OfferKind, learnt: LeadTimeStats) -> None:
    others = {one: known for one, known in draft.world.capacity.learnt.items() if one != kind}
    _change(draft, learnt={**dict([*others.items()][-KINDS_MAX + 1 :]), kind: learnt})


def _put(draft: Draft, lease: Lease) -> None:
    _change(draft, leases={**draft.world.capacity.leases, lease.id: lease})


def _change(draft: Draft, **fields: object) -> None:
    before: Capacity = draft.world.capacity
    after = replace(before, **fields)
    if after != before:
        draft.change(capacity=after)
