"""What one gateway holds of each Replica, what it uses of that, and which Replica of a Model a Call is granted.

Owns the use of Slots: one Call takes one and gives it back. Promises that no more than what is allowed is in use by a
grant, and that a Replica which did not take a connection gets one Call at a time until it is confirmed. What a hold is,
`gateway.dispatch.routes` says. It must not know of queues or Tenants.
"""

from __future__ import annotations

from autoscaler.contract import ModelName, ModelRoute, ReplicaId

SUSPECT_S = 1.0
"""A Replica that did not take a connection gets one Call per this time until it is confirmed."""


class Hold:
    """One Replica as this gateway uses it. `held` is the grant it acts on, `allowed` what it may use now."""

    __slots__ = (
        "address", "allowed", "byte_s", "connect_failures", "granted", "held", "in_use", "leaves", "model", "open",
        "probe_s", "ready", "replica", "slots", "state", "suspect_s",
    )  # fmt: skip

    def __init__(self, replica: ReplicaId, model: ModelRoutes) -> None:
        self.replica = replica
        self.model = model
        self.address = ""
        self.state = ""
        self.slots = 0
        self.held = 0
        self.granted = (-1, 0)
        """(epoch, version) of the grant of `held`."""
        self.allowed = 0
        self.in_use = 0
        self.ready = False
        self.leaves = False
        """Its end was ordered, so Routes say or said: what it cuts is no Call's fault."""
        self.open = False
        """Ready and not suspect: takes new Calls."""
        self.connect_failures = 0
        self.suspect_s = 0.0
        """When it last became suspect; it is while `connect_failures` is not 0."""
        self.probe_s = 0.0
        """When a suspect Replica takes its next Call."""
        self.byte_s: float | None = None
        """When a byte of an answer last came from it, as far as `heard` was told; None: never here."""

    def __repr__(self) -> str:
        return f"<Hold {self.replica} {self.state} {self.in_use}/{self.allowed}>"

    def take(self, now_s: float) -> None:
        """One Call more on it."""
        self.in_use += 1
        if self.open:
            self.model.free -= 1
        else:
            self.probe_s = now_s + SUSPECT_S

    def give(self) -> None:
        """One Call less on it."""
        self.in_use -= 1
        if self.open and self.in_use < self.allowed:
            self.model.free += 1

    def suspect(self, now_s: float) -> None:
        """A connect failed: not used until it is confirmed, but for one Call after a while."""
        self.connect_failures += 1
        self.suspect_s = now_s
        self.probe_s = now_s + SUSPECT_S
        self.model.recount()

    def heard(self, granted_s: float, now_s: float) -> bool:
        """It answers a Call granted at `granted_s`. True when that ends a suspicion: the Call was granted after it."""
        self.byte_s = now_s
        if not self.connect_failures or granted_s <= self.suspect_s:
            return False
        self.connect_failures = 0
        self.model.recount()
        return True


class ModelRoutes:
    """What Routes say of one Model, and this gateway's holds on its Replicas."""

    __slots__ = ("free", "heard_s", "holds", "name", "named", "opened", "ready", "route", "suspects")

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self.route = ModelRoute(model=name)
        self.named = False
        """Routes name the Model."""
        self.heard_s = 0.0
        """When `route` arrived."""
        self.holds: dict[ReplicaId, Hold] = {}
        self.opened: list[Hold] = []
        """Those that take new Calls, by id."""
        self.suspects: list[Hold] = []
        self.ready = False
        """Some Replica is ready: the Model is not cold."""
        self.free = 0
        """Slots free on open Replicas: the sum of what is allowed and not used."""

    def expected_wait_s(self, now_s: float) -> float | None:
        """Time until a cold Call would be answered; counts down once the start is under way. None: unknown."""
        expected_s = self.route.expected_wait_s
        if expected_s is None or self.route.state == "zero":
            return expected_s
        return max(0.0, expected_s - (now_s - self.heard_s))

    def capacity_wait_s(self, now_s: float) -> float | None:
        """Time until more capacity is there, that a cold Model waits for; None: it waits for none, or nobody knows."""
        wait_s = self.route.capacity_wait_s
        return None if self.ready or wait_s is None else max(0.0, wait_s - (now_s - self.heard_s))

    def recount(self) -> None:
        """Derives what follows from the holds; to be called after any change but take and give."""
        ready = sorted((hold for hold in self.holds.values() if hold.ready), key=lambda hold: hold.replica)
        for hold in ready:
            hold.open = not hold.connect_failures
        self.ready = bool(ready)
        self.opened = [hold for hold in ready if hold.open]
        self.suspects = [hold for hold in ready if not hold.open]
        self.free = sum(max(0, hold.allowed - hold.in_use) for hold in self.opened)

    def choose(self, now_s: float, avoid: ReplicaId | None = None) -> Hold | None:
        """The open Replica with most free Slots, then fewest in use, then first id; `avoid` only if no other has any.

        A suspect Replica whose time for a probe has come is taken when no other has a free Slot.
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
        """When a suspect Replica may next take a Call, None when there is none with room."""
        return min((hold.probe_s for hold in self.suspects if hold.in_use < hold.allowed), default=None)
