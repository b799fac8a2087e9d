"""Processes in virtual time: all tasks of one can be stopped and continued (SIGSTOP, SIGCONT) or killed (SIGKILL).

Each task of a process passes a gate whenever it resumes after an `await`. Tasks created by a task belong to the same
process. A killed process never resumes, not even to clean up; `buried` ends its tasks at the end of the test. `on_step`
is called at each step, so that a test can interrupt a process at any await point.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Process:
    """One process. `skew_s`: offset of its wall clock."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        self.on_step: Callable[[str], None] = lambda name: None
        """Called before each step with the name of the task's coroutine."""
        self.on_stop: Callable[[], None] = lambda: None
        self._running = asyncio.Event()
        self._running.set()
        self._tasks = set[asyncio.Task[Any]]()

    @property
    def runs(self) -> bool:
        """Whether it is not stopped."""
        return self._running.is_set()

    def stop(self) -> None:
        """SIGSTOP; also SIGKILL, if it is never continued."""
        self._running.clear()
        self.on_stop()

    def go_on(self) -> None:
        """SIGCONT."""
        self._running.set()

    def run(self, make: Callable[[], T]) -> T:
        """Call `make`; tasks that it creates belong to this process."""

        def within() -> T:
            _current.set(self)
            return make()

        return copy_context().run(within)

    async def awake(self) -> None:
        """Return when the process runs: data sent to a stopped process waits in a buffer of the kernel."""
        await self._running.wait()

    async def buried(self) -> None:
        """Cancel its remaining tasks."""
        self.go_on()
        self.on_step = lambda name: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def make(self, work: Coroutine[Any, Any, T], context: Context) -> asyncio.Task[T]:
        """Create a task of this process."""
        task = asyncio.Task(_through(self, work), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_current: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """The process of the current code."""
    return _current.get()


def install() -> None:
    """Enable processes on the running event loop."""
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
                except asyncio.CancelledError as cancelled:  # raised in the coroutine when it resumes
                    error = cancelled
            try:
                waits = work.send(None) if error is None else work.throw(error)
            except StopIteration as stop:
                value: T = stop.value
                return value
            error = None
            try:
                yield waits
            except BaseException as thrown:  # noqa: BLE001  raised in the coroutine
                error = thrown
