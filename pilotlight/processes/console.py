"""Says which Models fit on no device: at the start, when it becomes so, and when it no longer is.

A listener of the loop. It looks again only when documents or devices have changed, or what nodes may be cut into.
"""

from __future__ import annotations

from collections.abc import Callable

from autoscaler.contract import ModelName
from autoscaler.controller.loop import Step
from autoscaler.provisioning.feasibility import as_before, misfits
from pilotlight.output import say
from pilotlight.processes.news import News


class Misfits:
    """`say` takes one line. `fault` gets the Model that raised an exception."""

    def __init__(self, fault: Callable[[ModelName, str, Exception], None], say: Callable[[str], None] = say) -> None:
        self._fault = fault
        self._news = News(
            say,
            one="Model {name} fits on no device: {reason}; its calls get 503 no_capacity",
            more="{count} more models fit on no device: `pilotlight status` tells each",
            over="there is a device now for {names}",
        )
        self._looked = False

    def on_step(self, step: Step) -> None:
        """Says what this step changed."""
        before, after = step.before, step.after
        if not after.synced or (self._looked and as_before(before, after)):
            return
        self._looked = True
        self._news.tell(misfits(after, lambda name, error: self._fault(name, "misfits", error)), after)
