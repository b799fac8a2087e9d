"""What dispatch tells its shell to do. Owns the words; the shell performs them in the order they are returned."""

from __future__ import annotations

import msgspec

from autoscaler.contract import ReplicaId
from gateway.dispatch.call import Call
from gateway.errors import CallError


class Grant(msgspec.Struct, frozen=True):
    """Send the Call to this Replica now; it has a Slot there until `finish` or `bounce`."""

    call: Call
    replica: ReplicaId
    address: str


class Refuse(msgspec.Struct, frozen=True):
    """Answer the Call with this error; it has ended (its Outcome is failed)."""

    call: Call
    error: CallError


class ReportNow(msgspec.Struct, frozen=True):
    """An edge: the next report is due at once (sync keeps the least gap)."""


Effect = Grant | Refuse | ReportNow
