"""Telemetry of a gateway: metrics (interfaces, section 5) and one event per request. Redaction is done here.

All output of a gateway about requests is written here. It contains only ids, document names, codes and numbers, never a
prompt, a key or an address. Recording costs a few additions per request. A pipe or terminal that accepts no lines leads
to counted drops and never blocks. Above SERIES_MAX series, further tenants are reported as `other`.
"""

from __future__ import annotations

import os
import select
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.dispatch.call import Call, Outcome
from gateway.http.json_structs import Ended, TurnedAway

SERIES_MAX = 20_000
EVENTS_MAX = 20_000
"""Maximum number of buffered lines; more are dropped and counted."""
WRITE_BYTES = 4096
"""PIPE_BUF: a ready pipe accepts this much without blocking."""
WRITES_PER_FLUSH_MAX = 2_000

BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
OVERHEAD_BOUNDS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


TIMES_SERIES = 2 * (len(BOUNDS_S) + 3)
"""Series of one model's warm or cold requests: two histograms, each with its buckets, `+Inf`, count and sum."""


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Record one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts in Prometheus format."""
        total, out = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out


class ModelSeries:
    """Times of one model's warm or cold requests."""

    __slots__ = ("first_byte", "queue")

    def __init__(self) -> None:
        self.queue = Histogram(BOUNDS_S)
        self.first_byte = Histogram(BOUNDS_S)


class End:
    """Number of requests with one outcome and code."""

    __slots__ = ("count", "outcome")

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome.value
        self.count = 0


class PairSeries:
    """Counters of one (model, tenant) pair."""

    __slots__ = ("ends", "tokens_in", "tokens_out")

    def __init__(self) -> None:
        self.ends: dict[str, End] = {}
        """By code, which implies the outcome."""
        self.tokens_in = 0
        self.tokens_out = 0

    def end(self, outcome: Outcome, code: str) -> End:
        """Return the counter of an outcome and code."""
        end = self.ends.get(code)
        if end is None:
            end = self.ends[code] = End(outcome)
        return end


class Cell:
    """The counters of one combination of model, tenant, cold or warm, and code."""

    __slots__ = ("end", "pair", "times")

    def __init__(self, times: ModelSeries, pair: PairSeries, end: End) -> None:
        self.times = times
        self.pair = pair
        self.end = end


_encode: Final = msgspec.json.Encoder().encode


class Telemetry:
    """The counters of one gateway. `events_fd`: file descriptor for events, one line each; None to discard them."""

    def __init__(self, events_fd: int | None = None) -> None:
        self._cells: dict[tuple[str, str, bool, str], Cell] = {}
        """Cache, so that a request needs one lookup; bounded by the number of series."""
        self._models: dict[tuple[str, bool], ModelSeries] = {}
        self._pairs: dict[tuple[str, str], PairSeries] = {}
        self._retries: dict[tuple[str, str], int] = {}
        self._failed_checks: dict[tuple[str, str], int] = {}
        self._overhead = Histogram(OVERHEAD_BOUNDS_S)
        self._events_fd = events_fd
        self._events: deque[bytes] = deque()
        """JSON objects."""
        self._pending = b""
        self._dropped = 0
        self._series_folded = 0

    def ended(self, call: Call, outcome: Outcome, code: str, now_s: float, start_s: float) -> None:
        """Record the outcome of a request. `start_s`: duration of the start that it waited for, if any."""
        arrived_s, granted_s, first_byte_s = call.arrived_s, call.granted_s, call.first_byte_s
        queued_s = (now_s if granted_s is None else granted_s) - arrived_s
        waited_s = first_byte_s - arrived_s if first_byte_s else 0.0
        cell = self._cells.get((call.model, call.tenant, call.cold, code)) or self._new_cell(call, outcome, code)
        cell.end.count += 1
        cell.times.queue.add(queued_s)
        if first_byte_s:
            cell.times.first_byte.add(waited_s)
        if call.sent_s and granted_s is not None:
            self._overhead.add(call.sent_s - granted_s)
        cell.pair.tokens_in += call.tokens_in
        cell.pair.tokens_out += call.tokens_out
        if self._events_fd is not None:
            self._queue_event(
                Ended(
                    call.id, call.model, call.tenant, cell.end.outcome, code, call.stream, call.cold, call.moves,
                    call.replica, int(queued_s * 1e6), int(start_s * 1e6), int(waited_s * 1e6),
                    int((now_s - arrived_s) * 1e6), call.tokens_in, call.tokens_out,
                )
            )  # fmt: skip

    def turned_away(self, request_id: str, code: str) -> None:
        """Record a request that was rejected before admission."""
        pair = self._pairs.get(("", "")) or self._new_pair("", "")
        pair.end(Outcome.FAILED, code).count += 1
        if self._events_fd is not None:
            self._queue_event(TurnedAway(request_id, code))

    def retried(self, model: str, reason: str) -> None:
        """Record a request that returned to dispatch because an engine failed before the commit point."""
        self._retries[model, reason] = self._retries.get((model, reason), 0) + 1

    def check_failed(self, kind: str, is_allowed: bool) -> None:
        """Record an external check of this kind without a usable response, and whether that allowed the request."""
        labels = kind, "allowed" if is_allowed else "rejected"
        self._failed_checks[labels] = self._failed_checks.get(labels, 0) + 1

    def flush(self) -> None:
        """Write what the sink accepts now. Call it often; it never blocks on a pipe or a terminal.

        A file is always ready according to poll(2): a write to it takes as long as the page cache needs.
        """
        fd, events = self._events_fd, self._events
        if fd is None or not (events or self._pending):
            return
        ready = select.poll()
        ready.register(fd, select.POLLOUT)
        for _ in range(WRITES_PER_FLUSH_MAX):
            block = self._pending or self._block()
            if not block or not any(flags & select.POLLOUT for _, flags in ready.poll(0)):
                self._pending = block
                return
            self._pending = block
            try:
                self._pending = block[os.write(fd, block) :]
            except OSError:  # the reader has exited, or the disk is full
                self._pending = b""
                self._dropped += block.count(b"\n")

    def text(self, levels: Iterable[tuple[str, int, int]], routes_age_s: float | None) -> bytes:
        """Return all metrics as Prometheus text. `levels`: (model, waiting, running)."""
        registry = CollectorRegistry()
        registry.register(_Snapshot([*self._counters(), *self._times(), *_gauges(levels, routes_age_s)]))
        return generate_latest(registry)

    def _queue_event(self, event: Ended | TurnedAway) -> None:
        if len(self._events) >= EVENTS_MAX:
            self._dropped += 1
        else:
            self._events.append(_encode(event))

    def _block(self) -> bytes:
        """Return whole lines, up to WRITE_BYTES."""
        events, size, count = self._events, 0, 0
        for event in events:
            size += len(event) + 1
            if count and size > WRITE_BYTES:
                break
            count += 1
        lines = [events.popleft() for _ in range(count)]
        return b"\n".join([*lines, b""]) if lines else b""

    def _new_cell(self, call: Call, outcome: Outcome, code: str) -> Cell:
        times = self._models.get((call.model, call.cold))
        if times is None:
            full = len(self._models) >= SERIES_MAX // 2 // TIMES_SERIES
            times = self._models.setdefault(("other" if full else call.model, call.cold), ModelSeries())
        pair = self._pairs.get((call.model, call.tenant)) or self._new_pair(call.model, call.tenant)
        cell = Cell(times, pair, pair.end(outcome, code))
        if (call.model, call.tenant) in self._pairs:
            self._cells[call.model, call.tenant, call.cold, code] = cell
        return cell

    def _new_pair(self, model: str, tenant: str) -> PairSeries:
        if len(self._pairs) >= SERIES_MAX // 8:  # a pair has two token series and one per code
            self._series_folded += 1
            tenant = "other"
        return self._pairs.setdefault((model, tenant), PairSeries())

    def _counters(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            "pilotlight_calls", "Requests that have ended.", labels=("model", "tenant", "outcome", "code")
        )
        tokens = CounterMetricFamily(
            "pilotlight_tokens", "Tokens as engines report them.", labels=("model", "tenant", "direction")
        )
        for (model, tenant), pair in self._pairs.items():
            for code, end in pair.ends.items():
                calls.add_metric((model, tenant, end.outcome, code), end.count)
            if model:
                tokens.add_metric((model, tenant, "in"), pair.tokens_in)
                tokens.add_metric((model, tenant, "out"), pair.tokens_out)
        retries = CounterMetricFamily(
            "pilotlight_upstream_retries",
            "Requests that an engine failed before the first byte.",
            labels=("model", "reason"),
        )
        for labels, count in self._retries.items():
            retries.add_metric(labels, count)
        checks = CounterMetricFamily(
            "pilotlight_failed_checks",
            "External checks of requests and answers without a usable response.",
            labels=("check", "result"),
        )
        for labels, count in self._failed_checks.items():
            checks.add_metric(labels, count)
        dropped = CounterMetricFamily(
            "pilotlight_events_dropped", "Events that the sink did not accept.", value=self._dropped
        )
        folded = CounterMetricFamily(
            "pilotlight_series_folded",
            "Requests reported under tenant `other`, because there are too many tenants.",
            value=self._series_folded,
        )
        yield from (calls, tokens, retries, checks, dropped, folded)

    def _times(self) -> Iterator[Metric]:
        queue = HistogramMetricFamily(
            "pilotlight_queue_seconds",
            "Time from the arrival of a request until a slot of a replica is granted.",
            labels=("model", "cold"),
        )
        first = HistogramMetricFamily(
            "pilotlight_first_byte_seconds", "Time from arrival to the first byte.", labels=("model", "cold")
        )
        for (model, cold), series in self._models.items():
            labels = (model, "1" if cold else "0")
            queue.add_metric(labels, series.queue.buckets(), series.queue.sum)
            first.add_metric(labels, series.first_byte.buckets(), series.first_byte.sum)
        overhead = HistogramMetricFamily(
            "pilotlight_overhead_seconds",
            "Time from the grant of a slot until the gateway has sent the request to the engine.",
        )
        overhead.add_metric((), self._overhead.buckets(), self._overhead.sum)
        yield from (queue, first, overhead)


class _Snapshot(Collector):
    """Adapter: collected metrics as a Prometheus collector."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _gauges(levels: Iterable[tuple[str, int, int]], routes_age_s: float | None) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("pilotlight_calls_waiting", "Requests that wait now.", labels=("model",))
    running = GaugeMetricFamily("pilotlight_calls_running", "Requests that run on replicas now.", labels=("model",))
    for model, parked, granted in levels:
        waiting.add_metric((model,), parked)
        running.add_metric((model,), granted)
    yield from (waiting, running)
    if routes_age_s is not None:
        yield GaugeMetricFamily(
            "pilotlight_routes_age_seconds", "Time since the last message from an autoscaler.", value=routes_age_s
        )
