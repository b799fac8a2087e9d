"""No slot, connection, task or body leaks if a request ends at the same moment as another event.

Engine, gateway and clients share one event loop, so moments are counted in loop iterations: each pair of events is
tried with every number of iterations between them, in both orders.
"""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import pytest

from gateway.server import proxied_call
from gateway.upstream import pool
from gateway.upstream.pool import Pool
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    DONE,
    END,
    HOLD,
    OK,
    RESET,
    STREAM,
    STREAM_HEAD,
    Script,
    ScriptedEngine,
    delta,
    document,
)
from tests.support.harness.gateway.gateway_rig import Rig, rig, rig_and_client
from tests.support.timing import Connects, PlainEngine, turns
from tests.support.waiting import until

TURNS = range(13)
CONNECT_S_MAX = 60.0
"""A round trip from a client to the engine takes about ten."""


def pools(one: Rig) -> list[Pool]:
    return [*one.front.upstreams._pools.values()]


def left(one: Rig) -> dict[str, int]:
    """Return what remains of requests, by kind; idle kept connections do not count."""
    found = {
        "calls": sum(waiting + running for _, waiting, running in one.front.dispatch.counts()),
        "exchanges": len(one.front._calls),
        "slots in use": one.in_use(),
        "connections in use": sum(pool.connections - len(pool._idle) for pool in pools(one)),
        "connects": sum(len(pool._connecting) for pool in pools(one)),
        "leaving": sum(len(pool.leaving) for pool in pools(one)),
    }
    return {kind: number for kind, number in found.items() if number}


async def nothing_left(one: Rig) -> None:
    await until("nothing is left", lambda: not left(one) or None, CONNECT_S_MAX / 2, 0.001)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the connect timeout, so that leaks that last until it fires are found even on a busy machine."""
    monkeypatch.setattr(pool, "CONNECT_S_MAX", CONNECT_S_MAX)


async def parked(one: Rig, number: int = 1) -> None:
    """Wait until this many requests are queued."""
    await until("they wait", lambda: sum(w for _, w, _ in one.front.dispatch.counts()) == number, every_s=0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["leaves", "granted"])
async def test_disconnect_while_a_slot_is_assigned_leaks_no_slot(first: str, stream: bool) -> None:
    async with ScriptedEngine((HOLD,)) as engine, rig() as one:
        for number in TURNS:
            one.routes()
            client = await one.client()
            client.call(stream=stream)
            await parked(one)
            if first == "leaves":
                client.leave()
                await turns(number)
                one.routes(engine.address, slots=1)
            else:
                one.routes(engine.address, slots=1)
                await turns(number)
                client.leave()
            await nothing_left(one)
        engine.scripts = [(OK,)]
        client = await one.client()
        assert (await client.ask())[0] == 200, "the one Slot is free"


@pytest.mark.parametrize("warm", [False, True])
async def test_disconnect_during_a_response_leaks_no_slot_or_request(warm: bool) -> None:
    """At any iteration between its request and the end of a stream, on a new connection and on a reused one."""
    async with ScriptedEngine((STREAM,)) as engine, rig(engine.address, slots=1) as one:
        for number in range(3 * len(TURNS)):
            if warm:
                client = await one.client()
                await client.ask(stream=True)
            else:
                one.front.upstreams.close()
            client = await one.client()
            client.call(stream=True)
            await turns(number)
            client.leave()
            await nothing_left(one)
        client = await one.client()
        assert (await client.ask(stream=True))[0] == 200


async def test_disconnect_before_retry_cancels_the_retry() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(proxied_call, "BREATHS_S", (60.0, 60.0))  # the retry must not begin before the client leaves
        async with ScriptedEngine((RESET,)) as engine, rig_and_client(engine.address, slots=1) as (one, client):
            client.call()
            await until("the engine broke", lambda: engine.requests and not pools(one)[0].connections)
            (call,) = one.front._calls.values()
            retry = call._breath
            assert retry is not None
            client.leave()
            await nothing_left(one)
            assert retry.cancelled()
            assert len(engine.requests) == 1
            assert b"upstream_retries_total{" not in one.front.telemetry.text((), None), "it did not move"


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("first", ["closes", "call"])
async def test_reused_connection_closed_by_engine_is_replaced_without_retry(first: str, how: str) -> None:
    """The request is answered, on a new connection if need be; this is not a retry and uses no retry budget."""
    async with PlainEngine() as engine, rig_and_client(engine.address, slots=1) as (one, client):
        for number in TURNS:
            assert (await client.ask())[0] == 200
            kept = engine.connections[-1].transport
            close = kept.close if how == "close" else kept.abort
            if first == "closes":
                close()
                await turns(number)
                client.call()
            else:
                client.call()
                await turns(number)
                close()
            assert (await client.answer())[0] == 200
            await nothing_left(one)
        assert b"upstream_retries_total{" not in one.front.telemetry.text((), None)
        await until(
            "closed connections are removed here too", lambda: sum(pool.connections for pool in pools(one)) <= 1
        )


async def test_engine_sees_the_disconnect_before_it_gets_the_queued_request() -> None:
    """Otherwise it would briefly have more requests than slots: a kept connection is faster than a close."""
    async with PlainEngine() as engine, rig(engine.address, slots=2) as one:
        waiting, leaving = await one.client(), await one.client()
        for client in (waiting, leaving):
            client.call(path="/v1/embeddings", input="x")
        await until("both are there", lambda: len(engine.notes) == 2)
        one.routes(engine.address, slots=3)
        warm = await one.client()
        warm.call()
        await warm.answer()
        one.routes(engine.address, slots=2)  # there is a kept connection, and all slots are in use
        warm.call()
        await parked(one)
        engine.notes.clear()
        leaving.leave()
        assert (await warm.answer())[0] == 200
        assert engine.notes == ["left 1", "asked on 3"]


# --- routes that change during a connect -----------------------------------------------------------------------------


async def test_replica_removed_during_connect_still_serves_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A granted slot stays granted; the replica is forgotten when the request ends."""
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        connects = Connects(monkeypatch, engine.address)
        client.call()
        await until("it connects", lambda: connects.begun)
        one.routes()
        assert one.in_use() == 1
        connects.go.set()
        assert (await client.answer())[0] == 200
        await nothing_left(one)
        assert one.front.report().replicas == ()


async def test_request_waits_when_removed_replica_refuses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine((OK,)) as removed, ScriptedEngine((OK,)) as other, rig(removed.address) as one:
        client = await one.client()
        connects = Connects(monkeypatch, removed.address)
        connects.error = ConnectionRefusedError()
        client.call()
        await until("it connects", lambda: connects.begun)
        one.routes()
        connects.go.set()
        await parked(one)
        assert one.front.report().replicas == ()
        one.routes(other.address)
        assert (await client.answer())[0] == 200
        await nothing_left(one)
        assert removed.requests == []


async def test_disconnect_during_connect_to_a_removed_replica_leaks_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        connects = Connects(monkeypatch, engine.address)
        client.call()
        await until("it connects", lambda: connects.begun)
        one.routes()
        client.leave()
        await nothing_left(one)
        connects.go.set()
        await turns(20)
        assert (one.front.report().replicas, engine.requests, engine.connections) == ((), [], 0)


async def test_concurrent_connects_to_an_engine_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connect needs several times the memory of the resulting connection; disconnected clients start no connect."""
    monkeypatch.setattr(pool, "CONNECTING_MAX", 3)
    async with ScriptedEngine((OK,)) as engine, rig() as one:
        one.routes(engine.address, slots=20)
        connects = Connects(monkeypatch, engine.address)
        clients = [await one.client() for _ in range(10)]
        for client in clients:
            client.call()
        await until("all have a Slot", lambda: one.in_use() == 10 or None)
        await turns(20)
        assert connects.begun == 3
        clients[5].leave()
        await until("it has left", lambda: one.in_use() == 9 or None)
        connects.go.set()
        for number, client in enumerate(clients):
            assert number == 5 or (await client.answer())[0] == 200
        assert connects.begun == 9
        await nothing_left(one)


async def test_one_refused_connect_moves_all_requests_waiting_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CONNECTING_MAX", 1)
    async with ScriptedEngine((OK,)) as removed, ScriptedEngine((OK,)) as other, rig() as one:
        one.routes(removed.address, slots=8)
        connects = Connects(monkeypatch, removed.address)
        connects.error = ConnectionRefusedError()
        clients = [await one.client() for _ in range(6)]
        for client in clients:
            client.call()
        await until("all have a Slot", lambda: one.in_use() == 6 or None)
        one.routes(other.address, slots=8)
        connects.go.set()
        for client in clients:
            assert (await client.answer())[0] == 200
        assert (connects.begun, removed.requests) == (1, [])
        await nothing_left(one)


async def test_request_sent_when_connect_times_out_counts_as_a_reset_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout fires when the request is already sent: the engine may have it, so this counts as a retry."""
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        connects = Connects(monkeypatch, engine.address)
        connects.late = True
        connects.go.set()
        assert (await client.ask())[0] == 200
        metrics = one.front.telemetry.text((), None).decode()
        assert ('reason="reset"} 1.0' in metrics, 'reason="connect"' in metrics) == (True, False)
        await nothing_left(one)


# --- many disconnecting clients --------------------------------------------------------------------------------------


async def test_bodies_of_abandoned_requests_are_freed() -> None:
    """It holds even while an earlier waiting request keeps their places in the queue's timer."""
    body_bytes, number = 4 << 20, 40
    async with ScriptedEngine((HOLD,)) as engine, rig(engine.address, slots=1) as one:
        (await one.client()).call()
        await engine.asked.wait()
        (await one.client()).call()
        await parked(one)
        tracemalloc.start()
        try:
            for _ in range(number):
                client = await one.client()
                client.call(prompt="x" * body_bytes)
                await parked(one, 2)
                client.leave()
                await parked(one)
            del one.clients[2:]
            kept_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert kept_bytes < 4 * body_bytes


async def test_request_with_an_oversized_header_is_rejected_before_queueing() -> None:
    """If each were rejected only when granted, the next would be granted within that call, to an unbounded depth."""
    body = b'{"model":"m","messages":[]}'
    async with ScriptedEngine((HOLD, OK), (OK,)) as engine, rig_and_client(engine.address, slots=1) as (one, first):
        first.call()
        await engine.asked.wait()
        crowd = [await one.client() for _ in range(200)]
        for client in crowd:
            client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n")
            client.send(b"user-agent: %b\r\ncontent-length: %d\r\n\r\n%b" % (b"u" * 9000, len(body), body))
        assert {(await client.head())[0] for client in crowd} == {431}
        engine.release.set()
        assert (await first.answer())[0] == 200
        await nothing_left(one)
        assert len(engine.requests) == 1


SCRIPTS: list[Script] = [
    (OK,), (STREAM,), (OK,), (STREAM,), (HOLD,), (STREAM_HEAD + delta("a"), HOLD), (STREAM_HEAD + delta("a"), CLOSE),
    (CLOSE,), (RESET,), (OK, CLOSE), (STREAM, RESET), (OK[:-3], CLOSE), (b"SSH-2.0-x\r\n",), (OK + b"more",),
    (document(b"{}", "503 Service Unavailable"),), (STREAM_HEAD + b"zz\r\n",), (STREAM_HEAD + delta("a"), DONE + END),
]  # fmt: skip


class AnyEngine(ScriptedEngine):
    """Runs any of the scripts."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__((OK,))
        self._chance = chance

    def script(self, request: bytes) -> Script:
        return self._chance.choice(SCRIPTS)


async def one_call(one: Rig, chance: random.Random) -> None:
    """Send a request whose client disconnects after some iterations, unless it is answered before."""
    client = await one.client()
    client.call(stream=chance.random() < 0.5)
    ends = asyncio.ensure_future(client.reader.read(1))
    for _ in range(chance.choice((0, 1, 3, 10, 30, 300))):
        if ends.done():
            break
        await asyncio.sleep(0)
    await turns(chance.choice((0, 0, 1, 5)))
    client.leave()
    await asyncio.gather(ends, return_exceptions=True)


@pytest.mark.parametrize("seed", range(6))
async def test_random_failures_and_disconnects_leak_no_slot_or_connection(seed: int) -> None:
    """Engines fail, clients disconnect, replicas come and go; finally all clients are gone."""
    chance = random.Random(seed)
    async with AnyEngine(chance) as ada, AnyEngine(chance) as bob, rig(ada.address) as one:
        calls: set[asyncio.Task[None]] = set()
        for _ in range(150):
            calls.add(asyncio.create_task(one_call(one, chance)))
            await turns(chance.choice((0, 0, 1, 10, 100)))
            if chance.random() < 0.2:
                there = chance.choice(((), (ada.address,), (bob.address,), (ada.address, bob.address)))
                one.routes(*there, slots=chance.choice((1, 2, 4)))
        await asyncio.gather(*calls)
        await nothing_left(one)
        one.routes()
        assert one.front.report().replicas == ()
        await until("every disconnect is noticed", lambda: not one.front._connections)
