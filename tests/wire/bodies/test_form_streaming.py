"""Forms that are forwarded to an engine while they arrive: real sockets, and engines that report received bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from autoscaler.contract import FrontSettings
from gateway.http.body_buffers import LARGE_BYTES, ChunkedBody, Edit, StreamingBody
from gateway.limits import Limits
from gateway.server import body_intake, proxied_call
from gateway.server.body_intake import REST_S_MAX
from tests.support.fakes.engines.scripted_engine import OK, STREAM, STREAM_HEAD, chunk, document
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client
from tests.support.net.large_requests import MIB, Dying, Played, Reading, Refusing
from tests.support.waiting import until

PART = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
NAMED = PART % (b"model", b"", b"alias-m")
SOUND = PART % (b"file", b'; filename="a.wav"\r\nContent-Type: audio/wav', b"\0\r\n-\r\n--\xff" * (MIB // 4))
END = b"--b--\r\n"
FORM = NAMED + SOUND + END
CLOCK_S = 0.5
"""Timeout of a body that stops, which a test sets when the first half has reached the engine."""


@pytest.fixture(autouse=True)
def _any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward every form while it arrives: after a pause, its rest would seem to be too slow for that."""
    monkeypatch.setattr(body_intake, "REST_S_MAX", 3600.0)


def begin(client: Client, length: int, first: bytes, *lines: str) -> None:
    """Send a head and part of its body."""
    head = ["POST /v1/audio/transcriptions HTTP/1.1", "host: x", "content-type: multipart/form-data; boundary=b"]
    client.send("\r\n".join([*head, f"content-length: {length}", *lines, "", ""]).encode() + first)


@asynccontextmanager
async def begun(engine: Reading, form: bytes = FORM, part: int = MIB, *lines: str) -> AsyncIterator[tuple[Rig, Client]]:
    """Start a gateway and a client that has sent part of a form, some of which the engine has received."""
    async with engine, rig_and_client(engine.address) as (one, client):
        begin(client, len(form), form[:part], *lines)
        await engine.until(lambda: len(engine.came) > part // 2)
        assert one.in_use() == 1
        yield one, client


async def nothing_left(one: Rig) -> None:
    """Assert that no request remains and no memory is reserved."""
    await one.settled()
    await until("the memory budget is free", lambda: not one.front.room.held_bytes)
    assert one.in_use() == 0


def test_streaming_body_equals_edited_body_at_any_chunk_boundaries() -> None:
    pieces, text = ChunkedBody(), bytes(range(60))
    for edit in (Edit(10, 17, b"other name"), Edit(10, 10, b"more"), Edit(10, 17, b""), Edit(0, 0, b"")):
        wanted = text[: edit.start] + edit.text + text[edit.end :]
        for size in (1, 3, 60):
            pieces = ChunkedBody()
            growing, out = StreamingBody(pieces, len(text), edit.end).edited([edit]), b""
            assert len(growing) == len(wanted)
            for at in range(0, len(text), 5):
                pieces.add(text[at : at + 5])
                growing.ready = max(edit.end, at + 5)
                if pieces.size < growing.ready:
                    continue  # not before all edited bytes have arrived
                while found := growing.take(len(out), size):
                    assert 0 < sum(map(len, found)) <= size
                    out += b"".join(found)
                assert out == wanted[: growing.ready + len(wanted) - len(text)]
            assert out == wanted


@pytest.mark.parametrize("steps", [1, 7, 400])
async def test_uploaded_form_is_forwarded_to_the_engine_while_it_arrives(steps: int) -> None:
    engine = Reading(OK)
    async with begun(engine) as (one, client), asyncio.timeout(90):
        size = (len(FORM) - MIB) // steps
        for at in range(MIB, len(FORM), size):
            client.send(FORM[at : at + size])
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200
        begin(client, len(FORM), FORM)
        status, fields, _ = await client.answer()
        assert (status, fields.get("connection")) == (200, None)
        await nothing_left(one)
        assert one.totals()[0] == 2
    assert engine.connections == 1
    for sent in engine.whole:
        head, _, body = sent.partition(b"\r\n\r\n")
        assert body == FORM.replace(b"alias-m", b"served-m")
        assert b"content-length: %d\r\n" % len(body) in head
    assert len(engine.whole) == 2


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (b"--b-\r\n", "well-formed"),
        (b"--b\r\n", "well-formed"),
        (NAMED + END, "more than one part model"),
        (PART % (b"api_base", b"", b"http://10.0.0.1") + END, "api_base"),
        (PART % (b"stream", b"", b"perhaps") + END, "stream"),
    ],
)
async def test_streamed_form_with_an_invalid_end_gets_400_and_is_not_completed(end: bytes, word: str) -> None:
    engine, form = Reading(OK), NAMED + SOUND + end
    async with begun(engine, form) as (one, client):
        client.send(form[MIB:])
        status, fields, body = await client.answer()
        assert (status, fields["connection"]) == (400, "close")
        assert word in body.decode()
        await engine.until(lambda: engine.lost)
        await nothing_left(one)
    assert not engine.whole


async def test_disconnect_during_form_upload_aborts_the_engine_request() -> None:
    engine = Reading(OK)
    async with begun(engine) as (one, client):
        client.leave()
        await engine.until(lambda: engine.lost)
        await nothing_left(one)
    assert not engine.whole


async def test_stalled_form_body_times_out_with_408() -> None:
    engine = Reading(OK)
    async with begun(engine) as (one, client):
        one.front.limits = Limits(body_seconds_max=CLOCK_S)
        status, fields, _ = await client.answer()
        assert (status, fields["connection"]) == (408, "close")
        await engine.until(lambda: engine.lost)
        await nothing_left(one)


@asynccontextmanager
async def released(
    engine: Reading, monkeypatch: pytest.MonkeyPatch, form: bytes = FORM, *lines: str
) -> AsyncIterator[tuple[Rig, Client]]:
    """Do the same as `begun`, and then let the time pass after which a slow form no longer occupies an engine."""
    async with begun(engine, form, MIB, *lines) as (one, client):
        monkeypatch.setattr(proxied_call, "GROWING_S_MAX", 0.0)
        await engine.until(lambda: engine.lost)
        assert one.in_use() == 0
        yield one, client


@pytest.mark.parametrize("stream", [False, True])
async def test_slow_form_releases_its_engine_and_is_served_when_complete(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = NAMED + SOUND + (PART % (b"stream", b"", b"true") if stream else b"") + END
    engine = Reading(STREAM if stream else OK)
    async with released(engine, monkeypatch, form, "prefer: wait=500") as (one, client):
        clock, one.front.limits = one.front.clock, Limits(body_seconds_max=1e6)
        one.front.directory.settings = FrontSettings(keepalive_seconds=0)
        one.front.clock = lambda: clock() + 1000.0  # its time to wait begins when it is complete
        client.send(form[MIB:-9])
        client.send(form[-9:])
        status, fields, body = await client.answer()
        assert (status, fields.get("connection")) == (200, None)
        assert not stream or body.endswith(b"data: [DONE]\n\n")
        assert [sent.partition(b"\r\n\r\n")[2] for sent in engine.whole] == [form.replace(b"alias-m", b"served-m")]
        begin(client, len(form), form)
        assert (await client.answer())[0] == 200
        await nothing_left(one)
        assert 'code="client_closed"' not in one.front.telemetry.text((), None).decode()
    assert len(engine.whole) == 2


async def test_slow_form_with_an_invalid_end_gets_400_without_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, form = Reading(OK), NAMED + SOUND + NAMED + END
    async with released(engine, monkeypatch, form) as (one, client):
        client.send(form[MIB:])
        status, fields, body = await client.answer()
        assert (status, fields["connection"]) == (400, "close")
        assert b"more than one part model; send one" in body
        await nothing_left(one)
    assert not engine.whole


async def test_form_that_stalls_after_its_engine_was_released_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Reading(OK)
    async with released(engine, monkeypatch) as (one, client):
        one.front.limits = Limits(body_seconds_max=CLOCK_S)
        status, fields, body = await client.answer()
        assert (status, fields["connection"], b"limits.bodySecondsMax" in body) == (408, "close", True)
        await nothing_left(one)


async def test_disconnect_after_the_engine_was_released_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Reading(OK)
    async with released(engine, monkeypatch) as (one, client):
        client.leave()
        await until("the request to end", lambda: not one.front._calls)
        await nothing_left(one)


async def test_complete_form_is_rejected_if_the_gateway_has_begun_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Reading(OK)
    async with released(engine, monkeypatch) as (one, client):
        one.front.perform(one.front.dispatch.shutdown(one.front.clock()))
        client.send(FORM[MIB:])
        status, _, body = await client.answer()
        assert (status, b"shutting_down" in body) == (503, True)
        await nothing_left(one)


async def test_slow_form_with_an_early_keepalive_gets_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form, engine = NAMED + PART % (b"stream", b"", b"true") + SOUND + END, Reading(STREAM)
    async with released(engine, monkeypatch, form) as (one, client):
        one.front.directory.settings = FrontSettings(keepalive_seconds=0.1)
        assert (await client.head())[0] == 200
        client.send(form[MIB:])
        assert b"data: [DONE]\n\n" in await client.chunks()
        await nothing_left(one)


async def test_slow_form_is_buffered_until_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its rate the rest would not arrive soon."""
    monkeypatch.setattr(body_intake, "REST_S_MAX", REST_S_MAX)
    async with Reading(OK) as engine, rig_and_client(engine.address) as (one, client):
        begin(client, len(FORM), FORM[:100])
        await until("its clock runs", lambda: any(each._clock == "body" for each in one.front._connections))
        await asyncio.sleep(0.5)
        client.send(FORM[100 : LARGE_BYTES + 1000])
        await until("the form arrives", lambda: next(iter(one.front._connections))._reader.buffered > LARGE_BYTES)
        await asyncio.sleep(0.05)
        assert not engine.connections
        client.send(FORM[LARGE_BYTES + 1000 :])
        assert (await client.answer())[0] == 200
        assert engine.whole[0].endswith(FORM.replace(b"alias-m", b"served-m"))


class Eager(Played):
    """An engine that starts its response on the first bytes, and ends it when it has received all."""

    def __init__(self) -> None:
        super().__init__()
        self.got = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        writer.write(STREAM_HEAD + chunk(b": reading\n\n"))
        while self.got < length:
            self.got += len(await reader.read(MIB))
        writer.write(STREAM[len(STREAM_HEAD) :])
        await reader.read()
        writer.close()


@pytest.mark.parametrize("name", [b"alias-m", b"m"])
async def test_engine_that_responds_early_receives_the_rest_of_the_body(name: bytes) -> None:
    form = FORM.replace(b"alias-m", name)
    async with Eager() as engine, rig_and_client(engine.address) as (one, client):
        begin(client, len(form), form[:MIB])
        assert (await client.head())[0] == 200
        client.send(form[MIB:])
        assert (await client.chunks()).endswith(b"data: [DONE]\n\n")
        assert engine.got == len(form) + len(b"served-m") - len(name)
        await nothing_left(one)


async def test_early_engine_error_during_a_form_of_many_parts_is_relayed() -> None:
    """The part that was deferred to a later loop iteration is not forwarded."""
    refused = document(b'{"error":{"message":"no"}}', "400 Bad Request")
    many = b"".join(PART % (b"x%d" % number, b"", b"y") for number in range(900))
    form = NAMED + PART % (b"file", b"", b"z" * 2 * MIB) + many + END
    async with Refusing(refused) as engine, rig_and_client(engine.address) as (one, client):
        begin(client, len(form), form[:MIB])
        client.send(form[MIB:])
        assert (await client.answer())[0] == 400
        await nothing_left(one)


@pytest.mark.parametrize("read_bytes", [100, MIB // 2])
async def test_request_is_retried_if_the_engine_fails_during_the_form_upload(read_bytes: int) -> None:
    async with Dying(read_bytes) as first, Reading(OK) as second, rig(first.address, second.address) as one:
        client = await one.client()
        begin(client, len(FORM), FORM[:MIB])
        await second.until(lambda: len(second.came) > MIB // 2)
        client.send(FORM[MIB:])
        assert (await client.answer())[0] == 200
        assert second.whole[0].endswith(FORM.replace(b"alias-m", b"served-m"))
        await nothing_left(one)


async def test_engine_error_before_the_complete_body_closes_client_connection() -> None:
    refused = document(b'{"error":{"message":"too long"}}', "400 Bad Request")
    async with Refusing(refused) as engine, rig_and_client(engine.address) as (one, client):
        begin(client, len(FORM), FORM[:MIB])
        status, fields, body = await client.answer()
        assert (status, fields["connection"], body) == (400, "close", b'{"error":{"message":"too long"}}')
        client.send(FORM[MIB:])
        assert await client.rest() == b""
        await nothing_left(one)


async def test_unknown_model_is_rejected_before_the_body_is_complete() -> None:
    async with rig_and_client() as (one, client):
        begin(client, len(FORM), FORM.replace(b"alias-m", b"other-m")[:MIB])
        assert (await client.answer())[0] == 404
        await nothing_left(one)


async def test_form_with_model_last_is_buffered_until_complete() -> None:
    form = SOUND + NAMED + END
    async with Reading(OK) as engine, rig_and_client(engine.address) as (one, client):
        begin(client, len(form), form[:-20])
        await until("the form arrives", lambda: one.front.room.held_bytes >= len(form))
        assert not engine.connections
        client.send(form[-20:])
        assert (await client.answer())[0] == 200
        assert engine.whole[0].endswith(form.replace(b"alias-m", b"served-m"))


async def test_stream_part_at_the_end_of_a_form_gives_a_streamed_response() -> None:
    form = NAMED + SOUND + PART % (b"stream", b"", b"true") + END
    async with begun(Reading(STREAM), form) as (one, client):
        client.send(form[MIB:])
        status, fields, body = await client.answer()
        assert (status, fields["content-type"]) == (200, "text/event-stream")
        assert body.endswith(b"data: [DONE]\n\n")
        await nothing_left(one)


async def test_request_for_a_cold_model_is_queued_while_its_body_is_received() -> None:
    async with Reading(OK) as engine, rig_and_client(state="cold") as (one, client):
        begin(client, len(FORM), FORM[:MIB])
        await until("the request is queued", one.front.busy)
        client.send(FORM[MIB:])
        async with asyncio.timeout(60):
            (connection,) = one.front._connections
            while connection._growing is not None:
                await asyncio.sleep(0.001)
        one.routes(engine.address)
        assert (await client.answer())[0] == 200
        assert engine.whole[0].endswith(FORM.replace(b"alias-m", b"served-m"))
        await nothing_left(one)
