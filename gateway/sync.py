"""Keeps one gateway in step with the autoscalers: follows catalogue and Routes, reports levels (interfaces, section 6).

Owns the connections to the autoscalers and the pace of the reports; decides nothing. Every autoscaler gets every one;
dispatch ignores Routes of older epochs, so whoever leads is heard. What fails is tried again with a growing, jittered
pause; meanwhile the gateway serves from what it knows. What it knows is kept in a 0600 file, from which a gateway that
restarts while no autoscaler answers serves at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from autoscaler.contract import CatalogueDelta, GatewayId, Report, ReportAnswer, RoutesDelta
from gateway.reporting import Pace

log = logging.getLogger("pilotlight.gateway.sync")

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
REPORT_TIMEOUT_S = 2.0
STREAM_SILENT_S = 3.0
"""A stream that says nothing for three heartbeats is dead and is opened anew."""
LINE_BYTES_MAX = 64 << 20

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode_answer = msgspec.json.Decoder(ReportAnswer).decode


class Follower(Protocol):
    """What sync keeps in step (the gateway's front)."""

    def catalogue(self, delta: CatalogueDelta) -> None:
        """Takes a change of the catalogue."""

    def routes(self, delta: RoutesDelta) -> None:
        """Takes a change of Routes."""

    def report(self) -> Report:
        """The levels as they are now."""

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """An autoscaler has taken the report of that sequence."""

    def busy(self) -> bool:
        """Whether anything waits, here or elsewhere."""


class Sync:
    """Follows `autoscalers`: URLs `http://host:port` or `unix:PATH`. `edge` is to be called on every ReportNow."""

    def __init__(self, gateway: GatewayId, autoscalers: tuple[str, ...], follower: Follower) -> None:
        self._gateway = gateway
        self._autoscalers = autoscalers
        self._follower = follower
        self._pace = Pace()
        self._poke = asyncio.Event()

    def edge(self) -> None:
        """Something happened that the autoscaler should know at once."""
        self._pace.edge(asyncio.get_running_loop().time())
        self._poke.set()

    async def run(self) -> None:
        """Follows and reports until cancelled."""
        links = [_Link(url) for url in self._autoscalers]
        routes_path = f"/v1/routes?gateway={self._gateway}"
        try:
            async with asyncio.TaskGroup() as tasks:
                for link in links:
                    tasks.create_task(self._follow(link, routes_path, RoutesDelta, self._on_routes))
                    tasks.create_task(self._follow(link, "/v1/catalogue", CatalogueDelta, self._follower.catalogue))
                tasks.create_task(self._report(links))
        finally:
            for link in links:
                await link.close()

    def _on_routes(self, delta: RoutesDelta) -> None:
        self._follower.routes(delta)
        if delta.full:
            self.edge()  # a leader that just came, or came back, waits for our levels

    async def _follow(self, link: _Link, path: str, kind: type[T], take: Callable[[T], None]) -> None:
        retry_s = RETRY_S_MIN
        decode = msgspec.json.Decoder(kind).decode
        while True:
            try:
                async for line in link.lines(path):
                    take(decode(line))
                    retry_s = RETRY_S_MIN
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                log.debug("event=follow_broken path=%s error=%s", path.partition("?")[0], type(error).__name__)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311  jitter is no secret
            retry_s = min(retry_s * 2, RETRY_S_MAX)

    async def _report(self, links: list[_Link]) -> None:
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
                idle = [link for link in links if not link.sending]
                if idle:
                    report = self._follower.report()
                    self._pace.sent(now())
                    for link in idle:
                        link.sending = True
                        tasks.create_task(self._send(link, report))
                else:
                    await self._poke.wait()

    async def _send(self, link: _Link, report: Report) -> None:
        try:
            answer = await link.report(report)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("event=report_failed error=%s", type(error).__name__)
        else:
            self._follower.answered(report.sequence, answer)
        finally:
            link.sending = False
            self._poke.set()


class _Link:
    """One autoscaler: a pool of at most three connections (two streams, one report)."""

    def __init__(self, url: str) -> None:
        self.sending = False
        self._unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://autoscaler" if self._unix is not None else url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._unix) if self._unix is not None else aiohttp.TCPConnector()
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES_MAX)
        return self._session

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """The lines of a stream until it ends or falls silent (TimeoutError)."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REPORT_TIMEOUT_S, sock_read=STREAM_SILENT_S)
        async with self._connected().get(self._base + path, timeout=timeout, raise_for_status=True) as response:
            async for line in response.content:
                yield line

    async def report(self, report: Report) -> ReportAnswer:
        """Posts one report; raises what aiohttp raises."""
        timeout = aiohttp.ClientTimeout(total=REPORT_TIMEOUT_S)
        url = self._base + "/v1/report"
        async with self._connected().post(
            url, data=_encode(report), timeout=timeout, raise_for_status=True
        ) as response:
            return _decode_answer(await response.read())

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
