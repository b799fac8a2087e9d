"""The autoscaler's metrics (interfaces, section 5), counted from the loop's steps.

Owns one prometheus_client registry. Gauges are read from the World when scraped; counters and histograms are fed by
`on_step`. Label values are names of documents and states only, never addresses or tenants' data.

What became of orders for capacity from one World to the next, to be counted, and what is there of them. Pure.

Owns the words of metrics `pilotlight_offers_total` and `pilotlight_leases`. Of the first: ordered; came, and after how
long; failed (refused, or it did not come); returned; lost (it was here, and is gone without having been leaving).
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from autoscaler.capacity.availability import count_offered_devices
from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.fold.faults import list_quarantined_models
from autoscaler.provisioning.release import Leaving, is_leaving
from autoscaler.queries.crowded_slices import room_of
from autoscaler.queries.start_phases import phases_with_parts_s
from autoscaler.state.actions import Action, FailStart
from autoscaler.state.capacity_orders import Capacity, Lease
from autoscaler.state.device_claims import is_claim_owner
from autoscaler.state.lifecycle import HOLDS_SLICE, ReplicaState
from autoscaler.state.world import World


class Counted(NamedTuple):
    """One of them."""

    provider: str
    result: str
    took_s: float | None = None
    """From the order until it could be used, where it came."""


def count_capacity_events(before: Capacity, after: Capacity) -> Iterator[Counted]:
    """All that happened between them."""
    if before is after:
        return
    for id, lease in after.leases.items():
        was = before.leases.get(id)
        if was is None and not lease.found:
            yield Counted(id.provider, "ordered")
        if lease.here_s is not None and (was is None or was.here_s is None) and not lease.found:
            yield Counted(id.provider, "came", lease.here_s - lease.asked_s)
    for id, lease in before.leases.items():
        if id not in after.leases and lease.here_s is not None:
            yield Counted(id.provider, "returned" if is_leaving(lease) else "lost")
    for offer, barred in after.barred.items():
        known = before.barred.get(offer)
        if not is_claim_owner(ModelName(offer.name)) and (known is None or barred.times > known.times):
            yield Counted(offer.provider, "failed")


def state_of(lease: Lease) -> tuple[str, str]:
    """Its provider, and in a word what is with it: coming, idle, used or leaving."""
    if is_leaving(lease):
        return lease.id.provider, "leaving"
    return lease.id.provider, "coming" if lease.here_s is None else "used" if lease.in_use else "idle"


START_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
LEASE_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, 14400)
DECISION_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
KINDS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Action)}
"""All there are: a kind of Action that is not here would end the process when the first of it is ordered."""


class Metrics:
    """Feed it as a listener of the loop; `text()` is the exposition. `clock`: the World's.

    `unreadable`: kind -> number of objects of the cluster that cannot be read.
    """

    def __init__(
        self, world: Callable[[], World], clock: Callable[[], float] = time.monotonic,
        unreadable: Callable[[], Mapping[str, int]] = dict,
    ) -> None:  # fmt: skip
        registry = self._registry = CollectorRegistry()
        self._start_seconds = Histogram(
            "pilotlight_start_seconds",
            "Phases of a start: decide, place, image, load; place.* are parts of place",
            ("model", "phase"),
            registry=registry,
            buckets=START_BUCKETS,
        )
        self._failures = Counter(
            "pilotlight_start_failures", "Starts that never got ready", ("model", "reason"), registry=registry
        )
        self._decision = Histogram(
            "pilotlight_decision_seconds", "Report received to action sent", registry=registry, buckets=DECISION_BUCKETS
        )
        self._plan_seconds = Histogram(
            "pilotlight_plan_seconds", "One step of the loop", registry=registry, buckets=DECISION_BUCKETS
        )
        self._merged = Counter(
            "pilotlight_reports_merged",
            "Reports of gateways merged into later ones, too many waiting",
            registry=registry,
        )
        self._actions = Counter("pilotlight_actions", "Actions ordered", ("kind", "result"), registry=registry)
        self._offers = Counter(
            "pilotlight_offers", "What became of Offers of capacity", ("provider", "result"), registry=registry
        )
        self._lease_seconds = Histogram(
            "pilotlight_lease_seconds", "Order of capacity to its use", ("provider",), registry=registry,
            buckets=LEASE_BUCKETS,
        )  # fmt: skip
        self._leaving = Leaving()
        registry.register(_WorldCollector(world, self._leaving, clock, unreadable))

    def on_step(self, step: LoopStep) -> None:
        """Counts one step of the loop."""
        self._plan_seconds.observe(step.acted_s - step.started_s)
        self._leaving.look(step.after.capacity, step.acted_s)
        self._merged.inc(step.reports_merged)
        if step.actions:
            self._decision.observe(step.acted_s - step.received_s)
        for action in step.actions:
            self._actions.labels(KINDS[type(action)], "ordered").inc()
            if isinstance(action, FailStart):
                self._failures.labels(action.model, "impossible").inc()
        if step.after.leadership.leads:  # who follows sees the same, and it would be counted once by each of them
            for one in count_capacity_events(step.before.capacity, step.after.capacity):
                self._offers.labels(one.provider, one.result).inc()
                if one.took_s is not None:
                    self._lease_seconds.labels(one.provider).observe(one.took_s)
        for move in step.transitions:
            replica = step.after.replicas.get(move.replica)
            if move.after == ReplicaState.FAILED and move.before in {ReplicaState.PENDING, ReplicaState.STARTING}:
                self._failures.labels(move.model, "start").inc()
            elif move.after == ReplicaState.READY and move.before == ReplicaState.STARTING and replica is not None:
                for phase, took_s in phases_with_parts_s(replica).items():
                    self._start_seconds.labels(move.model, phase).observe(took_s)

    def text(self) -> bytes:
        """The Prometheus text format, version 0.0.4."""
        return generate_latest(self._registry)


class _WorldCollector:
    """Gauges that are read off the World at the moment of the scrape."""

    def __init__(
        self, world: Callable[[], World], leaving: Leaving, clock: Callable[[], float],
        unreadable: Callable[[], Mapping[str, int]],
    ) -> None:  # fmt: skip
        self._world, self._leaving, self._clock, self._unreadable = world, leaving, clock, unreadable

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The families, in the order of interfaces section 5."""
        world = self._world()
        replicas = GaugeMetricFamily("pilotlight_replicas", "Replicas by state", labels=("model", "state"))
        tally = Tally((r.model, r.state.value) for r in world.replicas.values())
        for (model, state), count in sorted(tally.items()):
            replicas.add_metric((model, state), count)
        yield replicas
        memory = GaugeMetricFamily(
            "pilotlight_slice_memory_bytes", "Memory of Slices", labels=("node", "device", "state")
        )
        for slice_ in world.nodes.slices.values():
            held = [world.replicas[r] for r in world.by_slice.get(slice_.id, ())]
            used = sum(room_of(r, slice_).memory_bytes for r in held if r.state in HOLDS_SLICE)
            memory.add_metric((slice_.node, slice_.device, "used"), used)
            memory.add_metric((slice_.node, slice_.device, "free"), max(0, slice_.memory_bytes - used))
        yield memory
        yield from self._leases(world)
        machines = GaugeMetricFamily("pilotlight_machines_coming", "Nodes that others have made", labels=("group",))
        for name, growth in sorted(world.capacity.groups.items()):
            if growth.group.offer is not None:
                machines.add_metric((name,), growth.coming)
        yield machines
        kinds = GaugeMetricFamily(
            "pilotlight_lesson_kinds",
            "Kinds of requests that places are chosen for: learnt by replays, or sizes",
            labels=("by",),
        )
        lesson = world.learned.lesson
        by = "nothing" if lesson is None else "replays" if lesson.learnt else "sizes"
        kinds.add_metric((by,), 0 if lesson is None else len(lesson.exercise.demand))
        yield kinds
        unreadable = GaugeMetricFamily(
            "pilotlight_unreadable_objects",
            "Objects of the cluster that cannot be read and are skipped",
            labels=("kind",),
        )
        for kind, count in sorted(self._unreadable().items()):
            unreadable.add_metric((kind,), count)
        yield unreadable
        yield GaugeMetricFamily(
            "pilotlight_models_quarantined",
            "Models that are quarantined because they caused an internal error",
            value=float(len(list_quarantined_models(world))),
        )
        yield GaugeMetricFamily(
            "pilotlight_degraded",
            "Whether something fails because of an internal error that no Model explains",
            value=float(bool(world.degraded)),
        )
        yield GaugeMetricFamily("pilotlight_leader", "Whether this process leads", value=float(world.leadership.leads))

    def _leases(self, world: World) -> Iterable[GaugeMetricFamily]:
        leases = GaugeMetricFamily("pilotlight_leases", "Capacity that was ordered", labels=("provider", "state"))
        for (provider, state), count in sorted(Tally(map(state_of, world.capacity.leases.values())).items()):
            leases.add_metric((provider, state), count)
        yield leases
        offered = GaugeMetricFamily(
            "pilotlight_devices_on_offer", "Devices that could be had more of now", labels=("provider", "product")
        )
        for key, count in sorted(count_offered_devices(world.capacity, self._clock()).items()):
            offered.add_metric(key, count)
        yield offered
        longest = GaugeMetricFamily(
            "pilotlight_lease_leaving_seconds",
            "Since the oldest of what is given back, and nobody is on, was to go",
            labels=("provider",),
        )
        for provider, for_s in sorted(self._leaving.longest_s().items()):
            longest.add_metric((provider,), for_s)
        yield longest
