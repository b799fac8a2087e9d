"""The autoscaler's metrics (interfaces, section 5), fed by the loop's steps, and those of gateways on Unix sockets.

Owns one prometheus_client registry. Gauges are read from the `World` at each scrape; `on_step` updates counters and
histograms. Label values are names of documents and states, never addresses or data of Tenants.

Also counts capacity events between two Worlds, for `pilotlight_offers_total` and `pilotlight_leases`. The results of
orders are: ordered; came, with its lead time; failed (rejected or not delivered); returned; lost (removed without a
release).

The texts of several processes are merged: samples with the same name and labels are added up, which is right for
counters, histograms and level gauges (waiting, running). Gauges of ages (families in MAXIMA) use the largest value,
creation times of counters the oldest.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import add
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from autoscaler.capacity.remaining_offers import count_offered_devices
from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.exception_handling import FaultReport, attempt_for, raise_fault
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.provisioning.release import Leaving, is_leaving
from autoscaler.queries.overcommitted_slices import room_of
from autoscaler.queries.start_phases import phases_with_parts_s
from autoscaler.state.actions import Action, FailStart
from autoscaler.state.capacity import Capacity, Lease
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import HOLDS_SLICE, ReplicaState
from autoscaler.state.pending_claims import is_claim_owner
from autoscaler.state.world import Replica, Slice, World


class Counted(NamedTuple):
    """One capacity event."""

    provider: str
    result: str
    took_s: float | None = None
    """The time from the order until the capacity was usable, if it arrived."""


def count_capacity_events(before: Capacity, after: Capacity) -> Iterator[Counted]:
    """Yield all events between two states."""
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
    """Return the provider and the state of an order: coming, idle, used or leaving."""
    if is_leaving(lease):
        return lease.id.provider, "leaving"
    return lease.id.provider, "coming" if lease.here_s is None else "used" if lease.in_use else "idle"


START_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
LEASE_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, 14400)
DECISION_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
KINDS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Action)}
"""All kinds of Actions. A missing kind would end the process at the first such Action."""


class Metrics:
    """Metrics of the loop; add `on_step` as a listener. `text()` returns the exposition. `clock`: the `World`'s clock.

    `unreadable`: kind -> number of cluster objects that cannot be read. `fault` receives Models that raised.
    """

    def __init__(
        self, world: Callable[[], World], clock: Callable[[], float] = time.monotonic,
        unreadable: Callable[[], Mapping[str, int]] = dict, fault: FaultReport = raise_fault,
    ) -> None:  # fmt: skip
        self._fault = fault
        registry = self._registry = CollectorRegistry()
        self._start_seconds = Histogram(
            "pilotlight_start_seconds",
            "Duration of the phases of a start: decide, place, image, load; place.* are parts of place",
            ("model", "phase"),
            registry=registry,
            buckets=START_BUCKETS,
        )
        self._failures = Counter("pilotlight_start_failures", "Failed starts", ("model", "reason"), registry=registry)
        self._decision = Histogram(
            "pilotlight_decision_seconds",
            "Time from the receipt of a gateway's report until the resulting actions are done",
            registry=registry,
            buckets=DECISION_BUCKETS,
        )
        self._plan_seconds = Histogram(
            "pilotlight_plan_seconds", "Duration of one step of the loop", registry=registry, buckets=DECISION_BUCKETS
        )
        self._merged = Counter(
            "pilotlight_reports_merged",
            "Gateway reports that were merged because too many were queued",
            registry=registry,
        )
        self._actions = Counter("pilotlight_actions", "Actions ordered", ("kind", "result"), registry=registry)
        self._offers = Counter(
            "pilotlight_offers", "Capacity orders by result", ("provider", "result"), registry=registry
        )
        self._lease_seconds = Histogram(
            "pilotlight_lease_seconds", "Time until ordered capacity is usable", ("provider",), registry=registry,
            buckets=LEASE_BUCKETS,
        )  # fmt: skip
        self._leaving = Leaving()
        registry.register(_WorldCollector(world, self._leaving, clock, unreadable, fault))

    def on_step(self, step: LoopStep) -> None:
        """Count one step of the loop."""
        self._plan_seconds.observe(step.acted_s - step.started_s)
        self._leaving.look(step.after.capacity, step.acted_s)
        self._merged.inc(step.reports_merged)
        if step.actions:
            self._decision.observe(step.acted_s - step.received_s)
        for action in step.actions:
            self._actions.labels(KINDS[type(action)], "ordered").inc()
            if isinstance(action, FailStart):
                self._failures.labels(action.model, "impossible").inc()
        if step.after.leadership.leads:  # followers observe the same, and each of them would count it
            for one in count_capacity_events(step.before.capacity, step.after.capacity):
                self._offers.labels(one.provider, one.result).inc()
                if one.took_s is not None:
                    self._lease_seconds.labels(one.provider).observe(one.took_s)
        for move in step.transitions:
            attempt_for(move.model, "metrics", self._fault, partial(self._count_transition, move, step.after))

    def _count_transition(self, move: Transition, after: World) -> None:
        replica = after.replicas.get(move.replica)
        if move.after == ReplicaState.FAILED and move.before in {ReplicaState.PENDING, ReplicaState.STARTING}:
            self._failures.labels(move.model, "start").inc()
        elif move.after == ReplicaState.READY and move.before == ReplicaState.STARTING and replica is not None:
            for phase, took_s in phases_with_parts_s(replica).items():
                self._start_seconds.labels(move.model, phase).observe(took_s)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format, version 0.0.4."""
        return generate_latest(self._registry)


class _WorldCollector:
    """Gauges that are read from the `World` at the time of a scrape."""

    def __init__(
        self, world: Callable[[], World], leaving: Leaving, clock: Callable[[], float],
        unreadable: Callable[[], Mapping[str, int]], fault: FaultReport,
    ) -> None:  # fmt: skip
        self._world, self._leaving, self._clock, self._unreadable = world, leaving, clock, unreadable
        self._fault = fault

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the families, in the order of interfaces section 5."""
        world = self._world()
        replicas = GaugeMetricFamily("pilotlight_replicas", "Replicas by state", labels=("model", "state"))
        tally = Tally((r.model, r.state.value) for r in world.replicas.values())
        for (model, state), count in sorted(tally.items()):
            replicas.add_metric((model, state), count)
        yield replicas
        memory = GaugeMetricFamily(
            "pilotlight_slice_memory_bytes", "Memory of slices", labels=("node", "device", "state")
        )
        for slice_ in world.nodes.slices.values():
            held = [world.replicas[r] for r in world.by_slice.get(slice_.id, ())]
            used = sum(self._used_bytes(r, slice_) for r in held if r.state in HOLDS_SLICE)
            memory.add_metric((slice_.node, slice_.device, "used"), used)
            memory.add_metric((slice_.node, slice_.device, "free"), max(0, slice_.memory_bytes - used))
        yield memory
        yield from self._leases(world)
        machines = GaugeMetricFamily(
            "pilotlight_machines_coming", "Nodes that other controllers are creating", labels=("group",)
        )
        for name, growth in sorted(world.capacity.groups.items()):
            if growth.group.offer is not None:
                machines.add_metric((name,), growth.coming)
        yield machines
        kinds = GaugeMetricFamily(
            "pilotlight_lesson_kinds",
            "Kinds of placement requests for which placement is optimized, by source of the values: replays (learned), "
            "sizes (not learned yet) or nothing (no requests so far)",
            labels=("by",),
        )
        lesson = world.learned.lesson
        by = "nothing" if lesson is None else "replays" if lesson.learnt else "sizes"
        kinds.add_metric((by,), 0 if lesson is None else len(lesson.exercise.demand))
        yield kinds
        unreadable = GaugeMetricFamily(
            "pilotlight_unreadable_objects", "Cluster objects that cannot be read and are skipped", labels=("kind",)
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
            "1 if a part of the autoscaler fails because of an internal error that no Model caused, else 0",
            value=float(bool(world.degraded)),
        )
        yield GaugeMetricFamily("pilotlight_leader", "Whether this process leads", value=float(world.leadership.leads))

    def _used_bytes(self, replica: Replica, slice_: Slice) -> int:
        """Return the memory that a replica uses of a slice: all of it if its Model raises."""
        room = attempt_for(replica.model, "metrics", self._fault, partial(room_of, replica, slice_))
        return slice_.memory_bytes if room is None else room.memory_bytes

    def _leases(self, world: World) -> Iterable[GaugeMetricFamily]:
        leases = GaugeMetricFamily("pilotlight_leases", "Capacity orders by state", labels=("provider", "state"))
        for (provider, state), count in sorted(Tally(map(state_of, world.capacity.leases.values())).items()):
            leases.add_metric((provider, state), count)
        yield leases
        offered = GaugeMetricFamily(
            "pilotlight_devices_on_offer", "Devices that can be ordered now", labels=("provider", "product")
        )
        for key, count in sorted(count_offered_devices(world.capacity, self._clock()).items()):
            offered.add_metric(key, count)
        yield offered
        longest = GaugeMetricFamily(
            "pilotlight_lease_leaving_seconds",
            "Age of the oldest release of ordered capacity that is still in progress and has no replica",
            labels=("provider",),
        )
        for provider, for_s in sorted(self._leaving.longest_s().items()):
            longest.add_metric((provider,), for_s)
        yield longest


MAXIMA = frozenset({"pilotlight_routes_age_seconds"})


def merge_metrics(texts: Iterable[bytes], *, openmetrics: bool = False) -> bytes:
    """Merge `texts` (text format 0.0.4) into one exposition, in the same format or in OpenMetrics 1.0.

    In OpenMetrics the family of a counter has no `_total`, the text ends in `# EOF`, and `_created` is not a family.
    """
    kinds: dict[str, tuple[str, str]] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            if openmetrics and family.name.endswith("_created"):
                continue
            kinds.setdefault(family.name, (family.type, family.documentation))
            into = samples.setdefault(family.name, {})
            for sample in family.samples:
                _put(into, sample, _rule(family.name))
    lines: list[str] = []
    for name, (kind, documentation) in sorted(kinds.items()):
        shown = f"{name}_total" if kind == "counter" and not openmetrics else name
        lines += (f"# HELP {shown} {_escape(documentation, quotes=openmetrics)}", f"# TYPE {shown} {kind}")
        lines += (_line(sample, labels, value) for (sample, labels), value in samples[name].items())
    return "".join(f"{line}\n" for line in (*lines, *(["# EOF"] if openmetrics else []))).encode()


def _rule(family: str) -> Callable[[float, float], float]:
    """Return the function that combines two values of a series."""
    if family in MAXIMA:
        return max
    return min if family.endswith("_created") else add


def _put(
    into: dict[tuple[str, tuple[tuple[str, str], ...]], float], sample: Sample, rule: Callable[[float, float], float]
) -> None:
    key = (sample.name, tuple(sorted(sample.labels.items())))
    known = into.get(key)
    into[key] = sample.value if known is None else rule(known, sample.value)


def _line(name: str, labels: tuple[tuple[str, str], ...], value: float) -> str:
    inside = ",".join(f'{k}="{_escape(v, quotes=True)}"' for k, v in labels)
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escape(text: str, *, quotes: bool) -> str:
    """Escape a text. Quotes in documentation are escaped only in OpenMetrics, those in label values in both formats."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped
