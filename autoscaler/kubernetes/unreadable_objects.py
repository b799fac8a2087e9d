"""Registry of API objects that the watches of this process cannot read.

Each watch reports its own objects, and several watches may cover the same one. Counts and listeners concern objects,
not watches: an object that three watches cannot read counts once, and listeners are called once for each reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterator
from typing import NamedTuple

_log = logging.getLogger("pilotlight.autoscaler.watch")

REASON_CHARACTERS_MAX = 300
"""Maximum length of the reason in the log and in Events."""


class Unreadable(NamedTuple):
    """An object that cannot be read. A field is empty if it could not be found in the metadata either."""

    kind: str
    namespace: str
    name: str
    version: str
    """resourceVersion."""
    reason: str
    api_version: str = ""
    uid: str = ""


Name = tuple[str, str]
"""Namespace and name."""


def report_fault(model: None, what: str, reason: str) -> None:
    """Log an exception that was caught, as `autoscaler.controller.loop.report_fault` does."""
    del model
    _log.error("event=degraded operation=%r error=%s", what, reason)


def log_fault(what: str, reason: str) -> None:
    """Log the exception of a watch; an empty `reason` (the watch recovered) is not logged."""
    if reason:
        report_fault(None, what, reason)


class UnreadableObjects:
    """The unreadable objects, by watch."""

    def __init__(self) -> None:
        self.fault: Callable[[str, str], None] = log_fault
        """Called with the name of a watch whose callback raised, and the exception; empty: the watch recovered."""
        self._watches: dict[Hashable, dict[Name, Unreadable]] = {}
        self.listeners: list[Callable[[Unreadable], None]] = []
        """Called for each object that became unreadable, or whose reason changed."""

    def __iter__(self) -> Iterator[Unreadable]:
        """Iterate over the objects, each once."""
        objects = {(one.kind, *name): one for known in self._watches.values() for name, one in known.items()}
        return iter(objects.values())

    def add(self, watch: Hashable, found: Unreadable, path: str) -> None:
        """Record that the watch or list of `path` cannot read the object; log it once for each reason."""
        known, name = self._watches.setdefault(watch, {}), (found.namespace, found.name)
        found = found._replace(reason=found.reason[:REASON_CHARACTERS_MAX])
        is_known = name in known and known[name].reason == found.reason
        is_known_elsewhere = any(
            name in other and (other[name].kind, other[name].reason) == (found.kind, found.reason)
            for other in self._watches.values()
        )
        known[name] = found
        if is_known:
            return
        _log.error(
            "event=unreadable_object kind=%s namespace=%s name=%s path=%s reason=%r",
            found.kind, found.namespace, found.name, path, found.reason,
        )  # fmt: skip
        if not is_known_elsewhere:
            for listener in self.listeners:
                listener(found)

    def remove(self, watch: Hashable, namespace: str, name: str) -> None:
        """Remove an object that the watch can read again, or that is deleted."""
        known = self._watches.get(watch)
        if known is not None:
            known.pop((namespace, name), None)

    def keep(self, watch: Hashable, names: Container[Name]) -> None:
        """Remove all other objects of the watch: only objects with these names exist."""
        known = {name: one for name, one in self._watches.pop(watch, {}).items() if name in names}
        if known:
            self._watches[watch] = known

    def names(self, watch: Hashable) -> Collection[Name]:
        """The names of the watch's objects."""
        return self._watches.get(watch, {}).keys()

    def forget(self, watch: Hashable) -> None:
        """Remove all objects of a watch that has ended."""
        self._watches.pop(watch, None)

    def counts(self) -> dict[str, int]:
        """Kind -> number of unreadable objects."""
        return dict(Counter(one.kind for one in self))
