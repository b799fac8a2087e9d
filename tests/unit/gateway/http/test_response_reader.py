"""An engine connection over a fake transport: the data of one read is delivered over several loop iterations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.http.response_reader import LAST_CHUNK, STEP_BYTES, BodyWalker, ResponseHead
from gateway.http.sse_relay import encode_chunk
from gateway.upstream.connection import EngineConnection, Loss, Sink
from gateway.upstream.pool import Pool, parse_address

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TEXT = bytes(range(97, 123)) * 400
CRUMBS = b"".join([encode_chunk(TEXT[at : at + 1]) for at in range(len(TEXT))])
"""Takes more than three steps of `STEP_BYTES`."""
TURNS = len(CRUMBS) // STEP_BYTES


class Played(asyncio.Transport):
    """A fake transport that records whether it is read from and whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


class Heard(Sink):
    """A fake sink that collects the content and counts its pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.end = ""
        self.fails = ""
        """The method that raises an exception."""
        self._walker: BodyWalker | None = None

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def sent_s(self) -> float:
        return 0.0

    def engine_sent(self) -> None:
        pass

    def engine_head(self, head: ResponseHead, walker: BodyWalker) -> Callable[[bytes], None] | None:
        del head
        self._raise("head")
        self._walker = walker
        return self._take

    def engine_end(self) -> None:
        self._raise("end")
        self.end = "whole"

    def engine_whole(self, head: ResponseHead, body: bytes) -> None:
        self._raise("whole")
        raise AssertionError

    def engine_lost(self, loss: Loss) -> None:
        self._raise("lost")
        self.end = loss

    def engine_failed(self, error: Exception) -> None:
        self.end = str(error)

    def _raise(self, method: str) -> None:
        if self.fails == method:
            raise LookupError(f"{method} failed")

    def _take(self, data: bytes) -> None:
        self._raise("take")
        assert self._walker is not None
        self.pieces.append(self._walker.strip(data))


class Line:
    """A connection with its transport and sink, after a request was sent."""

    def __init__(self) -> None:
        self.pool = Pool(parse_address("127.0.0.1:1"), lambda: pytest.fail("no TLS here"))
        self.connection = EngineConnection(self.pool)
        self.transport = Played()
        self.sink = Heard()
        self.connection.start(self.sink, (b"request", b""), single=False)
        self.connection.connection_made(self.transport)

    async def turns(self) -> int:
        """Run the loop until nothing more is delivered; return the number of iterations that delivered data."""
        brought = 0
        for _ in range(2 * TURNS):
            before = len(self.sink.pieces)
            await asyncio.sleep(0)
            brought += len(self.sink.pieces) > before
        return brought


async def test_large_read_is_delivered_over_several_event_loop_iterations() -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS + LAST_CHUNK)
    assert (len(line.sink.pieces), line.transport.reading) == (1, False)
    assert len(line.sink.content) <= STEP_BYTES // 6 + 1
    assert await line.turns() == TURNS
    assert (line.sink.content, line.sink.end) == (TEXT, "whole")
    assert line.transport.reading
    assert line.connection.sink is None


async def test_data_received_while_paused_is_delivered_in_order() -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS)
    line.connection.data_received(encode_chunk(b"!") + LAST_CHUNK)
    await line.turns()
    assert (line.sink.content, line.sink.end, line.transport.reading) == (TEXT + b"!", "whole", True)


async def test_reading_stays_paused_after_delivery_while_the_client_is_slow() -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS)
    line.connection.pause()
    await line.turns()
    assert (line.sink.content, line.transport.reading) == (TEXT, False)
    line.connection.resume()
    assert line.transport.reading


async def test_reading_resumes_only_after_buffered_data_is_delivered() -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS)
    line.connection.pause()
    line.connection.resume()
    assert not line.transport.reading
    await line.turns()
    assert line.transport.reading


@pytest.mark.parametrize(("rest", "end"), [(LAST_CHUNK, "whole"), (b"", "reset")])
async def test_lost_connection_is_reported_after_buffered_data_is_delivered(rest: bytes, end: str) -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS + rest)
    line.connection.connection_lost(ConnectionResetError())
    assert line.sink.end == ""
    await line.turns()
    assert (line.sink.content, line.sink.end) == (TEXT, end)
    assert line.pool.connections == 0


@pytest.mark.parametrize(("error", "end"), [(None, "whole"), (ConnectionResetError(), "reset")])
async def test_close_delimited_body_ends_after_buffered_data_is_delivered(error: Exception | None, end: str) -> None:
    line, text = Line(), TEXT * 6
    line.connection.data_received(CLOSING + text)
    line.connection.connection_lost(error)
    assert await line.turns() == len(text) // STEP_BYTES
    assert (line.sink.content, line.sink.end) == (text, end)


async def test_no_data_is_delivered_after_the_response_is_released() -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS + LAST_CHUNK)
    heard = line.sink.content
    line.connection.let_go()
    assert await line.turns() == 0
    assert (line.sink.content, line.sink.end, line.transport.aborted) == (heard, "", True)
    line.connection.connection_lost(None)
    assert line.pool.connections == 0


async def test_malformed_data_found_during_delivery_aborts_the_connection() -> None:
    line = Line()
    line.connection.data_received(HEAD + CRUMBS + b"odd")
    await line.turns()
    assert (line.sink.end, line.transport.aborted) == ("odd", True)
    assert TEXT.startswith(line.sink.content)


async def test_surplus_data_after_a_response_aborts_the_connection() -> None:
    line = Line()
    line.connection.data_received(HEAD + LAST_CHUNK + CRUMBS)
    assert (line.sink.end, line.transport.aborted) == ("whole", True), "such a connection is not used again"


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("head", HEAD), ("take", HEAD + CRUMBS), ("end", HEAD + LAST_CHUNK), ("lost", b"odd\r\n\r\n"),
        ("whole", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
    ],
)  # fmt: skip
async def test_exception_in_a_response_callback_fails_its_request(method: str, data: bytes) -> None:
    line = Line()
    line.sink.fails = method
    line.connection.data_received(data)
    assert line.sink.end == f"{method} failed"
