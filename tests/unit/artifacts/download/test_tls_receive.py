"""TLS bodies received from a connection into a file, in a thread: never more than requested, and every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import uvloop

from artifacts.download import tls_receive
from artifacts.download.splice import interrupt_transfer
from artifacts.download.tls_receive import Ends, Put, receive_body
from artifacts.http.transport import Limits, Sealed, create_tls_context
from artifacts.registry.blobs import Moved
from tests.support.harness.artifacts.registry_pull import go, place
from tests.support.net.certificates import OURS, leaf, write_authority

pytestmark = pytest.mark.standard

CONTENT = bytes(range(256)) * 4096
USUAL, SILENT, TRICKLE = Limits(), Limits(read_s=0.05), Limits(pace_s=0.1)
"""Each short limit applies to one kind of wait, so that a busy machine does not exceed another limit."""


class Pair:
    """Both ends of an established connection: the server's, and the client's as asyncio hands it over."""

    def __init__(self, folder: Path) -> None:
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        leaf(OURS).configure_cert(served)
        context = create_tls_context()
        context.load_verify_locations(write_authority(folder, OURS))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.client_socket = socket.create_connection(server.getsockname())
            plain, _ = server.accept()
        self.server_socket: ssl.SSLSocket | None = None

        def begin() -> None:
            self.server_socket = served.wrap_socket(plain, server_side=True)

        beginning = threading.Thread(target=begin)
        beginning.start()
        self.sealed = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="127.0.0.1")
        while True:
            try:
                self.sealed.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.client_socket.sendall(self.sealed.outgoing.read())
                self.sealed.incoming.write(self.client_socket.recv(1 << 16))
        self.client_socket.sendall(self.sealed.outgoing.read())
        beginning.join()
        self.client_socket.setblocking(False)

    @property
    def server(self) -> ssl.SSLSocket:
        assert self.server_socket is not None
        return self.server_socket

    def send(self, content: bytes) -> threading.Thread:
        sending = threading.Thread(target=self.server.sendall, args=(content,))
        sending.start()
        return sending

    def ahead(self, count: int) -> None:
        """Read this many encrypted bytes ahead of the transfer."""
        self.client_socket.setblocking(True)
        while self.sealed.incoming.pending < count:
            self.sealed.incoming.write(self.client_socket.recv(count - self.sealed.incoming.pending))
        self.client_socket.setblocking(False)

    def move(self, count: int, put: Put, at: int = 0, limits: Limits = USUAL) -> Moved:
        return receive_body(Ends(self.client_socket, self.sealed), count, put, at, limits)

    def close(self) -> None:
        self.client_socket.close()
        self.server.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path)
    yield one
    one.close()


class Came:
    """Collects the received bytes and their offsets."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.at: list[int] = []

    def put(self, at: int, pieces: Sequence[bytes | memoryview]) -> None:
        self.at.append(at)
        for piece in pieces:
            self.bytes += piece


@pytest.mark.parametrize("ahead", [0, 5, 70_000], ids=["nothing", "a record's begin", "some records"])
def test_tls_body_is_written_at_its_offset_without_later_bytes(pair: Pair, ahead: int) -> None:
    came = Came()
    sending = pair.send(CONTENT + b"more")
    pair.ahead(ahead)
    assert pair.move(len(CONTENT), came.put, 1000) == Moved(len(CONTENT))
    assert bytes(came.bytes) == CONTENT
    assert came.at[0] == 1000
    assert came.at == sorted(set(came.at))
    assert pair.move(4, came.put) == Moved(4)
    sending.join()
    assert bytes(came.bytes[-4:]) == b"more"


def test_disk_error_during_a_tls_transfer_is_raised_as_os_error(pair: Pair) -> None:
    def put(_at: int, _pieces: Sequence[bytes | memoryview]) -> None:
        raise OSError(28, "full")

    pair.send(CONTENT[:100]).join()
    with pytest.raises(OSError, match="full"):
        pair.move(100, put)


def test_tls_transfer_ends_if_the_connection_is_closed_silent_or_slow(pair: Pair) -> None:
    came = Came()
    pair.send(b"abc").join()
    assert pair.move(10, came.put, limits=SILENT) == Moved(3, "the connection broke during the response (too slow)")
    assert came.bytes == b"abc"
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.02):
            pair.server.sendall(b"x")

    dripping = threading.Thread(target=trickle)
    dripping.start()
    moved = pair.move(1 << 20, came.put, limits=TRICKLE)
    over.set()
    dripping.join()
    assert "sent only" in moved.broken
    pair.server.close()
    while (moved := pair.move(10, came.put)).came == 10:
        pass
    assert "it ended too early" in moved.broken


def test_tls_close_notify_before_the_end_of_the_body_is_an_error(pair: Pair) -> None:
    came = Came()
    pair.server.sendall(b"abc")
    saying = threading.Thread(target=_farewell, args=(pair.server,))
    saying.start()
    assert pair.move(10, came.put) == Moved(3, "the connection broke during the response (it ended too early)")
    interrupt_transfer(pair.client_socket)
    saying.join()


def _farewell(server: ssl.SSLSocket) -> None:
    with contextlib.suppress(OSError):  # the client sends no close_notify
        server.unwrap()


def test_invalid_tls_record_ends_the_transfer_with_no_bytes_written(pair: Pair) -> None:
    came = Came()
    pair.sealed.incoming.write(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert pair.move(10, came.put) == Moved(0, "the connection broke during the response (the data is not TLS)")
    assert not came.bytes


def test_tls_transfer_ends_on_an_interrupt_from_another_thread(pair: Pair) -> None:
    threading.Timer(0.01, interrupt_transfer, [pair.client_socket]).start()
    assert "the connection broke during the response" in pair.move(10, Came().put).broken


def test_tls_body_is_received_in_a_thread_under_uvloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent runs under uvloop, which has its own TLS implementation."""
    go("unsealed", monkeypatch, tmp_path)
    blob = CONTENT * 8
    moved: list[int] = []

    def counted(ends: Ends, count: int, put: Put, at: int, limits: Limits) -> Moved:
        moved.append(count)
        return receive_body(ends, count, put, at, limits)

    monkeypatch.setattr(tls_receive, "receive_body", counted)

    async def fetch() -> None:
        async with place(tmp_path) as one:
            await one.fetch(one.wanted(blob))
            assert one.file() == blob

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(fetch())
    assert len(moved) == 1
    assert 0 < moved[0] < len(blob), "what came with the head was unsealed already"


def test_tls_context_always_verifies_certificates() -> None:
    context = create_tls_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.sslobject_class is Sealed
    usual = ssl.create_default_context()
    assert context.verify_flags == usual.verify_flags
    assert context.options == usual.options
    assert context.minimum_version == usual.minimum_version
    assert len(context.get_ca_certs()) == len(usual.get_ca_certs())
