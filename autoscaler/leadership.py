"""Leadership: which of several autoscalers acts, by one record that each of them can read and write. Pure.

Owns what is written into the record, whether we lead and in which epoch, and until when we may act. The record is a
Lease of coordination.k8s.io/v1; `autoscaler.drivers.kubernetes.lease` reads and writes it. Promises: two never lead at
once, whatever their wall clocks say. A write is for the very record that was seen; one that another holds is taken
when it stood unchanged, on our own monotonic clock, for as long as its holder said; and who holds it ends MARGIN before
that, counted from the start of its last write that succeeded. So a process that was paused has ended before it knows.
The epoch rises with every acquisition, also by the same holder, and above all that gateways know.
"""

from __future__ import annotations

from typing import NamedTuple

RENEW, MARGIN = 0.2, 0.2
"""Shares of the duration: a holder writes this often, and ends so early, so that what it sent last is over by then."""
LOOK_S_MAX = 1.0
"""Who follows looks this often at least: a death is noticed so late."""
EPOCH_MAX = (1 << 31) - 1
"""Of leaseTransitions. What a gateway reports from above it is of no Lease, and is not believed."""


class Record(NamedTuple):
    """What the Lease says."""

    version: str
    """Of the object: a write names the one that it replaces."""
    holder: str
    """Empty: it was released."""
    epoch: int
    duration_s: float
    renewed: str = ""
    """As its holder wrote it: it differs with every write, and is never compared with a clock."""


class Write(NamedTuple):
    """What to write: in place of the record of that version, or a new one (None)."""

    version: str | None
    holder: str
    epoch: int
    duration_s: int
    acquires: bool = False


class Candidate:
    """One that would lead. `identity` is nobody else's, not even of the process that ran here before."""

    def __init__(self, identity: str, duration_s: int = 15) -> None:
        self.identity = identity
        self.duration_s = duration_s
        """Of the next write."""
        self._record: Record | None = None
        self._since_s = 0.0
        """When the record was first seen as it is."""
        self._known = False
        """`_record` is what the Lease was after our last look or write."""
        self._epoch: int | None = None
        self._until_s = self._renew_s = 0.0

    def epoch(self, now_s: float) -> int | None:
        """The epoch in which we lead; None: we do not. What is over does not come back without an acquisition."""
        if self._epoch is not None and now_s >= self._until_s:
            self._epoch = None
        return self._epoch

    def writes_s(self, now_s: float) -> float:
        """For how many more seconds we may act; 0: we may not."""
        return 0.0 if self.epoch(now_s) is None else self._until_s - now_s

    # --- what was seen and done ---------------------------------------------------------------------------------------

    def saw(self, record: Record | None, now_s: float) -> None:
        """What the Lease is; None: there is none."""
        if record is None or self._record is None or record[1:] != self._record[1:]:
            self._since_s = now_s
        self._record, self._known = record, True
        if record is None or record.holder != self.identity:
            self._epoch = None

    def wrote(self, write: Write, record: Record, started_s: float, now_s: float) -> None:
        """A write that began at `started_s` succeeded, and made the record this."""
        still_leads = self.epoch(now_s) is not None
        self._record, self._known, self._since_s = record, True, now_s
        if write.acquires or (write.holder and still_leads):
            self._epoch = write.epoch
            self._until_s = started_s + write.duration_s * (1.0 - MARGIN)
            self._renew_s = started_s + write.duration_s * RENEW

    def failed(self) -> None:
        """A read or a write failed, or nobody knows whether it did: look before the next write."""
        self._known = False

    # --- what to do ---------------------------------------------------------------------------------------------------

    def must_look(self, now_s: float) -> bool:
        """Read the Lease before anything else. A holder that knows its own record need not."""
        return not self._known or self.epoch(now_s) is None

    def write(self, now_s: float, floor: int = 0) -> Write | None:
        """What to write now, if anything. `floor`: the highest epoch that any gateway knows of.

        Who leads below the floor (the Lease was deleted) leads no more, and acquires anew the next time.
        """
        if not self._known:
            return None
        record, epoch = self._record, self.epoch(now_s)
        floor = floor if floor < EPOCH_MAX else 0
        if epoch is not None and floor > epoch:
            self._epoch = None
            return None
        if epoch is not None:
            version = None if record is None else record.version
            return Write(version, self.identity, epoch, self.duration_s) if now_s >= self._renew_s else None
        if record is None:
            return Write(None, self.identity, floor + 1, self.duration_s, acquires=True)
        if record.holder not in ("", self.identity) and now_s < self._since_s + record.duration_s:
            return None
        return Write(record.version, self.identity, max(record.epoch, floor) + 1, self.duration_s, acquires=True)

    def release(self, now_s: float) -> Write | None:
        """The last write: the next may lead at once. From now on we do not."""
        led, self._epoch = self.epoch(now_s), None
        record = self._record
        if led is None or record is None or not self._known:
            return None
        return Write(record.version, "", led, self.duration_s)

    def due_s(self, now_s: float) -> float:
        """When to look or write next."""
        look_s = now_s + min(LOOK_S_MAX, self.duration_s * RENEW)
        if self.epoch(now_s) is not None:
            return min(self._renew_s, self._until_s) if self._known else min(look_s, self._until_s)
        if self._known and self._record is not None and self._record.holder:
            free_s = self._since_s + self._record.duration_s
            return min(look_s, free_s) if free_s > now_s else look_s
        return look_s
