"""Folds gateway reports: demand as levels that expire, acknowledged slot allocations (holds), and service attained.

Implements the leader's bookkeeping for holds (interfaces section 6): which grants a gateway may still act on, and when
a gateway is proven dead. `autoscaler.routing.slots` grants the holds. A report from an older epoch carries demand but
acknowledges nothing. Late reports, duplicates and reports of dead boots change nothing, in whatever order they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName, Total
from autoscaler.demand import model_history as histories
from autoscaler.demand.max_min_shares import lift_attained_service
from autoscaler.fold.draft import Draft, with_grant
from autoscaler.fold.indices import demand_in, is_report_expired, levels_of, uses_of
from autoscaler.spec.tenant import weight_of
from autoscaler.state.events import GatewaySeen, HoldsGranted, Reported
from autoscaler.state.world import Gateway, Grant, World

BOOTS_MAX = 8
"""Dead boots remembered per gateway: their reports may still arrive late."""
GONE_KEPT_S = 60.0
"""A gateway proven dead is forgotten after this."""
UNWATCHED_SILENT_S = 60.0
"""A gateway whose process or pod nothing watches counts as gone after this silence."""


def apply_report(draft: Draft, of: Reported) -> None:
    """Fold one report, unless a newer one of that gateway is known."""
    report, seen_s = of.report, draft.now_s if of.came_s is None else of.came_s
    known = draft.gateways.now.get(report.gateway)
    gateway = known or Gateway(id=report.gateway)
    in_epoch = report.epoch == draft.world.epoch
    if gateway.gone and report.boot == gateway.boot and not (in_epoch and report.version >= gateway.gone_version):
        return  # a late report of a dead gateway; a gateway that applied later Routes is alive
    if gateway.boot and report.boot != gateway.boot:
        if not in_epoch or not _lives(gateway, report):
            return  # possibly a late report of an older boot: a new boot is believed once it acts on our Routes
        gateway = restart_gateway(draft, gateway, report.boot)
        draft.news = True  # a new version: if this boot is dead, only the living one will act on it
    elif gateway.report is not None and report.sequence <= gateway.report.sequence:
        return
    before = gateway
    if known is None or before.gone:
        draft.news = True
        _all_undivided(draft)
    after = replace(before, boot=report.boot, seen_s=seen_s, report=report, gone=False, lapsed=False)
    uses, levels = uses_of(report), levels_of(after, draft.now_s)
    after = replace(
        after,
        in_epoch=before.in_epoch or in_epoch,
        grants=reconcile_grants(before.grants, uses, report.version) if in_epoch else before.grants,
        uses=before.uses if uses == before.uses else uses,
        levels=before.levels if levels == before.levels else levels,
        stalled=tuple(use.replica for use in report.replicas if use.stalled),
    )
    if before.lapsed or (after.in_epoch and not before.in_epoch):
        _all_undivided(draft)
    _totals(draft, before, report, seen_s)
    _demand(draft, before, after)
    if report.totals:
        after = replace(after, totals=_merged(before.totals, report.totals))
    draft.gateways.put(after.id, after)
    _note_uses(draft, before, after)


def is_redundant_report(world: World, report: Report) -> bool:
    """Whether the report contains nothing relevant: no request arrived, moved or ended, wait times merely grew, and
    nothing else changed that a decision depends on. The attained service matters only while requests wait for the same
    Model (fair queueing uses it), later Routes only for drains and grants. While anything waits, a gateway sends twenty
    reports a second.
    """
    gateway = world.gateways.get(report.gateway)
    if gateway is None or gateway.gone or gateway.report is None:
        return False
    return (
        all(_same(gateway.totals.get((one.model, one.tenant)), one, world) for one in report.totals)
        and uses_of(report) == gateway.uses
        and _ageless(demand_in(report)) == _ageless(gateway.levels)
        and _acts_on_the_same(world, gateway, gateway.report, report)
    )


def _same(last: Total | None, total: Total, world: World) -> bool:
    if last is None or _counts(last) != _counts(total):
        return False
    load = world.loads.get(total.model)
    return last.busy_slot_us == total.busy_slot_us or load is None or not load.waiting


def _acts_on_the_same(world: World, gateway: Gateway, last: Report, report: Report) -> bool:
    """Whether acting on later Routes changes nothing: no drain and no grant waits for the acknowledgement."""
    if (report.boot, report.epoch) != (last.boot, last.epoch):
        return False
    if report.version == last.version:
        return True
    drains = any(one.drain is not None for one in world.replicas.values())
    return not drains and reconcile_grants(gateway.grants, gateway.uses, report.version) == gateway.grants


def _ageless(levels: Mapping[ModelName, Iterable[Level]]) -> dict[ModelName, list[Level]]:
    """The values without the fields that change only because time passes."""
    return {
        model: [replace(level, oldest_wait_s=0.0, soonest_deadline_s=None) for level in rows]
        for model, rows in levels.items()
    }


def _counts(total: Total) -> tuple[int, int, int, float]:
    return total.admitted, total.refused_cold, total.finished, total.retry_after_s


def _lives(gateway: Gateway, report: Report) -> bool:
    """Whether a report of another boot is from a later boot. A dead boot acts on no newer Routes than the living one.

    A boot that was replaced before must act on newer Routes; otherwise two late reports could alternate.
    """
    last = gateway.report
    if last is None:
        return report.boot not in gateway.boots_before
    acts_on, known = (report.epoch, report.version), (last.epoch, last.version)
    return acts_on > known if report.boot in gateway.boots_before else acts_on >= known


def reconcile_grants(
    grants: Mapping[ReplicaId, tuple[Grant, ...]], uses: Mapping[ReplicaId, ReplicaUse], version: int
) -> dict[ReplicaId, tuple[Grant, ...]]:
    """Return the grants that remain valid for a gateway that acts on Routes of `version` and reports these `uses`.

    The gateway acts on the last grant up to `version`; older grants are void. If that grant is the newest one, the
    reported hold is used instead, because a gateway may lower a hold at once. A hold that was not granted in this epoch
    is older than all grants.
    """
    left: dict[ReplicaId, tuple[Grant, ...]] = {}
    for replica, known in grants.items():
        if known[-1].version <= version:
            use = uses.get(replica)
            hold = 0 if use is None else min(use.hold, known[-1].hold) if known[-1].version else use.hold
            if hold:
                left[replica] = (known[-1] if hold == known[-1].hold else Grant(version=known[-1].version, hold=hold),)
            continue
        first = max((i for i, grant in enumerate(known) if grant.version <= version), default=0)
        left[replica] = known[first:]
    for replica, use in uses.items():
        if use.hold and replica not in grants:
            left[replica] = (Grant(version=0, hold=use.hold),)
    return dict(grants) if left == grants else left


def apply_grants(draft: Draft, moved: HoldsGranted) -> None:
    """Record the holds that `divide_slots` moved, with the next version. Holds are raised only here."""
    draft.settled = True
    draft.news = draft.news or bool(moved.holds)
    changed: dict[GatewayId, dict[ReplicaId, tuple[Grant, ...]]] = {}
    for id, replica, hold in moved.holds:
        grants = changed.get(id)
        if grants is None:
            grants = changed[id] = dict(draft.gateways.now[id].grants)
        grants[replica] = with_grant(grants.get(replica, ()), Grant(version=draft.version, hold=hold))
    for id, grants in changed.items():
        draft.gateways.put(id, replace(draft.gateways.now[id], grants=grants))


def register_gateway(draft: Draft, seen: GatewaySeen) -> None:
    """Register an existing gateway, whether or not it reports. One proven dead returns with a new boot."""
    id, boot = seen.gateway, seen.boot
    known = draft.gateways.now.get(id)
    if known is not None and seen.watched and not known.watched and not (boot and known.boot and boot != known.boot):
        known = replace(known, watched=True)
        draft.gateways.put(id, known)
    if known is None:
        draft.gateways.put(id, Gateway(id=id, boot=boot, seen_s=draft.now_s, watched=seen.watched))
        draft.news = True
    elif boot and known.boot and boot != known.boot and boot not in known.boots_before:
        draft.gateways.put(id, replace(restart_gateway(draft, known, boot), seen_s=draft.now_s, watched=seen.watched))
        draft.news = True


def mark_gateway_gone(draft: Draft, id: GatewayId, boot: str) -> None:
    """Remove the demand and holds of a gateway that is proven dead. No effect if a later boot is known."""
    known = draft.gateways.now.get(id)
    if known is not None and not known.gone and not (boot and known.boot and boot != known.boot):
        _end(draft, known)


def _end(draft: Draft, gateway: Gateway) -> None:
    dead = replace(
        clear_gateway(draft, gateway), gone=True, gone_version=draft.version, seen_s=draft.now_s, watched=False
    )
    draft.gateways.put(gateway.id, dead)
    draft.news = True


def restart_gateway(draft: Draft, gateway: Gateway, boot: str) -> Gateway:
    """The gateway at the start of a new boot, which proves the old one dead."""
    others = [one for one in gateway.boots_before if one != boot]
    boots_before = (*others, gateway.boot)[-BOOTS_MAX:]
    return replace(clear_gateway(draft, gateway), boot=boot, boots_before=boots_before, totals={}, gone=False)


def clear_gateway(draft: Draft, gateway: Gateway) -> Gateway:
    """The gateway without demand, use and holds, because its process no longer exists."""
    _all_undivided(draft)
    _silenced(draft, gateway)
    return replace(gateway, report=None, in_epoch=False, grants={}, uses={}, levels={}, lapsed=False)


def expire_reports(draft: Draft) -> None:
    """Expire the demand of gateways that are silent too long, but not their holds: a silent gateway may be alive.

    If nothing watches the gateway, its holds expire, too, and later the gateway: nothing else would ever end them.
    """
    for gateway in tuple(draft.gateways.now.values()):
        if not gateway.gone and not gateway.watched and draft.now_s >= gateway.seen_s + UNWATCHED_SILENT_S:
            _end(draft, gateway)
        elif (gateway.levels or _lapses(gateway)) and is_report_expired(gateway, draft.now_s):
            _silenced(draft, gateway)
            after = replace(gateway, levels={})
            if _lapses(gateway):
                after = replace(after, lapsed=True, grants={})
                draft.news = True
                _all_undivided(draft)
            draft.gateways.put(gateway.id, after)
        elif gateway.gone and draft.now_s - gateway.seen_s >= GONE_KEPT_S:
            draft.gateways.drop(gateway.id)


def _lapses(gateway: Gateway) -> bool:
    return not (gateway.watched or gateway.gone or gateway.lapsed)


def _silenced(draft: Draft, gateway: Gateway) -> None:
    """End all levels of the gateway. The time of its last report counts as the last activity of their Models."""
    for model in gateway.levels:
        draft.unsummed.add(model)
        draft.put_history(model, histories.record_activity(draft.history(model), gateway.seen_s))


def _demand(draft: Draft, before: Gateway, after: Gateway) -> None:
    """Mark the Models whose demand changed, and record the last activity of those without demand."""
    for model in before.levels:
        if model not in after.levels:
            draft.unsummed.add(model)
            draft.put_history(model, histories.record_activity(draft.history(model), draft.now_s))
    for model, levels in after.levels.items():
        draft.unsummed.add(model)
        active = draft.before.loads[model].tenants if model in draft.before.loads else frozenset()
        for level in levels:
            if level.tenant not in active:
                _comes_back(draft, model, level.tenant, active)


def _comes_back(draft: Draft, model: ModelName, tenant: TenantName, active: Iterable[TenantName]) -> None:
    attained = draft.attained.now.get(model, {})
    more = lift_attained_service(attained, tenant, active)
    if attained.get(tenant) != more:
        draft.attain(model, tenant, more)


def _totals(draft: Draft, before: Gateway, report: Report, seen_s: float) -> None:
    """Convert growth of a boot's cumulative counts into service attained, activity and rejected cold requests.

    Counts that fell were reset: the gateway had forgotten a Model that was missing from the documents for a while.
    """
    for total in report.totals:
        key = (total.model, total.tenant)
        last = before.totals.get(key)
        if last == total:
            continue
        if last is not None and (total.admitted < last.admitted or total.refused_cold < last.refused_cold):
            last = None
        at_s = seen_s - total.idle_s
        history = histories.record_activity(draft.history(total.model), at_s)
        if total.refused_cold > (last.refused_cold if last is not None else 0):
            history = histories.record_cold_refusal(history, at_s, total.retry_after_s)
        draft.put_history(total.model, history)
        grown_us = total.busy_slot_us - (last.busy_slot_us if last is not None else 0)
        if grown_us > 0:
            load = draft.before.loads.get(total.model)
            if total.tenant not in draft.attained.now.get(total.model, ()):
                _comes_back(draft, *key, load.tenants if load is not None else ())
            grown_s = grown_us / 1e6 / weight_of(draft.world.tenants, total.tenant)
            draft.attain(*key, draft.attained.now[total.model][total.tenant] + grown_s)


def _merged(
    before: dict[tuple[ModelName, TenantName], Total], totals: Iterable[Total]
) -> dict[tuple[ModelName, TenantName], Total]:
    changed = {key: total for total in totals if before.get(key := (total.model, total.tenant)) != total}
    return {**before, **changed} if changed else before


def _note_uses(draft: Draft, before: Gateway, after: Gateway) -> None:
    """Mark the Models of replicas whose use or grants changed: slots may be free to allocate."""
    if before.uses is after.uses and before.grants == after.grants:
        return
    for replica in {*before.uses, *after.uses, *before.grants, *after.grants}:
        same = before.uses.get(replica) == after.uses.get(replica)
        if not same or before.grants.get(replica) != after.grants.get(replica):
            known = draft.replicas.now.get(replica)
            if known is not None:
                draft.undivided.add(known.model)


def _all_undivided(draft: Draft) -> None:
    """Mark all Models with replicas: a change of the set of gateways affects their slot allocations."""
    draft.undivided.update(draft.by_model.now)
