"""Slot usage of one gateway per replica, and the choice of a replica for a request.

One request takes one slot and returns it. Slots in use never exceed the number allowed at the time of a grant. A
replica that did not accept a connection gets one request at a time until it is confirmed.
`gateway.dispatch.routing_table` sets the holds. Independent of queues and tenants.
"""

from __future__ import annotations

from math import inf

from autoscaler.contract import ModelName, ModelRoute, ReplicaId

STALLED_S_MIN, STALLED_FACTOR = 120.0, 10.0
"""A replica is stalled if streams get no byte from it for this time, and for this factor times the longest wait for a
first byte of a stream so far. The Model's limit of a first byte is the maximum. It applies as well if no stream got a
byte yet, if only one stream waits, since its prompt may be long, and while other requests run, since their progress is
invisible until their end.
"""
SUSPECT_S = 1.0
"""Interval of probe requests to a replica that did not accept a connection, until it is confirmed."""


class Hold:
    """One replica as this gateway uses it. `held`: slots allocated to this gateway; `allowed`: slots it may use now."""

    __slots__ = (
        "address", "allowed", "byte_s", "connect_failures", "granted", "held", "in_use", "leaves", "model", "open",
        "probe_s", "ready", "replica", "silent_s", "slots", "state", "streams", "suspect_s", "tried", "waiting_s",
    )  # fmt: skip

    def __init__(self, replica: ReplicaId, model: ModelRoutes) -> None:
        self.replica = replica
        self.model = model
        self.address = ""
        self.state = ""
        self.slots = 0
        self.held = 0
        self.granted = (-1, 0)
        """(epoch, version) of the allocation of `held`."""
        self.allowed = 0
        self.in_use = 0
        self.ready = False
        self.leaves = False
        """Whether Routes announce its shutdown: connections that it cuts then do not count against a request."""
        self.open = False
        """Whether it is ready and not suspect, and accepts new requests."""
        self.connect_failures = 0
        self.suspect_s = 0.0
        """When it last became suspect; it is suspect while `connect_failures` is not 0."""
        self.probe_s = 0.0
        """When a suspect replica gets its next request."""
        self.byte_s: float | None = None
        """When response bytes last arrived from it, as reported to `heard`; None if never."""
        self.streams = 0
        """Running streams."""
        self.silent_s = 0.0
        """How long streams waited that have ended since then without a byte."""
        self.waiting_s = 0.0
        """Since when running streams wait for a byte; without one it has no meaning."""
        self.tried = 0
        """Streams that ran since then."""

    def __repr__(self) -> str:
        return f"<Hold {self.replica} {self.state} {self.in_use}/{self.allowed}>"

    def take(self, now_s: float, *, stream: bool = False) -> None:
        """Take a slot."""
        self.in_use += 1
        if stream:
            if not self.streams:
                self.waiting_s = now_s
            self.streams += 1
            self.tried += 1
        if self.open:
            self.model.free -= 1
        else:
            self.probe_s = now_s + SUSPECT_S

    def give(self, now_s: float, *, stream: bool = False, byte_s: float = 0.0) -> None:
        """Return a slot. `byte_s`: when the first byte of the response arrived; 0: none did. A request that became a
        stream after it was granted was not counted (`Call.id`).
        """
        self.in_use -= 1
        if stream and self.streams:
            if byte_s > self.waiting_s:
                self.waiting_s, self.silent_s, self.tried = byte_s, 0.0, self.streams - 1
            self.streams -= 1
            if not self.streams:
                self.silent_s += now_s - self.waiting_s
        if self.open and self.in_use < self.allowed:
            self.model.free += 1

    def suspect(self, now_s: float) -> None:
        """Mark it suspect after a failed connect: it gets only probe requests until it is confirmed."""
        self.connect_failures += 1
        self.suspect_s = now_s
        self.probe_s = now_s + SUSPECT_S
        self.model.recount()

    def byte_age_s(self, now_s: float) -> float | None:
        """Return the time since response bytes last arrived; None if none have arrived."""
        return None if self.byte_s is None else max(0.0, now_s - self.byte_s)

    def heard(self, granted_s: float, now_s: float) -> bool:
        """Record response bytes for a request granted at `granted_s`; True if that ends an earlier suspicion."""
        self.byte_s = self.waiting_s = now_s
        self.silent_s = 0.0
        self.tried = self.streams
        if not self.connect_failures or granted_s <= self.suspect_s:
            return False
        self.connect_failures = 0
        self.model.recount()
        return True

    def stalled(self, now_s: float) -> bool:
        """Return whether streams have received nothing for far longer than usual (STALLED_S_MIN)."""
        silent_s = self.silent_s + (now_s - self.waiting_s if self.streams else 0.0)
        if silent_s < STALLED_S_MIN:
            return False
        usual_s, limit_s = self.model.first_byte_s_max, self.model.first_byte_limit_s
        if usual_s is not None and self.tried > 1 and self.streams == self.in_use:
            limit_s = min(limit_s, STALLED_FACTOR * usual_s)
        return silent_s >= limit_s


class ModelRoutes:
    """The Routes of one model, and this gateway's holds on its replicas."""

    __slots__ = (
        "first_byte_limit_s", "first_byte_s_max", "free", "heard_s", "holds", "name", "named", "opened", "ready",
        "route", "suspects",
    )  # fmt: skip

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self.route = ModelRoute(model=name)
        self.named = False
        """Whether Routes contain the model."""
        self.heard_s = 0.0
        """When `route` arrived."""
        self.holds: dict[ReplicaId, Hold] = {}
        self.opened: list[Hold] = []
        """Replicas that accept new requests, by id."""
        self.suspects: list[Hold] = []
        self.ready = False
        """Whether some replica is ready, so that the model is not cold."""
        self.first_byte_s_max: float | None = None
        """The longest wait for the first byte of a stream so far; None: no stream got one yet."""
        self.first_byte_limit_s = inf
        """The limit of that wait."""
        self.free = 0
        """Free slots on open replicas: allowed minus in use."""

    def expected_wait_s(self, now_s: float) -> float | None:
        """Return the estimated wait of a cold request; counts down once the start is under way. None if unknown."""
        expected_s = self.route.expected_wait_s
        if expected_s is None or self.route.state == "zero":
            return expected_s
        return max(0.0, expected_s - (now_s - self.heard_s))

    def capacity_wait_s(self, now_s: float) -> float | None:
        """Return the time until the capacity that a cold model waits for; None if it waits for none, or unknown."""
        wait_s = self.route.capacity_wait_s
        return None if self.ready or wait_s is None else max(0.0, wait_s - (now_s - self.heard_s))

    def recount(self) -> None:
        """Recompute derived values; call it after any change other than take and give."""
        ready = sorted((hold for hold in self.holds.values() if hold.ready), key=lambda hold: hold.replica)
        for hold in ready:
            hold.open = not hold.connect_failures
        self.ready = bool(ready)
        self.opened = [hold for hold in ready if hold.open]
        self.suspects = [hold for hold in ready if not hold.open]
        self.free = sum(max(0, hold.allowed - hold.in_use) for hold in self.opened)

    def choose(self, now_s: float, avoid: ReplicaId | None = None) -> Hold | None:
        """Return the open replica with most free slots, then fewest in use, then first id; `avoid` is the last choice.

        If no other replica has a free slot, a suspect replica that is due for a probe is returned.
        """
        best: Hold | None = None
        if self.free:
            if len(self.opened) == 1:
                return self.opened[0]
            most = fewest = 0
            for hold in self.opened:
                in_use = hold.in_use
                free = hold.allowed - in_use
                if free <= 0 or (hold.replica == avoid and free < self.free):
                    continue
                if free > most or (free == most and in_use < fewest):
                    best, most, fewest = hold, free, in_use
            return best
        for hold in self.suspects:
            if hold.probe_s <= now_s and hold.in_use < hold.allowed:
                return hold
        return None

    def probe_s(self) -> float | None:
        """Return when a suspect replica may next get a request; None if none has room."""
        return min((hold.probe_s for hold in self.suspects if hold.in_use < hold.allowed), default=None)
