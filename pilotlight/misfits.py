"""Says which Models fit on no device: at the start, when it becomes so, and when it no longer is.

A listener of the loop. Owns what was said; it looks again only when documents or devices have changed, and says at most
so many at a time, since a folder may hold a hundred models for a machine that is not there.
"""

from __future__ import annotations

from collections.abc import Callable

from autoscaler.contract import ModelName
from autoscaler.fitting import misfits
from autoscaler.loop import Step
from pilotlight.quiet import say

SAID_MAX = 10
"""Models of one change that get a line each; how many more there are is one line."""


class Misfits:
    """`say` takes one line."""

    def __init__(self, say: Callable[[str], None] = say) -> None:
        self._say = say
        self._known: dict[ModelName, str] = {}
        self._looked = False

    def on_step(self, step: Step) -> None:
        """Says what this step changed."""
        before, after = step.before, step.after
        same = before.models is after.models and before.slices is after.slices
        if not after.synced or (self._looked and same):
            return
        self._looked = True
        was, self._known = self._known, misfits(after)
        news = [(name, reason) for name, reason in self._known.items() if was.get(name) != reason]
        for name, reason in news[:SAID_MAX]:
            self._say(f"Model {name} fits on no device: {reason}; its calls get 503 no_capacity")
        if len(news) > SAID_MAX:
            self._say(f"{len(news) - SAID_MAX} more models fit on no device: `pilotlight status` tells each")
        fit = sorted(name for name in was if name in after.models and name not in self._known)
        if fit:
            more = f" and {len(fit) - SAID_MAX} more" if len(fit) > SAID_MAX else ""
            self._say(f"there is a device now for {', '.join(fit[:SAID_MAX])}{more}")
