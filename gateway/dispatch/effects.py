"""Effects that dispatch returns; the caller performs them in order."""

from __future__ import annotations

import msgspec

from autoscaler.contract import ModelName, ReplicaId
from gateway.dispatch.call import Call
from gateway.errors import CallError


class Grant(msgspec.Struct, frozen=True):
    """Send the request to this replica now; it has a slot there until `finish` or `bounce`."""

    call: Call
    replica: ReplicaId
    address: str


class Refuse(msgspec.Struct, frozen=True):
    """Answer the request with this error; it has ended (outcome: failed)."""

    call: Call
    error: CallError


class ReportNow(msgspec.Struct, frozen=True):
    """An edge: the next report is due at once (sync keeps the minimum gap)."""


class ModelFaulted(msgspec.Struct, frozen=True):
    """An exception closed this model and emptied its queue. End its requests that still wait."""

    model: ModelName
    error: Exception


Effect = Grant | Refuse | ReportNow | ModelFaulted
