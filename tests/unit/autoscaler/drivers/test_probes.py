"""Readiness probes, what they cost, and how their rate is shared. Also the assignment of engine ports."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler import text
from autoscaler.drivers import probes
from autoscaler.drivers.local.ports import (
    HOST,
    REUSE_S,
    Ports,
    PortsTakenError,
    has_open_socket,
    list_listening_sockets,
)
from autoscaler.drivers.probes import (
    FAST_EVERY_S,
    LISTENS_EVERY_S,
    READY_EVERY_S,
    SLOW_EVERY_S,
    Pace,
    probe_engine,
    probe_interval_s,
)
from gateway.upstream.pool import parse_address
from tests.simulation.environment.virtual_loop import run
from tests.support.harness.async_tests import run_with
from tests.support.net.certificates import OURS, THEIRS, leaf

pytestmark = pytest.mark.standard


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as s:
        yield s


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False),
        (b"", False),
        (b"HTTP/1.1", False),
    ],
)
async def test_only_a_200_response_counts_as_ready(answer: bytes, ready: bool) -> None:
    asked = asyncio.get_running_loop().create_future()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readuntil(b"\r\n\r\n"))
        for i in range(len(answer)):  # in fragments
            writer.write(answer[i : i + 1])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(engine, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await probe_engine(HOST, port, "/health") is ready
        assert (await asked).startswith(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_engine_with_ipv6_address_is_probed_over_ipv6() -> None:
    asked = asyncio.get_running_loop().create_future()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(engine, "::1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await probe_engine("::1", port, "/health") is True
        assert b"\r\nHost: [::1]:%d\r\n" % port in await asked
    assert await probe_engine("::1", port, "/health") is None, "no process listens any more"


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
@pytest.mark.parametrize(("tls_name", "name"), [(None, None), ("", "HOST"), ("m.example", "m.example")])
def test_gateway_parses_an_engine_address_with_its_port_and_tls_name(
    host: str, tls_name: str | None, name: str | None
) -> None:
    parsed = parse_address(text.format_engine_address(host, 80, tls_name))
    assert parsed[:3] == (host, 80, host if name == "HOST" else name)


@pytest.mark.parametrize("who", [OURS, THEIRS])
async def test_tls_engine_is_probed_over_tls_with_any_certificate(who: str) -> None:
    names: list[str | None] = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf(who).configure_cert(context)
    context.sni_callback = lambda _tls, name, _context: names.append(name)

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(engine, HOST, 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await probe_engine(HOST, port, "/health", tls_name="m.example") is True
        assert await probe_engine(HOST, port, "/health") is False, "it does not answer in clear"
    assert names == ["m.example"]
    assert await probe_engine(HOST, port, "/health", tls_name=HOST) is None, "no process listens any more"


async def test_plaintext_engine_that_should_use_tls_is_not_ready() -> None:
    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(engine, HOST, 0) as server:
        assert await probe_engine(HOST, server.sockets[0].getsockname()[1], "/", tls_name=HOST) is False


async def test_probe_of_a_closed_port_fails_immediately(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    coroutine = probe_engine(HOST, port, "/")
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value is None


async def test_silent_engine_fails_probe_after_one_timeout(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 0.05)
    began_s = time.monotonic()
    assert not await probe_engine(HOST, listener.getsockname()[1], "/")
    assert time.monotonic() - began_s < 5.0


async def test_full_accept_queue_fails_probe_after_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 0.05)
    began_s = time.monotonic()
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        assert await probe_engine(HOST, full.getsockname()[1], "/") is False
        assert 0.05 <= time.monotonic() - began_s < 5.0
        for other in others:
            other.close()


@run_with(run)
async def test_ten_engines_get_equal_shares_of_the_total_probe_rate() -> None:
    loop = asyncio.get_running_loop()
    pace, turns = Pace(loop.time), dict.fromkeys(range(10), 0)

    async def ask(who: int) -> None:
        while True:
            await pace.turn()
            turns[who] += 1
            await asyncio.sleep(FAST_EVERY_S)

    tasks = [asyncio.create_task(ask(who)) for who in turns]
    await asyncio.sleep(2.0)
    for task in tasks:
        task.cancel()
    assert 990 <= sum(turns.values()) <= 1002
    assert max(turns.values()) - min(turns.values()) <= 1


def test_probe_interval_is_longer_from_two_seconds_after_engine_start() -> None:
    assert (probe_interval_s(0.0), probe_interval_s(1.99), probe_interval_s(2.0)) == (
        FAST_EVERY_S,
        FAST_EVERY_S,
        SLOW_EVERY_S,
    )
    assert (probe_interval_s(1.99, listens=True), probe_interval_s(2.0, listens=True)) == (
        LISTENS_EVERY_S,
        SLOW_EVERY_S,
    )


def test_follower_probes_starting_engines_as_rarely_as_ready_ones() -> None:
    pace = Pace(lambda: 0.0)
    assert (pace.every_s(0.0), pace.every_s(0.0, listens=True)) == (FAST_EVERY_S, LISTENS_EVERY_S)
    pace.leads = False
    assert {pace.every_s(0.0), pace.every_s(0.0, listens=True), pace.every_s(9.0)} == {READY_EVERY_S}


def test_ports_avoid_ephemeral_range_and_are_not_reused_within_a_minute() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = Ports()
    given = [ports.choose(0.0) for _ in range(100)]
    assert len(set(given)) == 100
    assert all(1024 <= port < first_outgoing for port in given)
    ports._next = given[0] - ports._low
    assert ports.choose(REUSE_S - 1) not in given
    ports._next = given[0] - ports._low
    assert ports.choose(REUSE_S) == given[0]


def test_port_in_use_is_skipped_and_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = Ports()
    port = ports.choose(0.0)
    with socket.create_server((HOST, port)):
        ports._next = port - ports._low
        assert ports.choose(REUSE_S) == port + 1
        ports._count, ports._next, ports._low = 1, 0, port
        with pytest.raises(PortsTakenError, match="no free port"):
            ports.choose(2 * REUSE_S)


def test_listening_socket_is_found_and_matched_to_its_process(listener: socket.socket) -> None:
    inodes = list_listening_sockets(listener.getsockname()[1])
    assert inodes == {str(os.fstat(listener.fileno()).st_ino)}
    assert has_open_socket([os.getpid()], inodes) is True
    assert has_open_socket([], inodes) is False
    assert list_listening_sockets(1) == frozenset()


def test_socket_on_a_wildcard_address_counts_as_listening_on_its_port() -> None:
    with socket.create_server(("0.0.0.0", 0)) as wide:
        port = wide.getsockname()[1]
        assert list_listening_sockets(port) == {str(os.fstat(wide.fileno()).st_ino)}
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as wide:
        port = wide.getsockname()[1]
        assert list_listening_sockets(port) == {str(os.fstat(wide.fileno()).st_ino)}
