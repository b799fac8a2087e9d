"""TLS on real sockets: the data plane tests over it, handshakes and their limits, engines with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import resource
import ssl
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import ParamSpec, cast

import pytest
import uvloop

from autoscaler.contract import GatewayId
from gateway.gateway import DESCRIPTORS_RESERVED, Gateway
from gateway.limits import Limits
from gateway.server import connection as edge_module
from gateway.server.tls_handshakes import Handshakes
from gateway.upstream import pool
from pilotlight.net import certificates
from pilotlight.net.certificates import Identity
from tests.support.fakes.engines.scripted_engine import OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import LIMITS, Client, Rig, rig, rig_and_client
from tests.support.net.certificates import OURS, THEIRS, Sides, leaf, over_tls, pem, sides, write
from tests.support.timing import turns
from tests.support.waiting import until
from tests.wire.faults import test_engine_and_client_failures as faults
from tests.wire.responses import test_local_replies as edge
from tests.wire.responses import test_relay as relay

OTHERWISE = {
    "test_connection_above_the_limit_per_address_is_closed",
    "test_connection_limit_reserves_a_descriptor_for_each_engine_request",
}
"""Tested separately here: over TLS, a surplus connection does not even get a handshake."""
PLAIN = {
    name: test
    for module in (edge, faults, relay)
    for name, test in vars(module).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(test) and not inspect.signature(test).parameters
}
LEAVES = faults.test_client_disconnect_ends_the_engine_request_and_frees_its_slot
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])

Loop = Callable[[], asyncio.AbstractEventLoop]
P = ParamSpec("P")


def run(loop: Loop, test: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a test on its own loop; no exception may reach that loop's exception handler."""
    unseen: list[dict[str, object]] = []
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unseen.append(context))
        runner.run(test())
    assert unseen == []


def on_each_loop(scenario: Callable[P, Coroutine[None, None, None]]) -> Callable[..., None]:
    """Make a test that runs the scenario on an asyncio loop and on a uvloop."""
    own = [*inspect.signature(scenario).parameters.values()]

    @LOOPS
    @wraps(scenario)
    def test(loop: Loop, *args: P.args, **kwargs: P.kwargs) -> None:
        run(loop, lambda: scenario(*args, **kwargs))

    loop_first = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([loop_first, *own])  # type: ignore[attr-defined]
    return test


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - OTHERWISE))
def test_each_data_plane_test_also_passes_over_tls(name: str) -> None:
    with over_tls():
        run(uvloop.new_event_loop, PLAIN[name])


@pytest.mark.parametrize("how", ["reset", "end"])
@pytest.mark.parametrize("script", range(len(faults.LEAVING)))
def test_client_disconnect_ends_engine_work_over_tls(script: int, how: str) -> None:
    with over_tls():
        run(uvloop.new_event_loop, lambda: LEAVES(faults.LEAVING[script], how))


# --- the handshake ---------------------------------------------------------------------------------------------------


async def ended(client: Client) -> bytes:
    """Return what arrives until the connection ends, in whichever way."""
    try:
        return await client.rest()
    except ConnectionError:
        return b""


async def healthy(one: Rig) -> bool:
    """Return whether a new client is served."""
    client = await one.client()
    client.send(HEALTH)
    try:
        return (await client.answer())[0] == 200
    finally:
        client.leave()


@on_each_loop
async def test_incomplete_handshake_times_out_and_counts_as_a_connection() -> None:
    limits = Limits(header_seconds_max=60.0, connections_per_address_max=1)
    async with rig(tls=sides(), limits=limits) as one:
        first = await one.client(raw=True)
        first.send(b"\x16\x03\x01")  # the beginning of a ClientHello
        assert await ended(await one.client(raw=True)) == b"", "there is room for one"
        assert not first.reader.at_eof()
        first.leave()
        await until("its place is free", lambda: not one.front._addresses)
        one.front.limits = Limits(header_seconds_max=0.2, connections_per_address_max=1)
        slow = await one.client(raw=True)
        slow.send(b"\x16\x03\x01")
        assert await ended(slow) == b"", "its clock has run out"
        await until("its place is free again", lambda: not one.front._addresses)
        one.front.limits = limits
        assert await healthy(one)


@on_each_loop
async def test_incomplete_tls_handshake_counts_towards_the_descriptor_limit() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with rig(tls=sides()) as one:
        one.front.own_descriptors = limit - DESCRIPTORS_RESERVED - 2
        first = await one.client(raw=True)
        first.send(b"\x16\x03\x01")
        assert await ended(await one.client(raw=True)) == b"", "there is room for one"
        first.leave()
        await until("its place is free", lambda: not one.front._addresses)
        assert await healthy(one)


@LOOPS
@pytest.mark.parametrize("sent", [HEALTH, b"\x16\x03\x01\x00\x05hello", b"", b"\x15\x03\x03\x00\x02\x02\x28"])
def test_non_tls_data_closes_the_connection_without_logging(
    loop: Loop, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with rig(tls=sides()) as one:
            client = await one.client(raw=True)
            if sent:
                client.send(sent)
            else:
                client.writer.write_eof()
            assert b"HTTP" not in await ended(client)
            assert await healthy(one)

    with caplog.at_level(logging.INFO):
        run(loop, test)
    assert caplog.records == []


@on_each_loop
async def test_disconnect_before_handshake_frees_the_connection_slot() -> None:
    async with rig(tls=sides(), limits=Limits(connections_per_address_max=1)) as one:
        for sent in (b"", b"\x16\x03\x01"):
            client = await one.client(raw=True)
            client.send(sent)
            client.leave()
            after = await one.client(raw=True)  # it is accepted later: when it has ended, both have been counted
            after.send(HEALTH)
            await ended(after)
            await until("its place is free", lambda: not one.front._addresses)
        assert await healthy(one)


def own_sides(folder: Path) -> Sides:
    """Return the listener's side as the product builds it."""
    pair = write(folder, "edge", leaf(OURS))
    return Sides(certificates.build_server_context(Identity(cert=pair.cert, key=pair.key)), sides().client)


def test_only_tls_1_2_or_newer_with_http_1_1_is_accepted(tmp_path: Path) -> None:
    def client(newest: ssl.TLSVersion) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=pem(OURS))
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # which is why the gateway rejects it
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
        return context

    async def test() -> None:
        async with rig(tls=own_sides(tmp_path)) as one:
            for version, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
                _, writer = await asyncio.open_connection("127.0.0.1", one.port, ssl=client(version))
                spoken = writer.get_extra_info("ssl_object")
                assert (spoken.version(), spoken.selected_alpn_protocol()) == (name, "http/1.1")
                writer.transport.abort()
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", one.port, ssl=client(ssl.TLSVersion.TLSv1_1))
            assert await healthy(one)

    run(uvloop.new_event_loop, test)


@on_each_loop
async def test_new_certificate_applies_to_new_connections_only() -> None:
    front = Gateway(GatewayId("g"), "b", limits=LIMITS)
    now = [sides().server]
    handshakes = Handshakes(front, lambda: now[0])
    server = await asyncio.get_running_loop().create_server(handshakes.client, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    old, old_writer = await asyncio.open_connection("127.0.0.1", port, ssl=sides().client)
    now[0] = sides(THEIRS).server
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("127.0.0.1", port, ssl=sides().client)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=sides(THEIRS, THEIRS).client)
    old_writer.write(HEALTH)
    async with asyncio.timeout(60):
        assert b"200 OK" in await old.readline()
    for one in (old_writer, writer):
        one.transport.abort()
    server.close()
    handshakes.close()
    await front.drain(5)


@on_each_loop
async def test_drain_does_not_wait_for_tls_close_of_idle_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_module, "LINGER_S", 0.05)
    async with rig_and_client(tls=sides()) as (one, client):
        client.send(HEALTH)
        await client.answer()
        cast("asyncio.Transport", client.writer.transport).pause_reading()  # as in an idle pool
        async with asyncio.timeout(60):
            await one.front.drain(60)


@pytest.mark.parametrize("begun", [False, True])
@on_each_loop
async def test_stop_closes_connections_in_handshake(begun: bool) -> None:
    async with rig(tls=sides(), limits=Limits(header_seconds_max=60)) as one:
        client = await one.client(raw=True)
        assert one.handshakes is not None
        under_way = one.handshakes.under_way
        await until("its handshake is under way", lambda: under_way)
        if begun:
            await turns(5)
        one.handshakes.close()
        assert await ended(client) == b""
        await until("its place is free", lambda: not one.front._addresses)


# --- engines ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def engine_of(
    server: ssl.SSLContext, address: str = "https://{}", trusted: str = OURS
) -> AsyncIterator[tuple[ScriptedEngine, Rig]]:
    """Start an engine with that side of TLS at an address, and a gateway that trusts an authority."""
    async with ScriptedEngine((OK,), tls=server) as engine, rig() as one:
        one.trust = sides(OURS, trusted).client
        one.routes(address.format(engine.address.removeprefix("https://")))
        yield engine, one


async def answered(one: Rig) -> tuple[int, bytes]:
    """Return status and body of one request."""
    client = await one.client()
    status, _, body = await client.ask()
    client.leave()
    return status, body


@on_each_loop
async def test_second_request_reuses_the_tls_connection_to_the_engine() -> None:
    async with engine_of(sides().server) as (engine, one):
        for _ in range(2):
            assert (await answered(one))[0] == 200
        assert (len(engine.requests), engine.connections) == (2, 1)
        host = engine.address.removeprefix("https://").encode()
        assert b"\r\nhost: %b\r\n" % host in engine.requests[0]


@on_each_loop
async def test_engine_certificate_for_the_configured_host_name_is_accepted() -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf(OURS, "engine.example").configure_cert(server)
    async with engine_of(server, "https://engine.example@{}") as (engine, one):
        assert (await answered(one))[0] == 200
        assert b"\r\nhost: engine.example:" in engine.requests[0]


@pytest.mark.parametrize(
    ("address", "trusted", "why"),
    [
        ("https://{}", THEIRS, "unable to get local issuer certificate"),
        ("https://other.example@{}", OURS, "Hostname mismatch"),
    ],
)
@LOOPS
def test_untrusted_engine_receives_nothing_and_the_request_gets_502(
    loop: Loop, address: str, trusted: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with engine_of(sides().server, address, trusted) as (engine, one):
            for _ in range(2):
                status, body = await answered(one)
                assert (status, b'"code":"upstream_error"' in body) == (502, True)
                assert b"does not trust the TLS certificate of the engine" in body
            assert engine.requests == []
            await one.settled()
            assert one.in_use() == 0
            one.trust = sides().client
            one.routes(engine.address)
            assert (await answered(one))[0] == 200, "what is believed now holds for the next connection"

    run(loop, test)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1, "logged once, not for every request"
    assert messages[0].startswith(f"event=engine_distrusted reason='{why}")
    assert "example" not in messages[0]
    assert "127.0.0.1" not in messages[0]


@LOOPS
def test_engine_without_tls_receives_no_plaintext_request(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server, rig() as one:
            host, port = server.sockets[0].getsockname()
            one.routes(f"https://{host}:{port}")
            status, body = await answered(one)
            assert (status, b"the engine has no TLS" in body) == (502, True)
        assert len(heard) == 2, "the Call moved once"
        assert all(data.startswith(b"\x16\x03") and b"POST" not in data for data in heard)

    run(loop, test)
    assert "event=engine_distrusted reason='WRONG_VERSION_NUMBER'" in caplog.text


@on_each_loop
async def test_incomplete_engine_handshake_counts_as_connect_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CONNECT_S_MAX", 0.1)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        monkeypatch.setattr(pool, "CONNECT_S_MAX", 60.0)  # for the connect to the other replica, which must not fail
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server, ScriptedEngine((OK,)) as good:
        host, port = server.sockets[0].getsockname()
        async with rig(f"https://{host}:{port}", good.address) as one:
            assert (await answered(one))[0] == 200, "by the other Replica"
            assert 'reason="connect"} 1.0' in one.front.telemetry.text((), None).decode()
