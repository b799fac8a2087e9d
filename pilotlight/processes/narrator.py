"""Says every transition in one line for the person at the terminal, whose Calls are refused without a start, and what
is wrong with providers of capacity: of each once, until it is something else.

Owns one descriptor, on which it never waits: the loop tells it of every step, and a terminal that was stopped or a pipe
that nobody reads must not stop deciding. Lines that could not be shown are counted and told of later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from autoscaler.controller.loop import Step
from autoscaler.explain.decision_log import Refused
from autoscaler.state.lifecycle import ReplicaState
from pilotlight.output import write_line

UNSAID = frozenset({ReplicaState.PENDING, ReplicaState.SCRUBBING})
"""States that are left out, for another follows at once."""


class Narrator:
    """A listener of the loop. `fd` is where the lines go."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdout.fileno() if fd is None else fd
        self._width = 0
        self._unshown = 0
        self._wrong: dict[str, str] = {}
        """What was said last of each provider: one that is in trouble now and then is not told of each time."""

    def on_step(self, step: Step) -> None:
        """Prints what this step changed."""
        for move in step.transitions:
            if move.after not in UNSAID:
                self._tell(move.model, move.after.value, move.reason)
        capacity = step.after.capacity
        if capacity is not step.before.capacity:
            wrong = {name: says for name, says in capacity.wrong() if says != self._wrong.get(name)}
            for name, says in wrong.items():
                self._tell(name, "provider", says)
            self._wrong = {name: says for name, says in (self._wrong | wrong).items() if name in capacity.providers}

    def refused(self, rows: Iterable[Refused]) -> None:
        """Prints whose Calls are refused without a start."""
        for row in rows:
            self._tell(row.model, "refused", row.reason)

    def _tell(self, model: str, state: str, reason: str) -> None:
        self._width = max(self._width, len(model))
        self._show(f"{model:{self._width}}  {state:9}  {reason}")

    def _show(self, text: str) -> None:
        if self._unshown and self._write(f"({self._unshown} lines were not shown)"):
            self._unshown = 0
        self._unshown += not self._write(text)

    def _write(self, text: str) -> bool:
        """Whether the line was taken."""
        seconds, rest_ns = divmod(time.time_ns(), 1_000_000_000)
        now = time.strftime("%H:%M:%S", time.localtime(seconds))
        return write_line(self._fd, f"{now}.{rest_ns // 1_000_000:03d}  {text}")
