"""The gateway process as it is, with a clock around everything of ours that its event loop calls.

`python -m bench.timed FILE gateway ...` takes the arguments of `pilotlight` after the file that it tells the longest
callback to. Owns the clock: CPU time of the thread, so that a neighbour on the core is not counted. Three ways lead
from uvloop into our code, and all are timed: methods of the protocols (client and engine connections), callbacks with
the steps of tasks (`call_soon`), and timers. At a SIGUSR1 the longest since the last one is written down.
The product knows nothing of this.
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
    """The longest callback since the last look, and how many there were."""

    def __init__(self) -> None:
        self._longest_ns, self._where, self._calls = 0, "", 0

    def timed(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """The same, timed."""

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

    def tell(self, path: Path) -> None:
        """Writes down what there was, and begins anew."""
        told = {"longest_ms": self._longest_ns / 1e6, "where": self._where, "calls": self._calls}
        self._longest_ns, self._where, self._calls = 0, "", 0
        path.with_suffix(".new").write_text(json.dumps(told))
        path.with_suffix(".new").replace(path)


WATCH = Watch()


class TimedLoop(uvloop.Loop):
    """uvloop, with everything that is scheduled on it timed."""

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """As uvloop's."""
        return super().call_soon(WATCH.timed(callback), *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As uvloop's."""
        return super().call_later(delay, WATCH.timed(callback), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As uvloop's."""
        return super().call_at(when, WATCH.timed(callback), *args, context=context)


def run(main: Coroutine[object, object, None], path: Path) -> None:
    """In place of `pilotlight.process.run`."""

    async def watched() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, WATCH.tell, path)
        await main

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(watched())


def main() -> None:
    """Times what can be called, then is `pilotlight`."""
    path = Path(sys.argv.pop(1))
    for kind in (Connection, EngineConnection):
        for name in CALLED:
            if name in vars(kind):
                setattr(kind, name, WATCH.timed(getattr(kind, name)))
    process.run = functools.partial(run, path=path)
    cli()


if __name__ == "__main__":
    main()
