"""Computes the next `World`: `fold(world, batch, now_s)` applies a batch of observations to the snapshot. Pure.

This module dispatches the observations of a batch in order and handles the simple ones. The others are in `replicas`,
`gateway_reports`, `agent_reports`, `mig`, `capacity`, `model_quarantine` and `leadership_and_operator_orders`;
`autoscaler.demand.model_history` keeps what is learned about Models. Every write goes through `Draft`, which copies a
map once per batch, if it changes. Observations never raise; our own Actions raise IllegalIntentError if the state table
does not allow them. The version rises by one with each batch that requires an update of gateways.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from autoscaler.capacity import interruptions
from autoscaler.demand import model_history as histories
from autoscaler.demand.idle_timeout import idle_window_s
from autoscaler.demand.scaling_signals import record_signal
from autoscaler.fold import (
    agent_reports,
    capacity,
    gateway_reports,
    leadership_and_operator_orders,
    mig,
    model_quarantine,
    replicas,
)
from autoscaler.fold.draft import Draft
from autoscaler.queries.measured_memory import correct_memory_estimate
from autoscaler.state.actions import AcquireLease, Acted, CutNode, ReleaseLease
from autoscaler.state.capacity import (
    GroupsSeen,
    LearntSeen,
    LeaseRefused,
    LeasesSeen,
    OffersSeen,
    ProvidersSeen,
    ProviderTroubled,
)
from autoscaler.state.events import (
    ClockSeen,
    CopiesSeen,
    CordonsSeen,
    DisruptionsSeen,
    DocumentsSeen,
    FaultSeen,
    FollowingSeen,
    GatewayGone,
    GatewaySeen,
    HistorySeen,
    HoldsGranted,
    HostsSeen,
    ImagesSeen,
    LeadingSeen,
    LessonLearnt,
    ModelStopped,
    ModelWoken,
    MountsSeen,
    NodeReported,
    ReplicaSeen,
    Reported,
    SignalsSeen,
    SlicesSeen,
    StartSeen,
    Synced,
    Tick,
    Transition,
)
from autoscaler.state.mig import CutRefused, CuttableSeen
from autoscaler.state.pending_claims import AwaitedSeen
from autoscaler.state.world import NO_HISTORY, PlacementValues, Slice, World

CLOCK_S = 1.0
"""Clock offsets that differ by less than this are not updated."""
Observation = (
    DocumentsSeen
    | SlicesSeen
    | HostsSeen
    | CopiesSeen
    | ImagesSeen
    | DisruptionsSeen
    | StartSeen
    | FaultSeen
    | MountsSeen
    | SignalsSeen
    | ReplicaSeen
    | Synced
    | LeadingSeen
    | FollowingSeen
    | Reported
    | GatewaySeen
    | GatewayGone
    | HistorySeen
    | LessonLearnt
    | CordonsSeen
    | ModelWoken
    | ModelStopped
    | NodeReported
    | CuttableSeen
    | CutRefused
    | ProvidersSeen
    | OffersSeen
    | LeasesSeen
    | LeaseRefused
    | LearntSeen
    | ProviderTroubled
    | GroupsSeen
    | AwaitedSeen
    | HoldsGranted
    | ClockSeen
    | Tick
    | Acted
)
NO_MEMORY = "its memory reads 0 bytes: fix its driver or its memory label, or set its memory in Settings `nodes`"


def fold(world: World, batch: Sequence[Observation], now_s: float) -> tuple[World, tuple[Transition, ...]]:
    """Apply `batch` in order, at time `now_s`. Returns the new `World` and one Transition per move of a replica.

    Returns the identical `World` if nothing changed. Raises IllegalIntentError for an Action that the table forbids.
    """
    draft = Draft(world, now_s)
    for observation in batch:
        _one(draft, observation)
    _pass_time(draft)
    after = draft.finish()
    return after, tuple(draft.transitions)


def _one(draft: Draft, observation: Observation) -> None:
    match observation:
        case ReplicaSeen():
            replicas.apply_replica_observation(draft, observation)
        case Reported():
            gateway_reports.apply_report(draft, observation)
        case Acted(action=CutNode() as action):
            mig.apply_repartition(draft, action)
        case Acted(action=(AcquireLease() | ReleaseLease()) as action):
            capacity.apply_lease_action(draft, action)
        case Acted():
            replicas.apply_replica_action(draft, observation.action)
        case HoldsGranted():
            gateway_reports.apply_grants(draft, observation)
        case DocumentsSeen():
            _documents(draft, observation)
        case SlicesSeen():
            _slices(draft, observation)
        case HostsSeen():
            _hosts(draft, observation)
        case ImagesSeen():
            agent_reports.apply_kubelet_images(draft, observation)
        case CopiesSeen() | DisruptionsSeen() | MountsSeen() | ClockSeen():
            _whole(draft, observation)
        case StartSeen():
            _start_seen(draft, observation)
        case SignalsSeen():
            _signals(draft, observation)
        case FaultSeen():
            model_quarantine.quarantine_model(draft, observation)
        case GatewaySeen():
            gateway_reports.register_gateway(draft, observation)
        case GatewayGone():
            gateway_reports.mark_gateway_gone(draft, observation.gateway, observation.boot)
        case HistorySeen():
            _history(draft, observation)
        case LessonLearnt():
            _lesson(draft, observation.lesson)
        case CordonsSeen() | ModelWoken() | ModelStopped():
            leadership_and_operator_orders.apply_operator_observation(draft, observation)
        case NodeReported():
            agent_reports.apply_agent_report(draft, observation)
        case CuttableSeen() | CutRefused():
            mig.apply_mig_observation(draft, observation)
        case (
            ProvidersSeen()
            | OffersSeen()
            | LeasesSeen()
            | LeaseRefused()
            | LearntSeen()
            | ProviderTroubled()
            | GroupsSeen()
            | AwaitedSeen()
        ):
            capacity.apply_capacity_observation(draft, observation)
        case LeadingSeen() | FollowingSeen() | Synced():
            leadership_and_operator_orders.apply_leadership_observation(draft, observation)
        case Tick():
            _half_open(draft)


def _whole(draft: Draft, seen: CopiesSeen | DisruptionsSeen | MountsSeen | ClockSeen) -> None:
    """Replace the previous value of an observation that is a level."""
    match seen:
        case CopiesSeen() if (seen.copies, seen.failed) != (draft.world.nodes.copies, draft.world.learned.unbrought):
            draft.change_nodes(copies=seen.copies)
            draft.change_learned(unbrought=seen.failed)
        case DisruptionsSeen() if seen.undisturbed != draft.world.nodes.undisturbed:
            draft.change_nodes(undisturbed=seen.undisturbed)
        case MountsSeen() if seen.facts != draft.world.nodes.mounting:
            draft.change_nodes(mounting=seen.facts)
        case ClockSeen() if abs((draft.world.unix_offset_s or 0.0) - seen.unix_offset_s) > CLOCK_S:
            draft.change(unix_offset_s=seen.unix_offset_s)
        case _:
            pass  # unchanged


def _documents(draft: Draft, documents: DocumentsSeen) -> None:
    """Replace all documents. Failures of a Model whose spec hash changed no longer prevent its start."""
    before, known = draft.world, draft.histories.now
    models = {one.name: correct_memory_estimate(one, known.get(one.name, NO_HISTORY)) for one in documents.models}
    tenants = {tenant.name: tenant for tenant in documents.tenants}
    if not before.leadership.documented:
        draft.change_leadership(documented=True)
    if (models, tenants, documents.settings) == (before.models, before.tenants, before.settings):
        return
    obstacles = {name: obstacle for name, obstacle in before.learned.obstacles.items() if name in models}
    signals = {
        name: signal
        for name, signal in before.learned.signals.items()
        if name in models and models[name].spec.scaling.targets()
    }
    draft.change(models=models, tenants=tenants, settings=documents.settings)
    draft.change_learned(obstacles=obstacles, signals=signals)
    draft.news = True
    draft.undivided.update(draft.by_model.now)
    for name, history in tuple(draft.histories.now.items()):
        model, old = models.get(name), before.models.get(name)
        if model is None and old is not None:
            draft.histories.drop(name)
        elif model is not None and old is not None and model != old and model.spec_hash() != old.spec_hash():
            draft.put_history(name, histories.clear_failures(history))
        elif model is not None and old is None:
            draft.put_history(name, histories.drop_stale_failures(history, model))
    for name in before.models.keys() - models.keys():
        draft.attained.drop(name)
    agent_reports.refresh_weights_reports(draft)
    model_quarantine.drop_outdated_faults(draft, before)


def _slices(draft: Draft, inventory: SlicesSeen) -> None:
    slices = {slice_.id: _sound(slice_) for slice_ in inventory.slices}
    if (slices, inventory.others) != (draft.world.nodes.slices, draft.world.nodes.others):
        draft.change_nodes(slices=slices, others=inventory.others)


def _sound(slice_: Slice) -> Slice:
    """Close a slice without memory to all placements, including those of Models without a known size."""
    return slice_ if slice_.memory_bytes > 0 or slice_.closed else replace(slice_, closed=NO_MEMORY)


def _hosts(draft: Draft, seen: HostsSeen) -> None:
    """Replace the hosts; an unchanged host stays the identical object."""
    before = draft.world.nodes.hosts
    if seen.hosts != before:
        kept = {node: before.get(node, host) for node, host in seen.hosts.items()}
        hosts = {node: kept[node] if kept[node] == host else host for node, host in seen.hosts.items()}
        draft.change_nodes(hosts=hosts)


def _start_seen(draft: Draft, seen: StartSeen) -> None:
    before = draft.world.learned.obstacles
    if seen.model not in draft.world.models or before.get(seen.model, "") == seen.obstacle:
        return
    after = {name: obstacle for name, obstacle in before.items() if name != seen.model}
    draft.change_learned(obstacles=after | {seen.model: seen.obstacle} if seen.obstacle else after)
    history = draft.histories.now.get(seen.model)
    if not seen.obstacle and history is not None and history.failure == before[seen.model]:
        draft.put_history(seen.model, histories.clear_failures(history))  # the reason of the rejection is gone
        draft.news = True


def _signals(draft: Draft, seen: SignalsSeen) -> None:
    """Replace the signals of a Model; their peaks continue."""
    model, known = draft.world.models.get(seen.model), draft.world.learned.signals
    if model is None:
        return
    window_s, before = idle_window_s(model, draft.history(seen.model)), known.get(seen.model, {})
    signals = {
        name: record_signal(before.get(name), total, window_s, draft.now_s) for name, total in seen.signals.items()
    }
    draft.change_learned(signals=known | {seen.model: signals})


def _history(draft: Draft, seen: HistorySeen) -> None:
    """Take a stored history if none is known. A follower always merges it, because the leader wrote it."""
    known, model = draft.histories.now.get(seen.model), draft.world.models.get(seen.model)
    if known is None:
        draft.put_history(
            seen.model, seen.history if model is None else histories.drop_stale_failures(seen.history, model)
        )
    elif not draft.world.leadership.leads:
        draft.put_history(seen.model, histories.merge_leader_history(known, seen.history))
    draft.correct(seen.model)


def _lesson(draft: Draft, lesson: PlacementValues) -> None:
    """Take placement values; initial values do not replace learned ones."""
    known = draft.world.learned.lesson
    if known != lesson and (lesson.learnt or known is None or not known.learnt):
        draft.change_learned(lesson=lesson)


def _half_open(draft: Draft) -> None:
    """End expired back-offs, so that gateways receive the change."""
    out = model_quarantine.list_quarantined_models(draft.world)
    for model, history in tuple(draft.histories.now.items()):
        if model not in out and history.refused_until_s and draft.now_s >= history.refused_until_s:
            draft.put_history(model, histories.end_backoff(history, draft.now_s))
            draft.news = True


def _pass_time(draft: Draft) -> None:
    """Apply the effects of time: expire reports, quarantines and stops, and record the current demand."""
    gateway_reports.expire_reports(draft)
    model_quarantine.expire_quarantines(draft)
    leadership_and_operator_orders.end_completed_stops(draft)
    agent_reports.forget_silent_nodes(draft)
    capacity.update_leases(draft)
    cordons = interruptions.derive_cordons(draft.world, draft.before, draft.now_s)
    if cordons != draft.world.nodes.cordons:
        draft.change_nodes(cordons=cordons)
    out = model_quarantine.list_quarantined_models(draft.world)
    for model, load in draft.sum_loads().items():
        spec = draft.world.models.get(model)
        if spec is not None and model not in out:
            draft.put_history(model, histories.record_peak(draft.history(model), spec, load, draft.now_s))
