"""Logs why a collection cannot be watched: once for each change of the reason, and when the watch recovers.

A line names the collection, never an address, a token or prose from the server. A watch that breaks once and recovers
is not logged; neither is a missing kind if the collection is optional.
"""

from __future__ import annotations

import logging

from autoscaler.kubernetes.api import ApiError, UnreachableError

FORBIDDEN, ABSENT, GONE = 403, 404, 410
BREAKS = 2
"""Consecutive failures without an answer before it is logged: every watch ends now and then."""

_log = logging.getLogger("pilotlight.autoscaler.watch")


class WatchHealth:
    """The health of one watched collection. An `optional` one counts as empty while it cannot be read."""

    def __init__(self, path: str, *, optional: bool) -> None:
        self._path = path
        self._optional = optional
        self._said = ""
        self._breaks = 0

    def broke(self, error: ApiError | UnreachableError) -> bool:
        """Record a failure. Returns whether the collection counts as empty if it was never read."""
        if isinstance(error, UnreachableError):
            self._breaks += 1
            if self._breaks >= BREAKS:
                self._say("the API server does not answer")
            return False
        if error.status == FORBIDDEN:
            left = "it counts as empty" if self._optional else "nothing starts before it can be read"
            self._say(f"403 Forbidden: {left}; `pilotlight doctor` says which right is missing")
        elif error.status != GONE and not (self._optional and error.status == ABSENT):
            self._say(f"{error.status} {error.reason}")
        return self._optional and error.status in (FORBIDDEN, ABSENT)

    def is_heard(self) -> None:
        """Record that the watch delivered something."""
        self._breaks = 0
        if self._said:
            _log.warning("event=watch_recovered path=%s", self._path)
            self._said = ""

    def _say(self, what: str) -> None:
        if what != self._said:
            _log.warning("event=watch_failed path=%s error=%s", self._path, what)
            self._said = what
