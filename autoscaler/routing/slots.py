"""Divides slots among gateways: the leader's half of the hold rule (interfaces section 6, Slot allocations). Pure.

Only this module raises a hold. Invariant: for each replica, the sum over gateways of max(newest grant, every older
grant not yet acknowledged, in use) stays within its slots. Nothing changes before the hand-over is complete, except on
replicas that this leader started, because no gateway can have an older hold there. Slots are divided per model over all
its ready replicas: among tenants by priority, then weighted max-min; then among gateways, by the location of the
tenant's requests. The rest is spread over all live gateways, so that a first request finds a hold at once. Holds are
moved only if necessary. The result is folded (`HoldsGranted`); only models that changed since the last result are
examined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, TenantName
from autoscaler.demand.max_min_shares import Claimant, ShareDemand, max_min, split_share
from autoscaler.fold.indices import is_report_expired
from autoscaler.spec.tenant import weight_of
from autoscaler.state.events import HoldsGranted
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import Gateway, Replica, World

KEEP_S = 0.100
"""A hold moves to a request of the same tenant at another gateway only if that request is older by at least this time,
since a move costs a round trip."""

Holds = dict[ReplicaId, int]


class SlotTarget(NamedTuple):
    """How many slots of a model a gateway should hold: those due to its requests, and the total with its part of the
    rest.
    """

    due: int
    total: int


def divide_slots(world: World, now_s: float) -> HoldsGranted | None:
    """The holds to change now: (gateway, replica, new hold); None if there is nothing to report.

    A result without holds means that all changes were processed. A hold is raised only after the slots were released.
    """
    if not world.undivided or not world.leadership.leads:
        return None
    moved: list[tuple[GatewayId, ReplicaId, int]] = []
    for model in sorted(world.undivided):
        moved += _divide_model(world, model, now_s)
    return HoldsGranted(holds=tuple(moved)) if moved or world.leadership.handed_over else None


def read_latest_hold(gateway: Gateway, replica: ReplicaId) -> int:
    """The hold that a gateway was granted last."""
    grants = gateway.grants.get(replica)
    return grants[-1].hold if grants else 0


def compute_claimed_slots(gateway: Gateway, replica: ReplicaId) -> int:
    """Upper bound of the requests that a gateway may have on a replica: the term that the rule sums."""
    use = gateway.uses.get(replica)
    most = max((grant.hold for grant in gateway.grants.get(replica, ())), default=0)
    if use is None:
        return most
    return max(most, use.in_use) if gateway.in_epoch else max(most, use.in_use, use.hold)


def _divide_model(world: World, model: ModelName, now_s: float) -> list[tuple[GatewayId, ReplicaId, int]]:
    known = (world.replicas[id] for id in world.by_model.get(model, ()))
    ready = [
        replica
        for replica in known
        if replica.state is ReplicaState.READY and (world.leadership.handed_over or not replica.runtime.found)
    ]
    living = [g for g in world.gateways.values() if not g.gone and not g.lapsed]
    holders = sorted((g for g in living if g.in_epoch), key=lambda g: g.id)
    if not ready or not holders:
        return []
    desired = _slot_targets(world, model, ready, holders, now_s)
    targets = _assign_slots(ready, holders, desired)
    moved: list[tuple[GatewayId, ReplicaId, int]] = []
    for replica in ready:
        moved += _moves(replica, living, holders, {g.id: targets[g.id][replica.id] for g in holders}, desired)
    return moved


def _slot_targets(
    world: World, model: ModelName, ready: Sequence[Replica], holders: Sequence[Gateway], now_s: float
) -> dict[GatewayId, SlotTarget]:
    """How many slots of the model each gateway should hold in total."""
    slots = sum(replica.slots for replica in ready)
    due = _due(world, model, ready, holders, slots)
    held = {g.id: sum(read_latest_hold(g, replica.id) for replica in ready) for g in holders}
    live = [g.id for g in holders if not is_report_expired(g, now_s)]
    spare = _spread(due, held, live, slots - sum(due.values()))
    return {g.id: SlotTarget(due[g.id], due[g.id] + spare.get(g.id, 0)) for g in holders}


def _due(
    world: World, model: ModelName, ready: Sequence[Replica], holders: Sequence[Gateway], slots: int
) -> dict[GatewayId, int]:
    """Slots due to the requests at each gateway: by priority, then tenant, then where that tenant's requests are."""
    wanted: dict[int, dict[TenantName, dict[GatewayId, ShareDemand]]] = {}
    for gateway in holders:
        for level in _on_ready(gateway, model, ready):
            waits_s = gateway.seen_s - level.oldest_wait_s if level.waiting else gateway.seen_s
            part = ShareDemand(level.waiting + level.running, waits_s - KEEP_S if level.running else waits_s)
            wanted.setdefault(level.priority, {}).setdefault(level.tenant, {})[gateway.id] = part
    due = dict.fromkeys((gateway.id for gateway in holders), 0)
    for priority in sorted(wanted, reverse=True):
        tenants = wanted[priority]
        shares = max_min({tenant: _claimant(world, model, tenant, parts) for tenant, parts in tenants.items()}, slots)
        for tenant, share in shares.items():
            slots -= share
            for gateway_id, given in split_share(tenants[tenant], share).items():
                due[gateway_id] += given
    return due


def _on_ready(gateway: Gateway, model: ModelName, ready: Sequence[Replica]) -> list[Level]:
    """The gateway's levels without the requests that run on other, draining replicas: they need no slot of the `ready`
    replicas.

    Reports do not contain the tenants of the omitted requests; the lowest priority is assumed. If they were counted,
    slots would be allocated to them and not used.
    """
    levels = sorted(gateway.levels.get(model, ()), key=lambda level: (level.priority, level.tenant))
    used = (use.in_use for replica in ready if (use := gateway.uses.get(replica.id)) is not None)
    elsewhere = sum(level.running for level in levels) - sum(used)
    if elsewhere <= 0:
        return levels
    left: list[Level] = []
    for level in levels:
        less = max(0, min(elsewhere, level.running))
        elsewhere -= less
        left.append(replace(level, running=level.running - less))
    return left


def _claimant(world: World, model: ModelName, tenant: TenantName, parts: Mapping[GatewayId, ShareDemand]) -> Claimant:
    return Claimant(
        wants=sum(part.wants for part in parts.values()),
        weight=weight_of(world.tenants, tenant),
        attained=world.learned.attained.get(model, {}).get(tenant, 0.0),
    )


def _spread(
    due: Mapping[GatewayId, int], held: Mapping[GatewayId, int], live: Sequence[GatewayId], left: int
) -> dict[GatewayId, int]:
    """Spread slots due to no request over live gateways, evenly if there are no requests.

    Otherwise they stay where they are, but a gateway with no spare slot gets one from another that has two.
    """
    if not live or left <= 0:
        return {}
    if not any(due.values()):
        return _evenly(held, live, left)
    spare = dict.fromkeys(live, 0)
    for id in live:
        spare[id] = min(left, max(0, held.get(id, 0) - due[id]))
        left -= spare[id]
    while left:
        poorest = min(live, key=lambda gateway: (spare[gateway], gateway))
        level = min(
            (spare[id] for id in live if spare[id] > spare[poorest]), default=spare[poorest] + -(-left // len(live))
        )
        more = min(left, level - spare[poorest])
        spare[poorest] += more
        left -= more
    for poor in live:
        rich = max(live, key=lambda gateway: (spare[gateway], gateway))
        if not spare[poor] and spare[rich] > 1:
            spare[poor], spare[rich] = 1, spare[rich] - 1
    return spare


def _evenly(held: Mapping[GatewayId, int], live: Sequence[GatewayId], left: int) -> dict[GatewayId, int]:
    each, odd = divmod(left, len(live))
    lucky = set(sorted(live, key=lambda gateway: (-held.get(gateway, 0), gateway))[:odd])
    return {id: each + (id in lucky) for id in live}


def _assign_slots(
    ready: Sequence[Replica], holders: Sequence[Gateway], desired: Mapping[GatewayId, SlotTarget]
) -> dict[GatewayId, Holds]:
    """Assign each gateway's slots to replicas: first where it has some already, then where most slots are free."""
    assigned = {g.id: _kept(g, ready, desired[g.id].total) for g in holders}
    room = {r.id: _room(r, assigned) for r in ready}
    lacking = [g for g in holders if sum(assigned[g.id].values()) < desired[g.id].total]
    free = {r.id: r.slots - sum(compute_claimed_slots(g, r.id) for g in holders) for r in ready} if lacking else {}
    for gateway in sorted(lacking, key=lambda g: (desired[g.id].due <= sum(assigned[g.id].values()), g.id)):
        holds = assigned[gateway.id]
        lacks = desired[gateway.id].total - sum(holds.values())
        while lacks > 0:
            open_ = [r.id for r in ready if room[r.id] > 0]
            if not open_:
                break
            best = max(open_, key=lambda r: (free[r] > 0, min(free[r], room[r]), -holds[r], r))
            more = min(lacks, room[best], max(1, -(-lacks // len(open_))))
            holds[best] += more
            room[best] -= more
            free[best] -= more
            lacks -= more
    return assigned


def _kept(gateway: Gateway, ready: Sequence[Replica], total: int) -> Holds:
    """The holds of a gateway now, reduced to its target: first where it has the most unused slots."""
    used = {r.id: use.in_use if (use := gateway.uses.get(r.id)) is not None else 0 for r in ready}
    holds = {id: max(read_latest_hold(gateway, id), in_use) for id, in_use in used.items()}
    above = sum(holds.values()) - total
    while above > 0:
        idle = sorted(((holds[id] - used[id], holds[id], id) for id in holds if holds[id]), reverse=True)
        most = idle[0][0]
        less = max(1, min(above, holds[idle[0][2]], (most - idle[1][0]) if len(idle) > 1 else above))
        holds[idle[0][2]] -= less
        above -= less
    return holds


def _room(replica: Replica, assigned: Mapping[GatewayId, Holds]) -> int:
    """Slots that no gateway is to hold. If a former leader's holds are too many, the largest are cut first."""
    room = replica.slots - sum(holds[replica.id] for holds in assigned.values())
    while room < 0:
        most = max(assigned.values(), key=lambda holds: holds[replica.id])
        most[replica.id] -= 1
        room += 1
    return room


def _moves(
    replica: Replica,
    known: Sequence[Gateway],
    holders: Sequence[Gateway],
    targets: Mapping[GatewayId, int],
    desired: Mapping[GatewayId, SlotTarget],
) -> list[tuple[GatewayId, ReplicaId, int]]:
    """The holds to change on one replica: any may be lowered, but raised only into slots that are certainly unused."""
    held = {g.id: read_latest_hold(g, replica.id) for g in holders}
    moved = [(g.id, replica.id, targets[g.id]) for g in holders if targets[g.id] < held[g.id]]
    rising = [g for g in holders if targets[g.id] > held[g.id]]
    free = replica.slots - sum(compute_claimed_slots(g, replica.id) for g in known) if rising else 0
    for gateway in sorted(rising, key=lambda g: (held[g.id] >= desired[g.id].due, held[g.id] - targets[g.id], g.id)):
        have, claimed = held[gateway.id], compute_claimed_slots(gateway, replica.id)
        rise = min(targets[gateway.id] - have, max(0, free) + claimed - have)
        if rise > 0:
            moved.append((gateway.id, replica.id, have + rise))
            free -= max(0, have + rise - claimed)
    return moved
