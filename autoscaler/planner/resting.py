"""Models at rest: all that is wanted of them is there and no more, which holds until something of them, or time, does
not. Most Models are at rest most of the time, and need not be looked at again.

Owns what such an answer depends on. Promises: who rests here would be wanted and compared with the same outcome anew.
It decides nothing; `autoscaler.demand.desired_replicas` and `autoscaler.planner.reconcile` do.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.demand.desired_replicas import NO_HISTORY, NO_LOAD
from autoscaler.queries.gateways import complete
from autoscaler.spec.model import Model
from autoscaler.state.world import History, Load, Replica, World


class Rest(NamedTuple):
    """One Model at rest, and what that depends on."""

    model: Model
    load: Load
    history: History
    replicas: tuple[Replica, ...]
    since_s: float
    next_s: float | None
    """When time alone ends it."""


class Resting:
    """Who is known to rest; nobody at first."""

    def __init__(self) -> None:
        self._known: dict[ModelName, Rest] = {}
        self._of_all: tuple[object, ...] = ()

    def look(self, world: World, now_s: float) -> None:
        """Forgets everybody if something changed that could end the rest of any."""
        where = world.slices if world.cordons else None  # who is on a cordoned node is told by Slices
        leader = world.leading_since_s, world.epoch
        of_all = (complete(world, now_s), world.stops, world.cordons, where, world.rented, *leader)
        if of_all != self._of_all:
            self._known.clear()
            self._of_all = of_all
        if len(self._known) > len(world.models):
            self._known = {name: rest for name, rest in self._known.items() if name in world.models}

    def rest(self, world: World, model: Model, now_s: float) -> Rest | None:
        """None: it is not known to rest now."""
        known = self._known.get(model.name)
        if known is None:
            return None
        if known.model is model and known.since_s <= now_s and (known.next_s is None or now_s < known.next_s):
            name, ids = model.name, world.by_model.get(model.name, ())
            same = known.load is world.loads.get(name, NO_LOAD) or known.load == world.loads.get(name, NO_LOAD)
            same = same and known.history is world.histories.get(name, NO_HISTORY) and len(ids) == len(known.replicas)
            if same and all(world.replicas[id] is one for id, one in zip(ids, known.replicas, strict=True)):
                return known
        del self._known[model.name]
        return None

    def note(self, world: World, model: Model, now_s: float, next_s: float | None) -> None:
        """It rests. One whose Calls wait never does: what it takes to serve them depends on more than is kept here."""
        name, load = model.name, world.loads.get(model.name, NO_LOAD)
        if not load.waiting:
            replicas = tuple(world.replicas[id] for id in world.by_model.get(name, ()))
            history = world.histories.get(name, NO_HISTORY)
            self._known[name] = Rest(model, load, history, replicas, now_s, next_s)
