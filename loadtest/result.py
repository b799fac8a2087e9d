"""The words of a load test: a Shot (one Call to be sent) and its Result (what the client saw of it).

Owns both types and how a Result is classed. Everything is counted at the client: what a server says of itself is no
evidence. Times are seconds since the Shot's planned moment, so a client that is late cannot flatter a server.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

COLD_PHASES = frozenset({"decide", "place", "image", "pull", "load", "ready"})
"""Phases of Server-Timing that only a Call that waited for a start has."""


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One Call to send `at_s` seconds after the run began. The client gives up `timeout_s` after that moment."""

    model: str
    body: bytes
    stream: bool = True
    """The body asks for a stream; a document is no answer to it."""
    at_s: float = 0.0
    path: str = "/v1/chat/completions"
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0


class Ending(StrEnum):
    """How a Call ended, as its client sees it."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    LOST = "lost"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What the client saw of one Call."""

    model: str
    at_s: float = 0.0
    status: int = 0
    """0: no response head came."""
    code: str = ""
    """Of the first error: the body's or event's `error.code` (or `type`), `http_<status>`, or `transport`."""
    errors: int = 0
    """Errors that the server told: one is clear, more contradict each other."""
    clear: bool = True
    """False when an error status came without an error object."""
    lateness_s: float = 0.0
    sent_s: float | None = None
    first_byte_s: float | None = None
    """The first byte of the body, of any status."""
    last_byte_s: float | None = None
    bytes: int = 0
    text: str = ""
    saw_done: bool = False
    finish_reason: str = ""
    broken: str = ""
    """Why the response is not whole; empty when it is."""
    abandoned: bool = False
    resent: bool = False
    """A kept connection closed before any byte came, and the Call was sent once more on a new one."""
    cold: bool = False
    server_timing: dict[str, float] = {}
    """Phase -> milliseconds."""
    headers: dict[str, str] = {}

    @property
    def truncated(self) -> bool:
        """A 2xx that began and did not end as it should: nothing told the client in time."""
        return 200 <= self.status < 300 and bool(self.broken) and not self.abandoned

    @property
    def ending(self) -> Ending:
        """Completed, failed with exactly one error, abandoned; everything else is lost."""
        if self.abandoned:
            return Ending.ABANDONED
        if self.broken or self.status == 0 or self.errors > 1:
            return Ending.LOST
        if self.errors == 1:
            return Ending.LOST if self.saw_done else Ending.FAILED
        return Ending.COMPLETED if 200 <= self.status < 300 else Ending.LOST


def server_timing(value: str) -> dict[str, float]:
    """Server-Timing (W3C) as phase -> milliseconds. Metrics without a duration, or with a bad one, are left out."""
    phases: dict[str, float] = {}
    for metric in value.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, number = parameter.partition("=")
            try:
                phases.setdefault(name, float(number.strip().strip('"'))) if key.strip().lower() == "dur" else None
            except ValueError:
                continue
    return phases
