"""Processes in virtual time: all tasks of one can be stopped and continued (SIGSTOP, SIGCONT) or killed (SIGKILL).

Owns the gate that each task of a process passes whenever it goes on after an `await`. Tasks that a task of a process
makes are the same process's. A process that is killed never goes on, not even to clean up; `buried` ends its tasks when
the test is over. At each such step `on_step` is told, so that a test can interrupt a process at any await point.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Process:
    """One process. `skew_s`: how far its wall clock is off."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        self.on_step: Callable[[str], None] = lambda name: None
        """Told of each step, before it is taken, with the name of its task's coroutine."""
        self.on_stop: Callable[[], None] = lambda: None
        self._running = asyncio.Event()
        self._running.set()
        self._tasks = set[asyncio.Task[Any]]()

    @property
    def runs(self) -> bool:
        """It was not stopped."""
        return self._running.is_set()

    def stop(self) -> None:
        """SIGSTOP; and SIGKILL, if it never goes on."""
        self._running.clear()
        self.on_stop()

    def go_on(self) -> None:
        """SIGCONT."""
        self._running.set()

    def run(self, make: Callable[[], T]) -> T:
        """Calls `make`; tasks that it makes are this process's."""

        def within() -> T:
            _current.set(self)
            return make()

        return copy_context().run(within)

    async def awake(self) -> None:
        """Returns when it runs: what is sent to a process that does not waits in a buffer of the kernel."""
        await self._running.wait()

    async def buried(self) -> None:
        """Ends what is left of it."""
        self.go_on()
        self.on_step = lambda name: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def make(self, work: Coroutine[Any, Any, T], context: Context) -> asyncio.Task[T]:
        """A task of this process."""
        task = asyncio.Task(_through(self, work), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_current: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """Whose code this is."""
    return _current.get()


def install() -> None:
    """From now on this event loop has processes."""
    asyncio.get_running_loop().set_task_factory(_make)


def _make(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **more: Any
) -> asyncio.Task[T]:
    context = more.get("context") or copy_context()
    process = context.get(_current)
    assert isinstance(work, Coroutine)
    if process is None:
        return asyncio.Task(work, loop=loop, context=context)
    return process.make(work, context)


async def _through(process: Process, work: Coroutine[Any, Any, T]) -> T:
    return await _Steps(process, work)


class _Steps(Generic[T]):
    """Runs a coroutine from one await to the next, through the gate of its process."""

    def __init__(self, process: Process, work: Coroutine[Any, Any, T]) -> None:
        self._process = process
        self._work = work

    def __await__(self) -> Generator[Any, None, T]:
        process, work, name = self._process, self._work, getattr(self._work, "__qualname__", "")
        error: BaseException | None = None
        while True:
            process.on_step(name)
            while not process.runs:
                try:
                    yield from process.awake().__await__()
                except asyncio.CancelledError as cancelled:  # it hears of that when it goes on
                    error = cancelled
            try:
                waits = work.send(None) if error is None else work.throw(error)
            except StopIteration as stop:
                value: T = stop.value
                return value
            error = None
            try:
                yield waits
            except BaseException as thrown:  # noqa: BLE001  it is the coroutine's
                error = thrown
