"""Leadership: which of several autoscalers acts, by one record that each of them can read and write. Pure.

Owns what is written into the record, whether we lead and in which epoch, and until when we may act. The record is a
Lease of coordination.k8s.io/v1; `autoscaler.kubernetes.leader_election` reads and writes it. Promises: two never lead
at once, whatever their wall clocks say. A write is for the very record that was seen; one that another holds is taken
when it stood unchanged, on our own monotonic clock, for as long as its holder said; and who holds it ends MARGIN before
that, counted from the start of its last write that succeeded. So a process that was paused has ended before it knows.
A record that is gone (somebody deleted it) frees nobody's place: its holder does not know yet, and whoever has heard of
any, from the record, gateways or agents, waits as long before it makes a new one. The epoch rises with every
acquisition, also by the same holder, and above what those know.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

RENEW, MARGIN = 0.2, 0.2
"""Shares of the duration: a holder writes this often, and ends so early, so that what it sent last is over by then."""
LOOK_S_MAX = 1.0
"""Who follows looks this often at least: a death is noticed so late."""
EPOCH_MAX = (1 << 31) - 1
"""Of leaseTransitions, an int32: after it nobody could ever acquire again."""
AHEAD_MAX = 100_000
"""A gateway's or an agent's epoch is believed up to so far above the record's. Neither honestly knows a higher one:
each is one acquisition, and so many were made before a Lease was deleted only by one a minute for ten weeks. And what
one says in error must not use up the epochs: EPOCH_MAX is more than 20,000 times as far.
"""


class LeaseRecord(NamedTuple):
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


class ElectionCandidate:
    """One that would lead. `identity` is nobody else's, not even of the process that ran here before."""

    def __init__(self, identity: str, duration_s: int = 15) -> None:
        self.identity = identity
        self.duration_s = duration_s
        """Of the next write."""
        self._record: LeaseRecord | None = None
        self._since_s: float | None = None
        """When the record was first seen as it is, or not to be."""
        self._highest = 0
        """Of the epochs of all records that were seen."""
        self._lasts_s = 0.0
        """The duration of the last record; 0: none was ever seen."""
        self._floor = 0
        """The highest epoch that others knew of, as far as it was believed."""
        self._ours = False
        """It vanished while we led."""
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

    def saw(self, record: LeaseRecord | None, now_s: float) -> None:
        """What the Lease is; None: there is none."""
        old = self._record
        if (None if record is None else record[1:]) != (None if old is None else old[1:]) or self._since_s is None:
            self._since_s = now_s
            self._ours = record is None and self.epoch(now_s) is not None
        self._keep(record)
        if record is None or record.holder != self.identity:
            self._epoch = None

    def wrote(self, write: Write, record: LeaseRecord, started_s: float, now_s: float) -> None:
        """A write that began at `started_s` succeeded, and made the record this."""
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
        """A read or a write failed, or nobody knows whether it did: look before the next write."""
        self._known = False

    # --- what to do ---------------------------------------------------------------------------------------------------

    def must_look(self, now_s: float) -> bool:
        """Read the Lease before anything else. A holder that knows its own record need not."""
        return not self._known or self.epoch(now_s) is None

    def write(self, now_s: float, heard: Collection[int] = ()) -> Write | None:
        """What to write now, if anything. `heard`: the epochs that others know of.

        Who leads below one of them (the Lease was deleted) leads no more, and acquires anew the next time.
        """
        if not self._known:
            return None
        record, epoch = self._record, self.epoch(now_s)
        floor = max((one for one in heard if one <= self._highest + AHEAD_MAX), default=0)
        if floor > max(self._floor, self._highest):
            self._floor = floor
            if record is None:  # somebody led meanwhile, with a record that is gone, too
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
        """When nobody else leads any more."""
        record, since_s = self._record, now_s if self._since_s is None else self._since_s
        if record is not None:
            return now_s if record.holder in ("", self.identity) else since_s + record.duration_s
        if (self._ours and now_s < self._until_s) or not (self._lasts_s or self._floor):
            return now_s
        return since_s + max(self._lasts_s, self.duration_s)

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
        free_s = self._free_s(now_s)
        return min(look_s, free_s) if self._known and free_s > now_s else look_s
