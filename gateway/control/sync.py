"""Synchronizes a gateway with the autoscalers: follows catalogue and Routes, reports levels (interfaces, section 6).

Manages the connections to all autoscalers and the pace of reports; decides nothing. Every autoscaler gets every report.
Dispatch ignores Routes of older epochs, so the leader prevails; the others send blank lines, which do not count as a
sign of life of the leader. Failed connections are retried with exponential backoff and jitter, while the gateway serves
from its current state. Once complete, this state is saved to a 0600 file, from which a gateway that restarts while no
autoscaler responds serves at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from autoscaler.contract import CatalogueDelta, GatewayId, Report, ReportAnswer, RoutesDelta, make_decoder
from gateway.control import fault_containment, snapshot_file
from gateway.control.fault_containment import PAUSE_S, PAUSE_S_MAX, retry_until_success
from gateway.dispatch.reports import Pace
from gateway.exception_handling import describe_error, reraise_memory_error

log = logging.getLogger("pilotlight.gateway.sync")

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
UNREADABLE_S_MAX = 8.0
"""Maximum pause before a stream with an unreadable message is reopened; the first pause is RETRY_S_MAX."""
UNFOLDED_MAX = 256
KEEP_S = 1.0
"""How long to wait for an autoscaler at the start, and the minimum time between two writes of the snapshot."""

D = TypeVar("D", CatalogueDelta, RoutesDelta)


class LinkError(Exception):
    """The link broke, timed out or was rejected; retry."""


class MessageTooLargeError(LinkError):
    """A message of a stream, or a response, exceeds the limit of the link."""


class Link(Protocol):
    """The link to one autoscaler (`gateway.control.client` over HTTP; the simulation has its own)."""

    def lines(self, path: str) -> AsyncIterator[bytes]:
        """Yield the messages of a stream, until it ends. Raises LinkError, or MessageTooLargeError."""

    async def report(self, report: Report) -> ReportAnswer:
        """Post one report. Raises LinkError."""

    async def close(self) -> None:
        """Close the connections."""


class Follower(Protocol):
    """The part that sync keeps up to date (`gateway.gateway.Gateway`)."""

    def catalogue(self, delta: CatalogueDelta) -> None:
        """Apply a change of the catalogue."""

    def routes(self, delta: RoutesDelta) -> None:
        """Apply a change of Routes."""

    def restored(self, catalogue: CatalogueDelta, routes: RoutesDelta) -> None:
        """Apply a saved snapshot: no autoscaler responded, so the bound for a silent leader applies at once."""

    def report(self) -> Report:
        """Return a report of the current demand and slot use."""

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """Handle an autoscaler's answer to the report of that sequence."""

    def busy(self) -> bool:
        """Return whether anything waits, here or in another gateway."""

    def has_faults(self) -> bool:
        """Return whether an exception closed a model, which the complete catalogue and Routes open again."""


class Sync:
    """Follows all `links` and reports to all. Call `edge` on every ReportNow. Reports contain `boot`."""

    def __init__(
        self,
        gateway: GatewayId,
        links: Sequence[Link],
        follower: Follower,
        kept_at: Path | None = None,
        jitter: Callable[[], float] = random.random,
        *,
        boot: str = "",
    ) -> None:
        self._gateway = gateway
        self._boot = boot
        self._links = list(links)
        self._streams: dict[Link, list[asyncio.Task[None]]] = {}
        self._running: asyncio.TaskGroup | None = None
        self._sending: set[Link] = set()
        self._follower = follower
        self._pace = Pace()
        self._poke = asyncio.Event()
        self._kept_at = kept_at
        self._jitter = jitter
        self._known = snapshot_file.GatewaySnapshot()
        self._unfolded: list[CatalogueDelta | RoutesDelta] = []
        self._unmerged: set[type[CatalogueDelta | RoutesDelta]] = set()
        """Kinds of which a delta is missing in `_known`, because merging it raised an exception."""
        self._heard: set[type[CatalogueDelta | RoutesDelta]] = set()
        self._whole = asyncio.Event()
        """Set once both catalogue and Routes have arrived."""

    def edge(self) -> None:
        """Request an immediate report."""
        self._pace.edge(asyncio.get_running_loop().time())
        self._poke.set()

    async def run(self) -> None:
        """Follow and report until canceled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._running = tasks
                for link in self._links:
                    self._open(tasks, link)
                if self._kept_at is not None:
                    tasks.create_task(retry_until_success(partial(self._keep, self._kept_at), "snapshot"))
                tasks.create_task(retry_until_success(self._report, "reports"))
        finally:
            self._running = None
            self._streams.clear()
            self._sending.clear()

    def join(self, link: Link) -> None:
        """Add an autoscaler: follow it and report to it."""
        self._links.append(link)
        if self._running is not None:
            self._open(self._running, link)
        self._poke.set()

    def leave(self, link: Link) -> None:
        """Remove an autoscaler. The data received from it stays in effect; the caller closes the link."""
        self._links.remove(link)
        for stream in self._streams.pop(link, ()):
            stream.cancel()

    def _open(self, tasks: asyncio.TaskGroup, link: Link) -> None:
        routes_path = f"/v1/routes?gateway={self._gateway}&boot={self._boot}"
        self._streams[link] = [
            tasks.create_task(self._follow(link, routes_path, RoutesDelta, self._on_routes)),
            tasks.create_task(self._follow(link, "/v1/catalogue", CatalogueDelta, self._on_catalogue)),
        ]

    async def flush(self) -> None:
        """Report once more to all autoscalers: after a drain, this reports that nothing runs here."""
        try:
            report = self._follower.report()
        except Exception as error:  # noqa: BLE001 - the gateway stops in any case
            reraise_memory_error(error)
            fault_containment.report_fault(None, "reports", describe_error(error))
            return
        await asyncio.gather(*(self._send(link, report) for link in self._links))

    def _on_catalogue(self, delta: CatalogueDelta) -> None:
        self._follower.catalogue(delta)
        if delta.full or delta.models or delta.models_gone or delta.tenants or delta.tenants_gone or delta.settings:
            self._remember(delta)

    def _on_routes(self, delta: RoutesDelta) -> None:
        self._follower.routes(delta)
        if delta.full or delta.replicas or delta.replicas_gone or delta.models or delta.models_gone:
            self._remember(delta)
        if delta.full:
            self.edge()  # a new or restarted leader waits for our levels
        else:
            self._poke.set()  # others may wait now, and reports are due more often then

    def _remember(self, delta: CatalogueDelta | RoutesDelta) -> None:
        """Queue a delta for `_keep`: merging it into the whole for every changed hold would be too expensive."""
        self._unfolded.append(delta)
        self._heard.add(type(delta))
        if self._heard == {CatalogueDelta, RoutesDelta}:
            self._whole.set()
        if len(self._unfolded) >= UNFOLDED_MAX:
            self._fold()

    def _fold(self) -> None:
        """Merge the queued deltas. If one raises an exception, its part of the snapshot stays as it is until the
        complete state is merged, for which the stream is reopened.
        """
        unfolded, self._unfolded = self._unfolded, []
        for delta in unfolded:
            kind = type(delta)
            if kind in self._unmerged and not delta.full:
                continue
            try:
                if isinstance(delta, CatalogueDelta):
                    self._known = snapshot_file.with_catalogue(self._known, delta)
                else:
                    self._known = snapshot_file.with_routes(self._known, delta)
            except Exception as error:  # noqa: BLE001 - only the file is affected
                reraise_memory_error(error)
                if kind not in self._unmerged:
                    fault_containment.report_fault(None, "snapshot", describe_error(error))
                self._unmerged.add(kind)
            else:
                self._unmerged.discard(kind)

    async def _follow(self, link: Link, path: str, kind: type[D], take: Callable[[D], None]) -> None:
        """Apply a stream's messages. It is reopened, and starts with the complete state, after it broke, and with
        exponential back-off after an unreadable message or an exception in `take`, while a model is faulty, or while
        the snapshot is incomplete. Unreadable messages are logged once until a message is applied.
        """
        retry_s, fault_s, unreadable_s = RETRY_S_MIN, PAUSE_S, 0.0
        decode, now, name = make_decoder(kind), asyncio.get_running_loop().time, path.partition("?")[0]
        while True:
            reopen_s = math.inf
            try:
                async for line in link.lines(path):
                    retry_s = RETRY_S_MIN
                    if not line.isspace() and line:
                        take(decode(line))
                        unreadable_s = 0.0
                    if not self._follower.has_faults() and kind not in self._unmerged:
                        reopen_s, fault_s = math.inf, PAUSE_S
                    elif reopen_s == math.inf:
                        reopen_s, fault_s = now() + fault_s, min(2 * fault_s, PAUSE_S_MAX)
                    elif now() >= reopen_s:
                        break
            except (MessageTooLargeError, msgspec.DecodeError) as error:
                if not unreadable_s:
                    log.warning("event=message_unreadable path=%s error=%s", name, type(error).__name__)
                unreadable_s = min(max(2 * unreadable_s, RETRY_S_MAX), UNREADABLE_S_MAX)
                await asyncio.sleep(unreadable_s)
            except LinkError as error:
                log.debug("event=stream_lost path=%s error=%s", name, type(error).__name__)
            except Exception as error:  # noqa: BLE001 - no message may end the gateway
                reraise_memory_error(error)
                fault_containment.report_fault(None, name, describe_error(error))
                await asyncio.sleep(fault_s)
                fault_s = min(2 * fault_s, PAUSE_S_MAX)
            await asyncio.sleep(retry_s * (0.5 + 0.5 * self._jitter()))
            retry_s = min(retry_s * 2, RETRY_S_MAX)

    async def _keep(self, path: Path) -> None:
        """Serve from the file if no autoscaler responds at the start; once all data is there, keep the file current."""
        try:
            async with asyncio.timeout(KEEP_S):
                await self._whole.wait()
        except TimeoutError:
            if not self._heard:
                self._restore(path)
        await self._whole.wait()
        written = snapshot_file.GatewaySnapshot()
        while True:
            self._fold()
            if self._known is not written:
                written = self._known
                try:
                    await asyncio.to_thread(snapshot_file.save_snapshot, path, written)
                except OSError as error:
                    log.warning("event=snapshot_write_failed error=%s", type(error).__name__)
            await asyncio.sleep(KEEP_S)

    def _restore(self, path: Path) -> None:
        """Let the follower serve from the file, if it exists and is readable."""
        try:
            known = snapshot_file.load_snapshot(path)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("event=snapshot_read_failed error=%s", type(error).__name__)
            return
        if known is not None:
            log.warning("event=serving_from_snapshot models=%d", len(known.catalogue.models))
            self._follower.restored(known.catalogue, known.routes)

    async def _report(self) -> None:
        """Send reports when due. A link that is still sending is skipped: the next report contains all levels."""
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._poke.clear()
                wait_s = self._pace.due_s(now(), busy=self._follower.busy()) - now()
                if wait_s > 0:
                    try:
                        async with asyncio.timeout(wait_s):
                            await self._poke.wait()
                    except TimeoutError:
                        pass
                    continue
                idle = [link for link in self._links if link not in self._sending]
                if idle:
                    report = self._follower.report()
                    self._pace.sent(now())
                    for link in idle:
                        self._sending.add(link)
                        tasks.create_task(self._send(link, report))
                else:
                    await self._poke.wait()

    async def _send(self, link: Link, report: Report) -> None:
        try:
            answer = await link.report(report)
        except (LinkError, msgspec.DecodeError) as error:
            log.debug("event=report_failed error=%s", type(error).__name__)
        except Exception as error:  # noqa: BLE001 - the next report is sent in any case
            reraise_memory_error(error)
            fault_containment.report_fault(None, "reports", describe_error(error))
        else:
            self._follower.answered(report.sequence, answer)
        finally:
            self._sending.discard(link)
            self._poke.set()
