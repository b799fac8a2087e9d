"""Builds the routes for gateways, in full or as the difference between two Worlds. Pure.

Messages depend only on Worlds, so that a slow gateway gets one larger delta and never a queue of them. Deltas applied
in order equal the full message (checked by a property test). The passage of time is not a change: an expected wait is
relative to its sending time, and the receiver counts down. Routes are withheld until the driver has listed all existing
replicas, because gateways would drop those that a new leader does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor, inf

from autoscaler.contract import (
    GatewayId,
    ModelName,
    ModelRoute,
    Refusal,
    ReplicaId,
    Route,
    RoutesDelta,
)
from autoscaler.demand.idle_timeout import median_start_s
from autoscaler.fold.draft import is_routed
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.queries.start_phases import last_phases_ms
from autoscaler.state.actions import Unmet
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Gateway, History, ModelLoad, Replica, World
from autoscaler.text import format_duration

RETRY_S_MAX = 120.0
"""The longest Retry-After; SDKs give up if it is longer (interfaces, section 3)."""
NO_CAPACITY_RETRY_S = 60.0
ESTIMATE_STEP_S = 30.0
"""Rounding step of the reported wait for capacity."""

BEGINNING = frozenset({S.PENDING, S.STARTING, S.WAKING, S.UNREADY})
ENDING = frozenset({S.DRAINING, S.STOPPING, S.FALLING_ASLEEP})
NO_UNMET: Mapping[ModelName, Unmet] = {}


def count_gateways(world: World) -> int:
    """How many gateways are known; at least one, the caller."""
    return max(1, sum(not gateway.gone for gateway in world.gateways.values()))


def build_heartbeat(world: World) -> RoutesDelta:
    """A delta without changes: the leader is alive, and everything up to this version was sent."""
    return RoutesDelta(epoch=world.epoch, version=world.version, gateways=count_gateways(world))


def routes_full(
    world: World, gateway: GatewayId, now_s: float, unmet: Mapping[ModelName, Unmet] = NO_UNMET, *, boot: str = ""
) -> RoutesDelta:
    """All routes of one gateway; only a heartbeat while the driver has not listed everything.

    `boot` identifies the gateway process that reads. If the `World` has another `boot` for this gateway, the holds
    there belong to a process that has ended and are not sent.
    """
    if not world.leadership.synced:
        return build_heartbeat(world)
    me = _reader(world, gateway, boot)
    models = {*world.models, *world.by_model}
    return RoutesDelta(
        epoch=world.epoch,
        version=world.version,
        full=True,
        gateways=count_gateways(world),
        replicas=tuple(_route(replica, me) for replica in world.replicas.values() if is_routed(replica)),
        models=tuple(r for m in sorted(models) if (r := model_route(world, m, now_s, gateway, unmet)) is not None),
    )


def routes_delta(
    before: World,
    after: World,
    gateway: GatewayId,
    now_s: float,
    unmet: Mapping[ModelName, Unmet] = NO_UNMET,
    *,
    unmet_before: Mapping[ModelName, Unmet] | None = None,
    boot: str = "",
) -> RoutesDelta | None:
    """Return the changes for one gateway from `before`, which it has, to `after`; None if there are none.
    A version that grants the gateway a hold is always sent, so that the gateway can acknowledge that version.
    """
    if not before.leadership.synced or before.epoch != after.epoch:
        return routes_full(after, gateway, now_s, unmet, boot=boot)
    previous_unmet = unmet if unmet_before is None else unmet_before
    was, now = _reader(before, gateway, boot), _reader(after, gateway, boot)
    replicas, gone = _replicas(before, after, was, now)
    models, models_gone = _models(
        lambda model: model_route(before, model, now_s, gateway, previous_unmet),
        lambda model: model_route(after, model, now_s, gateway, unmet),
        _changed_models(before, after)
        | {
            m
            for m in {*previous_unmet, *unmet}
            if _capacity_refusal(before, previous_unmet, m) != _capacity_refusal(after, unmet, m)
        },
    )
    granted = now is not was and now is not None and any(
        grants[-1].version > before.version for grants in now.grants.values()
    )  # fmt: skip
    if not (replicas or gone or models or models_gone or granted):
        return None if count_gateways(before) == count_gateways(after) else build_heartbeat(after)
    return RoutesDelta(
        epoch=after.epoch,
        version=after.version,
        gateways=count_gateways(after),
        replicas=replicas,
        replicas_gone=gone,
        models=models,
        models_gone=models_gone,
    )


def model_route(
    world: World, model: ModelName, now_s: float, gateway: GatewayId, unmet: Mapping[ModelName, Unmet] = NO_UNMET
) -> ModelRoute | None:
    """Route of a model as a whole; None for one that has neither document nor replica."""
    if model not in world.models and model not in world.by_model:
        return None
    replicas = [world.replicas[id] for id in world.by_model.get(model, ())]
    if model in world.learned.faults and model in list_quarantined_models(world):
        return _faulty_route(world, model, replicas, now_s, gateway)
    history = world.learned.histories.get(model) or History()
    load = world.loads.get(model) or ModelLoad()
    state = _state(replicas, history)
    return ModelRoute(
        model=model,
        state=state,
        expected_wait_s=_expected_wait_s(state, replicas, history, now_s),
        capacity_wait_s=None if state == "ready" else _capacity_wait_s(unmet.get(model)),
        phases_ms=last_phases_ms(replicas),
        others_wait=bool(load.waiting_at - {gateway}),
        refusal=None if state == "ready" else _refusal(model, history, _capacity_refusal(world, unmet, model), now_s),
    )


def _faulty_route(
    world: World, model: ModelName, replicas: list[Replica], now_s: float, gateway: GatewayId
) -> ModelRoute:
    """Route of a quarantined model. It reads neither document nor history, since either may cause the exception."""
    ready = any(replica.state is S.READY for replica in replicas)
    retry_s = min(max(world.learned.faults[model].until_s - now_s, 1.0), RETRY_S_MAX)
    message = f"The model is quarantined because of an internal error (see `pilotlight explain model {model}`)."
    load = world.loads.get(model) or ModelLoad()
    return ModelRoute(
        model=model,
        state="ready" if ready else "failed",
        others_wait=bool(load.waiting_at - {gateway}),
        refusal=None
        if ready
        else Refusal(code="model_faulty", message=message, retry_after_s=retry_s, should_retry=False),
    )


def _reader(world: World, gateway: GatewayId, boot: str) -> Gateway | None:
    known = world.gateways.get(gateway)
    return known if known is None or not boot or known.boot == boot else None


def _route(replica: Replica, reader: Gateway | None) -> Route:
    grants = reader.grants.get(replica.id, ()) if reader is not None else ()
    return Route(
        replica=replica.id,
        model=replica.model,
        state=replica.state.value,
        address=replica.runtime.address,
        slots=replica.slots,
        hold=grants[-1].hold if grants else 0,
        granted=grants[-1].version if grants else 0,
    )


def _replicas(
    before: World, after: World, was: Gateway | None, now: Gateway | None
) -> tuple[tuple[Route, ...], tuple[ReplicaId, ...]]:
    """Changed routes, and replicas that no longer have one. A different hold without a newer grant is not a change."""
    changed: set[ReplicaId] = set()
    if before.replicas is not after.replicas:
        changed = {id for id, replica in after.replicas.items() if before.replicas.get(id) is not replica}
        changed |= before.replicas.keys() - after.replicas.keys()
    grants_was, grants_now = was.grants if was is not None else {}, now.grants if now is not None else {}
    if grants_was is not grants_now:
        changed |= {id for id, grants in grants_now.items() if grants_was.get(id) is not grants}
    routes: list[Route] = []
    gone: list[ReplicaId] = []
    for id in sorted(changed):
        old, new = before.replicas.get(id), after.replicas.get(id)
        if new is None or not is_routed(new):
            if old is not None and is_routed(old):
                gone.append(id)
            continue
        route = _route(new, now)
        if old is None or not is_routed(old) or _differs(_route(old, was), route):
            routes.append(route)
    return tuple(routes), tuple(gone)


def _differs(before: Route, after: Route) -> bool:
    if after.granted > before.granted:
        return True
    return (before.state, before.address, before.slots) != (after.state, after.address, after.slots)


def _models(
    was: Callable[[ModelName], ModelRoute | None],
    now: Callable[[ModelName], ModelRoute | None],
    changed: set[ModelName],
) -> tuple[tuple[ModelRoute, ...], tuple[ModelName, ...]]:
    routes: list[ModelRoute] = []
    gone: list[ModelName] = []
    for model in sorted(changed):
        before, after = was(model), now(model)
        if after is None:
            if before is not None:
                gone.append(model)
        elif before != after:
            routes.append(after)
    return tuple(routes), tuple(gone)


def _changed_models(before: World, after: World) -> set[ModelName]:
    """Models whose route may have changed."""
    changed: set[ModelName] = set()
    if before.models is not after.models:
        changed |= before.models.keys() ^ after.models.keys()
    if before.learned.faults is not after.learned.faults:
        changed |= before.learned.faults.keys() | after.learned.faults.keys()
    if before.loads is not after.loads:
        changed |= {name for name, load in after.loads.items() if before.loads.get(name) is not load}
        changed |= before.loads.keys() - after.loads.keys()
    known, histories = before.learned.histories, after.learned.histories
    if known is not histories:
        changed |= {name for name, history in histories.items() if known.get(name) is not history}
    if before.replicas is not after.replicas:
        changed |= {r.model for id, r in after.replicas.items() if before.replicas.get(id) is not r}
        changed |= {r.model for id, r in before.replicas.items() if id not in after.replicas}
    return changed


def _state(replicas: list[Replica], history: History) -> str:
    """The reported state: zero, starting, ready, draining or failed."""
    states = {replica.state for replica in replicas}
    if S.READY in states:
        return "ready"
    if history.refused_until_s:
        return "failed"
    if states & BEGINNING:
        return "starting"
    return "draining" if states & ENDING else "zero"


def _expected_wait_s(state: str, replicas: list[Replica], history: History, now_s: float) -> float | None:
    """The median of recent starts, minus the elapsed time of the oldest start. None: no start is known."""
    if state == "ready":
        return 0.0
    median_s = median_start_s(history)
    if median_s is None:
        return None
    begun_s = [
        r.times.created_s if r.times.started_s is None else r.times.started_s for r in replicas if r.state in BEGINNING
    ]
    return max(0.0, median_s - (now_s - min(begun_s))) if begun_s else median_s


def _refusal(name: ModelName, history: History, capacity_refusal: Refusal | None, now_s: float) -> Refusal | None:
    """Why requests are rejected at once. Texts are for clients; internal causes are shown by `explain`."""
    if history.refused_until_s:
        retry_s = min(max(history.refused_until_s - now_s, 1.0), RETRY_S_MAX)
        message = f"The model failed to start (see `pilotlight explain model {name}`)."
        return Refusal(code="model_start_failed", message=message, retry_after_s=retry_s, should_retry=False)
    return capacity_refusal


def _capacity_wait_s(missing: Unmet | None) -> float | None:
    """The wait for capacity, rounded down: no request is rejected that would be served in time, and the value changes
    rarely.
    """
    if missing is None or missing.ready_s is None or missing.ready_s == inf:
        return None
    return floor(missing.ready_s / ESTIMATE_STEP_S) * ESTIMATE_STEP_S or None


def _capacity_refusal(world: World, unmet: Mapping[ModelName, Unmet], name: ModelName) -> Refusal | None:
    """Rejection of requests that cannot be served in time; None: waiting may help. Rounded, so it rarely changes."""
    missing, model = unmet.get(name), world.models.get(name)
    if missing is None:
        return None
    if missing.never:
        message = f"The model fits on no device of this installation (see `pilotlight explain model {name}`)."
        return Refusal(code="no_capacity", message=message, retry_after_s=NO_CAPACITY_RETRY_S, should_retry=False)
    if missing.ready_s is None or model is None or missing.ready_s <= model.spec.queue.wait_seconds_max:
        return None
    if missing.ready_s == inf:
        message = "More capacity for the model has been ordered; its delivery time is unknown. Try again later."
        return Refusal(code="no_capacity", message=message, retry_after_s=RETRY_S_MAX)
    left_s = ceil(missing.ready_s / ESTIMATE_STEP_S) * ESTIMATE_STEP_S
    message = f"capacity for the model is being added; expected in about {format_duration(left_s)}; try again then"
    return Refusal(code="no_capacity", message=message, retry_after_s=min(left_s, RETRY_S_MAX))
