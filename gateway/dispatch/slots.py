"""Slot usage of one gateway per replica, and the choice of a replica for a request.

One request takes one slot and returns it. Slots in use never exceed the number allowed at the time of a grant. A
replica that did not accept a connection gets one request at a time until it is confirmed.
`gateway.dispatch.routing_table` sets the holds. Independent of queues and tenants.
"""

from __future__ import annotations

from math import inf

from autoscaler.contract import ModelName, ModelRoute, ReplicaId

STALLED_REQUESTS_MIN = 2
"""A replica is stalled if at least this many requests have waited for it and no byte arrived from it for the longer of
the Model's limits `firstByteSecondsMax` and `responseSecondsMax`. One request alone may only have a long prompt.
"""
SUSPECT_S = 1.0
"""Interval of probe requests to a replica that did not accept a connection, until it is confirmed."""


class Hold:
    """One replica as this gateway uses it. `held`: slots allocated to this gateway; `allowed`: slots it may use now."""

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
        self.waiting_s = 0.0
        """Since when the running requests get no byte; without a running request it has no meaning."""
        self.silent_s = 0.0
        """For how long requests got no byte that have ended after the last byte."""
        self.requests = 0
        """Requests that have run after the last byte."""

    def __repr__(self) -> str:
        return f"<Hold {self.replica} {self.state} {self.in_use}/{self.allowed}>"

    def take(self, now_s: float) -> None:
        """Take a slot."""
        if not self.in_use:
            self.waiting_s = now_s
        self.in_use += 1
        self.requests += 1
        if self.open:
            self.model.free -= 1
        else:
            self.probe_s = now_s + SUSPECT_S

    def give(self, now_s: float, byte_s: float = 0.0) -> None:
        """Return a slot. `byte_s`: when the first byte of the response arrived; 0: none did."""
        if byte_s > self.waiting_s:
            self.waiting_s, self.silent_s, self.requests = byte_s, 0.0, self.in_use - 1
        self.in_use -= 1
        if not self.in_use:
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
        self.requests = self.in_use
        if not self.connect_failures or granted_s <= self.suspect_s:
            return False
        self.connect_failures = 0
        self.model.recount()
        return True

    def stalled(self, now_s: float) -> bool:
        """Return whether several requests got no byte for longer than any request may wait."""
        silent_s = self.silent_s + (now_s - self.waiting_s if self.in_use else 0.0)
        return self.requests >= STALLED_REQUESTS_MIN and silent_s >= self.model.silent_s_max


class ModelRoutes:
    """The Routes of one model, and this gateway's holds on its replicas."""

    __slots__ = (
        "free", "heard_s", "holds", "name", "named", "opened", "ready", "route", "silent_s_max", "suspects",
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
        self.silent_s_max = inf
        """The longest time that a request may wait for a byte."""
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
