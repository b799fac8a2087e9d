"""Logs why a collection cannot be watched: once for each change of the reason, and when the watch recovers.

A line contains the collection, never an address, a token or a message of the server. A watch that fails once and
recovers is not logged; neither is a missing kind if the collection is optional.
"""

from __future__ import annotations

import logging

from autoscaler.kubernetes.api import ApiError, UnreachableError

FORBIDDEN, ABSENT, GONE = 403, 404, 410
BREAKS = 2
"""Consecutive failures without a response before they are logged: single failures are normal."""

_log = logging.getLogger("pilotlight.autoscaler.watch")


class WatchHealth:
    """The health of one watched collection. An `optional` one counts as empty while it cannot be read."""

    def __init__(self, path: str, *, optional: bool) -> None:
        self._path = path
        self._optional = optional
        self._logged = ""
        self._breaks = 0

    def broke(self, error: ApiError | UnreachableError) -> bool:
        """Record a failure. Returns whether the collection counts as empty if it was never read."""
        if isinstance(error, UnreachableError):
            self._breaks += 1
            if self._breaks >= BREAKS:
                self._log_change("the API server does not answer")
            return False
        if error.status == FORBIDDEN:
            left = "it counts as empty" if self._optional else "nothing starts before it can be read"
            self._log_change(f"403 Forbidden: {left}; `pilotlight doctor` reports the missing permission")
        elif error.status != GONE and not (self._optional and error.status == ABSENT):
            self._log_change(f"{error.status} {error.reason}")
        return self._optional and error.status in (FORBIDDEN, ABSENT)

    def is_heard(self) -> None:
        """Record that the watch delivered something."""
        self._breaks = 0
        if self._logged:
            _log.warning("event=watch_recovered path=%s", self._path)
            self._logged = ""

    def _log_change(self, what: str) -> None:
        if what != self._logged:
            _log.warning("event=watch_failed path=%s error=%s", self._path, what)
            self._logged = what
