"""Queued streams, responses without an engine, connection limits, and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from functools import partial
from pathlib import Path

import pytest

from autoscaler.contract import FrontSettings
from gateway.gateway import DESCRIPTORS_RESERVED
from gateway.limits import Limits
from loadtest.result import server_timing
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    DONE,
    END,
    ERROR,
    HOLD,
    OK,
    STREAM,
    STREAM_HEAD,
    WITHOUT_USAGE,
    ScriptedEngine,
    delta,
    document,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client
from tests.support.timing import turns
from tests.support.waiting import until


async def parked(one: Rig, *, stream: bool, minor: int = 1, path: str = "/v1/chat/completions") -> Client:
    client = await one.client()
    client.call(stream=stream, minor=minor, path=path)
    return client


async def test_response_to_a_queued_request_has_the_cold_start_header() -> None:
    async with ScriptedEngine((OK,)) as engine, rig() as one:
        client = await parked(one, stream=False)
        while not one.front.report().levels:
            await asyncio.sleep(0.001)
        one.routes(engine.address, phases_ms={"load": 12.5})
        status, fields, _ = await client.answer()
        assert (status, fields["x-pilotlight-cold"]) == (200, "1")
        assert "load;dur=12.5" in fields["server-timing"]


@pytest.mark.parametrize(("load_ms", "whole"), [(0.1, True), (60_000.0, False)])
async def test_server_timing_omits_ready_if_the_start_began_before_the_request(load_ms: float, whole: bool) -> None:
    async with ScriptedEngine((OK,)) as engine, rig() as one:
        client = await parked(one, stream=False)
        while not any(level.oldest_wait_s > 0.001 for level in one.front.report().levels):  # longer than a short start
            await asyncio.sleep(0.001)
        one.routes(engine.address, phases_ms={"decide": 0.1, "load": load_ms})
        timings = server_timing((await client.answer())[1]["server-timing"])
        assert list(timings) == ["queue", "decide", "load", *(["ready"] if whole else []), "upstream"]
        if whole:
            assert timings["decide"] + timings["load"] + timings["ready"] == pytest.approx(timings["queue"], abs=0.2)


EARLY = FrontSettings(keepalive_seconds=0.1)


@pytest.mark.parametrize("minor", [0, 1])
async def test_queued_stream_receives_its_queue_position_before_the_response(minor: int) -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(settings=EARLY) as one:
        client = await parked(one, stream=True, minor=minor)
        status, fields = await client.head()
        assert (status, fields["content-type"], fields["x-pilotlight-cold"]) == (200, "text/event-stream", "1")
        one.routes(engine.address)
        body = await (client.chunks() if minor else client.rest())
        assert body.startswith(b": waiting, position 1\ndata: ")
        assert WITHOUT_USAGE in body
        assert body.splitlines()[-1].startswith(b": server-timing queue;dur=")


async def test_stream_of_an_anthropic_request_gets_pings_while_queued() -> None:
    async with rig(settings=EARLY) as one:
        client = await parked(one, stream=True, path="/v1/messages")
        await client.head()
        assert (await client.chunk()).startswith(b"event: ping\n")


async def test_engine_error_after_the_response_head_was_sent_becomes_an_event() -> None:
    async with (
        ScriptedEngine((document(b'{"error":{"message":"too long","code":400}}', "400 Bad"),)) as engine,
        rig(settings=EARLY) as one,
    ):
        client = await parked(one, stream=True)
        await client.head()
        one.routes(engine.address)
        body = await client.chunks()
        assert b'data: {"error":{"message":"too long","code":400}}\n\n' in body
        assert b"[DONE]" not in body


async def test_rejection_after_the_response_head_was_sent_becomes_an_event() -> None:
    async with rig(settings=EARLY) as one:
        client = await parked(one, stream=True)
        await client.head()
        one.front.perform(one.front.dispatch.shutdown(one.front.clock()))
        body = await client.chunks()
        assert b'"shutting_down"' in body
        assert b"[DONE]" not in body


async def test_engine_failure_after_the_response_head_was_sent_is_retried_once() -> None:
    async with ScriptedEngine((CLOSE,)) as engine, rig(settings=EARLY) as one:
        client = await parked(one, stream=True)
        await client.head()
        one.routes(engine.address)
        body = await client.chunks()
        assert ERROR in body
        assert len(engine.requests) == 2


async def test_queued_non_streaming_request_gets_503_after_silent_seconds_max() -> None:
    async with rig(settings=FrontSettings(silent_seconds_max=0.1)) as one:
        client = await parked(one, stream=False)
        status, fields, body = await client.answer()
        assert (status, fields["retry-after"]) == (503, "1")
        assert b'"model_starting"' in body
        report = one.front.report()
        assert report.levels == ()
        assert [total.refused_cold for total in report.totals] == [1], "it still is demand for one start"


@pytest.mark.parametrize("length", ["999999999", "60"])
async def test_error_before_the_whole_body_has_request_id_and_api_format(length: str) -> None:
    async with rig_and_client(limits=Limits(body_seconds_max=0.1)) as (_, client):
        client.send(
            b"POST /v1/messages HTTP/1.1\r\nHost: gw\r\nX-Request-Id: mine\r\n"
            b"Content-Type: application/json\r\nContent-Length: %b\r\n\r\n{" % length.encode()
        )
        status, fields, body = await client.answer()
        assert (status, fields["x-request-id"]) == (413 if len(length) > 2 else 408, "mine")
        assert json.loads(body)["type"] == "error", "as Anthropic's clients read it"


async def test_invalid_header_value_is_reported_only_after_the_key_check() -> None:
    async with rig_and_client(settings=FrontSettings(keys_needed=True)) as (_, client):
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nX-Priority: high\r\nContent-Length: 2\r\n\r\n{}")
        assert (await client.answer())[0] == 401
    async with rig_and_client() as (_, client):
        for _ in range(2):
            client.send(b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nX-Priority: high\r\nContent-Length: 2\r\n\r\n{}")
            status, _, body = await client.answer()
            assert (status, b"x-priority" in body) == (400, True)


async def get(one: Rig, path: str, *, method: str = "GET", more: str = "") -> tuple[int, dict[str, str], bytes]:
    client = await one.client()
    client.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode())
    return await client.answer()


async def test_models_request_lists_a_stopped_model_without_starting_it() -> None:
    async with rig(state="zero") as one:
        status, _, body = await get(one, "/v1/models")
        listed = json.loads(body)
        assert (status, listed["object"], [item["id"] for item in listed["data"]]) == (200, "list", ["m"])
        assert listed["data"][0]["pilotlight"]["state"] == "zero"
        assert listed["data"][0]["pilotlight"]["context_tokens"] == 4096
        assert json.loads((await get(one, "/v1/models/m"))[2])["id"] == "m"
        assert (await get(one, "/v1/models/none"))[0] == 404
        assert one.front.report().levels == ()


async def test_unknown_path_gets_openai_404_and_keeps_the_connection() -> None:
    async with rig_and_client() as (_, client):
        client.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        status, fields, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
        assert fields["x-request-id"]
        assert (await client.answer())[0] == 200


async def test_malformed_request_gets_one_400_without_echo() -> None:
    async with rig_and_client() as (_, client):
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization : Bearer sk-canary\r\n\r\n")
        rest = await client.rest()
        assert rest.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"canary" not in rest


async def test_missing_key_gets_401_with_www_authenticate() -> None:
    async with rig(settings=FrontSettings(keys_needed=True)) as one:
        status, fields, _ = await get(one, "/v1/models")
        assert (status, fields["www-authenticate"]) == (401, "bearer")


async def test_cors_preflight_allows_only_configured_origins() -> None:
    async with rig(settings=FrontSettings(cors_origins=("https://app.example",))) as one:
        allowed = await get(one, "/v1/models", method="OPTIONS", more="origin: https://app.example\r\n")
        assert (allowed[0], allowed[1]["access-control-allow-origin"]) == (204, "https://app.example")
        refused = await get(one, "/v1/models", method="OPTIONS", more="origin: https://evil.example\r\n")
        assert "access-control-allow-origin" not in refused[1]


async def test_100_continue_is_sent_before_the_body_of_an_expect_request() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 13\r\n\r\n"
        )
        assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b'{"model":"m"}')
        assert (await client.answer())[0] == 200


async def test_100_continue_is_sent_once_for_a_split_body() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 13\r\n\r\n"
        )
        assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        (connection,) = one.front._connections

        def holds(unread: int) -> bool:
            return connection._reader.buffered == unread

        for at in range(13):
            client.send(b'{"model":"m"}'[at : at + 1])
            await until("it is read", partial(holds, (at + 1) % 13))
        assert (await client.answer())[0] == 200


async def test_data_after_a_rejection_is_dropped_until_the_linger_timeout() -> None:
    """Otherwise a reset would overtake the response and destroy it."""
    async with rig(limits=Limits(body_bytes_max=10)) as one:
        now_s = one.front.clock()
        one.front.clock = lambda: now_s  # stopped: time passes only in the calls of `sweep` below
        client = await one.client()
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n{")
        assert (await client.answer())[0] == 413
        (connection,) = one.front._connections
        connection.sweep(now_s + 1.0)
        client.send(b"x" * 1_000_000)
        await client.writer.drain()
        await turns(10)
        assert one.front._connections == {connection}
        connection.sweep(now_s + 5.0)
        await until("it is closed", lambda: not one.front._connections)


@pytest.mark.parametrize("wish", ["connection: close", "host: y", "x: y"])
async def test_error_that_closes_the_connection_sends_connection_close(wish: str) -> None:
    """Covers a request that gets an error, an unsupported request, and one that cannot be parsed."""
    removed = (b"HTTP/1.1 200 OK\r\n", CLOSE)
    kept = wish == "x: y"
    lines = f"host: x\r\ncontent-type: application/json\r\n{wish}\r\n"
    async with ScriptedEngine(removed) as engine, rig(engine.address) as one:
        for request, status in (
            (f'POST /v1/chat/completions HTTP/1.1\r\n{lines}content-length: 13\r\n\r\n{{"model":"m"}}', 502),
            (f"GET /v1/models/none HTTP/1.1\r\n{lines}\r\n", 404),
            (f"GET /nothing HTTP/1.1\r\n{lines}\r\n", 404),
        ):
            client = await one.client()
            client.send(request.encode())
            got, fields, _ = await client.answer()
            assert got == (400 if wish == "host: y" else status)
            assert fields.get("connection") == (None if kept else "close")
            if not kept:
                assert await client.rest() == b""


@pytest.mark.parametrize("cut", [1, 40, 1000])
@pytest.mark.parametrize(
    ("line", "dialect"),
    [
        (b"POST /v1/messages HTTP/1.1", "anthropic"), (b"POST /v1/messages?beta=true HTTP/1.1", "anthropic"),
        (b"POST /v1/chat/completions HTTP/1.1", "openai"), (b"POST /nothing HTTP/1.1", "openai"),
        (b"POST /v1/messages HTTP/1.2", "openai"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", b"X : y\r\n\r\n", b"X: y\n",
        b"Expect: more\r\n\r\n", b"X: " + b"y" * (64 << 10),
    ],
)  # fmt: skip
async def test_error_for_an_invalid_head_has_the_api_format_of_its_path(
    fields: bytes, line: bytes, dialect: str, cut: int
) -> None:
    data = line + b"\r\nHost: x\r\n" + fields
    async with rig_and_client() as (_, client):
        for part in (data[:cut], data[cut:]):
            client.send(part)
            await turns(5)
        rest = await client.rest()
        assert rest.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
        assert ("type" in json.loads(rest.partition(b"\r\n\r\n")[2])) == (dialect == "anthropic")


async def assert_room_for_two_clients(one: Rig) -> None:
    """The third is closed without a response; the others are served."""
    kept = [await one.client(), await one.client()]
    third = await one.client()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await third.head()
    for client in kept:
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_connection_above_the_limit_per_address_is_closed() -> None:
    async with rig(limits=Limits(connections_per_address_max=2)) as one:
        await assert_room_for_two_clients(one)


async def test_connection_limit_reserves_a_descriptor_for_each_engine_request() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with rig() as one:
        one.front.own_descriptors = limit - DESCRIPTORS_RESERVED - 2 * 2
        await assert_room_for_two_clients(one)


async def test_drain_finishes_running_requests_and_rejects_queued_ones() -> None:
    async with (
        ScriptedEngine((STREAM_HEAD + delta("a"), HOLD, DONE + END)) as engine,
        rig(engine.address, slots=1) as one,
    ):
        running, idle = await parked(one, stream=True), await one.client()
        await running.head()
        waiting = await parked(one, stream=False)
        while not any(waiting for _, waiting, _ in one.front.dispatch.counts()):
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(one.front.drain(90))
        status, fields, body = await waiting.answer()
        assert (status, fields["connection"]) == (503, "close")
        assert b'"shutting_down"' in body
        assert await idle.rest() == b""
        assert not draining.done()
        engine.release.set()
        assert b"[DONE]" in await running.rest()
        await asyncio.wait_for(draining, 60)  # not the 90 s that it may take


async def test_drain_timeout_ends_running_stream_with_one_error() -> None:
    async with ScriptedEngine((STREAM_HEAD + delta("a"), HOLD)) as engine, rig(engine.address) as one:
        client = await parked(one, stream=True)
        await client.head()
        await client.chunk()
        await one.front.drain(0.05)
        assert b'"shutting_down"' in await client.chunk()
        assert await client.rest() == b""


async def test_drain_does_not_wait_for_an_incomplete_request() -> None:
    async with ScriptedEngine() as engine, rig_and_client(engine.address) as (one, client):
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.send(b"content-length: 100\r\n\r\n{")
        await until("the head is read", lambda: any(each._clock == "body" for each in one.front._connections))
        await one.front.drain(5)
        assert b'"shutting_down"' in await client.rest()


# --- no disclosure ---------------------------------------------------------------------------------------------------


async def test_events_metrics_and_errors_contain_no_key_prompt_or_address(tmp_path: Path) -> None:
    sink = os.open(tmp_path / "events", os.O_RDWR | os.O_CREAT)
    prompt = [{"role": "user", "content": "canary-prompt"}]
    scripts = [(STREAM,), (STREAM_HEAD + delta("a"), CLOSE), (CLOSE,), (document(b"{}", "302 Found"),)]
    output = b""
    async with ScriptedEngine(*scripts) as engine:
        async with rig(engine.address, events=sink) as one:
            for number in range(4):
                client = await one.client()
                client.call(stream=number < 2, minor=0, key="sk-canary-key", messages=prompt, user="canary-user")
                output += await client.rest()
            client = await one.client()
            client.send(b"POST /v1/canary-path?key=canary HTTP/1.1\r\nhost: canary-host\r\n\r\nGET canary\r\n\r\n")
            output += await client.rest()
            output += one.front.metrics()
        events = os.pread(sink, 1 << 20, 0)
        os.close(sink)
        assert events.count(b'{"event":"call",') == 4
        assert events.count(b'{"event":"turned_away",') == 2
        assert b"canary" not in output + events
        assert engine.address.encode() not in output + events
