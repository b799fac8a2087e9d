"""`serve`: one autoscaler process and N gateway processes on a Unix socket, kept alive, ended in order.

Owns the children, the listening sockets (so that a child that is replaced refuses nobody) and the lock of the state
directory. It decides nothing about Models. SIGKILL of this process kills gateways and autoscaler with it and leaves
the engines running, to be adopted by the next start; SIGTERM drains the gateways, then the engines are stopped; SIGHUP
has the documents read again. Engines of an autoscaler that died become children of this process (it is a subreaper),
which reaps them.
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

from autoscaler.drivers.local.processes import become_subreaper
from autoscaler.text import format_count
from pilotlight.output import write_stderr
from pilotlight.process import Signals

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
SIGNALS = {*STOP_SIGNALS, signal.SIGCHLD, signal.SIGHUP}
RESTART_S_MIN, RESTART_S_MAX = 0.1, 5.0
"""Pause before a child that died is started again; it doubles while the child keeps dying within 10 s."""
STEADY_S = 10.0
STOP_MARGIN_S = 5.0
"""What a gateway may take to end beyond the grace for its Calls; after that it hangs."""
WIND_DOWN_S_MAX = 60.0
"""What the autoscaler may take to stop engines and prove that they are gone."""
PIDS_SAID_MAX = 10
"""Of engines that are left behind."""
POLL_S = 0.02
"""How often a start is looked at until everything is ready."""


class Role(NamedTuple):
    """One child: its name, its command after `python -m pilotlight`, and the listening sockets it inherits."""

    name: str
    arguments: tuple[str, ...]
    sockets: tuple[socket.socket, ...] = ()


class Child:
    """One child process and how often it died."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        self.pause_s = RESTART_S_MIN
        self.due_s: float | None = None

    def start(self) -> None:
        """Starts it in a process group of its own: a Ctrl-C at the terminal is for the supervisor to pass on."""
        fds = [s.fileno() for s in self.role.sockets]
        command = [
            sys.executable,
            select_module_flag(),
            "pilotlight",
            *self.role.arguments,
            "--parent",
            str(os.getpid()),
        ]
        self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, process_group=0)
        self.started_s, self.due_s = time.monotonic(), None

    def ended_or_never_began(self) -> bool:
        """Whether no process of it is there now."""
        return self.process is None or self.process.poll() is not None

    def ended(self) -> int | None:
        """The exit status once, after which a restart is due; None while it runs."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.process = None
        now_s = time.monotonic()
        self.pause_s = RESTART_S_MIN if now_s - self.started_s > STEADY_S else min(self.pause_s * 2, RESTART_S_MAX)
        self.due_s = now_s + self.pause_s
        return status


class Supervisor:
    """Runs until a signal; `ready` is polled during the start, and `on_ready` called once when it is true.

    At a SIGHUP `on_reload` is called; when it says True the autoscaler is told to read the documents again.
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
        """Returns the exit status of the whole: 0 after an orderly stop."""
        self._signals = Signals(SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # of a reload during the start
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
            if number in STOP_SIGNALS or (number == signal.SIGHUP and self._terminal_gone()):
                return self._stop()
            if number == signal.SIGHUP:
                self._reload()
            reap_adopted({child.process.pid for child in children if child.process is not None})
            for child in children:
                status = child.ended()
                if status is not None:
                    write_stderr(
                        f"{child.role.name} ended ({describe_exit_status(status)}); it is started again in "
                        f"{child.pause_s:.1f} s"
                    )
                    if not announced and status == 2:
                        return self._stop(status=2)
                elif child.due_s is not None and time.monotonic() >= child.due_s:
                    self._start(child)

    def _start(self, child: Child) -> None:
        with self._signals.held():
            child.start()

    def _terminal_gone(self) -> bool:
        """A SIGHUP because the window was closed means stop, as for every command that runs in one."""
        return self._had_terminal and not has_terminal()

    def _reload(self) -> None:
        child = self._autoscaler.process
        if self._on_reload() and child is not None:
            child.send_signal(signal.SIGHUP)

    @staticmethod
    def _timeout_s(children: Sequence[Child]) -> float:
        due = [child.due_s for child in children if child.due_s is not None]
        return max(0.0, min(due) - time.monotonic()) if due else 60.0

    def _stop(self, status: int = 0) -> int:
        """Gateways first, so that nothing new arrives; then the autoscaler. A second signal ends all at once.

        A child that hangs is killed; engines that are left then are adopted by the next start. Then, and when the
        autoscaler failed to stop them, the status is 1.
        """
        write_stderr("stopping: running calls finish, waiting ones are answered; press Ctrl-C again to end at once")
        for gateway in self._gateways:
            for listener in gateway.role.sockets:
                listener.close()  # or clients would connect to a socket that nobody accepts from any more
        for group, s_max in ((self._gateways, self._drain_s_max), ([self._autoscaler], WIND_DOWN_S_MAX)):
            if group == [self._autoscaler] and self._autoscaler.ended_or_never_began():
                self._start(self._autoscaler)  # it alone knows how to stop the engines that are left
            for child in group:
                if child.process is not None:
                    child.process.send_signal(signal.SIGTERM)
            if not self._ended(group, s_max):
                return self._end_now()
            for child in group:
                if child.process is not None and child.process.poll() is None:
                    write_stderr(f"{child.role.name} did not end within {s_max:g} s and is killed")
                    child.process.kill()
                    child.process.wait()
                    status = 1
        if self._autoscaler.process is not None and self._autoscaler.process.poll():
            write_stderr("the autoscaler could not stop the engines: those that are left are adopted by the next start")
            status = status or 1
        write_stderr("stopped")
        return status

    def _end_now(self) -> int:
        """Nothing of ours is waited for any more; which engines that leaves is said. The exit status."""
        processes = [child.process for child in (*self._gateways, self._autoscaler) if child.process is not None]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        engines = list_orphaned_engines()
        left = (
            f"; {format_count(len(engines), 'engine')} still there (pid {', '.join(map(str, engines[:PIDS_SAID_MAX]))}"
        )
        left += ", ...)" if len(engines) > PIDS_SAID_MAX else ")"
        write_stderr(
            f"ended at once, running calls were cut{left + ': the next start adopts what runs then' if engines else ''}"
        )
        return 1

    def _ended(self, group: Sequence[Child], s_max: float) -> bool:
        """Waits for all of the group, or `s_max`; False when a second signal came."""
        end_s = time.monotonic() + s_max
        while any(child.process is not None and child.process.poll() is None for child in group):
            if self._signals.wait(0.5) in STOP_SIGNALS:
                return False
            if time.monotonic() >= end_s:
                break
        return True


def select_module_flag() -> str:
    """`-m`, without the folder that `serve` was called in on the path: a `gateway.py` there is none of ours.

    Only a clone that is not installed is found through that folder and nothing else.
    """
    return "-Pm" if str(Path(__file__).parents[2]) in sys.path[1:] or sys.flags.safe_path else "-m"


def reap_adopted(ours: set[int]) -> None:
    """Reaps ended processes that were reparented to us; our own children are left to their Popen."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in ours:
            return  # one of ours hides others until its own turn, which is now
        os.waitpid(info.si_pid, 0)


def list_orphaned_engines() -> list[int]:
    """Main processes of engines whose autoscaler is dead: our children now, each the leader of a session."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if child.status() != psutil.STATUS_ZOMBIE and os.getsid(child.pid) == child.pid:
                found.append(child.pid)
    return sorted(found)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def describe_exit_status(status: int) -> str:
    """An exit status in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
