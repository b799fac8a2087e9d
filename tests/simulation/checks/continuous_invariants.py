"""Invariants of a running town (reliability, section 3: I2, I4 to I6, I12; the hold rule of interfaces section 6).

The Watcher checks the true state of the machine and the clients and the reports of gateways
(`tests.simulation.checks.gateway_reports`), never the `World`'s assumptions, except where the invariant is about the
`World`. Invariants at the end of a run are in `tests.simulation.checks.final_invariants`, and those with a time limit
in `tests.simulation.checks.liveness`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from autoscaler.contract import LEADER_SILENT_S
from autoscaler.controller.loop import LoopStep
from autoscaler.queries.device_health import is_lost
from autoscaler.spec.model import Model
from autoscaler.state.actions import DrainReplica
from autoscaler.state.lifecycle import LIVE, ReplicaState
from gateway.dispatch.call import CallState, Outcome
from tests.simulation.checks.gateway_reports import COUNTS_S
from tests.simulation.installations.installation import Journey, Town
from tests.support.fakes.driver import FakeEngine

SAMPLE_S = 0.010
CONSERVATION_S = 0.050
"""I4: the longest that a request may wait while a usable slot is free, without faults (interfaces section 6)."""
TRAVEL_S = 0.1
"""Maximum delay between a decision and the observation of it: a step of the loop, or a sample."""
STOP_S = 1.0
"""Maximum latency of a stop on its way to an API server, while a start that was ordered with it may be quicker."""
COLD_S_MIN = 10.0
"""A request that was rejected because its Model is cold wants a start for this long, or for twice its Retry-After."""


class Watcher:
    """Watches a running town. `conserve`: nothing fails, so no request waits while a slot is free (I4)."""

    def __init__(self, town: Town, *, strict: bool) -> None:
        self._town = town
        self._strict = strict
        self.conserve = strict
        self._gap_since_s: dict[str, float] = {}
        self._moves: Counter[tuple[str, str]] = Counter()
        self._ready_s: dict[str, float] = {}
        self._last_end_s: dict[str, float] = {}
        self._told_before: dict[str, int] = {}
        self._silent_until_s = 0.0
        self.gaps_s: list[float] = []
        self.broken: list[str] = []
        self._listeners: list[Callable[[FakeEngine, str], None]] = []
        self._changed = town.machine.on_change
        town.machine.on_change = self._on_change
        town.on_arrive, town.on_grant, town.on_end, town.on_step = (
            self._on_arrive, self._on_grant, self._on_end, self._on_step,
        )  # fmt: skip
        self._task = town.task(self._sample())

    def _on_change(self, engine: FakeEngine, what: str) -> None:
        self._changed(engine, what)
        self._moves[engine.replica.model, what] += 1
        if what == "start":
            self._slices_hold(engine)
            self._no_more_than_planned(engine)
        elif what == "ready":
            self._ready_s.setdefault(engine.replica.id, self._town.now())
        for listener in self._listeners:
            listener(engine, what)

    def listen(self, listener: Callable[[FakeEngine, str], None]) -> None:
        """Register a callback for every engine that starts, gets ready, dies or is gone."""
        self._listeners.append(listener)

    def _model(self, name: str) -> Model:
        return next(m for m in self._town.models if m.name == name)

    # --- starts and drains ---

    def _slices_hold(self, engine: FakeEngine) -> None:
        """I5: memory held by engines, scrubbing included, never exceeds a Slice."""
        machine = self._town.machine
        for slice_ in machine.slices:
            held = [
                e.replica.resources.memory_bytes or slice_.memory_bytes
                for e in machine.engines.values()
                if slice_.id in e.replica.resources.slices
            ]
            if sum(held) > slice_.memory_bytes:
                self.broken.append(f"I5: {slice_.id} is over-committed by the start of {engine.replica.id}")

    def _no_more_than_planned(self, engine: FakeEngine) -> None:
        """I6: a starting replica exceeds neither its Model's maximum nor the requests reported to the leader.
        Not counted are those that drain, those whose stop was just ordered, and those that leave with their node once a
        replacement exists. Without such requests, one was rejected recently.
        """
        town, model = self._town, self._model(engine.replica.model)
        known = town.autoscaler.loop.world.replicas if town.autoscaler is not None else {}
        cordons = town.autoscaler.loop.world.nodes.cordons if town.autoscaler is not None else {}
        removed = {place.name for place in cordons if place.kind == "node"}
        going = {one.id for one in town.machine.slices if one.node in removed}
        leaving = {
            id
            for id, replica in known.items()
            if replica.state == ReplicaState.DRAINING
            or (replica.state == ReplicaState.STOPPING and town.now() - replica.since_s <= STOP_S)
            or not going.isdisjoint(replica.resources.slices)
        }
        alive = [
            e for e in town.machine.engines.values() if e.replica.model == model.name and e.alive and not e.stopping
        ]
        staying = len([e for e in alive if e.replica.id not in leaving])
        replicas = model.spec.replicas
        if staying > replicas.max:
            self.broken.append(f"I6: {len(alive)} Replicas of {model.name}, {replicas.max} at most")
        calls = town.reports.demand(model.name, town.now())
        if staying > max(1, -(-calls // model.slots), replicas.min):
            self.broken.append(
                f"I6: {staying} replicas of {model.name}, {calls} requests reported, {model.slots} slots"
            )
        if not calls and not replicas.min and not self._refused_cold(model.name):
            self.broken.append(f"I6: {engine.replica.id} starts without demand")

    def _refused_cold(self, model: str) -> bool:
        """Whether a request was rejected so recently that a start may still be owed to it."""
        now_s = self._town.now()
        for journey in self._town.journeys.values():
            error = journey.ended[0].error if journey.call.model == model and journey.ended else None
            if error is None or error.retry_after_s is None:
                continue
            if now_s - journey.ended[0].at_s <= max(COLD_S_MIN, 2.0 * error.retry_after_s) + COUNTS_S:
                return True
        return False

    def _on_step(self, step: LoopStep) -> None:
        for action in step.actions:
            replica = step.after.replicas.get(action.replica) if isinstance(action, DrainReplica) else None
            if replica is None or not isinstance(action, DrainReplica):
                continue
            if is_lost(step.after, replica, self._town.now()) or replica.id in self._town.machine.mute:
                continue
            if action.victim_of is None:
                self._all_have_told(replica.model, replica.id)
                if not any(r.model == replica.model and r.state in LIVE for r in step.after.replicas.values()):
                    self._idle_for_long_enough(replica.model, replica.id)
            else:
                self._resided(replica.model, replica.id, action.victim_of)

    def _all_have_told(self, name: str, replica: str) -> None:
        """Unknown is never zero: no replica drains for lack of demand while a living gateway is silent.
        Silent: no report to this leader for a report's expiry time. A gateway that returned after the leader began is
        known when it connects. Only a surplus above `replicas.max` drains at once, such as one that a new leader finds.
        """
        town, model = self._town, self._model(name)
        now_s, reports = town.now(), town.reports
        alive = [e for e in town.machine.engines.values() if e.replica.model == name and e.alive and not e.stopping]
        if len(alive) > model.spec.replicas.max:
            return
        for gateway in town.gateways:
            if gateway.alive and (
                gateway.started_s < reports.since_s or now_s - gateway.started_s > COUNTS_S + TRAVEL_S
            ):
                heard_s = reports.heard_s(gateway.id)
                if heard_s is None or now_s - heard_s > COUNTS_S + TRAVEL_S:
                    self.broken.append(f"unknown is not zero: {replica} drains, and {gateway.id} has not reported")

    def _idle_for_long_enough(self, name: str, replica: str) -> None:
        """I6: a replica that scales to zero for lack of demand was idle for its window, as the clients see it."""
        town, idle_s = self._town, self._model(name).spec.idle_seconds
        now_s = town.now()
        if not self._strict or idle_s == "auto":
            return
        if now_s - self._last_end_s.get(name, 0.0) < idle_s - TRAVEL_S:
            self.broken.append(f"I6: {replica} drains {now_s - self._last_end_s[name]:.3f} s after the last Call")
        for journey in town.open.values():
            if journey.call.model == name and now_s - journey.call.arrived_s > TRAVEL_S:
                self.broken.append(f"I6: {replica} drains as idle, and there is {journey!r}")

    def _resided(self, name: str, replica: str, other: str) -> None:
        """I6: a replica evicted for another Model had its residency, and there were requests for the other Model."""
        town, stays_s = self._town, self._model(name).spec.residency_seconds
        ready_s = self._ready_s.get(replica)
        if ready_s is not None and stays_s != "auto" and town.now() - ready_s < stays_s - 1e-6:
            self.broken.append(f"I6: {replica} makes room for {other} {town.now() - ready_s:.3f} s after it was ready")
        if not town.reports.demand(other, town.now()) and not self._refused_cold(other):
            self.broken.append(f"I6: {replica} makes room for {other}, which no one requested")

    def churned(self) -> list[str]:
        """I6: over time no Model starts more often than it is called; failed starts are retried."""
        town, broken = self._town, []
        for model in town.models:
            calls = sum(journey.call.model == model.name for journey in town.journeys.values())
            starts, broke = self._moves[model.name, "start"], self._moves[model.name, "kill"]
            if starts > calls + broke:
                broken.append(f"I6: {starts} starts of {model.name} for {calls} Calls, {broke} broke")
        return broken

    # --- requests ---

    def _on_arrive(self, journey: Journey) -> None:
        """I12: the bounds of the queue that it entered. Requests that an engine failed return whatever the bounds."""
        town, model = self._town, self._model(journey.call.model)
        parked = [
            j.call
            for j in town.open.values()
            if j.gateway is journey.gateway and j.call.model == model.name and not j.granted_to
            and j.call.state == CallState.PARKED
        ]  # fmt: skip
        waiting, waiting_bytes = len(parked), sum(call.body_bytes for call in parked)
        if waiting > model.spec.queue.calls_max or waiting_bytes > model.spec.queue.bytes_max:
            self.broken.append(f"I12: {waiting} ({waiting_bytes} bytes) wait for {model.name} at {journey.gateway.id}")

    def _on_end(self, journey: Journey) -> None:
        """I2: a response breaks off only with its gateway, with its engine by a fault, or at the end of a drain.
        The last only at the end of the drain's grace while its gateway is cut off.
        """
        end, gateway = journey.ended[-1], journey.gateway
        if end.error is None or end.error.code != "queue_full":
            self._last_end_s[journey.call.model] = end.at_s
        if end.outcome != Outcome.FAILED or end.error is not None or not gateway.alive:
            return
        replica = journey.granted_to[-1]
        cut_off_s = self._town.reports.unheard_s(gateway.id, end.at_s)
        if (
            replica not in self._town.machine.killed
            and cut_off_s < self._model(journey.call.model).spec.drain_seconds_max
        ):
            self.broken.append(f"I2: {journey!r} was cut on {replica}, which no fault ended")

    def _on_grant(self, replica: str) -> None:
        """The hold rule: in use per replica never exceeds the slots; nor, even during silence, the stated bound."""
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
        """Grants that a gateway made without a leader stay until they are served, even if a leader returns."""
        town, now_s = self._town, self._town.now()
        if any(now_s - g.heard_s >= LEADER_SILENT_S - 1e-6 for g in town.gateways if g.alive):
            self._silent_until_s = now_s + town.machine.manners.serve_s[1] + 1.0

    # --- periodic checks ---

    async def _sample(self) -> None:
        while True:
            self._look_for_silence()
            if self.conserve:
                self._work_is_conserved(self._town.now())
            self._demand_was_told()
            await asyncio.sleep(SAMPLE_S)

    def _demand_was_told(self) -> None:
        """Demand expires (section 6): the leader counts no more requests than recently heard gateways reported.

        Reports since the last sample may not be folded yet, and the values that they replaced were true then.
        """
        town, before = self._town, self._told_before
        if town.autoscaler is None:
            return
        for model, load in town.autoscaler.loop.world.loads.items():
            reported, believed = town.reports.demand(model, town.now() - TRAVEL_S), load.waiting + load.running
            if believed > max(reported, before.get(model, 0)):
                self.broken.append(f"demand expires: {believed} Calls counted for {model}, {reported} reported")
            before[model] = reported

    def _work_is_conserved(self, now_s: float) -> None:
        """I4: no request waits while a slot that it may use is free."""
        town = self._town
        control = town.autoscaler
        world = control.loop.world if control is not None else None
        for model in town.models:
            waits = any(w for g in town.gateways if g.alive for m, w, _ in g.dispatch.counts() if m == model.name)
            free = waits and world is not None and any(
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
        """End the watch."""
        self._task.cancel()
