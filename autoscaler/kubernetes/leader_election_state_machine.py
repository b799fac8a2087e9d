"""Leader election between autoscalers through one shared record: state machine without I/O. Pure.

Decides what to write into the record, whether this process leads, in which epoch, and until when it may act. The record
is a coordination.k8s.io/v1 Lease; `autoscaler.kubernetes.leader_election` reads and writes it.

Invariant: two processes never lead at once, even if their wall clocks are wrong. A write is conditional on the record
version that was read. Another holder's Lease may be acquired after it stayed unchanged for its stated duration, on our
monotonic clock. The holder stops leading MARGIN earlier, counted from the start of its last successful write, so a
suspended process has lost the leadership when it resumes.

The holder of a deleted Lease may not know of the deletion yet. A process that knows of an earlier Lease, from itself,
gateways or agents, therefore waits for the same duration before it creates a new one. The epoch increases with every
acquisition, also by the same holder, and exceeds all reported epochs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

RENEW, MARGIN = 0.2, 0.2
"""Fractions of the duration: renewal interval, and how early a holder stops so that its last requests have ended."""
LOOK_S_MAX = 1.0
"""Maximum interval between a follower's reads, which delays the detection of a failed leader."""
EPOCH_MAX = (1 << 31) - 1
"""Maximum of leaseTransitions, an int32: beyond it no acquisition would be possible."""
AHEAD_MAX = 100_000
"""Reported epochs that exceed the Lease's epoch by more than this are ignored. Correct ones never do: that would take
one acquisition a minute for ten weeks before the Lease was deleted. The bound prevents that a wrong report uses up the
epochs: EPOCH_MAX is more than 20,000 times as large.
"""


class LeaseRecord(NamedTuple):
    """The content of the Lease."""

    version: str
    """resourceVersion of the object: a write names the version that it replaces."""
    holder: str
    """Empty: the Lease was released."""
    epoch: int
    duration_s: float
    renewed: str = ""
    """As the holder wrote it. It changes with every write and is never compared with a clock."""


class Write(NamedTuple):
    """A write to perform: replace the record with that version, or create a new one (None)."""

    version: str | None
    holder: str
    epoch: int
    duration_s: int
    acquires: bool = False


class ElectionCandidate:
    """A candidate for leadership. `identity` is unique to this process, also among earlier processes on its host."""

    def __init__(self, identity: str, duration_s: int = 15) -> None:
        self.identity = identity
        self.duration_s = duration_s
        """Lease duration of the next write."""
        self._record: LeaseRecord | None = None
        self._since_s: float | None = None
        """When the record was first read in its current state, or as missing."""
        self._highest = 0
        """The highest epoch of all records that were read."""
        self._lasts_s = 0.0
        """The duration of the last record; 0: none was read yet."""
        self._floor = 0
        """The highest accepted epoch that gateways or agents reported."""
        self._ours = False
        """The record disappeared while we led."""
        self._known = False
        """`_record` is the state of the Lease after our last read or write."""
        self._epoch: int | None = None
        self._until_s = self._renew_s = 0.0

    def epoch(self, now_s: float) -> int | None:
        """The epoch in which we lead; None: we do not. Leadership that has ended needs a new acquisition."""
        if self._epoch is not None and now_s >= self._until_s:
            self._epoch = None
        return self._epoch

    def writes_s(self, now_s: float) -> float:
        """The remaining seconds in which we may act; 0: we may not."""
        return 0.0 if self.epoch(now_s) is None else self._until_s - now_s

    # --- results of reads and writes ----------------------------------------------------------------------------------

    def saw(self, record: LeaseRecord | None, now_s: float) -> None:
        """Record the Lease as it was read; None: it does not exist."""
        old = self._record
        if (None if record is None else record[1:]) != (None if old is None else old[1:]) or self._since_s is None:
            self._since_s = now_s
            self._ours = record is None and self.epoch(now_s) is not None
        self._keep(record)
        if record is None or record.holder != self.identity:
            self._epoch = None

    def wrote(self, write: Write, record: LeaseRecord, started_s: float, now_s: float) -> None:
        """Record that a write begun at `started_s` succeeded and resulted in `record`."""
        still_leads = self.epoch(now_s) is not None
        self._keep(record)
        self._since_s = now_s
        if write.acquires or (write.holder and still_leads):
            self._epoch = write.epoch
            self._until_s = started_s + write.duration_s * (1.0 - MARGIN)
            self._renew_s = started_s + write.duration_s * RENEW

    def _keep(self, record: LeaseRecord | None) -> None:
        self._record, self._known = record, True
        if record is not None:
            self._highest, self._lasts_s = max(self._highest, record.epoch), record.duration_s

    def failed(self) -> None:
        """Record that a read or write failed, or may have failed: the next write needs a read first."""
        self._known = False

    # --- decisions ----------------------------------------------------------------------------------------------------

    def must_look(self, now_s: float) -> bool:
        """Whether the Lease must be read first. A holder that knows its own record need not read it."""
        return not self._known or self.epoch(now_s) is None

    def write(self, now_s: float, heard: Collection[int] = ()) -> Write | None:
        """The write to perform now, if any. `heard`: epochs that gateways and agents reported. A leader whose epoch is
        below a reported one (the Lease was deleted) steps down. A later call acquires a higher epoch.
        """
        if not self._known:
            return None
        record, epoch = self._record, self.epoch(now_s)
        floor = max((one for one in heard if one <= self._highest + AHEAD_MAX), default=0)
        if floor > max(self._floor, self._highest):
            self._floor = floor
            if record is None:  # another process led in between, and its Lease was deleted, too
                self._since_s = now_s
        if epoch is not None and floor > epoch:
            self._epoch = None
            return None
        if epoch is not None:
            version = None if record is None else record.version
            return Write(version, self.identity, epoch, self.duration_s) if now_s >= self._renew_s else None
        if now_s < self._free_s(now_s):
            return None
        version = None if record is None else record.version
        return Write(version, self.identity, max(self._highest, self._floor) + 1, self.duration_s, acquires=True)

    def _free_s(self, now_s: float) -> float:
        """The time from which no other process can be leading."""
        record, since_s = self._record, now_s if self._since_s is None else self._since_s
        if record is not None:
            return now_s if record.holder in ("", self.identity) else since_s + record.duration_s
        if (self._ours and now_s < self._until_s) or not (self._lasts_s or self._floor):
            return now_s
        return since_s + max(self._lasts_s, self.duration_s)

    def release(self, now_s: float) -> Write | None:
        """Stop leading and return the final write, which lets another process lead at once."""
        led, self._epoch = self.epoch(now_s), None
        record = self._record
        if led is None or record is None or not self._known:
            return None
        return Write(record.version, "", led, self.duration_s)

    def due_s(self, now_s: float) -> float:
        """The time of the next read or write."""
        look_s = now_s + min(LOOK_S_MAX, self.duration_s * RENEW)
        if self.epoch(now_s) is not None:
            return min(self._renew_s, self._until_s) if self._known else min(look_s, self._until_s)
        free_s = self._free_s(now_s)
        return min(look_s, free_s) if self._known and free_s > now_s else look_s
