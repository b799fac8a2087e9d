"""Routes as one gateway acts on them: which Replicas there are, and its hold on each.

Owns the snapshot of Routes and what each delta changes of it; the use of a hold is in `gateway.dispatch.slots`.
Promises that nothing older than what is known is applied, that a hold rises only by a newer grant of the leader
(interfaces, section 6, Holds), that use above a lowered hold is never cut, and that a silent leader is replaced by the
stated bound and by nothing else.
It must not know of queues or Tenants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autoscaler.contract import LEADER_SILENT_S, ModelName, ModelRoute, ReplicaId, ReplicaUse, Route, RoutesDelta
from gateway.dispatch.slots import Hold, ModelRoutes

READY = "ready"
GONE = "gone"
LEAVING = frozenset(("draining", "stopping"))
"""What Routes say of a Replica that somebody ends; one that broke they name no more."""


class Changes(NamedTuple):
    """What a delta changed: Models to look at again, and whether the leader should hear of it at once."""

    models: set[ModelName]
    acknowledge: bool


class Routes:
    """The Routes of one gateway, from deltas. Replicas that are gone stay known until their last Call has left."""

    def __init__(self) -> None:
        self.epoch = 0
        self.version = 0
        self.gateways = 1
        self.silent = False
        """The leader has not been heard for too long: the stated bound holds."""
        self.silent_at_s = math.inf
        """When the leader will count as silent; infinite before the first word and while it is."""
        self.models: dict[ModelName, ModelRoutes] = {}
        self.holds: dict[ReplicaId, Hold] = {}

    def of(self, name: ModelName) -> ModelRoutes:
        """The Model's part; the same object until `drop`."""
        routes = self.models.get(name)
        if routes is None:
            routes = self.models[name] = ModelRoutes(name)
        return routes

    def drop(self, name: ModelName) -> None:
        """Nobody needs the Model's part any more."""
        self.models.pop(name, None)

    def apply(self, delta: RoutesDelta, now_s: float) -> Changes | None:
        """Takes a delta; None when it is older than what is known."""
        if (delta.epoch, delta.version) < (self.epoch, self.version):
            return None
        risen = delta.epoch > self.epoch
        changed = self._heard(now_s)
        if delta.gateways != self.gateways and self.silent:
            changed = set(self.models)
        self.epoch, self.version, self.gateways = delta.epoch, delta.version, delta.gateways
        acknowledge = self._replicas(delta, changed, risen=risen)
        self._models(delta, now_s, changed)
        for name in changed:
            self._allow(self.of(name))
        return Changes(changed, acknowledge or risen)

    def fall_silent(self) -> list[ModelName]:
        """The leader is silent: what may be used follows the stated bound until it is heard again."""
        self.silent, self.silent_at_s = True, math.inf
        for routes in self.models.values():
            self._allow(routes)
        return list(self.models)

    def give_back(self, part: ModelRoutes, *, waiting: int) -> bool:
        """Others wait: lowers holds that are not used here to their use, unless a Call waits here and may use them.

        True when one was lowered. A silent leader would not hand them to anybody.
        """
        lowered = False
        for hold in () if self.silent else part.holds.values():
            if hold.in_use < hold.held and not (waiting and hold.open):
                hold.held = hold.in_use
                lowered = True
        if lowered:
            self._allow(part)
        return lowered

    def uses(self, now_s: float) -> Iterator[ReplicaUse]:
        """Every Replica with a hold, a Call or failed connects, for the report."""
        for hold in self.holds.values():
            if hold.held or hold.in_use or hold.connect_failures:
                yield ReplicaUse(
                    replica=hold.replica,
                    hold=hold.held,
                    in_use=hold.in_use,
                    connect_failures=hold.connect_failures,
                    last_byte_age_s=None if hold.byte_s is None else max(0.0, now_s - hold.byte_s),
                )

    def release(self, hold: Hold) -> None:
        """A Call left; a Replica that is gone goes with its last one."""
        hold.give()
        if hold.state == GONE and not hold.in_use:
            self._remove(hold)

    def _heard(self, now_s: float) -> set[ModelName]:
        self.silent_at_s = now_s + LEADER_SILENT_S
        if not self.silent:
            return set()
        self.silent = False
        return set(self.models)

    def _replicas(self, delta: RoutesDelta, changed: set[ModelName], *, risen: bool) -> bool:
        """Applies the Replicas; True when the leader waits for word of it: a lowered hold, or a Replica that drains."""
        acknowledge = False
        for route in delta.replicas:
            hold = self.holds.get(route.replica) or self._add(route)
            before = (hold.held, hold.ready)
            if risen or (hold.state, hold.address) != (route.state, route.address):
                hold.connect_failures = 0  # news of the Replica itself; a hold that moved says nothing of it
            self._update(hold, route, delta.epoch)
            acknowledge |= hold.held < before[0] or (before[1] and not hold.ready) or route.state == "draining"
            changed.add(hold.model.name)
        gone = set(delta.replicas_gone)
        if delta.full:
            gone |= self.holds.keys() - {route.replica for route in delta.replicas}
        for replica in sorted(gone & self.holds.keys()):
            hold = self.holds[replica]
            changed.add(hold.model.name)
            acknowledge = True
            hold.state, hold.ready, hold.open, hold.held, hold.connect_failures = GONE, False, False, 0, 0
            if not hold.in_use:
                self._remove(hold)
        return acknowledge

    def _update(self, hold: Hold, route: Route, epoch: int) -> None:
        hold.address, hold.state, hold.slots = route.address, route.state, route.slots
        hold.ready = route.state == READY and bool(route.address)
        hold.leaves = route.state in LEAVING
        if not hold.ready:
            hold.open = False
        if route.granted and (epoch, route.granted) > hold.granted:
            hold.held, hold.granted = route.hold, (epoch, route.granted)

    def _models(self, delta: RoutesDelta, now_s: float, changed: set[ModelName]) -> None:
        gone = set(delta.models_gone)
        if delta.full:
            gone |= self.models.keys() - {route.model for route in delta.models}
        for name in gone & self.models.keys():
            self.models[name].route, self.models[name].named = ModelRoute(model=name), False
            changed.add(name)
        for route in delta.models:
            part = self.of(route.model)
            part.route, part.named, part.heard_s = route, True, now_s
            changed.add(route.model)

    def _allow(self, routes: ModelRoutes) -> None:
        """What may be used: the hold; with a silent leader max(hold, floor(slots / gateways), 1 where none is held)."""
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
        del self.holds[hold.replica]
        del hold.model.holds[hold.replica]
