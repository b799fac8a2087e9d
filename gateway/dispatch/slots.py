"""Slot usage of one gateway per replica, and the choice of a replica for a request.

A running request uses one slot. A slot is granted only while fewer slots are in use than allowed. A replica that did
not accept a connection is suspect: it gets one request per `SUSPECT_S` until it responds to one.
`gateway.dispatch.routing_table` sets the allocations. This module is independent of queues and tenants.
"""

from __future__ import annotations

from math import inf

from autoscaler.contract import ModelName, ModelRoute, ReplicaId

STALLED_REQUESTS_MIN = 2
"""Minimum number of requests that must have waited for a stalled replica. A single request may have a long prompt.

A replica is stalled if these requests got no byte for the longest of the Model's limits `firstByteSecondsMax`,
`stallSecondsMax` and `responseSecondsMax`.
"""
SUSPECT_S = 1.0
"""Interval of the requests to a suspect replica, in seconds."""


class Hold:
    """A replica as this gateway uses it.

    `held`: slots that are allocated to this gateway. `allowed`: slots that it may use now. Times are monotonic seconds.
    """

    __slots__ = (
        "address", "allowed", "byte_s", "connect_failures", "granted", "held", "in_use", "leaves", "model", "open",
        "probe_s", "ready", "replica", "requests", "silent_s", "slots", "state", "suspect_s", "waiting_s",
    )  # fmt: skip

    def __init__(self, replica: ReplicaId, model: ModelRoutes) -> None:
        self.replica = replica
        self.model = model
        self.address = ""
        self.state = ""
        self.slots = 0
        self.held = 0
        self.granted = (-1, 0)
        """Epoch and version of the Routes that set `held`."""
        self.allowed = 0
        self.in_use = 0
        self.ready = False
        self.leaves = False
        """Whether Routes report its planned shutdown. A request may then move more than once if the replica cuts it."""
        self.open = False
        """Whether it is ready and not suspect, so that it gets new requests."""
        self.connect_failures = 0
        self.suspect_s = 0.0
        """When its last failed connect was. It is suspect while `connect_failures` is not 0."""
        self.probe_s = 0.0
        """When it may get its next request while it is suspect."""
        self.byte_s: float | None = None
        """When `heard` last recorded response bytes. None: never."""
        self.waiting_s = 0.0
        """Start of the current time without a response byte. Undefined while no request runs."""
        self.silent_s = 0.0
        """Time in which requests ran without a response byte, in seconds, before `waiting_s`."""
        self.requests = 0
        """Number of requests that have run since the last response byte."""

    def __repr__(self) -> str:
        return f"<Hold {self.replica} {self.state} {self.in_use}/{self.allowed}>"

    def take(self, now_s: float) -> None:
        """Use a slot for a request."""
        if not self.in_use:
            self.waiting_s = now_s
        self.in_use += 1
        self.requests += 1
        if self.open:
            self.model.free -= 1
        else:
            self.probe_s = now_s + SUSPECT_S

    def give(self, now_s: float, byte_s: float = 0.0) -> None:
        """Release a slot. `byte_s`: when the first byte of the response arrived. 0: no byte arrived."""
        if byte_s > self.waiting_s:
            self.waiting_s, self.silent_s, self.requests = byte_s, 0.0, self.in_use - 1
        self.in_use -= 1
        if not self.in_use:
            self.silent_s += now_s - self.waiting_s
        if self.open and self.in_use < self.allowed:
            self.model.free += 1

    def suspect(self, now_s: float) -> None:
        """Mark it suspect after a failed connect. It then gets one request per `SUSPECT_S`."""
        self.connect_failures += 1
        self.suspect_s = now_s
        self.probe_s = now_s + SUSPECT_S
        self.model.recount()

    def byte_age_s(self, now_s: float) -> float | None:
        """Return the seconds since the last response bytes. None: no bytes have arrived."""
        return None if self.byte_s is None else max(0.0, now_s - self.byte_s)

    def heard(self, granted_s: float, now_s: float) -> bool:
        """Record response bytes for a request that was granted at `granted_s`.

        Return whether the replica was suspect and no longer is.
        """
        self.byte_s = self.waiting_s = now_s
        self.silent_s = 0.0
        self.requests = self.in_use
        if not self.connect_failures or granted_s <= self.suspect_s:
            return False
        self.connect_failures = 0
        self.model.recount()
        return True

    def stalled(self, now_s: float) -> bool:
        """Return whether several requests got no byte for longer than the limits of a request allow."""
        silent_s = self.silent_s + (now_s - self.waiting_s if self.in_use else 0.0)
        return self.requests >= STALLED_REQUESTS_MIN and silent_s >= self.model.silent_s_max


class ModelRoutes:
    """The Routes of one model, and its replicas as this gateway uses them."""

    __slots__ = (
        "free", "heard_s", "holds", "name", "named", "opened", "ready", "route", "silent_s_max", "suspects",
    )  # fmt: skip

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self.route = ModelRoute(model=name)
        self.named = False
        """Whether Routes contain the model."""
        self.heard_s = 0.0
        """When the gateway received `route`."""
        self.holds: dict[ReplicaId, Hold] = {}
        self.opened: list[Hold] = []
        """Replicas that get new requests, sorted by id."""
        self.suspects: list[Hold] = []
        self.ready = False
        """Whether at least one replica is ready. Otherwise the model is cold."""
        self.silent_s_max = inf
        """The longest of `firstByteSecondsMax`, `stallSecondsMax` and `responseSecondsMax`, in seconds."""
        self.free = 0
        """Slots on open replicas that are allowed and not in use."""

    def expected_wait_s(self, now_s: float) -> float | None:
        """Return the estimated wait of a cold request in seconds. It decreases after a start begins. None: unknown."""
        expected_s = self.route.expected_wait_s
        if expected_s is None or self.route.state == "zero":
            return expected_s
        return max(0.0, expected_s - (now_s - self.heard_s))

    def capacity_wait_s(self, now_s: float) -> float | None:
        """Return the seconds until the ordered capacity for a cold model arrives. None: no order, or unknown."""
        wait_s = self.route.capacity_wait_s
        return None if self.ready or wait_s is None else max(0.0, wait_s - (now_s - self.heard_s))

    def recount(self) -> None:
        """Recompute the derived values. Call this after each change except `take` and `give`."""
        ready = sorted((hold for hold in self.holds.values() if hold.ready), key=lambda hold: hold.replica)
        for hold in ready:
            hold.open = not hold.connect_failures
        self.ready = bool(ready)
        self.opened = [hold for hold in ready if hold.open]
        self.suspects = [hold for hold in ready if not hold.open]
        self.free = sum(max(0, hold.allowed - hold.in_use) for hold in self.opened)

    def choose(self, now_s: float, avoid: ReplicaId | None = None) -> Hold | None:
        """Return the open replica with the most free slots, then the fewest slots in use, then the lowest id.

        Return `avoid` only if no other open replica has a free slot. If no open replica has one, return a suspect
        replica whose next request is due. None: no replica can get the request.
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
        """Return when a suspect replica may next get a request. None: no suspect replica has a free slot."""
        return min((hold.probe_s for hold in self.suspects if hold.in_use < hold.allowed), default=None)
