"""Start and end of each process: exits with its parent, inherits sockets, and stops on a signal.

System calls that exist only on Linux are skipped on other systems. Signals are received one at a time, in whichever
thread. sigwait would not suffice: threads of libraries do not block signals (OpenBLAS starts some when numpy is
imported). A SIGTERM delivered to such a thread would terminate the process at once.
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
from pathlib import Path

import click

from pilotlight.safe_output import QuietStderr, write_stderr

PR_SET_PDEATHSIG = 1

log = logging.getLogger("pilotlight.process.limits")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent thread ends (prctl(2)); exit at once if it already has."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)


def unblock_signals() -> None:
    """Unblock the signals that the supervisor blocks while it starts a child, since children inherit the mask.

    SIGHUP is ignored first: a pending one has nothing to reload and must not end the process.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def open_all_files() -> None:
    """Raise the soft limit of file descriptors to the hard limit, for a process that starts no child processes.

    Shells set 1,024 for programs that use select(2) (setrlimit(2)); engines should inherit the original limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS reports no limit and then rejects it
        log.warning("event=descriptors_limited error=%s", error)


def count_open_files() -> int:
    """Return how many file descriptors this process has open."""
    return len(list(Path("/dev/fd").iterdir()))


def stop_event() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second signal ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if event.is_set():
            write_stderr("stopped at once after a second signal")
            os._exit(1)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    unblock_signals()
    return event


def reload_event() -> asyncio.Event:
    """Return an event that each SIGHUP sets, to reload the documents."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, event.set)
    return event


def freeze_gc() -> None:
    """Exclude the objects created at startup from garbage collection: they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run(main: Coroutine[object, object, None]) -> None:
    """Run `main` on uvloop if it is installed (not on Windows), else on asyncio's own loop, and log to standard error.

    Log lines have the form `event=NAME key=value ...`: NAME is snake_case, a noun or a verb in past tense. A value that
    may contain spaces is quoted with `%r`, except an `error` or `reason` at the end of the line. No line contains a
    prompt, a key or an address. Loggers are named `pilotlight.COMPONENT.TOPIC`. Messages of a command to its user
    (`write_stderr`) have no event.

    A ClickException from inside is raised without the exception groups of the TaskGroups that it passed through.
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
        reported = group.subgroup(click.ClickException)
        if reported is None:
            raise
        first: BaseException = reported
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class Signals:
    """Receives these signals from now on. Create it once, in the main thread."""

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._numbers = numbers
        self._come, there = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in numbers:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(there, warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> int | None:
        """Return the next signal, or None if none arrives within the timeout."""
        if not select.select([self._come], [], [], timeout_s)[0]:
            return None
        return os.read(self._come, 1)[0]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block the signals; a process started meanwhile inherits the mask until it calls `unblock_signals`."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _noted(_number: int, _frame: object) -> None:
    """Do nothing: `signal.set_wakeup_fd` has already written the signal's number to the pipe."""
