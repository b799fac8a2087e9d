"""Keeps one gateway in step with the autoscalers: follows catalogue and Routes, reports levels (interfaces, section 6).

Owns the connections to the autoscalers and the pace of the reports; decides nothing. Every autoscaler gets every one;
dispatch ignores Routes of older epochs, so whoever leads is heard; who does not lead says blank lines, which are no
word of a leader. Autoscalers come and go: `follow` takes those that there are. What fails is tried again with a
growing, jittered pause; meanwhile the gateway serves from what it knows. What it knows is kept in a 0600 file, from the
moment that it is whole; from it a gateway that restarts while no autoscaler answers serves at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from autoscaler.contract import CatalogueDelta, GatewayId, Report, ReportAnswer, RoutesDelta, make_decoder
from gateway.control import snapshot_file
from gateway.dispatch.reports import Pace

log = logging.getLogger("pilotlight.gateway.sync")

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
UNFOLDED_MAX = 256
KEEP_S = 1.0
"""How long an autoscaler may take to answer at the start, and the least time between two writes of what is kept."""

T = TypeVar("T")


class LinkError(Exception):
    """The link broke, timed out or was refused; trying again is right."""


class Link(Protocol):
    """The way to one autoscaler (`gateway.control.client` over HTTP; the simulation has its own)."""

    def lines(self, path: str) -> AsyncIterator[bytes]:
        """The messages of a stream, until it ends. Raises LinkError."""

    async def report(self, report: Report) -> ReportAnswer:
        """Posts one report. Raises LinkError."""

    async def close(self) -> None:
        """Closes the connections."""


class Follower(Protocol):
    """What sync keeps in step (the gateway's front)."""

    def catalogue(self, delta: CatalogueDelta) -> None:
        """Takes a change of the catalogue."""

    def routes(self, delta: RoutesDelta) -> None:
        """Takes a change of Routes."""

    def restored(self, catalogue: CatalogueDelta, routes: RoutesDelta) -> None:
        """Takes what was kept: nobody was heard, so the bound for a silent leader holds at once."""

    def report(self) -> Report:
        """The levels as they are now."""

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """An autoscaler has taken the report of that sequence."""

    def busy(self) -> bool:
        """Whether anything waits, here or elsewhere."""


class Sync:
    """Follows all `links`, reports to all. `edge` is to be called on every ReportNow. `boot` is that of the reports."""

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
        self._heard: set[type[CatalogueDelta | RoutesDelta]] = set()
        self._whole = asyncio.Event()
        """Both were heard."""

    def edge(self) -> None:
        """Something happened that the autoscaler should know at once."""
        self._pace.edge(asyncio.get_running_loop().time())
        self._poke.set()

    async def run(self) -> None:
        """Follows and reports until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._running = tasks
                for link in self._links:
                    self._open(tasks, link)
                if self._kept_at is not None:
                    tasks.create_task(self._keep(self._kept_at))
                tasks.create_task(self._report())
        finally:
            self._running = None
            self._streams.clear()
            self._sending.clear()

    def join(self, link: Link) -> None:
        """Follows one autoscaler more, and reports to it."""
        self._links.append(link)
        if self._running is not None:
            self._open(self._running, link)
        self._poke.set()

    def leave(self, link: Link) -> None:
        """That autoscaler is gone. What it said stays; the caller closes the link."""
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
        """Reports once more, to whoever answers: after a drain this says that nothing runs here."""
        report = self._follower.report()
        await asyncio.gather(*(self._send(link, report) for link in self._links))

    def _on_catalogue(self, delta: CatalogueDelta) -> None:
        if delta.full or delta.models or delta.models_gone or delta.tenants or delta.tenants_gone or delta.settings:
            self._remember(delta)
        self._follower.catalogue(delta)

    def _on_routes(self, delta: RoutesDelta) -> None:
        if delta.full or delta.replicas or delta.replicas_gone or delta.models or delta.models_gone:
            self._remember(delta)
        self._follower.routes(delta)
        if delta.full:
            self.edge()  # a leader that just came, or came back, waits for our levels
        else:
            self._poke.set()  # others may wait now: reports are due more often then

    def _remember(self, delta: CatalogueDelta | RoutesDelta) -> None:
        """Puts it aside for `_keep`: folding the whole for every moved hold would cost more than the hold."""
        self._unfolded.append(delta)
        self._heard.add(type(delta))
        if self._heard == {CatalogueDelta, RoutesDelta}:
            self._whole.set()
        if len(self._unfolded) >= UNFOLDED_MAX:
            self._fold()

    def _fold(self) -> None:
        for delta in self._unfolded:
            if isinstance(delta, CatalogueDelta):
                self._known = snapshot_file.with_catalogue(self._known, delta)
            else:
                self._known = snapshot_file.with_routes(self._known, delta)
        self._unfolded.clear()

    async def _follow(self, link: Link, path: str, kind: type[T], take: Callable[[T], None]) -> None:
        retry_s = RETRY_S_MIN
        decode = make_decoder(kind)
        while True:
            try:
                async for line in link.lines(path):
                    retry_s = RETRY_S_MIN
                    if not line.isspace() and line:
                        take(decode(line))
            except (LinkError, msgspec.DecodeError) as error:
                log.debug("event=follow_broken path=%s error=%s", path.partition("?")[0], type(error).__name__)
            await asyncio.sleep(retry_s * (0.5 + 0.5 * self._jitter()))
            retry_s = min(retry_s * 2, RETRY_S_MAX)

    async def _keep(self, path: Path) -> None:
        """Serves from the file if no autoscaler answers at the start; once it has heard all, keeps the file true."""
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
                    log.warning("event=kept_unwritable error=%s", type(error).__name__)
            await asyncio.sleep(KEEP_S)

    def _restore(self, path: Path) -> None:
        """The follower serves from the file, if there is one that can be read."""
        try:
            known = snapshot_file.load_snapshot(path)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("event=kept_unreadable error=%s", type(error).__name__)
            return
        if known is not None:
            log.warning("event=serving_from_kept models=%d", len(known.catalogue.models))
            self._follower.restored(known.catalogue, known.routes)

    async def _report(self) -> None:
        """Sends when due. A link that is still sending is skipped: levels make the next report say it all."""
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
        else:
            self._follower.answered(report.sequence, answer)
        finally:
            self._sending.discard(link)
            self._poke.set()
