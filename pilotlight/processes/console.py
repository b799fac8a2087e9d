"""Terminal output of `serve`: state changes, Models that fit no device, and commands to paste.

* A listener of the loop reports Models that fit no device, at startup and on changes. It computes this again only when
  documents, devices or MIG layouts have changed.
* Each state change takes one line, so that a user whose requests are rejected without a start sees why. A fault of a
  capacity provider is printed once until it changes. The number of lines is limited: a folder may contain 100 models.
* The narrator writes to one descriptor without blocking: a stopped terminal or a pipe without a reader must not stop
  the loop. Lines that could not be written are counted, and their number is printed later.
* A curl command and a Python program that send a request to this listener.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from autoscaler.contract import ModelName
from autoscaler.controller.loop import LoopStep
from autoscaler.exception_handling import FaultReport, attempt_for, raise_fault
from autoscaler.explain.decision_log import RefusedCalls
from autoscaler.provisioning.unplaceable_models import is_fit_unchanged, list_unplaceable_models
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import World
from pilotlight.safe_output import list_names, write_line, write_stderr

UNSAID = frozenset({ReplicaState.PENDING, ReplicaState.SCRUBBING})
"""States that are not printed because another follows at once."""


class Narrator:
    """A listener of the loop. `fd` is where lines are written. `fault` receives Models that raised an exception."""

    def __init__(self, fd: int | None = None, fault: FaultReport = raise_fault) -> None:
        self._fault = fault
        self._fd = sys.stdout.fileno() if fd is None else fd
        self._width = 0
        self._unshown = 0
        self._wrong: dict[str, str] = {}
        """The last fault printed per provider, so that an intermittent fault is not printed each time."""

    def on_step(self, step: LoopStep) -> None:
        """Print the changes of this step."""
        for move in step.transitions:
            if move.after not in UNSAID:
                line = partial(self._tell, move.model, move.after.value, move.reason)
                attempt_for(move.model, "console", self._fault, line)
        capacity = step.after.capacity
        if capacity is not step.before.capacity:
            wrong = {name: says for name, says in capacity.wrong() if says != self._wrong.get(name)}
            for name, says in wrong.items():
                self._tell(name, "provider", says)
            self._wrong = {name: says for name, says in (self._wrong | wrong).items() if name in capacity.providers}

    def refused(self, rows: Iterable[RefusedCalls]) -> None:
        """Print the Models whose requests are rejected without a start."""
        for row in rows:
            attempt_for(row.model, "console", self._fault, partial(self._tell, row.model, "refused", row.reason))

    def _tell(self, model: str, state: str, reason: str) -> None:
        self._width = max(self._width, len(model))
        self._show(f"{model:{self._width}}  {state:9}  {reason}")

    def _show(self, text: str) -> None:
        if self._unshown and self._write(f"({self._unshown} lines were not shown)"):
            self._unshown = 0
        self._unshown += not self._write(text)

    def _write(self, text: str) -> bool:
        """Write a line and return whether it was accepted."""
        seconds, rest_ns = divmod(time.time_ns(), 1_000_000_000)
        now = time.strftime("%H:%M:%S", time.localtime(seconds))
        return write_line(self._fd, f"{now}.{rest_ns // 1_000_000:03d}  {text}")


SAID_MAX = 10
"""Maximum number of Models of one change that get a line each; one more line counts the rest."""


class News:
    """Prints changes of a set of faulty Models. `say` writes one line. Templates: `one` with {name} and {reason},
    `more` with {count}, `over` with {names}.
    """

    def __init__(self, say: Callable[[str], None], *, one: str, more: str, over: str) -> None:
        self._say = say
        self._one, self._more, self._over = one, more, over
        self._known: dict[ModelName, str] = {}

    def tell(self, known: Mapping[ModelName, str], world: World) -> None:
        """Print how `known`, Model -> reason, differs from the last call; a deleted Model is not mentioned."""
        was, self._known = self._known, dict(known)
        news = [(name, reason) for name, reason in sorted(known.items()) if was.get(name) != reason]
        for name, reason in news[:SAID_MAX]:
            self._say(self._one.format(name=name, reason=reason))
        if len(news) > SAID_MAX:
            self._say(self._more.format(count=len(news) - SAID_MAX))
        over = sorted(name for name in was if name in world.models and name not in known)
        if over:
            self._say(self._over.format(names=list_names(over, SAID_MAX)))


class Misfits:
    """Prints Models that fit no device. `say` writes one line. `fault` receives Models whose check raised an error."""

    def __init__(
        self, fault: Callable[[ModelName, str, Exception], None], say: Callable[[str], None] = write_stderr
    ) -> None:
        self._fault = fault
        self._news = News(
            say,
            one="Model {name} fits on no device: {reason}; its requests get 503 no_capacity",
            more="{count} more models fit on no device: `pilotlight status` lists them",
            over="a device is now available for {names}",
        )
        self._looked = False

    def on_step(self, step: LoopStep) -> None:
        """Print the changes of this step."""
        before, after = step.before, step.after
        if not after.leadership.synced or (self._looked and is_fit_unchanged(before, after)):
            return
        self._looked = True
        self._news.tell(list_unplaceable_models(after, lambda name, error: self._fault(name, "misfits", error)), after)


def format_curl_command(url: str, model: str, *, key: bool) -> str:
    """Return a curl command for one streaming chat request."""
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if key else ""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} -d '{body}'"


def format_python_program(url: str, model: str, *, key: bool) -> str:
    """Return a Python program for the same request with the official client (`pip install openai`)."""
    api_key = "YOUR_KEY" if key else "none-needed"
    return "\n".join(
        (
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="{api_key}")',
            'messages = [{"role": "user", "content": "Hello"}]',
            f'answer = client.chat.completions.create(model="{model}", messages=messages)',
            "print(answer.choices[0].message.content)",
        )
    )
