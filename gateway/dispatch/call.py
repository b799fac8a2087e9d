"""One Call: an accepted inference request, from admission to its one Outcome.

Owns the record that dispatch and the shell share (whose Call is a ProxiedCall). It is mutable on purpose (one per
request, on the hot path), but each field has one writer, named beside it. A Call has no behaviour; its life is decided
in `gateway.dispatch.dispatcher`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from autoscaler.contract import ModelName, ReplicaId, TenantName

if TYPE_CHECKING:
    from gateway.dispatch.fair_queue import TenantQueue
    from gateway.dispatch.slots import Hold


class Outcome(StrEnum):
    """How a Call ended; it has exactly one."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"


class CallState(StrEnum):
    """Where a Call is (written by dispatch only)."""

    NEW = "new"
    PARKED = "parked"
    RUNNING = "running"
    ENDED = "ended"


class Call:
    """An admitted request. Times are monotonic seconds; `deadline_s` bounds the first byte, not the whole answer."""

    __slots__ = (
        "arrived_s", "body_bytes", "cold", "deadline_s", "dialect", "first_byte_s", "fled", "granted_s", "hold", "id",
        "line", "model", "moves", "priority", "replica", "sent_s", "state", "stream", "tenant", "tokens_in",
        "tokens_out",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917  one per request: keywords would cost as much again
        self,
        id: str,
        tenant: TenantName,
        model: ModelName,
        arrived_s: float,
        deadline_s: float,
        priority: int = 0,
        body_bytes: int = 0,
        stream: bool = False,
        dialect: str = "openai",
    ) -> None:
        self.id = id
        """The request id. Written once, by the edge, like all up to `deadline_s`; but whether a form that goes on while
        it comes wants a stream may be known only at its end.
        """
        self.tenant = tenant
        self.model = model
        self.priority = priority
        self.body_bytes = body_bytes
        self.stream = stream
        self.dialect = dialect
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.sent_s = self.first_byte_s = 0.0
        """When it went to an engine and when the answer began; 0.0 before. Written by the shell, like its tokens."""
        self.tokens_in = self.tokens_out = 0
        self.state = CallState.NEW
        """Written by dispatch, like all below."""
        self.line: TenantQueue | None = None
        """The Calls of its kind, once it is admitted."""
        self.hold: Hold | None = None
        """Where it runs."""
        self.cold = False
        """It waited for a start or a wake."""
        self.granted_s: float | None = None
        self.replica: ReplicaId | None = None
        self.moves = 0
        """Times it went back to the queue after an engine took its bytes."""
        self.fled: Hold | None = None
        """What it moved off without a reason of which Routes knew then. Once: perhaps it is the Call that kills."""

    def __repr__(self) -> str:
        where = f" on {self.replica}" if self.replica else ""
        return f"<Call {self.id} {self.model}/{self.tenant} p{self.priority} {self.state}{where}>"
