"""An asyncio event loop in virtual time: nothing sleeps, and the same program gives the same run.

Time advances only when no callback is ready, and then directly to the next timer. There is no I/O: a program that waits
without any timer set is a deadlock, and raises.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeadlockError(Exception):
    """No callback is ready, no timer is set, and the program has not ended."""


class _Selector(selectors.BaseSelector):
    """Selects nothing; a wait advances the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def register(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError
        self.now_s += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. `time()` starts at 1,000 s, to expose code that treats 0 as "never"."""

    _scheduled: list[asyncio.TimerHandle]
    """An attribute of asyncio's own loop, which has no public way to count timers."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return 1000.0 + self._virtual.now_s

    def timers(self) -> int:
        """Number of timers that are set and not cancelled."""
        return sum(not timer.cancelled() for timer in self._scheduled)


def run(main: Coroutine[object, object, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def in_virtual_time(scenario: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Make a test that runs the scenario in virtual time."""

    @wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(scenario(*args, **kwargs))

    return test
