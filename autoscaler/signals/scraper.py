"""Reads the metrics of ready engines, and the results of Prometheus queries, for Models with `spec.scaling`. I/O.

Only a leader reads. All replicas are read at the same time with a time limit each, so an endpoint that hangs makes only
the signals of its own Model unknown. Connections are closed after each response: engines that stop wait for open ones.
Certificates of engines are not verified, as in readiness probes; those of the Prometheus server are.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

import aiohttp
from yarl import URL

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.scaling_signals import SCRAPE_S
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.signals.metric_responses import MetricReading, read_metric, read_query_result, read_queue_seconds
from autoscaler.signals.totals import CounterSample, add_sample, compute_rate, sum_readings
from autoscaler.spec.engine_definition import EngineMetrics
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import Model, SignalName
from autoscaler.state.events import SignalsSeen
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import Replica, SignalTotal, World

READ_S_MAX: Final = 2.0
"""Maximum time of one request."""
RESPONSE_BYTES_MAX: Final = 4 << 20
AT_ONCE: Final = 128
"""Maximum concurrent requests."""
LOG_AFTER: Final = 3
"""A signal that is unknown this many times in a row is logged."""
HEADERS: Final = {"Accept": "text/plain;version=0.0.4, application/json", "Accept-Encoding": "identity"}
NOT_READY: Final = MetricReading(None, "the replica is not ready")
_UNVERIFIED: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE
_log = logging.getLogger("pilotlight.autoscaler.signals")


class ReadError(Exception):
    """A response could not be read. `str()`: the reason, without an address."""


class EngineUrl(NamedTuple):
    """Where to read an engine."""

    origin: str
    server_name: str | None
    """The name in its certificate, if it is not the host of the origin."""


class SignalScraper:
    """Reads signals and observes them. `clock` returns the seconds of the loop's clock."""

    def __init__(
        self,
        world: Callable[[], World],
        observe: Callable[[Sequence[SignalsSeen]], None],
        clock: Callable[[], float],
        *,
        every_s: float = SCRAPE_S,
        read_s_max: float = READ_S_MAX,
    ) -> None:
        self._world = world
        self._observe = observe
        self._clock = clock
        self._every_s = every_s
        self._read_s_max = read_s_max
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._counters: dict[tuple[ReplicaId, SignalName], tuple[CounterSample, ...]] = {}
        self._unknown: dict[tuple[ModelName, SignalName], int] = {}
        """How many times in a row a signal was unknown."""

    async def run(self) -> None:
        """Read all signals periodically, until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
        ) as session:
            while True:
                began_s = self._clock()
                if self._world().leadership.leads:
                    await self.read_all(session)
                await asyncio.sleep(max(0.0, began_s + self._every_s - self._clock()))

    async def read_all(self, session: aiohttp.ClientSession) -> None:
        """Read the signals of all Models once. Each Model is observed as soon as all its replicas are read."""
        world = self._world()
        present = world.replicas.keys()
        self._counters = {key: samples for key, samples in self._counters.items() if key[0] in present}
        models = [model for model in world.models.values() if model.spec.scaling.targets()]
        async with asyncio.TaskGroup() as tasks:
            for model in models:
                if model.name in world.by_model:
                    tasks.create_task(self._read_model(session, world, model))

    async def _read_model(self, session: aiohttp.ClientSession, world: World, model: Model) -> None:
        replicas = [world.replicas[id] for id in world.by_model[model.name]]
        serving = [one for one in replicas if one.state in {ReplicaState.READY, ReplicaState.UNREADY}]
        signals = [name for name in model.spec.scaling.targets() if name != "prometheus"]
        read = await asyncio.gather(*(self._read_replica(session, model, one, signals) for one in serving))
        totals: dict[SignalName, SignalTotal] = {
            name: sum_readings([readings[name] for readings in read]) for name in signals
        }
        if model.spec.scaling.prometheus is not None:
            url, query = world.settings.prometheus.url, model.spec.scaling.prometheus.query
            totals["prometheus"] = sum_readings([await self._read_query(session, url, query)])
        self._log_problems(model, totals)
        self._observe([SignalsSeen(model=model.name, signals=totals)])

    async def _read_replica(
        self, session: aiohttp.ClientSession, model: Model, replica: Replica, signals: Sequence[SignalName]
    ) -> dict[SignalName, MetricReading]:
        """Return a reading of each signal. No exception of one replica reaches another."""
        metrics = ENGINES[model.spec.engine].behavior.metrics
        if replica.state is not ReplicaState.READY or not replica.runtime.address or metrics is None or not signals:
            return dict.fromkeys(signals, NOT_READY)
        at = parse_engine_url(replica.runtime.address)
        found: dict[SignalName, MetricReading] = {}
        try:
            queued = "engineQueue" in signals and bool(metrics.queue_time_path)
            if queued:
                path = metrics.queue_time_path.replace("{name}", quote(model.served(), safe=""))
                found["engineQueue"] = self._rate(
                    replica, "engineQueue", read_queue_seconds(await self._get_engine(session, at, path))
                )
            left = [name for name in signals if name not in found]
            if left:
                body = await self._get_engine(session, at, metrics.path)
                found |= {name: self._read_metric(replica, metrics, name, body) for name in left}
        except Exception as error:  # noqa: BLE001 - a response of any kind makes only this replica's signals unknown
            reraise_memory_error(error)
            found = dict.fromkeys(signals, MetricReading(None, _describe(error))) | found
        return found

    def _read_metric(self, replica: Replica, metrics: EngineMetrics, name: SignalName, body: bytes) -> MetricReading:
        reading = read_metric(body, metrics.metric_names(name), mean=name == "kvCachePercent")
        if name == "tokensPerSecond":
            return self._rate(replica, name, reading)
        if name == "kvCachePercent" and reading.value is not None:
            return MetricReading(100.0 * reading.value)
        return reading

    def _rate(self, replica: Replica, name: SignalName, counter: MetricReading) -> MetricReading:
        """Return the rate of a counter of the replica."""
        if counter.value is None:
            return counter
        key = (replica.id, name)
        samples = add_sample(self._counters.get(key, ()), CounterSample(self._clock(), counter.value))
        self._counters[key] = samples
        return compute_rate(samples)

    async def _read_query(self, session: aiohttp.ClientSession, url: str | None, query: str) -> MetricReading:
        if url is None:
            return MetricReading(None, "Settings prometheus.url is not set")
        try:
            return read_query_result(
                await self._get(session, URL(url) / "api/v1/query" % {"query": query}, verified=True)
            )
        except Exception as error:  # noqa: BLE001 - a response of any kind makes only this signal unknown
            reraise_memory_error(error)
            return MetricReading(None, f"Prometheus: {_describe(error)}")

    async def _get_engine(self, session: aiohttp.ClientSession, at: EngineUrl, path: str) -> bytes:
        return await self._get(session, URL(at.origin + path, encoded=True), server_name=at.server_name)

    async def _get(
        self, session: aiohttp.ClientSession, url: URL, *, server_name: str | None = None, verified: bool = False
    ) -> bytes:
        """Return the body of a 200. Raises ReadError."""
        async with self._turns:
            try:
                async with (
                    asyncio.timeout(self._read_s_max),
                    session.get(
                        url, headers=HEADERS, allow_redirects=False, ssl=True if verified else _UNVERIFIED,
                        server_hostname=server_name,
                    ) as response,
                ):  # fmt: skip
                    if response.status != 200:
                        raise ReadError(f"the endpoint returned status {response.status}")
                    body = bytearray()
                    async for piece in response.content.iter_chunked(1 << 16):
                        body += piece
                        if len(body) > RESPONSE_BYTES_MAX:
                            raise ReadError(f"the response exceeds {RESPONSE_BYTES_MAX >> 20} MiB")
                    return bytes(body)
            except TimeoutError:
                raise ReadError(f"the endpoint did not respond within {self._read_s_max:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise ReadError(f"the connection failed ({type(error).__name__})") from None

    def _log_problems(self, model: Model, totals: dict[SignalName, SignalTotal]) -> None:
        """Log a signal that stays unknown, once. A replica that has just become ready is unknown only for a moment."""
        for name, total in totals.items():
            key = (model.name, name)
            times = self._unknown.pop(key, 0)
            if total.unknown:
                self._unknown[key] = times + 1
            if total.unknown and times + 1 == LOG_AFTER:
                _log.warning("event=signal_unknown model=%s signal=%s reason=%r", *key, total.unknown)
            elif not total.unknown and times >= LOG_AFTER:
                _log.info("event=signal_known model=%s signal=%s", *key)


def _describe(error: Exception) -> str:
    """Describe an error without an address."""
    return str(error) if isinstance(error, ReadError) else f"it could not be read ({type(error).__name__})"


def parse_engine_url(address: str) -> EngineUrl:
    """Parse an address as routes contain it (`autoscaler.text.format_engine_address`)."""
    if not address.startswith("https://"):
        return EngineUrl(f"http://{address}", None)
    name, _, host = address.removeprefix("https://").rpartition("@")
    return EngineUrl(f"https://{host}", name or None)
