"""Operator orders and their effects: wake, stop, cordon, uncordon, drain (interfaces, section 1). Pure.

Owns the permission check, the meaning of an order in the current `World`, and the sentence about its effect.
`autoscaler.server.order_handlers` executes orders; the fold applies their changes, and the planner acts. Invariants:
repeating an order succeeds; no sentence contains a key or an address.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.demand.idle_timeout import idle_window_s
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.provisioning.unplaceable_models import Fitting
from autoscaler.queries.gateway_reports import count_running_calls
from autoscaler.queries.operator_orders import FORCE_S, STILL_THERE, find_drain_cordon, list_target_replicas
from autoscaler.queries.response_types import OrderResult
from autoscaler.server.operator_request_checks import OrderError
from autoscaler.spec.model import Model
from autoscaler.state import StateRecord
from autoscaler.state.events import ModelStopped, ModelWoken
from autoscaler.state.lifecycle import LIVE
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, Cordon, CordonTarget, Replica, World
from autoscaler.text import format_count, format_duration


class Wish(StateRecord, frozen=True, forbid_unknown_fields=True):
    """The body of an order; `{}` is sufficient.

    `force` of stop and drain: stop replicas after a short time, even if requests still run. `force` of drain: also
    detach fabric devices that their node does not release.
    """

    force: bool = False
    """`stop` and `drain`: stop replicas after a short time even if requests still run. `drain`: also detach fabric
    devices that their node does not release.
    """


class Order(NamedTuple):
    """An order to execute: an observation, or a cordon to store or to remove; and the response."""

    response: OrderResult
    observed: ModelWoken | ModelStopped | None = None
    put: Cordon | None = None
    lift: CordonTarget | None = None


def model_order(world: World, model: Model, verb: str, wish: Wish) -> Order:
    """Build the order `wake` or `stop`. Raises OrderError."""
    return _wake(world, model) if verb == "wake" else _stop(world, model, wish)


def place_order(world: World, place: CordonTarget, verb: str, wish: Wish, now_s: float) -> Order:
    """Build the order `cordon`, `uncordon` or `drain` of an existing device or node."""
    known = world.nodes.cordons.get(place)
    known = None if known is not None and known.why else known
    if verb == "uncordon":
        says = f"{place.kind} {place.name} {'is no longer' if known else 'was not'} cordoned"
        return Order(OrderResult(verb="uncordon", kind=place.kind, name=place.name, says=says), lift=place)
    drain = verb == "drain" or (known is not None and known.drain)
    force = (verb == "drain" and wish.force) or (known is not None and known.force)
    cordon = Cordon(place=place, node=_node(world, place), since_s=now_s, drain=drain, force=force)
    if known is not None and (known.drain, known.force) == (drain, force):
        cordon = known
    there = tuple(one for one in list_target_replicas(world, place) if one.state in STILL_THERE)
    says = f"no new replica is placed on {place.kind} {place.name}"
    if drain:
        says += f"; {_leaves(world, there, force=force)}{_detaches(world, place) if force else ''}"
    elif there:
        says += f"; {_who(there)} stays there until it is idle or drained (`pilotlight drain {place.name}`)"
    ids = tuple(one.id for one in there) if drain else ()
    response = OrderResult(
        verb="drain" if verb == "drain" else "cordon", kind=place.kind, name=place.name, says=says, replicas=ids
    )
    return Order(response, put=cordon)


def _wake(world: World, model: Model) -> Order:
    name = model.name
    if name in list_quarantined_models(world):
        says = f"retrying {name} now"
        return Order(OrderResult(verb="wake", kind="model", name=name, says=says), ModelWoken(model=name))
    if model.spec.paused:
        raise OrderError(409, f"{name} is paused: set spec.paused to false first")
    if name in world.learned.obstacles:
        raise OrderError(409, f"{name} cannot start: {world.learned.obstacles[name]}")
    never = Fitting(world).never(model)
    if never:
        raise OrderError(409, f"{name} fits on no device: {never}")
    replicas = [world.replicas[id] for id in world.by_model.get(name, ())]
    window_s = idle_window_s(model, world.learned.histories.get(name, NO_HISTORY))
    stays = f"stays for its idle timeout ({format_duration(window_s)})"
    if any(one.state is S.READY for one in replicas):
        says = f"{name} is ready and {stays}"
    elif any(one.state in LIVE for one in replicas):
        says = f"{name} is starting, and then {stays}"
    else:
        says = f"{name} starts as soon as there is room, and then {stays}"
    return Order(OrderResult(verb="wake", kind="model", name=name, says=says), ModelWoken(model=name))


def _stop(world: World, model: Model, wish: Wish) -> Order:
    name = model.name
    going = tuple(one for id in world.by_model.get(name, ()) if (one := world.replicas[id]).state in STILL_THERE)
    if not going:
        says = f"no replica of {name} runs"
    else:
        calls = count_running_calls(world)
        running = sum(calls.get(one.id, 0) for one in going)
        within = format_duration(FORCE_S if wish.force else model.spec.drain_seconds_max)
        says = (
            f"{format_count(len(going), 'replica')} of {name} drains"
            if len(going) == 1
            else f"{len(going)} replicas of {name} drain"
        )
        says += f"; {format_count(running, 'running request')} may take {within} at most" if running else ""
    says += _again(model)
    response = OrderResult(verb="stop", kind="model", name=name, says=says, replicas=tuple(one.id for one in going))
    return Order(response, ModelStopped(model=ModelName(name), force=wish.force))


def _again(model: Model) -> str:
    if model.adopted is not None and model.adopted.held:
        return f"; {model.adopted.message}" + (", so it starts again" if model.spec.replicas.min else "")
    if model.spec.paused:
        return "; it is paused, so it stays stopped"
    if model.spec.replicas.min:
        return f"; replicas.min is {model.spec.replicas.min}, so it starts again: set spec.paused to keep it stopped"
    return "; a waiting or new request starts it again, unless spec.paused is set"


def _leaves(world: World, there: tuple[Replica, ...], *, force: bool) -> str:
    if not there:
        return "no replica runs there"
    if force:
        return (
            f"{_who(there)} stops at most {format_duration(FORCE_S)} after its drain begins, and starts on another "
            f"device if there is room"
        )
    coming = " (already in progress)" if all(find_drain_cordon(world, one) for one in there) else ""
    return f"{_who(there)} drains, and starts on another device if there is room{coming}"


def _detaches(world: World, place: CordonTarget) -> str:
    """Describe fabric devices that may be detached by force."""
    devices = [
        f"{one.devices} x {one.offer.product} of {one.id.provider}"
        for _, one in sorted(world.capacity.leases.items())
        if one.listed is not None and one.offer.node
        and (place == CordonTarget("node", one.offer.node) or place.name in one.listed.device_ids)
    ]  # fmt: skip
    return (
        f"; {', '.join(devices)} is released, by force if necessary: programs that have it open lose it"
        if devices
        else ""
    )


def _who(there: tuple[Replica, ...]) -> str:
    return ", ".join(sorted({one.model for one in there}))


def _node(world: World, place: CordonTarget) -> str:
    if place.kind == "node":
        return place.name
    known = world.nodes.cordons.get(place)
    if known is not None:
        return known.node
    return next(slice_.node for slice_ in world.nodes.slices.values() if slice_.device == place.name)
