"""Clients that disconnect, do not read, are slow, or are too many, on real processes: cases 34 to 37 of reliability, F.

bench/ measures the seconds and shares that the cases promise; these tests check what happens, to whom and how often.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import struct
import time
from functools import partial
from pathlib import Path

import pytest

from loadtest.cli import request_body
from loadtest.client import request_bytes, target_of
from loadtest.run_verdict import judge_run
from pilotlight.net.listen import BACKLOG
from tests.support.fakes.engines import endless_stream_engine
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.client_load import SLACK_BYTES, Crowd, Stream, chat, connected, counted, resident_bytes
from tests.support.harness.serve.serve import Serving, fake, model, serving, settings, shot, transcript
from tests.support.waiting import until

HEALTH = b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n"
HEAD_BEGUN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nX-Slow: "
BODY_BEGUN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
)
ROOM = 20
"""Free file descriptors when the limit is set."""
OTHERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")

# --- case 34: clients that disconnect ---------------------------------------------------------------------------------

ABORTED_S = 40.0
"""From a client's disconnect to the end of its engine connection; case 34 promises 0.1 s, the rest is margin: on a busy
machine each process may be paused for 20 s.
The engines hang, so a gateway that detects a disconnect only on a write never detects it."""


class Raw:
    """A client socket that can disconnect in every possible way."""

    def __init__(self, one: Serving, model: str, *, stream: bool) -> None:
        target = target_of(one.url)
        self.socket = socket.create_connection((target.host, target.port), timeout=60)
        body = request_body(model, 100, 30, stream=stream)
        self.socket.sendall(request_bytes(target, "POST", "/v1/chat/completions", (("X-Request-Id", "leaver"),), body))

    def read_some(self) -> None:
        """Wait for the first bytes of the response."""
        assert self.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")

    def leave(self, how: str) -> float:
        """Disconnect and return the Unix time of it."""
        if how == "half-close":
            self.socket.shutdown(socket.SHUT_WR)
            return time.time()
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        at_s = time.time()
        self.socket.close()
        return at_s


def shows(one: Serving, name: str, **numbers: int) -> bool:
    return numbers.items() <= one.demand(name).items()


@pytest.mark.case("34")
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.standard
async def test_client_disconnect_cancels_the_request_and_frees_its_slot(tmp_path: Path, how: str) -> None:
    """In prefill (not streaming), mid-stream or queued: engine connection ends, slot is freed, request is abandoned."""
    ada = fake(tmp_path, "ada", "--fail", "hangs-before-first-byte", slots=1)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0", "--fail", "hangs-after-first-byte", slots=1)
    async with serving(tmp_path, ada, bob) as one:
        for name, stream in (("ada", False), ("bob", True)):
            client = Raw(one, name, stream=stream)
            await until("it runs", partial(shows, one, name, running=1))
            if stream:
                await asyncio.to_thread(client.read_some)
            parked = Raw(one, name, stream=stream)
            await until("the next one waits", partial(shows, one, name, waiting=1))
            parked.leave(how)
            await until("the queued request was removed", partial(shows, one, name, waiting=0))
            left_s = client.leave(how)
            calls = await until("the engine notes it", partial(transcript, tmp_path, name))
            assert (len(calls), calls[0].aborted) == (1, True)
            assert calls[0].ended_s - left_s < ABORTED_S
            await until("its Slot is free", partial(shows, one, name, waiting=0, running=0))
            client.socket.close()
            parked.socket.close()
        await until("all four are counted", lambda: counted(one, "pilotlight_calls_total") == 4)
        assert counted(one, "pilotlight_calls_total", 'outcome="abandoned"', 'code="client_closed"') == 4


# --- case 35: clients that do not read --------------------------------------------------------------------------------

STALL_S = 30.0
"""Longer than a process may be paused on a busy machine. The client that reads runs in the process of the test."""
SILENT, SLOW = 40, 60
STALLED_BYTES_MAX = 128 << 10
"""Process memory for one client that does not read (the figure of the case)."""
RECEIVE_BYTES = 4096


async def sip(stream: Stream) -> None:
    """Read a byte now and then."""
    while await stream.reader.read(1):
        await asyncio.sleep(0.1)


async def drink(stream: Stream) -> int:
    """Read everything and return the number of bytes."""
    got = 0
    while data := await stream.reader.read(1 << 16):
        got += len(data)
    return got


@pytest.mark.case("35")
@pytest.mark.usefixtures("many_files")
@pytest.mark.standard
async def test_slow_and_non_reading_clients_are_disconnected_by_the_stall_limit(tmp_path: Path) -> None:
    """Uses 100 clients for the case's 600, and a stall timeout of 30 s for 60 s, with endless responses.

    40 clients read nothing, 60 one byte at a time. Each costs at most 128 KiB, all are disconnected and their engine
    work ends. Reading clients are unaffected: neither short requests nor a stream longer than the timeout.
    """
    ada = model("ada", engine="command", command=endless_stream_engine.command(), slots=SILENT + SLOW + 8)
    limits = {"writeStallSecondsMax": STALL_S}
    async with serving(tmp_path, ada, settings(limits=limits)) as one, Crowd(one) as crowd:
        await crowd.ask(chat("ada", close=True))
        gateway = one.gateways()["gateway-1"]
        reader = await crowd.connect()
        reader.writer.write(chat("ada", stream=True))
        reading = asyncio.create_task(drink(reader))
        await until("it runs", lambda: one.busy("ada") == 1)
        before_bytes = resident_bytes(gateway)
        stalled = [await crowd.connect(receive_bytes=RECEIVE_BYTES) for _ in range(SILENT + SLOW)]
        for stream in stalled:
            stream.writer.write(chat("ada", stream=True))
        sipping = asyncio.gather(*map(sip, stalled[SILENT:]))
        await until("all run", lambda: one.busy("ada") == 1 + SILENT + SLOW)
        most_bytes, beside = 0, 0
        while (busy := one.busy("ada")) > 1:
            most_bytes = max(most_bytes, resident_bytes(gateway))
            assert (await crowd.ask(chat("ada", close=True))).startswith(b"HTTP/1.1 200"), "others are served"
            beside += busy == 1 + SILENT + SLOW == one.busy("ada")
            await asyncio.sleep(0.1)
        assert most_bytes - before_bytes < (SILENT + SLOW) * STALLED_BYTES_MAX + SLACK_BYTES
        sipping.cancel()
        await asyncio.gather(sipping, return_exceptions=True)
        await until("only the reader is connected", lambda: connected(one, gateway) == 1)
        assert beside, "also while all of them stall"
        assert not reading.done(), "who reads is not cut"
        await until("their Slots are free", lambda: one.demand("ada") == {"waiting": 0, "running": 1})
        assert counted(one, "pilotlight_calls_total", 'outcome="abandoned"') == SILENT + SLOW
        reader.leave()
        await until("nothing runs", lambda: one.busy("ada") == 0)
        await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.case("35")
async def test_slot_is_freed_while_a_slow_client_still_reads_its_response(tmp_path: Path) -> None:
    """The engine finishes at once and the client stays connected: no timeout applies to a fully written response."""
    ada = model("ada", engine="command", command=endless_stream_engine.command(), slots=1)
    async with serving(tmp_path, ada, settings(limits={"writeStallSecondsMax": 4})) as one, Crowd(one) as crowd:
        slow = await crowd.connect(receive_bytes=RECEIVE_BYTES)
        slow.writer.write(chat("ada", stream=True, max_tokens=3))
        await until("it is answered", lambda: counted(one, "pilotlight_calls_total", 'outcome="completed"') == 1)
        await until("the last is over", lambda: one.demand("ada") == {"waiting": 0, "running": 0})
        await asyncio.sleep(6)  # one and a half times the timeout
        got = b""
        async with asyncio.timeout(60):
            while not got.endswith(b"0\r\n\r\n"):
                got += await slow.reader.read(256)
        assert got.count(b"data: {") == 3
        assert b"data: [DONE]" in got


# --- case 36: slow heads, slow bodies, idle connections ---------------------------------------------------------------

SLOW_HEADS = SLOW_BODIES = 150
IDLE_MAX = 300
SURPLUS = 20


@pytest.mark.case("36")
@pytest.mark.usefixtures("many_files")
@pytest.mark.standard
async def test_slow_or_idle_connections_are_closed_after_their_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses 150 slow heads, 150 slow bodies, 300 idle connections (case: 2,000, 2,000, 20,000); timeouts 25 to 30 s.

    Trickling bytes do not reset a timeout. Connections above the per-address limit are closed. Requests from another
    address are all answered meanwhile, and afterwards the first address may connect again. The timeouts are longer than
    a process may be paused on a busy machine: no connection ends before a healthy client was served beside all of them.
    """
    clocks = {"headerSecondsMax": 25, "bodySecondsMax": 26, "idleSecondsMax": 30, "connectionsPerAddressMax": IDLE_MAX}
    monkeypatch.setattr("tests.support.harness.serve.client_load.DRIBBLE_EVERY_S", 0.5)
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, settings(limits=clocks)) as one, Crowd(one) as crowd:
        assert b" 200 OK" in await crowd.ask(chat("ada", close=True))
        gateway = one.gateways()["gateway-1"]
        before_bytes = resident_bytes(gateway)
        idle = [await crowd.connect(OTHERS[0]) for _ in range(IDLE_MAX + SURPLUS)]
        for kept in idle[:10]:  # these are idle after a response
            kept.writer.write(HEALTH)
        ends = [asyncio.ensure_future(stream.rest()) for stream in idle]
        await until("the surplus is closed", lambda: all(end.done() for end in ends[IDLE_MAX:]))
        assert all(end.result() == b"" for end in ends[IDLE_MAX:]), "unanswered"
        heads = [asyncio.ensure_future(crowd.dribble(HEAD_BEGUN, OTHERS[1])) for _ in range(SLOW_HEADS)]
        bodies = [asyncio.ensure_future(crowd.dribble(BODY_BEGUN, OTHERS[1])) for _ in range(SLOW_BODIES)]
        most_bytes, served, beside = 0, 0, 0
        while not all(end.done() for end in (*heads, *bodies, *ends)):
            assert b" 200 OK" in await crowd.ask(chat("ada", close=True)), "a healthy client is served"
            served += 1
            beside += not any(end.done() for end in (*heads, *bodies))
            most_bytes = max(most_bytes, resident_bytes(gateway))
            await asyncio.sleep(0.1)
        for answer in await asyncio.gather(*heads, *bodies):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"request_timeout"' in answer
        answers = [await end for end in ends]
        assert [answer[:15] for answer in answers[:10]] == [b"HTTP/1.1 200 OK"] * 10
        assert set(answers[10:]) == {b""}, "an idle connection is closed without a word"
        assert beside, "also while all of them are there"
        connections = IDLE_MAX + SLOW_HEADS + SLOW_BODIES
        assert most_bytes - before_bytes < connections * (16 << 10) + SLACK_BYTES
        assert b" 200 OK" in await crowd.ask(chat("ada", close=True), OTHERS[0]), "its places are free again"
        assert counted(one, "pilotlight_calls_total", 'code="request_timeout"') == SLOW_HEADS + SLOW_BODIES
        await until("the last is over", lambda: one.demand("ada") == {"waiting": 0, "running": 0})
        assert counted(one, "pilotlight_calls_total", 'outcome="completed"') == served + 2


# --- case 37: very many connections, and no more file descriptors -----------------------------------------------------


def files(pid: int) -> int:
    """Return the number of file descriptors that a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def begin_connect(one: Serving) -> socket.socket:
    """Start a nonblocking connect."""
    target = target_of(one.url)
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex((target.host, target.port))
    return sock


def established(sock: socket.socket) -> bool:
    """Return whether the kernel has put the connection into the accept queue."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01"


@pytest.mark.case("37")
@pytest.mark.standard
async def test_connections_beyond_the_file_descriptor_limit_are_closed(tmp_path: Path) -> None:
    """At the limit, new connections are closed unanswered while kept ones and streams work; afterwards, all is normal.

    The limit is set on the gateway while four streams run: it leaves 20 free descriptors, and 200 clients connect. Each
    request needs two descriptors, and the gateway keeps some for itself.
    """
    # The streams last 30 s: they still run when a test that was paused for 20 s looks at them.
    ada = fake(tmp_path, "ada", "--tokens-per-s", "1", "--tokens", "30", slots=4)
    bob = fake(tmp_path, "bob", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, bob) as one, Crowd(one) as crowd:
        assert b" 200 OK" in await crowd.ask(chat("bob", close=True)), "an engine connection is kept"
        streams = one.begin(*(shot("ada") for _ in range(4)))
        await until("all run", lambda: one.demand("ada")["running"] == 4)
        gateway = one.gateways()["gateway-1"]
        limit = files(gateway) + ROOM
        before = resource.prlimit(gateway, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway, resource.RLIMIT_NOFILE, (limit, before[1]))
        flood = [await crowd.connect() for _ in range(10 * ROOM)]
        ends = [asyncio.ensure_future(stream.rest()) for stream in flood]
        await until("most of those who find no room are closed", lambda: sum(end.done() for end in ends) >= 8 * ROOM)
        for stream, end in zip(flood, ends, strict=True):
            if not end.done():
                stream.writer.write(chat("bob", close=True))
        await until("the kept ones are served", lambda: all(end.done() for end in ends))
        answers = [end.result() for end in ends]
        assert 0 < sum(b" 200 OK" in answer for answer in answers) <= ROOM / 2
        assert {answer for answer in answers if b" 200 OK" not in answer} == {b""}, "closed unanswered"
        results = await streams
        assert judge_run(4, results).completed == 4, "what runs goes on"
        assert b" 200 OK" in await crowd.ask(chat("bob", close=True)), "under the same limit, but with room"
        assert one.starts("ada") == one.starts("bob") == 1, "a shortage in a gateway is no evidence about an engine"
        assert one.gateways()["gateway-1"] == gateway


@pytest.mark.case("37")
async def test_gateway_raises_its_soft_file_limit_to_the_hard_limit(tmp_path: Path) -> None:
    """The usual soft limit in a shell, often 1,024, is below the connection limit of a single address."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0")) as one:
            assert b" 200 OK" in await Crowd(one).ask(chat("ada", close=True))
            limits = {
                pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in (*one.gateways().values(), *one.engines())
            }
            (gateway,), (engine,) = one.gateways().values(), one.engines()
            assert limits == {gateway: (hard, hard), engine: (min(soft, 1024), hard)}, "engines get what we got"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.case("37")
@pytest.mark.usefixtures("many_files")
async def test_resumed_gateway_answers_connections_from_its_listen_backlog(tmp_path: Path) -> None:
    """Clients fill the backlog while the gateway is stopped (SIGSTOP); each is answered after it resumes.

    Meanwhile the connections wait in the queue of listen(): 4,096, or what the kernel allows.
    """
    count = min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))  # the most that listen() allows
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * count:
        pytest.skip(f"a process may not open {2 * count} files here")
    limits = {"connectionsPerAddressMax": 10_000}
    async with serving(tmp_path, fake(tmp_path, "ada"), settings(limits=limits)) as one, Crowd(one) as crowd:
        assert b" 200 OK" in await crowd.ask(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        gateway = one.gateways()["gateway-1"]
        freeze(gateway)
        try:
            socks = [begin_connect(one) for _ in range(count + 100)]
            await until("the backlog is full", lambda: sum(map(established, socks)) >= count)
            taken = [sock for sock in socks if established(sock)]
            assert count <= len(taken) <= count + 1, "what listen() got"
        finally:
            os.kill(gateway, signal.SIGCONT)
        for sock in taken:
            sock.send(HEALTH)
        for sock in taken:
            sock.setblocking(True)
            sock.settimeout(60)
            assert (await asyncio.to_thread(sock.recv, 100)).startswith(b"HTTP/1.1 200 OK")
        late = set(socks).difference(taken)  # the kernel repeats their SYN after 1, 3, 7, 15, 31 and 63 s
        await until("who did not fit came later", lambda: all(map(established, late)))
        for sock in socks:
            sock.close()
