"""What must hold, checked from outside (reliability, section 3: I1 to I8, I12; the hold rule of interfaces section 6).

Owns the checkers only: they look at the machine's and the clients' truth, never at what the World believes, except
where the invariant is about the World. A violation is an AssertionError that names the invariant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from autoscaler.contract import LEADER_SILENT_S
from autoscaler.states import ReplicaState
from gateway.call import CallState, Outcome
from tests.kit.fakedriver import FakeEngine
from tests.sim.gateway import SimGateway
from tests.sim.town import Town

SAMPLE_S = 0.010
CONSERVATION_S = 0.050
"""I4: the longest that a Call may wait while a Slot it may use is free, when nothing is lost (interfaces section 6)."""

NEWS_S, OLD_NEWS_S = 1.0, 45.0
"""I6: how old the demand may be that a start answers: nothing is lost; a report is 30 s late and stands 10 s more."""


class Watcher:
    """Watches a town while it lives. `strict`: no faults, so work must be conserved within the stated time."""

    def __init__(self, town: Town, *, strict: bool) -> None:
        self._town = town
        self._strict = strict
        self._gap_since_s: dict[str, float] = {}
        self._moves: Counter[tuple[str, str]] = Counter()
        self._silent_until_s = 0.0
        self.gaps_s: list[float] = []
        self.broken: list[str] = []
        self._listeners: list[Callable[[FakeEngine, str], None]] = []
        self._changed = town.machine.on_change
        town.machine.on_change = self._on_change
        town.on_grant = self._on_grant
        self._task = town.task(self._sample())

    def _on_change(self, engine: FakeEngine, what: str) -> None:
        self._changed(engine, what)
        self._moves[engine.replica.model, what] += 1
        if what == "start":
            self._slices_hold(engine)
            self._no_more_than_planned(engine)
        for listener in self._listeners:
            listener(engine, what)

    def listen(self, listener: Callable[[FakeEngine, str], None]) -> None:
        """Tells of every engine that starts, gets ready, dies or is gone."""
        self._listeners.append(listener)

    def _no_more_than_planned(self, engine: FakeEngine) -> None:
        """I6: never more Replicas of a Model alive than it may have or, when one starts, than its Calls of late fill.

        Whoever leads; those that drain are leaving. Of late: as old as what the leader may still believe.
        """
        town = self._town
        model = next(m for m in town.models if m.name == engine.replica.model)
        known = town.autoscaler.loop.world.replicas if town.autoscaler is not None else {}
        leaving = {id for id, replica in known.items() if replica.state == ReplicaState.DRAINING}
        alive = [
            e for e in town.machine.engines.values() if e.replica.model == model.name and e.alive and not e.stopping
        ]
        staying = len([e for e in alive if e.replica.id not in leaving])
        if staying > model.spec.replicas.max:
            self.broken.append(f"I6: {len(alive)} Replicas of {model.name}, {model.spec.replicas.max} at most")
        at_once = self._most_at_once(model.name)
        if staying > max(1, -(-at_once // model.slots), model.spec.replicas.min):
            self.broken.append(
                f"I6: {staying} Replicas of {model.name}, {at_once} Calls at once of {model.slots} slots"
            )

    def _most_at_once(self, model: str) -> int:
        """The most Calls that the leader may believe in; in a storm it may know each gateway of another moment."""
        town = self._town
        if self._strict:
            return most_at_once(town, model, town.gateways, town.now() - NEWS_S)
        return sum(most_at_once(town, model, [gateway], town.now() - OLD_NEWS_S) for gateway in town.gateways)

    def churned(self) -> list[str]:
        """I6: over time no Model starts more often than it is called; those that broke are tried again."""
        town, broken = self._town, []
        for model in town.models:
            calls = sum(journey.call.model == model.name for journey in town.journeys.values())
            starts, broke = self._moves[model.name, "start"], self._moves[model.name, "kill"]
            if starts > calls + broke:
                broken.append(f"I6: {starts} starts of {model.name} for {calls} Calls, {broke} broke")
        return broken

    def _slices_hold(self, engine: FakeEngine) -> None:
        """I5: what engines hold, scrubbing included, never exceeds a Slice."""
        machine = self._town.machine
        for slice_ in machine.slices:
            held = [
                e.replica.memory_bytes or slice_.memory_bytes
                for e in machine.engines.values()
                if slice_.id in e.replica.slices
            ]
            if sum(held) > slice_.memory_bytes:
                self.broken.append(f"I5: {slice_.id} is over-committed by the start of {engine.replica.id}")

    def _on_grant(self, replica: str) -> None:
        """The hold rule: in use per Replica never above the slots; above the stated bound never, even while silent."""
        town = self._town
        engine = next((e for e in town.machine.engines.values() if e.replica.id == replica), None)
        if engine is None:
            return
        self._look_for_silence()
        slots, used, gateways = engine.replica.slots, town.used(replica), len(town.gateways)
        if used <= slots:
            return
        if town.now() > self._silent_until_s:
            self.broken.append(f"hold rule: {used} on {replica} of {slots} slots while the leader is heard")
        elif used > slots + max(slots, gateways) - 1:
            self.broken.append(f"hold rule: {used} on {replica} of {slots} slots is above the stated over-commit")

    def _look_for_silence(self) -> None:
        """What a gateway granted while it heard no leader stays until it is served, whoever is heard meanwhile."""
        town, now_s = self._town, self._town.now()
        if any(now_s - g.heard_s >= LEADER_SILENT_S - 1e-6 for g in town.gateways if g.alive):
            self._silent_until_s = now_s + town.machine.manners.serve_s[1] + 1.0

    async def _sample(self) -> None:
        town = self._town
        while True:
            now_s = town.now()
            self._look_for_silence()
            if self._strict:
                self._work_is_conserved(now_s)
            for gateway in town.gateways:
                for model, waiting, _ in gateway.dispatch.counts():
                    entry = next(m for m in town.models if m.name == model)
                    if waiting > entry.spec.queue.calls_max + came_back(town, gateway, model):
                        self.broken.append(f"I12: {waiting} wait for {model} at {gateway.id}")
            await asyncio.sleep(SAMPLE_S)

    def _work_is_conserved(self, now_s: float) -> None:
        """I4."""
        town = self._town
        control = town.autoscaler
        world = control.loop.world if control is not None else None
        for model in town.models:
            waits = any(w for g in town.gateways if g.alive for m, w, _ in g.dispatch.counts() if m == model.name)
            free = world is not None and any(
                r.state == ReplicaState.READY and (e := town.machine.engines.get(r.id)) is not None and e.ready
                and town.used(r.id) < r.slots
                for r in (world.replicas[i] for i in world.by_model.get(model.name, ()))
            )  # fmt: skip
            if waits and free:
                since_s = self._gap_since_s.setdefault(model.name, now_s)
                if now_s - since_s > CONSERVATION_S + SAMPLE_S:
                    self.broken.append(f"I4: a Call for {model.name} waits {now_s - since_s:.3f} s beside a free Slot")
            elif (began_s := self._gap_since_s.pop(model.name, None)) is not None:
                self.gaps_s.append(now_s - began_s)

    def stop(self) -> None:
        """Ends the watch."""
        self._task.cancel()


def most_at_once(town: Town, model: str, gateways: Sequence[SimGateway], since_s: float) -> int:
    """The most Calls of a Model without an outcome at one moment since then, as clients of these gateways count."""
    now_s, moves = town.now(), []
    for journey in town.journeys.values():
        end_s = journey.ended[0].at_s if journey.ended else now_s
        if journey.call.model == model and journey.gateway in gateways and end_s >= since_s:
            moves += [(max(journey.call.arrived_s, since_s), 1), (end_s, -1)]
    at_once = most = 0
    for _, change in sorted(moves, key=lambda move: (move[0], -move[1])):
        at_once += change
        most = max(most, at_once)
    return most


def came_back(town: Town, gateway: SimGateway, model: str) -> int:
    """Calls that wait again after an engine failed them: they were let in once, and no full queue turns them away."""
    journeys = (j for j in town.journeys.values() if j.gateway is gateway and j.granted_to)
    return sum(j.call.model == model and j.call.state == CallState.PARKED for j in journeys)


def everybody_was_answered(town: Town) -> list[str]:
    """I1 to I3: one Outcome per Call; completed only when the engine was done; bytes from one Replica only."""
    broken = []
    for journey in town.journeys.values():
        if len(journey.ended) != 1:
            broken.append(f"I1: {journey!r} has {len(journey.ended)} outcomes")
        elif journey.ended[0].outcome == Outcome.COMPLETED and journey.first_byte_s is None:
            broken.append(f"I2: {journey!r} completed without a byte")
        if len(journey.served_by) > 1:
            broken.append(f"I3: {journey!r} got bytes from {sorted(journey.served_by)}")
        error = journey.ended[0].error if journey.ended else None
        if error is not None and error.status in {429, 503} and error.retry_after_s is None:
            broken.append(f"one clear error: {journey!r} got {error!r} without Retry-After")
    return broken


def nothing_is_left(town: Town) -> list[str]:
    """I8: no process and no Replica of ours, nothing waiting or running."""
    broken = [f"I8: {e.replica.id} is left" for e in town.machine.engines.values()]
    assert town.autoscaler is not None
    broken += [f"I8: the World still has {r!r}" for r in town.autoscaler.loop.world.replicas.values()]
    for gateway in town.gateways:
        broken += [f"I8: {w} wait and {r} run at {gateway.id}" for _, w, r in gateway.dispatch.counts() if w or r]
    return broken
