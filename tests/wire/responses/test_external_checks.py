"""External checks of requests and answers: decisions, failures, limits, streams, disconnects, forbidden addresses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from autoscaler.contract import CatalogueDelta, FrontSettings, PolicyCheck, PolicyEntry
from gateway.policy import external_checks
from gateway.policy.external_check_addresses import AddressRules
from gateway.upstream import external_check_client
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    END,
    HOLD,
    STREAM,
    ScriptedEngine,
    chunk,
    document,
)
from tests.support.harness.gateway.gateway_rig import Rig, rig
from tests.support.waiting import until
from tests.wire.requests.test_request_policy import MODEL_ENTRY, post

SECRET = "the-secret-prompt"
ANSWER = document(b'{"choices":[{"message":{"content":"the-answer"},"finish_reason":"stop"}]}')
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b'{"choices":')
    + chunk(b"[]}")
    + END
)
UNTIL_CLOSE = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"choices":[]}'
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """The server of a check. It answers with `reply`, and keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.reply: Answering = allowing
        self.port = 0
        self.gone = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.messages.append(await request.json())
        try:
            return await self.reply(request)
        except asyncio.CancelledError:
            self.gone += 1
            raise

    def check(self, **options: Any) -> PolicyCheck:
        return PolicyCheck(url=f"http://127.0.0.1:{self.port}/check", **({"timeout_s": 60.0} | options))


async def allowing(request: web.Request) -> web.StreamResponse:
    del request
    return web.json_response({"allow": True, "extra": 1})


async def rejecting(request: web.Request) -> web.StreamResponse:
    del request
    return web.json_response({"allow": False, "reason": "no\npoems"})


async def hanging(request: web.Request) -> web.StreamResponse:
    del request
    await asyncio.Event().wait()
    return web.Response()


@contextlib.asynccontextmanager
async def guard() -> AsyncIterator[Guard]:
    one = Guard()
    application = web.Application(client_max_size=8 << 20)
    application.router.add_route("*", "/{path:.*}", one.handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.port = runner.addresses[0][1]
    try:
        yield one
    finally:
        await runner.cleanup()


def apply_policy(
    one: Rig, *, hosts: tuple[str, ...] = ("127.0.0.1",), version: int = 2, keepalive_s: float = 15.0,
    silent_s: float = 0.0, dialects: tuple[str, ...] = MODEL_ENTRY.dialects, **checks: Any,
) -> None:  # fmt: skip
    model = msgspec.structs.replace(MODEL_ENTRY, dialects=dialects, policy=PolicyEntry(**checks))
    settings = FrontSettings(check_hosts=hosts, keepalive_seconds=keepalive_s, silent_seconds_max=silent_s)
    one.front.catalogue(CatalogueDelta(epoch=1, version=version, full=True, models=(model,), settings=settings))


async def ask(one: Rig, path: str = "/v1/chat/completions", **members: object) -> tuple[int, dict[str, str], Any]:
    client = await one.client()
    post(
        client, path, json.dumps({"model": "m", "messages": [{"role": "user", "content": SECRET}], **members}).encode()
    )
    status, fields, body = await client.answer()
    is_json = fields["content-type"].startswith("application/json")
    return status, fields, json.loads(body) if is_json else body


# --- requests --------------------------------------------------------------------------------------------------------


async def test_allowed_request_is_sent_to_the_engine_after_its_check() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,), (STREAM,)) as engine, rig(engine.address) as one:
        apply_policy(one, request_check=checked.check())
        assert (await ask(one, seed=7))[0] == 200
        (message,) = checked.messages
        assert message.pop("body") == {
            "model": "served-m",
            "messages": [{"role": "user", "content": SECRET}],
            "seed": 7,
        }
        assert message.pop("request_id")
        assert message == {
            "check": "request", "model": "m", "tenant": "default", "endpoint": "/v1/chat/completions"
        }  # fmt: skip
        assert b"data: [DONE]" in (await ask(one, stream=True))[2]
        assert len(checked.messages) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_rejected_request_gets_403_and_reaches_no_engine(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = rejecting
        apply_policy(one, request_check=checked.check())
        status, fields, body = await ask(one, path)
        assert (status, fields["x-should-retry"]) == (403, "false")
        assert "rejected the request: no poems" in json.dumps(body)
        assert path == "/api/chat" or body["error"]["code"] == "request_rejected"
        assert not engine.requests
        await one.settled()
        assert one.in_use() == 0
    assert SECRET not in caplog.text


def reply_with(status: int, body: bytes, **headers: str) -> Answering:
    async def replying(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(status=status, body=body, headers=headers)

    return replying


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (500, b'{"allow":true}', {}),
        (503, b"", {}),
        (429, b"", {}),
        (408, b"", {}),
        (404, b"", {}),
        (204, b"", {}),
        (302, b"", {"location": "/other"}),
        (200, b"", {}),
        (200, b"[true]", {}),
        (200, b'{"allow":"yes"}', {}),
        (200, b'{"reason":"x"}', {}),
        (200, b"[" * 10_000, {}),
        (200, b'{"allow":true,"padding":"' + b"x" * external_checks.RESPONSE_BYTES_MAX + b'"}', {}),
        (200, b'{"allow":true}', {"content-encoding": "gzip"}),
    ],
)
async def test_invalid_check_response_gets_503_unless_the_check_fails_open(
    status: int, body: bytes, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = reply_with(status, body, **headers)
        apply_policy(one, request_check=checked.check())
        answered, fields, error = await ask(one)
        assert (answered, error["error"]["code"], fields["retry-after"]) == (503, "check_failed", "2")
        assert fields["x-should-retry"] == ("true" if status in (408, 429, 500, 503) else "false")
        assert not engine.requests
        assert len(checked.messages) == 1
        apply_policy(one, version=3, request_check=checked.check(fail_open=True))
        assert (await ask(one))[0] == 200
    assert "event=check_failed" in caplog.text
    assert SECRET not in caplog.text
    assert "127.0.0.1" not in caplog.text


async def test_check_timeout_gets_503_unless_the_check_fails_open() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = hanging
        apply_policy(one, request_check=checked.check(timeout_s=0.05))
        status, fields, _ = await ask(one)
        assert (status, fields["x-should-retry"]) == (503, "true")
        apply_policy(one, version=3, request_check=checked.check(timeout_s=0.05, fail_open=True))
        assert (await ask(one))[0] == 200
        metrics = one.front.telemetry.text((), None).decode()
        for result in ("allowed", "rejected"):
            assert f'pilotlight_failed_checks_total{{check="request",result="{result}"}} 1.0' in metrics


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
async def test_stream_gets_keepalives_during_its_check_and_an_event_if_rejected(path: str) -> None:
    decided = asyncio.Event()

    async def rejecting_later(request: web.Request) -> web.StreamResponse:
        await decided.wait()
        return await rejecting(request)

    async with guard() as checked, ScriptedEngine((STREAM,)) as engine, rig(engine.address) as one:
        checked.reply = rejecting_later
        apply_policy(one, keepalive_s=0.1, request_check=checked.check())
        client = await one.client()
        post(client, path, b'{"model":"m","stream":true,"messages":[{"role":"user","content":"Hello"}]}')
        assert (await client.head())[0] == 200  # the first keep-alive sends the head
        decided.set()
        assert b"no poems" in await client.chunks()
        assert not engine.requests


async def test_tenant_with_slow_checks_leaves_half_of_the_checks_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_check_client, "CHECKS_MAX", 8)
    async with guard() as checked:
        checked.reply = hanging
        client = external_check_client.CheckClient()
        client.set_rules(AddressRules(["127.0.0.1"]))

        def count_started(tenant: str, tries: int) -> int:
            started = [client.start("request", tenant, (checked.check(),), b"{}", lambda _: None) for _ in range(tries)]
            return sum(task is not None for task in started)

        try:
            assert [count_started(tenant, 9) for tenant in ("slow", "other", "third")] == [4, 2, 1]
            await until("all checks to begin", lambda: len(checked.messages) == 7)
        finally:
            await client.close()
        assert count_started("slow", 9) == 4
        await client.close()


async def test_request_whose_check_ends_after_its_deadline_gets_503() -> None:
    now_s = 0.0

    async def allowing_late(request: web.Request) -> web.StreamResponse:
        nonlocal now_s
        now_s += 3.0
        return await allowing(request)

    async with guard() as checked, ScriptedEngine((ANSWER,), (ANSWER,)) as engine, rig(engine.address) as one:
        clock = one.front.clock
        one.front.clock = lambda: clock() + now_s
        checked.reply = allowing_late
        apply_policy(one, request_check=checked.check())
        for wait_s, status in ((1, 503), (60, 200), (0, 200)):
            client = await one.client()
            lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nPrefer: wait={wait_s}\r\nContent-Length: 13"
            client.send(f'{lines}\r\n\r\n{{"model":"m"}}'.encode())
            found, _, body = await client.answer()
            assert (found, b'"code":"overloaded"' in body) == (status, status == 503)
        assert len(engine.requests) == 2


async def test_check_of_a_silent_request_is_canceled_after_silent_seconds_max() -> None:
    async with guard() as checked, ScriptedEngine((STREAM,)) as engine, rig(engine.address) as one:
        checked.reply = hanging
        apply_policy(one, keepalive_s=0.1, silent_s=0.1, request_check=checked.check(fail_open=True))
        client = await one.client()
        client.call(stream=True)
        assert (await client.head())[0] == 200, "the keep-alive of a stream ends its silence"
        status, fields, error = await ask(one)
        assert (status, error["error"]["code"], fields["x-should-retry"]) == (503, "overloaded", "true")
        await until("the check to be canceled", lambda: checked.gone == 1)
        assert len(checked.messages) == 2
        assert not engine.requests


async def test_silent_seconds_max_does_not_apply_to_the_check_of_an_answer() -> None:
    swept = asyncio.Event()

    async def allowing_later(request: web.Request) -> web.StreamResponse:
        await swept.wait()
        return await allowing(request)

    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = allowing_later
        apply_policy(one, silent_s=50.0, answer_check=checked.check())
        asked = asyncio.create_task(ask(one))
        await until("the check to begin", lambda: len(checked.messages) == 1)
        one.front.sweep(one.front.clock() + 51.0)
        swept.set()
        assert (await asked)[0] == 200


async def test_client_that_disconnects_cancels_its_check() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = hanging
        apply_policy(one, request_check=checked.check())
        client = await one.client()
        post(client, "/v1/chat/completions", b'{"model":"m"}')
        await until("the check to begin", lambda: len(checked.messages) == 1)
        client.leave()
        await until("the check to be canceled", lambda: checked.gone == 1)
        assert not engine.requests


async def test_gateway_shutdown_cancels_a_running_check() -> None:
    async with guard() as checked, rig() as one:
        checked.reply = hanging
        apply_policy(one, request_check=checked.check())
        client = await one.client()
        post(client, "/v1/chat/completions", b'{"model":"m"}')
        await until("the check to begin", lambda: len(checked.messages) == 1)
        await one.front.drain(0.05)
        assert b'"code":"shutting_down"' in await client.rest()
        await until("the check to be canceled", lambda: checked.gone == 1)


async def test_body_that_is_too_large_for_a_check_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        apply_policy(one, request_check=checked.check(fail_open=True))
        held_bytes = one.front.room.held_bytes
        status, _, error = await ask(one, padding="x" * external_checks.CONTENT_BYTES_MAX)
        assert (status, error["error"]["code"]) == (413, "too_large")
        await until("the body to be freed", lambda: one.front.room.held_bytes == held_bytes)
        monkeypatch.setattr(external_check_client, "CONTENT_BYTES_MAX", 10)
        status, _, error = await ask(one)
        assert (status, error["error"]["code"]) == (503, "overloaded")
        assert not checked.messages
        assert not engine.requests


async def test_check_of_a_form_request_receives_no_body() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        apply_policy(one, request_check=checked.check())
        client = await one.client()
        body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
        post(client, "/v1/audio/transcriptions", body, kind="multipart/form-data; boundary=b")
        assert (await client.answer())[0] == 200
        assert (checked.messages[0]["endpoint"], checked.messages[0]["body"]) == ("/v1/audio/transcriptions", None)


async def test_large_body_with_invalid_json_inside_reaches_no_check() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        apply_policy(one, request_check=checked.check(fail_open=True))
        client = await one.client()
        post(client, "/v1/chat/completions", b'{"model":"m","messages":[1,,2],"x":"%b"}' % (b"x" * 300_000))
        assert (await client.answer())[0] == 400
        post(client, "/v1/chat/completions", b'{"model":"m","x":"\\ud800","y":"%b"}' % (b"x" * 300_000))
        assert (await client.answer())[0] == 200
        assert len(checked.messages) == 1


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [(ANSWER,), (CHUNKED,), (UNTIL_CLOSE, CLOSE)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages"])
async def test_whole_answer_is_checked_before_the_client_gets_it(reply: tuple[bytes, ...], path: str) -> None:
    chat_only = ("openai",)
    async with (
        guard() as checked,
        ScriptedEngine(reply, reply, reply) as engine,
        rig(engine.address, dialects=chat_only) as one,
    ):
        status, _, expected = await ask(one, path, stream=False, max_tokens=9)
        apply_policy(one, dialects=chat_only, answer_check=checked.check())
        assert not checked.messages
        found = await ask(one, path, stream=False, max_tokens=9)
        assert found[0] == status
        if path == "/v1/chat/completions":  # durations and ids differ
            assert found[2] == expected
        (message,) = checked.messages
        assert (message["check"], [*message["body"]]) == ("answer", ["choices"])
        checked.reply = rejecting
        status, fields, body = await ask(one, path, stream=False, max_tokens=9)
        assert (status, fields["x-should-retry"]) == (403, "false")
        assert "rejected the answer to this request: no poems" in json.dumps(body)
        assert "the-answer" not in json.dumps(body)
        await one.settled()
        assert one.in_use() == 0


async def test_engine_error_response_is_not_sent_to_the_answer_check() -> None:
    reply = document(b'{"error":{"message":"too long"}}', "400 Bad Request")
    async with guard() as checked, ScriptedEngine((reply,)) as engine, rig(engine.address) as one:
        apply_policy(one, answer_check=checked.check())
        assert (await ask(one))[0] == 400
        assert not checked.messages


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
async def test_stream_is_rejected_if_rejects_streams_is_set_and_else_unchecked(path: str) -> None:
    async with guard() as checked, ScriptedEngine((STREAM,)) as engine, rig(engine.address) as one:
        apply_policy(one, answer_check=checked.check(rejects_streams=True))
        status, _, error = await ask(one, path, stream=True)
        assert status == 400
        assert "send stream: false" in json.dumps(error)
        assert not engine.requests
        apply_policy(one, version=3, answer_check=checked.check())
        assert (await ask(one, path, stream=True))[0] == 200
        assert not checked.messages


async def test_failed_answer_check_gets_503_unless_the_check_fails_open() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,), (ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = reply_with(500, b"")
        apply_policy(one, answer_check=checked.check())
        assert (await ask(one))[0] == 503
        apply_policy(one, version=3, answer_check=checked.check(fail_open=True))
        assert (await ask(one))[2]["choices"][0]["message"]["content"] == "the-answer"


async def test_checked_answer_that_is_too_large_or_incomplete_gets_502(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = UNTIL_CLOSE.removesuffix(b"}")
    cut = CHUNKED.removesuffix(END)
    scripts = ((ANSWER,), (CHUNKED,), (broken, CLOSE), (cut, CLOSE), (CHUNKED,))
    async with guard() as checked, ScriptedEngine(*scripts) as engine, rig(engine.address) as one:
        apply_policy(one, answer_check=checked.check(fail_open=True))
        with monkeypatch.context() as patched:
            patched.setattr(external_checks, "CONTENT_BYTES_MAX", 12)
            for _ in range(2):
                assert (await ask(one))[0] == 502
        for _ in range(2):
            assert (await ask(one))[0] == 502
        with monkeypatch.context() as patched:
            patched.setattr(external_check_client, "HELD_BYTES_MAX", 12)
            status, _, error = await ask(one)
            assert (status, error["error"]["code"]) == (503, "overloaded")
        assert one.front.checks.held_bytes == 0
        assert not checked.messages
        await one.settled()
        assert one.in_use() == 0


async def test_text_answer_is_checked_as_a_string_and_binary_answer_as_null() -> None:
    text, audio = document(b"a\xc3\xa4", kind="text/plain"), document(b"\xff\x00", kind="audio/mpeg")
    async with guard() as checked, ScriptedEngine((text,), (audio,)) as engine, rig(engine.address) as one:
        apply_policy(one, answer_check=checked.check())
        assert [(await ask(one, "/v1/audio/speech"))[2] for _ in range(2)] == [b"a\xc3\xa4", b"\xff\x00"]
        assert [message["body"] for message in checked.messages] == ["aä", None]


async def test_client_that_disconnects_cancels_the_check_of_its_answer() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        checked.reply = hanging
        apply_policy(one, answer_check=checked.check())
        client = await one.client()
        post(client, "/v1/chat/completions", b'{"model":"m"}')
        await until("the check to begin", lambda: len(checked.messages) == 1)
        client.leave()
        await until("the check to be canceled", lambda: checked.gone == 1)
        await one.settled()
        assert one.in_use() == 0


async def test_disconnect_while_an_answer_is_buffered_for_its_check_frees_slot() -> None:
    async with (
        guard() as checked,
        ScriptedEngine((CHUNKED.removesuffix(END), HOLD)) as engine,
        rig(engine.address) as one,
    ):
        apply_policy(one, answer_check=checked.check())
        client = await one.client()
        post(client, "/v1/chat/completions", b'{"model":"m"}')
        await until("the request to arrive", lambda: len(engine.requests) == 1)
        client.leave()
        await until("the slot to become free", lambda: one.in_use() == 0)
        assert not checked.messages


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1", "0x7f.1"]
)
async def test_check_at_a_loopback_address_fails_unless_its_host_is_allowed(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        check = PolicyCheck(url=f"http://{host}:{checked.port}/check")
        apply_policy(one, hosts=(), request_check=check)
        status, fields, error = await ask(one)
        assert (status, error["error"]["code"], fields["x-should-retry"]) == (503, "check_failed", "false")
        assert not checked.messages
    assert "event=check_failed" in caplog.text


async def test_check_host_is_resolved_once_per_connection_to_allowed_addresses() -> None:
    async with guard() as checked, ScriptedEngine((ANSWER,), (ANSWER,)) as engine, rig(engine.address) as one:
        looked_up: list[str] = []
        answers = [["127.0.0.1"], ["127.0.0.1", "169.254.169.254"], ["169.254.169.254"]]

        async def look_up(host: str, port: int, family: socket.AddressFamily) -> list[tuple[int, str]]:
            del port, family
            looked_up.append(host)
            return [(socket.AF_INET, address) for address in answers[len(looked_up) - 1]]

        one.front.checks.look_up = look_up  # type: ignore[method-assign]
        check = PolicyCheck(url=f"http://guard.example:{checked.port}/check")
        apply_policy(one, hosts=("127.0.0.1",), request_check=check)
        assert (await ask(one))[0] == 200
        assert (await ask(one))[0] == 200  # the connection is used again
        assert looked_up == ["guard.example"]
        apply_policy(one, version=3, hosts=("127.0.0.1", "other.example"), request_check=check)
        assert (await ask(one))[0] == 503  # one of two addresses is not allowed
        assert (await ask(one))[0] == 503
        assert looked_up == ["guard.example"] * 3
        assert len(checked.messages) == 2


async def test_requests_without_a_policy_start_no_check() -> None:
    async with ScriptedEngine((ANSWER,)) as engine, rig(engine.address) as one:
        assert (await ask(one))[0] == 200
        assert one.front.directory.policies is None
        assert one.front.checks._session is None
