"""Prometheus metrics of an agent's weights (interfaces, section 5): pulls, the store, evictions.

Defines these metric names. Labels contain no artifact names; reports to autoscalers name what is pulled.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from artifacts.store.store import Row

PULL_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
STATES = ("in_use", "pinned", "idle")
ASKED = {200: "given", 206: "given", 404: "absent", 429: "busy", 503: "coming"}
"""The `result` label for responses to other agents, by status."""


class StoreMetrics:
    """The metrics of one agent; `text()` is the exposition."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "pilotlight_pull_seconds", "Duration of pulls of weights", ("result",), registry=registry,
            buckets=PULL_BUCKETS,
        )  # fmt: skip
        self._bytes = Counter("pilotlight_pull_bytes", "Bytes of weights received", registry=registry)
        self._from_peers = Counter(
            "pilotlight_pull_peer_bytes", "Bytes of weights received from other agents", registry=registry
        )
        self._asked = Counter(
            "pilotlight_peer_requests", "Responses to other agents, by result", ("result",), registry=registry
        )
        self._gave = Counter("pilotlight_peer_bytes", "Bytes of weights sent to other agents", registry=registry)
        self._stored = Gauge("pilotlight_store_bytes", "Copies in the store, by state", ("state",), registry=registry)
        self._evicted = Counter(
            "pilotlight_store_evictions", "Evictions from the store, by reason", ("reason",), registry=registry
        )

    def pulled(self, took_s: float, bytes_: int, *, well: bool) -> None:
        """Count a completed pull."""
        self._seconds.labels("done" if well else "failed").observe(took_s)
        self._bytes.inc(bytes_)

    def from_peers(self, bytes_: int) -> None:
        """Count the bytes of a pull that came from other agents."""
        self._from_peers.inc(bytes_)

    def asked(self, status: int, bytes_: int) -> None:
        """Count a response to another agent."""
        self._asked.labels(ASKED.get(status, "refused")).inc()
        self._gave.inc(bytes_)

    def holds(self, rows: Iterable[Row]) -> None:
        """Set the current contents of the store."""
        found = dict.fromkeys(STATES, 0)
        for row in rows:
            found["in_use" if row.in_use else "pinned" if row.pinned else "idle"] += row.record.bytes
        for state, bytes_ in found.items():
            self._stored.labels(state).set(bytes_)

    def evicted(self, reason: str) -> None:
        """Count an eviction: of a copy (`room`), or of leftovers of an interrupted pull (`left`)."""
        self._evicted.labels(reason).inc()

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)
