"""Call: an admitted inference request, from admission to its single outcome.

The record is shared by dispatch and the gateway's server (as ProxiedCall). It is mutable on purpose (one per request,
on the hot path), but each field has one writer, stated at the field. It has no behaviour; `gateway.dispatch.dispatcher`
decides what happens to it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from autoscaler.contract import ModelName, ReplicaId, TenantName

if TYPE_CHECKING:
    from gateway.dispatch.fair_queue import TenantQueue
    from gateway.dispatch.slots import Hold


class Outcome(StrEnum):
    """How a request ended; each has exactly one outcome."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"


class CallState(StrEnum):
    """State of a request (written by dispatch only)."""

    NEW = "new"
    PARKED = "parked"
    RUNNING = "running"
    ENDED = "ended"


class Call:
    """An admitted request. Times are monotonic seconds; `deadline_s` limits the first byte, not the whole response."""

    __slots__ = (
        "arrived_s", "body_bytes", "cold", "deadline_s", "dialect", "first_byte_s", "fled", "granted_s", "hold", "id",
        "line", "model", "moves", "priority", "replica", "sent_s", "state", "stream", "tenant", "tokens_in",
        "tokens_out",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917  one per request: keywords would double the cost
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
        """The request id. Set once at admission, like all fields up to `deadline_s`.
        Exceptions: for a form that is forwarded while it arrives, `stream` may be known only at its end. If it is
        withdrawn until then, its times begin again.
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
        """When sent to an engine, and when the response began; 0.0 before. Written by the server, like the tokens."""
        self.tokens_in = self.tokens_out = 0
        self.state = CallState.NEW
        """Written by dispatch, like all fields below."""
        self.line: TenantQueue | None = None
        """Its tenant's queue, once it is admitted."""
        self.hold: Hold | None = None
        """The replica where it runs."""
        self.cold = False
        """Whether it waited for a start or a wake-up."""
        self.granted_s: float | None = None
        self.replica: ReplicaId | None = None
        self.moves = 0
        """The number of returns to the queue after an engine had received its bytes."""
        self.fled: Hold | None = None
        """The replica whose failure counts against this request (see `ModelDispatcher.bounce`). After a second such
        failure the request is rejected, because it may itself crash engines.
        """

    def __repr__(self) -> str:
        where = f" on {self.replica}" if self.replica else ""
        return f"<Call {self.id} {self.model}/{self.tenant} p{self.priority} {self.state}{where}>"
