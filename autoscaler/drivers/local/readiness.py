"""Probes whether an engine is ready for requests, as long as it runs, and reports changes. I/O.

The first 200 from its own process means READY; three failures in a row after that mean UNREADY; the next 200 means
READY again. While an engine starts, its memory growth is also checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from autoscaler.drivers import probes
from autoscaler.drivers.local.container_runtime import RuntimeFailedError, list_containers
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.engine_process import EngineProcess
from autoscaler.drivers.local.nvml import NvmlError
from autoscaler.drivers.local.ports import HOST, has_open_socket, list_listening_sockets
from autoscaler.drivers.local.replica_processes import Reaper, find_processes
from autoscaler.drivers.local.state_directory import ReplicaRecord
from autoscaler.drivers.resilient_tasks import retry_on_shortage
from autoscaler.state.events import Seen
from autoscaler.text import format_size

WEIGH_EVERY_S = 1.0
"""How often the memory of a starting engine is measured."""
WEIGH_READY_S = 10.0
"""How often the memory of a ready engine is measured."""
EXCESS = 1.03
"""A replica whose usage exceeds its claim by this factor is logged, and again after each further growth by it."""
GREW_BYTES = 1 << 20
FIRST_CALLS_S = 0.05
"""Delay of the scan of a ready engine's processes, so that it does not delay the first requests."""

_log = logging.getLogger("pilotlight.autoscaler.local_driver")


class EngineStateCallback(Protocol):
    """Receives the observed state of an engine."""

    def __call__(self, engine: EngineProcess, seen: Seen, *, reason: str = "", grew: bool = False) -> None:
        """Report the new state of the engine."""


class Readiness:
    """Probes engines. `remember` stores a changed record."""

    def __init__(
        self,
        devices: Devices,
        reaper: Reaper,
        clock: Callable[[], float],
        see: EngineStateCallback,
        remember: Callable[[ReplicaRecord], None],
    ) -> None:
        self._devices = devices
        self._reaper = reaper
        self._clock = clock
        self._see = see
        self._remember = remember
        self._pace = probes.Pace(clock)

    async def probe_until_stopped(self, engine: EngineProcess) -> None:
        """Probe the engine until cancelled, one probe at a time."""
        weigh_s = engine.born_s + WEIGH_EVERY_S
        while True:
            await self._pace.turn()
            began_s = self._clock()
            answered = await self._probe(engine.record)
            pause_s = await self._judge(engine, answered=answered)
            if self._clock() >= weigh_s:
                weigh_s = self._clock() + (WEIGH_EVERY_S if engine.seen is Seen.STARTING else WEIGH_READY_S)
                await self._look_again(engine)
            await asyncio.sleep(max(0.0, began_s + pause_s - self._clock()))

    async def answers(self, engine: EngineProcess) -> bool:
        """Probe once: return whether the engine is ready and the response is its own."""
        answered = await self._probe(engine.record)
        return bool(answered) and await self._is_its_own(engine)

    @staticmethod
    async def _probe(record: ReplicaRecord) -> bool | None:
        if record.tls is None:
            return await probes.probe_engine(HOST, record.port, record.readiness_path)
        return await probes.probe_engine(
            HOST, record.port, record.readiness_path, tls_name=record.tls.server_name or HOST
        )

    async def _judge(self, engine: EngineProcess, *, answered: bool | None) -> float:
        """Evaluate a probe. Return the seconds between the starts of this probe and the next one."""
        if engine.seen is Seen.STARTING:
            if not answered:
                listens = answered is not None
                await self._look_early(engine, listens=listens)
                return probes.probe_interval_s(self._clock() - engine.born_s, listens=listens)
            if not engine.owns_port and not await self._is_its_own(engine):
                if not engine.reason:
                    reason = f"a foreign process listens on its port {engine.record.port}"
                    self._see(engine, Seen.STARTING, reason=reason)
                return probes.READY_EVERY_S
            await self._got_ready(engine)
        elif answered:
            engine.failed_probes = 0
            if engine.seen is Seen.UNREADY:
                self._see(engine, Seen.READY)
        else:
            engine.failed_probes += 1
            if engine.failed_probes >= probes.FAILURES_MAX and engine.seen is Seen.READY:
                self._see(engine, Seen.UNREADY, reason=f"{probes.FAILURES_MAX} probes in a row failed")
        return probes.READY_EVERY_S

    async def _got_ready(self, engine: EngineProcess) -> None:
        engine.record = msgspec.structs.replace(engine.record, was_ready=True)
        self._see(engine, Seen.READY)
        await asyncio.sleep(FIRST_CALLS_S)
        await self._weigh(engine)
        self._remember(engine.record)

    async def _look_again(self, engine: EngineProcess) -> None:
        """Measure the memory of the engine. Report growth while it starts, and usage while it is ready."""
        grew = await self._weigh(engine)
        if engine.seen is Seen.STARTING and grew:
            self._see(engine, Seen.STARTING, reason=engine.reason, grew=True)
        elif engine.seen is Seen.READY and engine.used_bytes:
            self._see(engine, Seen.READY)

    async def _look_early(self, engine: EngineProcess, *, listens: bool) -> None:
        """Check the port's owner while the engine still loads, so that the first requests do not wait for the check."""
        if not listens:
            engine.owns_port = None
        elif engine.owns_port is None:
            engine.owns_port = await self._is_its_own(engine)

    async def _is_its_own(self, engine: EngineProcess) -> bool:
        """Return whether its own process listens on its port; assumed if the kernel does not report it. The listener of
        a container may belong to the daemon of the container runtime: the running container is the proof.
        """
        if engine.record.container_client:
            try:
                return bool(await list_containers(engine.record.container_client, engine.mark, running=True))
            except RuntimeFailedError as error:
                _log.warning("event=container_query_failed replica=%s error=%s", engine.record.id, error)
                return False
        inodes = await retry_on_shortage(partial(list_listening_sockets, engine.record.port))
        if not inodes or await retry_on_shortage(partial(has_open_socket, (engine.record.pid,), inodes)) is not False:
            return True
        found, _ = await find_processes(engine.claim, self._reaper)
        return await retry_on_shortage(partial(has_open_socket, [one.pid for one in found], inodes)) is not False

    async def _weigh(self, engine: EngineProcess) -> bool:
        """Measure its memory, of the host and of its devices; return whether it grew since the last check."""
        found, _ = await find_processes(engine.claim, self._reaper)
        if engine.record.container_client:  # the client uses little; the container's processes may be hidden from us
            found = tuple(one for one in found if one.session != engine.record.pid)
        memory_bytes = sum(one.rss_pages for one in found) * os.sysconf("SC_PAGE_SIZE")
        try:
            held = await self._devices.holding(engine.record.slices, (one.pid for one in found))
        except NvmlError as error:
            _log.warning("event=device_memory_query_failed replica=%s error=%s", engine.record.id, error)
            held = {}
        if held:
            pids = tuple(sorted({*engine.record.gpu_pids, *held}))
            engine.record = msgspec.structs.replace(engine.record, gpu_pids=pids)
        on_device = memory_bytes if self._devices.host else sum(held.values())
        engine.used_bytes = on_device // max(1, len(engine.record.slices))
        self._report_excess(engine)
        memory_bytes += sum(held.values())
        grew, engine.memory_bytes = memory_bytes - engine.memory_bytes >= GREW_BYTES, memory_bytes
        return grew

    def _report_excess(self, engine: EngineProcess) -> None:
        """Log a replica that uses more GPU memory than it was placed with: others may run out of memory."""
        claimed_bytes = engine.record.memory_bytes
        bound_bytes = max(claimed_bytes, engine.reported_bytes) * EXCESS
        if not self._devices.measured or not claimed_bytes or engine.used_bytes <= bound_bytes:
            return
        engine.reported_bytes = engine.used_bytes
        _log.warning(
            "event=device_memory_exceeded replica=%s used=%s claimed=%s hint='raise spec.gpu.memory'",
            engine.record.id, format_size(engine.used_bytes), format_size(claimed_bytes),
        )  # fmt: skip
