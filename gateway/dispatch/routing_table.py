"""Routes as one gateway applies them: the replicas, and the gateway's hold on each.

Applies each delta to the current Routes; slot usage is in `gateway.dispatch.slots`. Invariants: nothing older than the
current state is applied. A hold rises only by a newer allocation of the leader (interfaces, section 6, Holds). Requests
above a lowered hold are never cut. While the leader is silent, the limit of interfaces,
section 6, Silent leader, applies. Independent of queues and tenants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from autoscaler.contract import LEADER_SILENT_S, ModelName, ModelRoute, ReplicaId, ReplicaUse, Route, RoutesDelta
from gateway.dispatch.slots import Hold, ModelRoutes
from gateway.exception_handling import reraise_memory_error

READY: Final = "ready"
GONE: Final = "gone"
LEAVING: Final = frozenset(("draining", "stopping"))
"""States of a replica with a planned shutdown; a failed replica is removed from Routes."""


class Changes(NamedTuple):
    """Result of a delta: models to re-evaluate, and whether to report to the leader at once."""

    models: set[ModelName]
    acknowledge: bool
    faults: dict[ModelName, Exception]
    """Models for which an exception was raised, so that their Routes here are incomplete."""


class Routes:
    """The Routes of one gateway, built from deltas. Removed replicas are kept until their last request ends."""

    def __init__(self) -> None:
        self.epoch = 0
        self.version = 0
        self.gateways = 1
        self.silent = False
        """No message of the leader for too long: the stated bound applies."""
        self.silent_at_s = math.inf
        """When the leader will count as silent; infinite before its first message and while it is silent."""
        self.models: dict[ModelName, ModelRoutes] = {}
        self.holds: dict[ReplicaId, Hold] = {}

    def of(self, name: ModelName) -> ModelRoutes:
        """Return the model's part; the same object until `drop`."""
        routes = self.models.get(name)
        if routes is None:
            routes = self.models[name] = ModelRoutes(name)
        return routes

    def drop(self, name: ModelName) -> None:
        """Drop the model's part."""
        self.models.pop(name, None)

    def apply(self, delta: RoutesDelta, now_s: float) -> Changes | None:
        """Apply a delta; None if it is older than the current state."""
        if (delta.epoch, delta.version) < (self.epoch, self.version):
            return None
        risen = delta.epoch > self.epoch
        changed = self._heard(now_s)
        if delta.gateways != self.gateways and self.silent:
            changed = set(self.models)
        self.epoch, self.version, self.gateways = delta.epoch, delta.version, delta.gateways
        faults: dict[ModelName, Exception] = {}
        acknowledge = self._replicas(delta, changed, faults, risen=risen)
        self._models(delta, now_s, changed, faults)
        self._allow_all(changed, faults)
        return Changes(changed, acknowledge or risen, faults)

    def fall_silent(self) -> Changes:
        """Apply the stated bound for a silent leader until its next message."""
        self.silent, self.silent_at_s = True, math.inf
        faults: dict[ModelName, Exception] = {}
        self._allow_all(set(self.models), faults)
        return Changes(set(self.models), acknowledge=False, faults=faults)

    def give_back(self, part: ModelRoutes, *, waiting: int) -> bool:
        """Lower each hold to its slots in use, because requests wait at other gateways.

        If requests wait here too, holds on replicas that accept new requests are kept. Returns whether one was lowered.
        No-op while the leader is silent: it could not reallocate them.
        """
        lowered = False
        for hold in () if self.silent else part.holds.values():
            if hold.in_use < hold.held and not (waiting and hold.open):
                hold.held = hold.in_use
                lowered = True
        if lowered:
            self._allow(part)
        return lowered

    def uses(self, now_s: float, faults: dict[ModelName, Exception]) -> Iterator[ReplicaUse]:
        """Yield every replica with a hold, a request or failed connects, for the report. A replica that raises an
        exception is reported without the age of its last byte.
        """
        for hold in self.holds.values():
            try:
                age_s, is_stalled = hold.byte_age_s(now_s), hold.stalled(now_s)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[hold.model.name], age_s, is_stalled = error, None, False
            if hold.held or hold.in_use or hold.connect_failures:
                yield ReplicaUse(
                    replica=hold.replica,
                    hold=hold.held,
                    in_use=hold.in_use,
                    connect_failures=hold.connect_failures,
                    last_byte_age_s=age_s,
                    stalled=is_stalled,
                )

    def release(self, hold: Hold, now_s: float, byte_s: float) -> None:
        """Return a request's slot; a removed replica is dropped with its last request."""
        hold.give(now_s, byte_s)
        if hold.state == GONE and not hold.in_use:
            self._remove(hold)

    def recount(self, part: ModelRoutes) -> None:
        """The slots in use were counted again after an exception: update what is derived from them."""
        for hold in [hold for hold in part.holds.values() if hold.state == GONE and not hold.in_use]:
            self._remove(hold)
        part.recount()

    def _heard(self, now_s: float) -> set[ModelName]:
        self.silent_at_s = now_s + LEADER_SILENT_S
        if not self.silent:
            return set()
        self.silent = False
        return set(self.models)

    def _replicas(
        self, delta: RoutesDelta, changed: set[ModelName], faults: dict[ModelName, Exception], *, risen: bool
    ) -> bool:
        """Apply the replicas; True if the leader waits for an acknowledgement (lowered hold or draining replica)."""
        acknowledge = False
        for route in delta.replicas:
            changed.add(route.model)
            try:
                acknowledge |= self._replica(route, delta.epoch, risen=risen)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[route.model] = error
        gone = set(delta.replicas_gone)
        if delta.full:
            gone |= self.holds.keys() - {route.replica for route in delta.replicas}
        for replica in sorted(gone & self.holds.keys()):
            hold = self.holds[replica]
            changed.add(hold.model.name)
            acknowledge = True
            try:
                self._set_gone(hold)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[hold.model.name] = error
        return acknowledge

    def _set_gone(self, hold: Hold) -> None:
        hold.state, hold.ready, hold.open, hold.held, hold.connect_failures = GONE, False, False, 0, 0
        if not hold.in_use:
            self._remove(hold)

    def _replica(self, route: Route, epoch: int, *, risen: bool) -> bool:
        hold = self.holds.get(route.replica) or self._add(route)
        before = (hold.held, hold.ready)
        if risen or (hold.state, hold.address) != (route.state, route.address):
            hold.connect_failures = (
                0  # its state or address changed; a changed number of slots would not prove that it works
            )
        self._update(hold, route, epoch)
        return hold.held < before[0] or (before[1] and not hold.ready) or route.state == "draining"

    def _update(self, hold: Hold, route: Route, epoch: int) -> None:
        hold.address, hold.state, hold.slots = route.address, route.state, route.slots
        hold.ready = route.state == READY and bool(route.address)
        hold.leaves = route.state in LEAVING
        if not hold.ready:
            hold.open = False
        if route.granted and (epoch, route.granted) > hold.granted:
            hold.held, hold.granted = route.hold, (epoch, route.granted)

    def _models(
        self, delta: RoutesDelta, now_s: float, changed: set[ModelName], faults: dict[ModelName, Exception]
    ) -> None:
        gone = set(delta.models_gone)
        if delta.full:
            gone |= self.models.keys() - {route.model for route in delta.models}
        for name in gone & self.models.keys():
            self.models[name].route, self.models[name].named = ModelRoute(model=name), False
            changed.add(name)
        for route in delta.models:
            changed.add(route.model)
            try:
                self._model(route, now_s)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[route.model] = error

    def _model(self, route: ModelRoute, now_s: float) -> None:
        part = self.of(route.model)
        part.route, part.named, part.heard_s = route, True, now_s

    def _allow_all(self, names: set[ModelName], faults: dict[ModelName, Exception]) -> None:
        for name in names:
            try:
                self._allow(self.of(name))
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                reraise_memory_error(error)
                faults[name] = error

    def _allow(self, routes: ModelRoutes) -> None:
        """Set the allowed slots of each replica: the hold. While the leader is silent: max(hold, slots // gateways),
        and at least 1 if this gateway holds no slot of the model.
        """
        least = 0
        if self.silent and not any(hold.held for hold in routes.holds.values()):
            least = 1
        for hold in routes.holds.values():
            share = hold.slots // max(1, self.gateways) if self.silent else 0
            hold.allowed = max(hold.held, share, least)
        routes.recount()

    def _add(self, route: Route) -> Hold:
        model = self.of(route.model)
        hold = self.holds[route.replica] = model.holds[route.replica] = Hold(route.replica, model)
        return hold

    def _remove(self, hold: Hold) -> None:
        self.holds.pop(hold.replica, None)
        hold.model.holds.pop(hold.replica, None)
