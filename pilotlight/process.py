"""What each process does at its start and end: exit with its parent, take inherited sockets, and stop on a signal.

System calls that exist only on Linux do nothing on other systems. Signals are received one after the other, whichever
thread the kernel delivers them to: sigwait would suffice if all threads were ours, but those of libraries (OpenBLAS
starts some when numpy is imported) block no signals, and a SIGTERM delivered to one would end the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager

import click

from pilotlight.output import QuietStderr, write_stderr

PR_SET_PDEATHSIG = 1

log = logging.getLogger("pilotlight.process")


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends (prctl(2)); at once if it already has."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)


def unblock_signals() -> None:
    """The supervisor starts its children with its signals blocked, and a mask is inherited: open it again.

    A SIGHUP that is already there finds nothing to read again and must not end the process.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def open_all_files() -> None:
    """Raises the soft limit of descriptors to the hard one, for a process that starts no others.

    Shells give 1,024 so that programs with select(2) live (setrlimit(2)); engines shall get what we were given.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS says `no limit` and then refuses it
        log.warning("event=descriptors_limited error=%s", error)


def stop_event() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second SIGINT or SIGTERM ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if event.is_set():
            write_stderr("ended at once, by a second signal")
            os._exit(1)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    unblock_signals()
    return event


def reload_event() -> asyncio.Event:
    """Set by every SIGHUP: read the documents again."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, event.set)
    return event


def freeze_gc() -> None:
    """After start-up nothing of what was imported dies any more: keep the collector from looking at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run(main: Coroutine[object, object, None]) -> None:
    """Runs `main` on uvloop where it is installed (not on Windows), else on asyncio's own loop.

    Raises the ClickException that was raised inside of it, bare, however many TaskGroups it came through.
    """
    logging.getLogger().addHandler(logging.StreamHandler(QuietStderr()))
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        loop = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main)
    except BaseExceptionGroup as group:
        told = group.subgroup(click.ClickException)
        if told is None:
            raise
        first: BaseException = told
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class Signals:
    """Of these numbers, from now on; made in the main thread, once."""

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._numbers = numbers
        self._come, there = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in numbers:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(there, warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> int | None:
        """The next one; None: none came in that time."""
        if not select.select([self._come], [], [], timeout_s)[0]:
            return None
        return os.read(self._come, 1)[0]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Who is started meanwhile has them blocked, until it is ready for them (`process.unblock_signals`)."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _noted(_number: int, _frame: object) -> None:
    """Its number is in the pipe already (signal.set_wakeup_fd)."""
