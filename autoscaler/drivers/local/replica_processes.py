"""Processes of replicas on this machine: spawns, identifies, finds, signals and reaps them. I/O; Linux 5.3 or newer.

A process is identified by its pid, its start time and its boot. A mark in its environment names the installation and
the replica. Before a process is signalled, a pidfd is opened and the start time is compared, so that no other process
with the same pid gets the signal. The end of a process is observed by its pidfd, also if it is not our child. Children
that other code of this process started are never reaped. /proc is scanned in steps of about a millisecond, so that the
event loop is not blocked. If file descriptors run out, a scan waits and is retried (`retry_on_shortage`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from autoscaler.drivers.resilient_tasks import SHORT, retry_on_shortage

MARK = "PILOTLIGHT_REPLICA"
BLANK = ""
"""An environment that is empty, overwritten with a process title (as by vLLM), or not set yet during an exec."""
LOOK_AT_ONCE = 48
"""Processes scanned before yielding to the event loop: about a millisecond."""
_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Facts(NamedTuple):
    """One process as in /proc/PID/stat. `gone`: it has ended and waits to be reaped."""

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int
    rss_pages: int
    gone: bool


class ProcessSelector(NamedTuple):
    """Selects one replica's processes."""

    mark: str
    main_pid: int = 0
    """Leader of the session that it was started in; 0: unknown."""
    held: bool = False
    """The main process is our child and not reaped: its pid, group and session cannot be reused."""
    since_ticks: int = 0
    """When the main process started: processes started earlier are excluded."""


def become_subreaper() -> None:
    """Make this process the parent of engines' orphans, so that it can reap them: prctl(2). Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def boot_id() -> str:
    """Return an id that differs with every boot; start times of different boots are not comparable."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int) -> Facts | None:
    """Return the kernel's facts about a pid; None if the process does not exist or is hidden from us (hidepid,
    proc(5)). Raises `OSError` in a resource shortage. Fields: proc_pid_stat(5).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - half the cost of Path.read_bytes, 100 per scan
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    f = text[text.rindex(b")") + 2 :].split()
    gone = f[0] in b"ZX" and int(f[17]) <= 1  # a leader that ended before its threads is shown as Z and lives on
    return Facts(pid, int(f[1]), int(f[2]), int(f[3]), int(f[19]), int(f[21]), gone)


def read_process_mark(pid: int) -> str | None:
    """Return the mark of the process; BLANK if its environment is blank. None: the process has no mark, is not readable
    by us, or has ended.

    Raises `OSError` in a resource shortage.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as above
            environment = file.read()
    except OSError as error:
        if error.errno in SHORT:
            raise
        return None  # gone, or another user's
    if not environment.strip(b"\0"):
        return BLANK
    _, found, rest = (b"\0" + environment).partition(f"\0{MARK}=".encode())
    return rest.partition(b"\0")[0].decode(errors="replace") if found else None


def is_process_alive(pid: int, start_ticks: int, mark: str) -> bool:
    """Return whether exactly this process still runs. The caller must compare the boot."""
    now = read_process(pid)
    return (
        now is not None and not now.gone and now.start_ticks == start_ticks and read_process_mark(pid) in (mark, BLANK)
    )


def started_s(start_ticks: int) -> float:
    """Convert a start time to seconds of the monotonic clock."""
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / _TICKS_PER_S)


def spawn_process(
    argv: Sequence[str], env: Mapping[str, str], output_fd: int, inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, which inherits no descriptor of ours except `inherited`.
    Raises `OSError` on failure.
    """
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        start_new_session=True,
        close_fds=True,
        pass_fds=inherited,
    )


def describe_exit(pid: int) -> str:
    """Describe how our child ended, without reaping it; empty while it runs or if it is not our child."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    if status is None:
        return ""
    if status.si_code == os.CLD_EXITED:
        return f"exited with status {status.si_status}"
    return f"was killed by {signal.Signals(status.si_status).name}"


async def iterate_processes(reaper: Reaper | None = None) -> AsyncIterator[Facts | None]:
    """Yield all processes once; yield None for each that ended during the scan, since its children may be missed."""
    names = await retry_on_shortage(partial(os.listdir, "/proc"))
    for i, name in enumerate(names):
        if name.isdigit():
            yield await retry_on_shortage(partial(_look, int(name), reaper))
        if i % LOOK_AT_ONCE == LOOK_AT_ONCE - 1:
            await asyncio.sleep(0)


def _look(pid: int, reaper: Reaper | None) -> Facts | None:
    one = read_process(pid)
    if one is not None and reaper is not None:
        reaper.consider(one)
    return one


async def find_processes(claim: ProcessSelector, reaper: Reaper | None = None) -> tuple[tuple[Facts, ...], bool]:
    """Return (running processes of the claim, whether the scan was complete: none vanished, all were identified)."""
    if claim.main_pid and not claim.held:
        leader = await retry_on_shortage(partial(read_process, claim.main_pid))
        if leader is not None and leader.start_ticks != claim.since_ticks:
            claim = claim._replace(main_pid=0)  # its pid was reused: the session of this number is not ours
    found, complete = [], True
    async for one in iterate_processes(reaper):
        if one is None:
            complete = False
        elif not one.gone and one.start_ticks >= claim.since_ticks:
            claimed = await retry_on_shortage(partial(_claimed, one, claim))
            complete = complete and claimed is not None
            if claimed:
                found.append(one)
    return tuple(found), complete


def _claimed(one: Facts, claim: ProcessSelector) -> bool | None:
    """Return whether the process belongs to the claim; None: its environment is blank."""
    in_session = claim.main_pid != 0 and claim.main_pid in (one.session, one.group)
    if in_session and claim.held:
        return True
    mark = read_process_mark(one.pid)
    if mark == BLANK:
        kernel_thread = one.rss_pages == 0
        return in_session or (False if kernel_thread else None)
    return mark == claim.mark


async def find_marked_processes(prefix: str, reaper: Reaper) -> dict[str, list[Facts]]:
    """Return all running processes whose mark starts with `prefix`, by the rest of their mark."""
    found: dict[str, list[Facts]] = {}
    async for one in iterate_processes(reaper):
        if one is not None and not one.gone:
            mark = await retry_on_shortage(partial(read_process_mark, one.pid))
            if mark is not None and mark.startswith(prefix):
                found.setdefault(mark.removeprefix(prefix), []).append(one)
    return found


def send_signal(targets: Iterable[Facts], number: signal.Signals) -> None:
    """Signal exactly these processes, never another one that got the same pid.
    Raises `OSError` in a resource shortage; some processes may have been signalled.
    """
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = os.pidfd_open(target.pid)
            try:
                now = read_process(target.pid)
                if now is not None and now.start_ticks == target.start_ticks:
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


class Reaper:
    """Reaps engines' orphans, which the kernel reparents to a subreaper, and no other child of this process.

    A child that this process started is in our session or leads its own. So a zombie child in any other session is an
    orphan. A zombie that leads its own session is reaped only if it was observed with our mark while it ran.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._session = os.getsid(0)
        self._mains: set[int] = set()
        self._orphans: set[tuple[int, int]] = set()
        """(pid, start) of our children that lead their own session and carry our mark, until they are reaped."""

    def spare(self, pid: int) -> None:
        """Never reap this child, because other code needs its exit status."""
        self._mains.add(pid)

    def forget(self, pid: int) -> None:
        """Forget a spared child that has been reaped."""
        self._mains.discard(pid)

    def consider(self, one: Facts) -> None:
        """Process the facts of one process: check its mark while it runs, reap it when it has ended."""
        if one.parent != os.getpid() or one.pid in self._mains:
            return
        leads, key = one.session == one.pid, (one.pid, one.start_ticks)
        if not one.gone:
            if leads and (read_process_mark(one.pid) or "").startswith(self._prefix):
                self._orphans.add(key)
        elif key in self._orphans or (not leads and one.session != self._session):
            self._orphans.discard(key)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, os.WNOHANG)


class ProcessWatch:
    """Watches at most one process per name; watching another one under the same name replaces it."""

    def __init__(self) -> None:
        self._watched: dict[Hashable, tuple[int, int]] = {}

    def watch(self, name: Hashable, pid: int, ended: Callable[[], None]) -> None:
        """Call `ended` once when the process ends; at once if it does not exist."""
        known = self._watched.get(name)
        if known is not None and known[0] == pid:
            return
        self.forget(name)
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            ended()
            return
        self._watched[name] = (pid, fd)

        def on_exit() -> None:
            self.forget(name)
            ended()

        asyncio.get_running_loop().add_reader(fd, on_exit)

    def forget(self, name: Hashable) -> None:
        """Stop watching; `ended` is not called."""
        known = self._watched.pop(name, None)
        if known is not None:
            asyncio.get_running_loop().remove_reader(known[1])
            os.close(known[1])
