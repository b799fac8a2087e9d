"""Scaling by metrics of engines, also of endpoints that hang or return nonsense: only their own signals are unknown."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from autoscaler.contract import ModelName
from autoscaler.signals import scraper
from autoscaler.signals.scraper import SignalScraper
from autoscaler.spec.model import Model, PrometheusQuery, Scaling, SignalName
from autoscaler.spec.settings import PrometheusServer, Settings
from autoscaler.state.events import SignalsSeen
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import SignalTotal, World
from tests.support.builders.worlds import model, replica, world
from tests.support.fakes.engines.fake_engine_process import fake_engine
from tests.support.harness.serve.serve import Serving, fake, serving, settings, shot
from tests.support.net.certificates import THEIRS, leaf
from tests.support.net.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.standard

HANGS: None = None
KV = Scaling(kv_cache_percent=50.0)
Answer = Callable[[bytes], bytes | None]
"""From the head of a request to the bytes of the response; None: there is none."""


def ok(body: bytes, *headers: bytes) -> bytes:
    """A response with status 200."""
    lines = (b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers)
    return b"\r\n".join((*lines, b"", body))


@asynccontextmanager
async def endpoint(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves an endpoint; yields its host and port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has disconnected
            response = answer(await reader.readuntil(b"\r\n\r\n"))
            if response is not None:
                writer.write(response)
            else:
                await reader.read()  # until the client closes the connection
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


class Scrapes:
    """Runs the scraper on a `World` and collects what it observes."""

    def __init__(self, seen: World, read_s_max: float = 60.0) -> None:
        self.world, self.observed = seen, list[SignalsSeen]()
        loop = asyncio.get_running_loop()
        self._scraper = SignalScraper(
            lambda: self.world, self._observe, loop.time, every_s=0.05, read_s_max=read_s_max
        )  # fmt: skip

    def _observe(self, batch: Sequence[SignalsSeen]) -> None:
        self.observed += batch

    def last(self, name: str) -> dict[SignalName, SignalTotal]:
        """The last observation of a Model; empty if there is none."""
        return next((one.signals for one in reversed(self.observed) if one.model == name), {})

    async def until(self, what: str, look: Callable[[], object]) -> None:
        """Runs the scraper until the condition holds."""
        task = asyncio.create_task(self._scraper.run())
        try:
            await until(what, lambda: task.done() or look())
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def seen(addresses: dict[str, list[str]], scaling: Scaling = KV, **fields: Any) -> World:
    """Models with ready replicas at these addresses."""
    models = {name: model(name, scaling=scaling) for name in addresses}
    replicas = [
        replica(models[name], f"{name}-{number}", address=address)
        for name, ones in addresses.items()
        for number, address in enumerate(ones)
    ]
    return world(models.values(), (), replicas, **fields)


FULL = ok(b"vllm:kv_cache_usage_perc 0.75\n")
UNUSABLE: dict[str, tuple[bytes, str]] = {
    "NaN": (ok(b"vllm:kv_cache_usage_perc NaN\n"), "is not a number"),
    "missing": (ok(b"other 1\n"), "it is missing in the engine's metrics"),
    "error": (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "the endpoint returned status 500"),
    "redirect": (
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        "the endpoint returned status 302",
    ),
    "too large": (ok(b"#" * (scraper.RESPONSE_BYTES_MAX + 1)), "the response exceeds 4 MiB"),
    "compressed": (
        ok(gzip.compress(b"vllm:kv_cache_usage_perc 0.75\n" * 1000), b"Content-Encoding: gzip"),
        "it is missing in the engine's metrics",
    ),
    "cut": (FULL[:-10], "the connection failed (ClientPayloadError)"),
    "no HTTP": (b"SSH-2.0\r\n\r\n", "the connection failed (ClientResponseError)"),
    "empty": (b"", "the connection failed (ServerDisconnectedError)"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
async def test_unusable_metrics_of_one_replica_make_the_total_incomplete(name: str) -> None:
    response, problem = UNUSABLE[name]
    async with endpoint(lambda _: FULL) as good, endpoint(lambda _: response) as bad:
        scrapes = Scrapes(seen({"a": [good, bad]}))
        await scrapes.until("it was read", lambda: scrapes.last("a"))
    total = scrapes.last("a")["kvCachePercent"]
    assert total.total == 75.0
    assert total.unknown.startswith("1 of 2 replicas do not report it")
    assert problem in total.unknown
    assert "127.0.0.1" not in total.unknown


async def test_engine_with_tls_is_read_with_any_certificate_but_prometheus_not() -> None:
    names: list[str | None] = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf(THEIRS).configure_cert(context)
    context.sni_callback = lambda _tls, name, _context: names.append(name)
    async with endpoint(lambda _: FULL, context) as place:
        both = Scaling(kv_cache_percent=50.0, prometheus=QUERIED.prometheus)
        made = seen({"a": [f"https://m.example@{place}"]}, both, settings=prometheus(f"https://{place}"))
        scrapes = Scrapes(made)
        await scrapes.until("it was read", lambda: scrapes.last("a"))
    totals = scrapes.last("a")
    assert totals["kvCachePercent"] == SignalTotal(total=75.0)
    assert totals["prometheus"].unknown == "Prometheus: the connection failed (ClientConnectorCertificateError)"
    assert names[0] == "m.example"


async def test_hanging_endpoint_does_not_delay_the_signals_of_other_models() -> None:
    async with endpoint(lambda _: FULL) as good, endpoint(lambda _: HANGS) as bad:
        scrapes = Scrapes(seen({"bad": [bad], "good": [good, good]}))
        await scrapes.until("the other model was read", lambda: scrapes.last("good"))
        assert scrapes.last("good")["kvCachePercent"] == SignalTotal(total=150.0)
        assert not scrapes.last("bad"), "it is still being read"


async def test_hanging_endpoint_is_unknown_after_the_time_limit_and_read_again() -> None:
    answers = [HANGS, FULL]
    async with endpoint(lambda _: answers.pop(0) if len(answers) > 1 else answers[0]) as address:
        scrapes = Scrapes(seen({"a": [address]}), read_s_max=0.5)
        await scrapes.until(
            "it was read again", lambda: any(not s.signals["kvCachePercent"].unknown for s in scrapes.observed)
        )
    first = scrapes.observed[0].signals["kvCachePercent"]
    assert (first.total, first.unknown) == (0.0, "the endpoint did not respond within 0.5 s")


async def test_refused_connection_and_unready_replica_are_unknown() -> None:
    async with endpoint(lambda _: FULL) as good:
        made = seen({"a": [f"127.0.0.1:{free_port()}"], "b": [good]})
        (of,) = (one for one in made.replicas.values() if one.model == "b")
        unready = {of.id: replica(made.models[ModelName("b")], "b-0", state=ReplicaState.UNREADY, address=good)}
        made = world(made.models.values(), (), {**made.replicas, **unready}.values())
        scrapes = Scrapes(made)
        await scrapes.until("both were read", lambda: scrapes.last("a") and scrapes.last("b"))
    assert "the connection failed" in scrapes.last("a")["kvCachePercent"].unknown
    assert scrapes.last("b")["kvCachePercent"].unknown == "the replica is not ready"


async def test_follower_reads_nothing_and_a_leader_begins_to_read() -> None:
    requests: list[bytes] = []

    def answer(head: bytes) -> bytes:
        requests.append(head)
        return FULL

    async with endpoint(answer) as address:
        scrapes = Scrapes(seen({"a": [address]}, leads=False))
        rounds: list[None] = []
        following, leading = scrapes.world, seen({"a": [address]})

        def look() -> World:
            rounds.append(None)
            return following if len(rounds) < 10 else leading

        task = asyncio.create_task(
            SignalScraper(look, scrapes.observed.extend, asyncio.get_running_loop().time, every_s=0.01).run()
        )
        await until("ten rounds", lambda: len(rounds) >= 5)
        assert not requests
        await until("it leads and reads", lambda: scrapes.last("a"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def triton_model() -> Model:
    """A Model with engine Triton."""
    made = model("ada", scaling=Scaling(engine_queue=2.0))
    return Model(
        name=made.name, spec=type(made.spec)(engine="triton", artifact="file:///m", scaling=made.spec.scaling)
    )  # fmt: skip


async def test_queue_time_of_triton_becomes_the_mean_number_of_waiting_requests() -> None:
    paths: list[bytes] = []
    clock = [100.0]

    def answer(head: bytes) -> bytes:
        paths.append(head.split()[1])
        clock[0] += 5.0
        ns = int(15e9 * len(paths))  # three requests wait on average
        stats = [{"name": "ada", "version": "1", "inference_stats": {"queue": {"count": 1, "ns": ns}}}]
        return ok(json.dumps({"model_stats": stats}).encode())

    async with endpoint(answer) as address:
        of = triton_model()
        observed: list[SignalsSeen] = []
        made = world([of], (), [replica(of, "ada-0", address=address)])
        one = SignalScraper(lambda: made, observed.extend, lambda: clock[0], every_s=0.0)
        task = asyncio.create_task(one.run())
        await until("it was read twice", lambda: len(observed) >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert set(paths) == {b"/v2/models/ada/stats"}
    totals = [seen.signals["engineQueue"] for seen in observed[:2]]
    assert totals == [SignalTotal(unknown="a rate needs two readings"), SignalTotal(total=3.0)]


QUERIED = Scaling(prometheus=PrometheusQuery(query='sum(rate(x{a="b"}[1m]))', target=5.0))


def prometheus(url: str | None) -> Settings:
    """Settings with this server."""
    return Settings(prometheus=PrometheusServer(url=url))


async def test_prometheus_query_is_sent_and_its_result_is_the_total() -> None:
    queries: list[str] = []

    def answer(head: bytes) -> bytes:
        url = urlsplit(head.split()[1].decode())
        assert url.path == "/prefix/api/v1/query"
        queries.append(parse_qs(url.query)["query"][0])
        return ok(b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"12.5"]}]}}')

    async with endpoint(answer) as address:
        made = seen({"a": ["127.0.0.1:1"]}, QUERIED, settings=prometheus(f"http://{address}/prefix"))
        scrapes = Scrapes(made)
        await scrapes.until("the query was sent", lambda: scrapes.last("a"))
    assert scrapes.last("a") == {"prometheus": SignalTotal(total=12.5)}
    assert set(queries) == {'sum(rate(x{a="b"}[1m]))'}


async def test_prometheus_signal_is_unknown_without_a_server_and_after_an_error() -> None:
    scrapes = Scrapes(seen({"a": ["127.0.0.1:1"]}, QUERIED))
    await scrapes.until("there is no server", lambda: scrapes.last("a"))
    assert scrapes.last("a")["prometheus"].unknown == "Settings prometheus.url is not set"
    async with endpoint(lambda _: b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n") as address:
        scrapes = Scrapes(seen({"a": ["127.0.0.1:1"]}, QUERIED, settings=prometheus(f"http://{address}")))
        await scrapes.until("the query was sent", lambda: scrapes.last("a"))
    assert scrapes.last("a")["prometheus"].unknown == "Prometheus: the endpoint returned status 400"


@pytest.mark.parametrize(
    ("knobs", "total"),
    [
        ((), SignalTotal()),
        (("--fail", "nan-metrics"), SignalTotal(unknown="llamacpp:kv_cache_usage_ratio is not a number")),
        (("--fail", "hangs-metrics"), SignalTotal(unknown="the endpoint did not respond within 2 s")),
    ],
)
async def test_fake_engine_serves_metrics_that_hang_or_are_nan_on_demand(
    tmp_path: Path, knobs: tuple[str, ...], total: SignalTotal
) -> None:
    with fake_engine(tmp_path, *knobs) as engine:
        scrapes = Scrapes(seen({"a": [engine.url.removeprefix("http://")]}), read_s_max=scraper.READ_S_MAX)
        await scrapes.until("it was read", lambda: scrapes.last("a"))
    assert scrapes.last("a") == {"kvCachePercent": total}


# --- in `serve` -------------------------------------------------------------------------------------------------------

SLOW = ("--tokens-per-s", "2", "--tokens", "20000")
SCALED = {"replicas": {"max": 3}, "scaling": {"kvCachePercent": 25}}


def reason(serve: Serving, name: str) -> str:
    """Why the Model has the number of replicas that it has, as `explain` reports it."""
    return serve.text(f"/api/v1/explain/model/{name}")


def is_contained(part: str, read: Callable[[], str]) -> bool:
    """Whether the text that `read` returns contains the part."""
    return part in read()


async def test_full_kv_cache_starts_replicas_although_slots_are_free(tmp_path: Path) -> None:
    documents = (fake(tmp_path, "ada", *SLOW, **SCALED), settings("200Mi"))
    async with serving(tmp_path / "s", *documents) as serve:
        running = serve.begin(*(shot("ada", tokens=20_000) for _ in range(3)))
        await until("three requests run on one replica", lambda: serve.busy("ada") == 3)
        await serve.ready("ada", 3)
        assert "kvCachePercent is 75 and needs 3 x 25" in reason(serve, "ada")
        running.cancel()


async def test_hanging_and_nan_metrics_are_unknown_and_requests_continue(tmp_path: Path) -> None:
    documents = (
        fake(tmp_path, "ada", *SLOW, "--fail", "hangs-metrics", **SCALED),
        fake(tmp_path, "bob", *SLOW, "--fail", "nan-metrics", **SCALED),
        settings("200Mi"),
    )
    async with serving(tmp_path / "s", *documents) as serve:
        running = serve.begin(shot("ada", tokens=20_000), shot("bob", tokens=20_000))
        for name, problem in (("ada", "did not respond within 2 s"), ("bob", "is not a number")):
            await until(f"{name} is unknown", partial(is_contained, problem, partial(reason, serve, name)))
            logged = f"event=signal_unknown model={name}"
            await until(f"{name} is logged", partial(is_contained, logged, serve.output))
            assert serve.replicas(name) == {"ready": 1}
        running.cancel()
