"""The types of a load test: a Shot (a request to send) and its Result (what the client observed).

Classifies Results by the client's observations alone; the server's own reports are not used. Times are seconds since
the Shot's planned time, so a slow client cannot make a server look better.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

COLD_PHASES = frozenset({"decide", "place", "image", "pull", "load", "ready"})
"""Phases of Server-Timing that occur only if the request waited for a start."""


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """A request to send `at_s` seconds after the start of the run; abandoned `timeout_s` after that time."""

    model: str
    body: bytes
    stream: bool = True
    """Whether the body requests a stream; a document is then not a valid response."""
    at_s: float = 0.0
    path: str = "/v1/chat/completions"
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0


class Ending(StrEnum):
    """The outcome of a request as observed by the client."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    LOST = "lost"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The client's observations of one request."""

    model: str
    at_s: float = 0.0
    status: int = 0
    """0: no response head was received."""
    code: str = ""
    """Code of the first error: `error.code` (or `type`) of the body or event, `http_<status>`, or `transport`."""
    errors: int = 0
    """Number of errors that the server reported: one is clear, several contradict each other."""
    clear: bool = True
    """Whether each error status had an error object."""
    lateness_s: float = 0.0
    sent_s: float | None = None
    first_byte_s: float | None = None
    """The first byte of the body, for any status."""
    last_byte_s: float | None = None
    bytes: int = 0
    text: str = ""
    saw_done: bool = False
    finish_reason: str = ""
    broken: str = ""
    """Why the response is incomplete; empty if it is complete."""
    abandoned: bool = False
    resent: bool = False
    """Whether a reused connection closed before any byte and the request was sent again on a new one."""
    cold: bool = False
    server_timing: dict[str, float] = {}
    """Milliseconds by phase."""
    headers: dict[str, str] = {}

    @property
    def truncated(self) -> bool:
        """Whether a 2xx response began but did not end properly."""
        return 200 <= self.status < 300 and bool(self.broken) and not self.abandoned

    @property
    def ending(self) -> Ending:
        """The outcome: completed, failed (exactly one error), abandoned, or else lost."""
        if self.abandoned:
            return Ending.ABANDONED
        if self.broken or self.status == 0 or self.errors > 1:
            return Ending.LOST
        if self.errors == 1:
            return Ending.LOST if self.saw_done else Ending.FAILED
        return Ending.COMPLETED if 200 <= self.status < 300 else Ending.LOST


def server_timing(value: str) -> dict[str, float]:
    """Parse Server-Timing (W3C) into milliseconds by phase; metrics without a valid duration are skipped."""
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
