"""Attaches and detaches fabric GPUs on this node as autoscalers request it, and reports the progress. I/O.

Each round makes one look and one step per GPU; after a successful step the next round starts at once.
`pilotlight.agent.gpu.hotplug` decides the steps. A withdrawn request is undone before it is forgotten. Failures are
logged and retried. The caller passes only the requests of the newest epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from autoscaler.agent_contract import FabricReport, FabricWant
from pilotlight.agent.gpu import hotplug
from pilotlight.agent.gpu.hotplug import Job, Seen, Stand, Step
from pilotlight.agent.gpu.pci_bus import StepError

LOOK_S = 1.0
"""Interval between looks while a GPU is attached or detached and no step succeeded."""
REST_S = 30.0
"""Maximum pause while there is nothing to do; a changed request ends it."""
SAID_MAX = 300

log = logging.getLogger("pilotlight.agent.gpu")


class Node(Protocol):
    """The node's bus, driver and pods."""

    def look(self, jobs: Sequence[Job]) -> Awaitable[Seen]:
        """Return what is seen of the node; `Seen.trouble` contains what could not be read."""

    def act(self, step: Step) -> Awaitable[None]:
        """Execute a step. Raises StepError."""


class Attaching:
    """The attachment loop of one node. `changed` is called when the report changes."""

    def __init__(self, node: Node, clock: Callable[[], float] = time.monotonic) -> None:
        self._node, self._clock = node, clock
        self.changed: Callable[[], None] = lambda: None
        self._jobs: dict[str, Job] = {}
        self._stands: dict[str, Stand] = {}
        self._last: dict[str, Step] = {}
        self._wanted: dict[str, FabricWant] = {}
        self._wake = asyncio.Event()
        self._swept: bool | None = None
        """Whether leftovers of a previous agent process are undone; None before the first `want`."""

    def want(self, wants: Sequence[FabricWant]) -> None:
        """Set all requested attachments and detachments."""
        wanted = {one.device: one for one in wants}
        if wanted != self._wanted or self._swept is None:
            self._swept = bool(self._swept)
            self._wanted = wanted
            self._wake.set()

    def report(self) -> tuple[FabricReport, ...]:
        """Return the progress of each request."""
        return tuple(
            FabricReport(
                device=device, leave=one.leave, done=stand.done, failed=stand.failed, says=stand.says[:SAID_MAX]
            )
            for device, one in sorted(self._wanted.items())
            if (stand := self._stands.get(device)) is not None and self._jobs[device].leave == one.leave
        )  # fmt: skip

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            self._wake.clear()
            moved = await self.turn()
            pause_s = 0.0 if moved else LOOK_S if self._jobs else REST_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def turn(self) -> bool:
        """Make one look and one step per GPU; return whether a step made progress."""
        self._begin()
        if not self._jobs and self._swept is not False:
            return False
        seen, before, moved = await self._node.look([*self._jobs.values()]), self.report(), False
        self._jobs = {device: hotplug.observe_job(job, seen) for device, job in self._jobs.items()}
        for device in sorted(self._jobs):
            moved = await self._step(device, seen) or moved
        if self.report() != before:
            self.changed()
        if self._swept is False and not seen.trouble:
            await self._sweep(seen)
        return moved

    async def _sweep(self, seen: Seen) -> None:
        """Undo leftovers of a previous agent process, once. Later detachments are undone when they are withdrawn."""
        self._swept = True
        for step in hotplug.list_cleanup_steps(self._jobs.values(), seen):
            try:
                await self._node.act(step)
            except StepError as error:
                self._swept = False
                log.warning("event=fabric_step device=%s step=%s reason=%r", step.of[0], step.does, str(error))

    def _begin(self) -> None:
        """Start a new job for each new or reversed request; the last known bus is kept."""
        for device, want in self._wanted.items():
            known = self._jobs.get(device)
            if known is None or known.leave != want.leave:
                bus = "" if known is None else known.bus
                self._jobs[device] = Job(device, want.leave, self._clock(), bus)
                self._stands.pop(device, None)

    async def _step(self, device: str, seen: Seen) -> bool:
        job, wanted = self._jobs[device], [one for name, one in self._jobs.items() if name in self._wanted]
        step = (
            hotplug.next_step(job, seen, self._clock(), wanted) if job in wanted else hotplug.next_undo_step(job, seen)
        )
        if isinstance(step, Stand):
            self._stands[device] = step
            return False
        if step is None:
            if not seen.trouble:
                del self._jobs[device]
                self._stands.pop(device, None)
                self._last.pop(device, None)
            return False
        return await self._act(device, job, step)

    async def _act(self, device: str, job: Job, step: Step) -> bool:
        if self._stands.get(device, Stand(done=True)).done:  # not started, or no longer done
            self._stands[device] = Stand("the node releases it" if job.leave else "the node attaches it")
        try:
            await self._node.act(step)
        except StepError as error:
            if self._stands.get(device, Stand()).says != str(error):
                log.warning("event=fabric_step device=%s step=%s reason=%r", device, step.does, str(error))
            self._stands[device] = Stand(str(error))
            return False
        log.info("event=fabric_step device=%s step=%s", device, step.does)
        self._jobs[device] = hotplug.record_step(job, step, self._clock())
        fresh = self._last.get(device) != step  # pause before repeating a step that succeeded without effect
        self._last[device] = step
        return fresh and step.does != "scan"
