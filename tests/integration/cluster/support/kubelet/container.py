"""One container as a local process group: started, probed, restarted with back-off, terminated with a grace period."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.cluster.support.kubelet.probes import Prober

Spec = dict[str, Any]
AFTER_HOOK_S = 2.0
"""Minimum seconds between SIGTERM and SIGKILL, whatever `preStop` leaves of the grace period."""
LASTED_S = 600.0
"""Seconds after which a running container resets its back-off."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class BackOff(NamedTuple):
    """Seconds between restarts: initial and maximum (a kubelet: 10 and 300)."""

    first_s: float
    longest_s: float


def now(*, micro: bool = False) -> str:
    """Returns the current time in the API's format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


class Container:
    """A container with the state of `containerStatuses`; `changed` is called after each state change."""

    def __init__(
        self,
        spec: Spec,
        log: Path,
        prober: Prober,
        environment: Callable[[Spec], Awaitable[dict[str, str]]],
        changed: Callable[[], None],
        *,
        here: Callable[[str], str] = str,
    ) -> None:
        self.spec = spec
        self._log = log
        self._prober = prober
        self.ip = prober.ip
        """The address of its pod."""
        self._environment = environment
        self._changed = changed
        self._here = here
        """Translates a word that contains a path in the container to the path on this machine."""
        self.state: Spec = {"waiting": {"reason": "ContainerCreating"}}
        self._last_state: Spec = {}
        self.started = self.ready = self.ending = False
        self._restarts = 0
        self._end_s = math.inf
        self._sooner = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None

    def status(self) -> Spec:
        """Returns the entry of `containerStatuses`."""
        return {
            "name": self.spec["name"], "image": self.spec["image"], "imageID": self.spec["image"],
            "containerID": f"process://{self.process.pid}" if self.process else "", "state": self.state,
            "lastState": self._last_state, "ready": self.ready, "started": self.started,
            "restartCount": self._restarts,
        }  # fmt: skip

    def waits(self, reason: str, message: str) -> None:
        """Sets the state `waiting`."""
        self.state = {"waiting": {"reason": reason, "message": message}}
        self._changed()

    async def run(self, policy: str, back_off: BackOff) -> None:
        """Runs the container until it has terminated for good."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code, ended = await self._run_once()
            self.started = self.ready = False
            if self.ending or policy == "Never" or (policy == "OnFailure" and code == 0):
                self.state = ended
                self._changed()
                return
            lasted = time.monotonic() - began_s > LASTED_S
            pause_s = back_off.first_s if lasted else min(max(2 * pause_s, back_off.first_s), back_off.longest_s)
            self._last_state, self.state = ended, {"waiting": {"reason": "CrashLoopBackOff"}}
            self._changed()
            await asyncio.sleep(pause_s)
            self._restarts += 1

    async def _run_once(self) -> tuple[int, Spec]:
        """Runs the process once and returns (exit code, the state `terminated`)."""
        env = await self._environment(self.spec)
        words = [_expanded(word, env) for word in (*self.spec.get("command", []), *self.spec.get("args", []))]
        words = words or ["sleep", "infinity"]  # no image, so there is no entrypoint to run
        words, env = [self._here(word) for word in words], {name: self._here(env[name]) for name in env}
        began = now()
        with self._log.open("ab") as log:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *words, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, preexec_fn=_die_with_parent,
                )  # fmt: skip
            except OSError as error:
                return 127, _terminated(127, f"StartError: {error}", began)
        self.state = {"running": {"startedAt": now()}}
        self.started = "startupProbe" not in self.spec
        self.ready = self.started and "readinessProbe" not in self.spec
        self._changed()
        probes = asyncio.create_task(self._probe())
        try:
            code = await self.process.wait()
        finally:
            probes.cancel()
            if self.process.returncode is None:  # nothing else references a process started while its pod ended
                self.signal(signal.SIGKILL)
                await self.process.wait()
        code = code if code >= 0 else 128 - code  # as a shell reports signals
        return code, _terminated(code, "Completed" if code == 0 else "Error", began)

    async def _probe(self) -> None:
        spec, prober = self.spec, self._prober
        if (startup := spec.get("startupProbe")) is not None:
            await asyncio.sleep(startup.get("initialDelaySeconds", 0))
            if not await prober.until(startup, good=True, failures_max=startup.get("failureThreshold", 3)):
                self.signal(signal.SIGTERM)
                return
            self.started = True
            self.ready = "readinessProbe" not in spec
            self._changed()
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in spec:
                group.create_task(self._readiness(spec["readinessProbe"]))
            if "livenessProbe" in spec:
                group.create_task(self._liveness(spec["livenessProbe"]))

    async def _readiness(self, probe: Spec) -> None:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            await self._prober.until(probe, good=not self.ready)
            self.ready = not self.ready
            self._changed()

    async def _liveness(self, probe: Spec) -> None:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        await self._prober.until(probe, good=False)
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Sends a signal to the whole process group."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def end_within(self, grace_s: float) -> None:
        """Shortens the remaining time to `grace_s`; never extends it."""
        self._end_s = min(self._end_s, time.monotonic() + grace_s)
        self._sooner.set()

    async def end(self) -> None:
        """Sends SIGTERM, then SIGKILL when the grace period is over (`end_within`); there is no restart."""
        self.ending = True
        if self.process is None or self.process.returncode is not None:
            return
        over = asyncio.create_task(self.process.wait())
        before_s: float = self.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        await self._over_within(over, time.monotonic() + before_s)
        if before_s:
            self._end_s = max(self._end_s, time.monotonic() + AFTER_HOOK_S)
        self.signal(signal.SIGTERM)
        await self._over_within(over, math.inf)
        self.signal(signal.SIGKILL)
        await over
        if "terminated" not in self.state:
            self.state = _terminated(0, "Completed", now())
        self.ready = False

    async def _over_within(self, over: asyncio.Task[int], until_s: float) -> None:
        """Waits for the process until that time or until its grace period is over."""
        while not over.done() and (left_s := min(self._end_s, until_s) - time.monotonic()) > 0:
            self._sooner.clear()
            sooner = asyncio.create_task(self._sooner.wait())
            await asyncio.wait((over, sooner), timeout=min(left_s, 3600), return_when=asyncio.FIRST_COMPLETED)
            sooner.cancel()


def _terminated(code: int, reason: str, began: str) -> Spec:
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}}


def _expanded(word: str, env: dict[str, str]) -> str:
    """Expands $(NAME) as Kubernetes does."""
    return re.sub(r"\$\(([\w.]+)\)", lambda match: env.get(match[1], match[0]), word)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
