"""What keeps a collection of an API server from being heard, said in the log: once when it changes, and its end.

Owns the words. Promises: the line names the collection and never an address, a token or what a server says in prose; a
watch that breaks once and is there again is no line, nor is a kind that the server does not have where that is usual.
"""

from __future__ import annotations

import logging

from autoscaler.kubernetes.api import ApiError, UnreachableError

FORBIDDEN, ABSENT, GONE = 403, 404, 410
BREAKS = 2
"""Times in a row without an answer before it is said: all watches end now and then."""

_log = logging.getLogger(__name__)


class WatchHealth:
    """Of one collection. Of an `optional` one our part goes on without: then it has nothing, as far as we know."""

    def __init__(self, path: str, *, optional: bool) -> None:
        self._path = path
        self._optional = optional
        self._said = ""
        self._breaks = 0

    def broke(self, error: ApiError | UnreachableError) -> bool:
        """It cannot be heard now. Whether it is taken to be empty, if nothing was heard of it yet."""
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
        """Something of it was told."""
        self._breaks = 0
        if self._said:
            _log.warning("heard again path=%s", self._path)
            self._said = ""

    def _say(self, what: str) -> None:
        if what != self._said:
            _log.warning("not heard path=%s error=%s", self._path, what)
            self._said = what
