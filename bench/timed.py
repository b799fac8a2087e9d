"""The unchanged gateway process, with a timer around every callback that its event loop runs.

`python -m bench.timed FILE gateway ...`: after the file for the longest callback, the arguments of `pilotlight` follow.
The timer measures the CPU time of the thread, so other processes on the core do not count. It covers all three ways in
which uvloop calls the gateway's code: methods of the protocols (client and engine connections), callbacks including the
steps of tasks (`call_soon`), and timers. On SIGUSR1 the longest callback since the last signal is written to the file.
The product does not depend on this.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import ParamSpec, TypeVar

import uvloop

from gateway.server.connection import Connection
from gateway.upstream.connection import EngineConnection
from pilotlight import process
from pilotlight.cli.main import cli

CALLED = ("connection_made", "data_received", "eof_received", "pause_writing", "resume_writing", "connection_lost")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Watch:
    """The longest callback since the last report, and the number of callbacks."""

    def __init__(self) -> None:
        self._longest_ns, self._where, self._calls = 0, "", 0

    def timed(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return the function with a timer."""

        def around(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            begun_ns = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took_ns = time.thread_time_ns() - begun_ns
                self._calls += 1
                if took_ns > self._longest_ns:
                    self._longest_ns, self._where = took_ns, getattr(call, "__qualname__", repr(call))

        return around

    def report(self, path: Path) -> None:
        """Write the measurements to the file, and reset them."""
        found = {"longest_ms": self._longest_ns / 1e6, "where": self._where, "calls": self._calls}
        self._longest_ns, self._where, self._calls = 0, "", 0
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").replace(path)


WATCH = Watch()


class TimedLoop(uvloop.Loop):
    """uvloop with timers around everything that is scheduled on it."""

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """As in uvloop."""
        return super().call_soon(WATCH.timed(callback), *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in uvloop."""
        return super().call_later(delay, WATCH.timed(callback), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in uvloop."""
        return super().call_at(when, WATCH.timed(callback), *args, context=context)


def run(main: Coroutine[object, object, None], path: Path) -> None:
    """Replacement of `pilotlight.process.run`."""

    async def watched() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, WATCH.report, path)
        await main

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(watched())


def main() -> None:
    """Install the timers, then run `pilotlight`."""
    path = Path(sys.argv.pop(1))
    for kind in (Connection, EngineConnection):
        for name in CALLED:
            if name in vars(kind):
                setattr(kind, name, WATCH.timed(getattr(kind, name)))
    process.run = functools.partial(run, path=path)
    cli()


if __name__ == "__main__":
    main()
