"""The supervisor of `serve`: starts one autoscaler and N gateways, restarts them, and stops them in order.

Holds the child processes, the listening sockets (so that clients are not refused while a child restarts) and the lock
of the state directory. It makes no decisions about Models. SIGKILL of this process also kills gateways and autoscaler
but leaves the engines running, which the next start adopts. SIGTERM drains the gateways, then stops the engines. SIGHUP
reloads the documents. Engines of a crashed autoscaler become children of this process (a subreaper), which reaps them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from autoscaler.drivers.local.replica_processes import become_subreaper
from autoscaler.text import format_count
from pilotlight.process import Signals
from pilotlight.safe_output import write_line, write_stderr

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
SIGNALS = {*STOP_SIGNALS, signal.SIGCHLD, signal.SIGHUP}
RESTART_S_MIN, RESTART_S_MAX = 0.1, 5.0
"""Pause before a crashed child is restarted; doubled while it keeps crashing within 10 s."""
STEADY_S = 10.0
STOP_MARGIN_S = 5.0
"""Time beyond the grace period of its requests after which a stopping gateway counts as hung."""
WIND_DOWN_S_MAX = 60.0
"""Time limit for the autoscaler to stop engines and verify that they are gone."""
PIDS_SAID_MAX = 10
"""Maximum number of process ids printed for orphaned engines."""
POLL_S = 0.02
"""Interval of readiness checks during startup."""


class Role(NamedTuple):
    """A child: its name, its arguments after `python -m pilotlight`, and the listening sockets that it inherits."""

    name: str
    arguments: tuple[str, ...]
    sockets: tuple[socket.socket, ...] = ()


class Child:
    """A child process with its restart backoff."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        self.pause_s = RESTART_S_MIN
        self.due_s: float | None = None

    def start(self) -> None:
        """Start it in its own process group, so that the supervisor handles Ctrl-C at the terminal."""
        fds = [s.fileno() for s in self.role.sockets]
        arguments = ["pilotlight", *self.role.arguments, "--parent", str(os.getpid())]
        command = [sys.executable, select_module_flag(), *arguments]
        self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, process_group=0)
        self.started_s, self.due_s = time.monotonic(), None

    def ended_or_never_began(self) -> bool:
        """Return whether the child is not running."""
        return self.process is None or self.process.poll() is not None

    def ended(self) -> int | None:
        """Return the exit status once and schedule a restart; None while it runs."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.process = None
        now_s = time.monotonic()
        self.pause_s = RESTART_S_MIN if now_s - self.started_s > STEADY_S else min(self.pause_s * 2, RESTART_S_MAX)
        self.due_s = now_s + self.pause_s
        return status


class Supervisor:
    """Runs until a signal; polls `ready` during startup and then calls `on_ready` once.

    On SIGHUP it calls `on_reload`; if that returns True, it signals the autoscaler to reload the documents.
    """

    def __init__(
        self,
        autoscaler: Role,
        gateways: Sequence[Role],
        *,
        ready: Callable[[], bool],
        on_ready: Callable[[], None],
        on_reload: Callable[[], bool],
        grace_s: float,
    ) -> None:
        self._autoscaler = Child(autoscaler)
        self._gateways = [Child(role) for role in gateways]
        self._ready = ready
        self._on_ready = on_ready
        self._on_reload = on_reload
        self._drain_s_max = grace_s + STOP_MARGIN_S
        self._had_terminal = has_terminal()

    def run(self) -> int:
        """Run and return the exit status: 0 after an orderly stop."""
        self._signals = Signals(SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a reload requested during startup
        become_subreaper()
        children = [self._autoscaler, *self._gateways]
        for child in children:
            self._start(child)
        announced = False
        while True:
            if not announced and self._ready():
                announced = True
                self._on_ready()
            number = self._signals.wait(self._timeout_s(children) if announced else POLL_S)
            # SIGHUP means stop if the terminal was closed, as for any terminal program.
            if number in STOP_SIGNALS or (number == signal.SIGHUP and self._had_terminal and not has_terminal()):
                return self._stop()
            if number == signal.SIGHUP:
                self._reload()
            reap_adopted({child.process.pid for child in children if child.process is not None})
            for child in children:
                status = child.ended()
                if status is not None:
                    reason = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                    restart_s = f"{child.pause_s:.1f}"
                    _log(f"event=process_exited process={child.role.name} restart_s={restart_s} reason={reason!r}")
                    if not announced and status == 2:
                        return self._stop(status=2)
                elif child.due_s is not None and time.monotonic() >= child.due_s:
                    self._start(child)

    def _start(self, child: Child) -> None:
        with self._signals.held():
            child.start()

    def _reload(self) -> None:
        child = self._autoscaler.process
        if self._on_reload() and child is not None:
            child.send_signal(signal.SIGHUP)

    @staticmethod
    def _timeout_s(children: Sequence[Child]) -> float:
        due = [child.due_s for child in children if child.due_s is not None]
        return max(0.0, min(due) - time.monotonic()) if due else 60.0

    def _stop(self, status: int = 0) -> int:
        """Stop the gateways first, so that no new requests arrive, then the autoscaler. A second signal kills all.

        A hung child is killed; the next start adopts engines that are left. The exit status is 1 if a child was killed
        or the autoscaler failed to stop the engines.
        """
        write_stderr("stopping: running requests finish, waiting ones are rejected; press Ctrl-C again to stop at once")
        for gateway in self._gateways:
            for listener in gateway.role.sockets:
                listener.close()  # otherwise clients would connect to a socket that is no longer accepted from
        for group, s_max in ((self._gateways, self._drain_s_max), ([self._autoscaler], WIND_DOWN_S_MAX)):
            if group == [self._autoscaler] and self._autoscaler.ended_or_never_began():
                self._start(self._autoscaler)  # only it can stop the remaining engines
            for child in group:
                if child.process is not None:
                    child.process.send_signal(signal.SIGTERM)
            if not self._ended(group, s_max):
                return self._end_now()
            for child in group:
                if child.process is not None and child.process.poll() is None:
                    _log(f"event=process_killed process={child.role.name} timeout_s={s_max:g} reason='stop timed out'")
                    child.process.kill()
                    child.process.wait()
                    status = 1
        if self._autoscaler.process is not None and self._autoscaler.process.poll():
            _log("event=engine_stop_failed effect='the next start adopts the engines that are left'")
            status = status or 1
        write_stderr("stopped")
        return status

    def _end_now(self) -> int:
        """Kill all children, report the engines that are left, and return the exit status."""
        processes = [child.process for child in (*self._gateways, self._autoscaler) if child.process is not None]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        engines = list_orphaned_engines()
        left = ""
        if engines:
            pids = [*map(str, engines[:PIDS_SAID_MAX]), *(["..."] if len(engines) > PIDS_SAID_MAX else [])]
            count = format_count(len(engines), "engine")
            left = f"; {count} still running (pid {', '.join(pids)}): the next start adopts them"
        write_stderr(f"stopped at once; running requests were aborted{left}")
        return 1

    def _ended(self, group: Sequence[Child], s_max: float) -> bool:
        """Wait for the group, at most `s_max`; return False on a second signal."""
        end_s = time.monotonic() + s_max
        while any(child.process is not None and child.process.poll() is None for child in group):
            if self._signals.wait(0.5) in STOP_SIGNALS:
                return False
            if time.monotonic() >= end_s:
                break
        return True


def select_module_flag() -> str:
    """Return `-m`, with the current folder excluded from the module search path, because a foreign `gateway.py` may be
    in that folder.

    The folder is kept only for a clone that is not installed, which is found through nothing else.
    """
    return "-Pm" if str(Path(__file__).parents[2]) in sys.path[1:] or sys.flags.safe_path else "-m"


def reap_adopted(ours: set[int]) -> None:
    """Reap ended processes that were reparented to this one; our own children are left to their Popen."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in ours:
            return  # an ended child of ours hides others until it is reaped by its own poll, which follows
        os.waitpid(info.si_pid, 0)


def list_orphaned_engines() -> list[int]:
    """Return the main processes of engines whose autoscaler is dead: session leaders that are now our children."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if child.status() != psutil.STATUS_ZOMBIE and os.getsid(child.pid) == child.pid:
                found.append(child.pid)
    return sorted(found)


def has_terminal() -> bool:
    """Return whether this process still has a controlling terminal (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _log(line: str) -> None:
    """Write a log line without blocking: this process has no log handler."""
    write_line(sys.stderr.fileno(), line)
