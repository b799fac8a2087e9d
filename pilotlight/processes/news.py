"""News of Models for the person at the terminal: each reason once, when it comes and when it no longer holds.

Owns what was said of one kind of thing, and how many lines it may take: a folder may hold a hundred models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoscaler.contract import ModelName
from autoscaler.state.world import World

SAID_MAX = 10
"""Models of one change that get a line each; how many more there are is one line."""


class News:
    """`say` takes one line. `one` is a line of {name} and {reason}, `more` one of {count}, `over` one of {names}."""

    def __init__(self, say: Callable[[str], None], *, one: str, more: str, over: str) -> None:
        self._say = say
        self._one, self._more, self._over = one, more, over
        self._known: dict[ModelName, str] = {}

    def tell(self, known: Mapping[ModelName, str], world: World) -> None:
        """Says how `known`, Model -> reason, differs from what was known before; a Model that left is no news."""
        was, self._known = self._known, dict(known)
        news = [(name, reason) for name, reason in sorted(known.items()) if was.get(name) != reason]
        for name, reason in news[:SAID_MAX]:
            self._say(self._one.format(name=name, reason=reason))
        if len(news) > SAID_MAX:
            self._say(self._more.format(count=len(news) - SAID_MAX))
        over = sorted(name for name in was if name in world.models and name not in known)
        if over:
            more = f" and {len(over) - SAID_MAX} more" if len(over) > SAID_MAX else ""
            self._say(self._over.format(names=", ".join(over[:SAID_MAX]) + more))
