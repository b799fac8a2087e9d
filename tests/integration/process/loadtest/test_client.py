"""The load client against real processes: precise, accurate about failures, and fast enough for many requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import openai
import pytest
import uvloop

from loadtest.arrivals import burst_arrivals
from loadtest.cli import request_body
from loadtest.client import Client, LoadError, target_of
from loadtest.result import Ending, Result, Shot
from loadtest.run_verdict import judge_run
from tests.support.fakes.engines.fake_engine_process import fake_engine

pytestmark = pytest.mark.standard

SENTENCE = "Hello, I am ada, asleep until you called."
FAST = ("--name", "ada", "--tokens-per-s", "0")


def shot(*, stream: bool = True, at_s: float = 0.0, timeout_s: float = 60.0, max_tokens: int = 100) -> Shot:
    body = request_body("ada", max_tokens, 30, stream=stream)
    return Shot(model="ada", body=body, stream=stream, at_s=at_s, timeout_s=timeout_s)


async def send(url: str, *shots: Shot, reuse: bool = False) -> list[Result]:
    return await Client(url, reuse=reuse).run(shots)


@asynccontextmanager
async def server_saying(*answers: bytes) -> AsyncIterator[str]:
    """Serve each of these byte strings as the next response; close after an empty or the last one."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        content = b"more"
        while left and content:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
            content = left.pop(0)
            writer.write(content)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


EVENTS = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
OK_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes) -> bytes:
    return b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "ending", "truncated"),
    [
        (OK_STREAM + chunked(EVENTS) + b"0\r\n\r\n", Ending.COMPLETED, False),
        (OK_STREAM + b"\r\n" + EVENTS, Ending.COMPLETED, False),
        (OK_STREAM + chunked(EVENTS), Ending.LOST, True),
        (OK_STREAM + chunked(EVENTS[:-14]) + b"0\r\n\r\n", Ending.LOST, True),
        (OK_STREAM + b"Content-Length: 500\r\n\r\n" + EVENTS, Ending.LOST, True),
        (OK_STREAM + chunked(EVENTS) + b"zz\r\n", Ending.LOST, True),
        (b"HTTP/1.1 200 OK\r\n", Ending.LOST, False),
        (b"", Ending.LOST, False),
        (b"SSH-2.0-x\r\n", Ending.LOST, False),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", Ending.FAILED, False),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", Ending.LOST, False),
    ],
)
async def test_load_client_counts_a_request_completed_only_on_a_full_answer(
    answer: bytes, ending: Ending, truncated: bool
) -> None:
    async with server_saying(answer) as url:
        (result,) = await send(url, shot())
    assert (result.ending, result.truncated) == (ending, truncated), result


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_after_many_1xx_responses_is_received_unchanged(tmp_path: Path, stream: bool) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", "flood-1xx:200") as engine:
        (result,) = await send(engine.url, shot(stream=stream))
    assert (result.text, result.finish_reason, result.ending) == (SENTENCE, "stop", Ending.COMPLETED)
    assert result.saw_done is stream


@pytest.mark.parametrize(
    ("fault", "stream", "why"),
    [
        ("dies-mid-stream", True, "the connection was closed"),
        ("bad-chunk", True, "the response is not HTTP/1.1"),
        ("cl-mismatch", False, "the connection was closed"),
    ],
)
async def test_answer_cut_short_or_malformed_is_reported_as_truncated(
    tmp_path: Path, fault: str, stream: bool, why: str
) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", fault) as engine:
        (result,) = await send(engine.url, shot(stream=stream))
    assert (result.truncated, result.broken) == (True, why)


@pytest.mark.parametrize("fault", ["hangs-before-first-byte", "hangs-after-first-byte"])
async def test_request_past_its_deadline_is_abandoned_and_aborted_at_the_engine(tmp_path: Path, fault: str) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", fault) as engine:
        # On a busy machine, this process or the engine may be paused for seconds before the first byte.
        (result,) = await send(engine.url, shot(timeout_s=25.0))
        async with asyncio.timeout(60):
            while not (calls := engine.calls()):
                await asyncio.sleep(0.005)
    assert (result.ending, result.truncated) == (Ending.ABANDONED, False)
    assert (result.first_byte_s is None) is (fault == "hangs-before-first-byte")
    assert calls[0]["aborted"]
    assert float(str(calls[0]["after_s"])) > 0.1


async def test_load_client_reports_the_status_and_code_of_error_responses(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", "busy-503:2", "--fail", "error-500:3") as engine:
        results = [(await send(engine.url, shot()))[0] for _ in range(3)]
    assert [(r.status, r.code, r.clear) for r in results] == [
        (200, "", True),
        (503, "503", True),
        (500, "http_500", False),
    ]


async def test_load_client_latency_is_measured_from_the_planned_send_time(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "50", "--tokens", "4") as engine:
        sending = asyncio.create_task(send(engine.url, *(shot(at_s=i / 20) for i in range(6))))
        idle_s = await longest_without_a_turn_s(sending)
    for result in await sending:
        assert 0 <= result.lateness_s < 0.1 + idle_s
        assert result.sent_s is not None
        assert result.first_byte_s is not None
        assert result.last_byte_s is not None
        assert result.lateness_s <= result.sent_s < result.first_byte_s
        assert result.first_byte_s - result.sent_s > 0.015
        assert result.last_byte_s - result.sent_s > 0.075


async def longest_without_a_turn_s(task: asyncio.Task[list[Result]]) -> float:
    """Return the longest time that this process did not run until the task ended: anything due then is late."""
    longest_s, looked_s = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        longest_s, looked_s = max(longest_s, time.monotonic() - looked_s), time.monotonic()
    return longest_s


async def test_request_sent_late_has_its_lateness_in_the_measured_latency(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        client = Client(engine.url)
        (result,) = await client.run([shot(at_s=-0.5)])
    assert result.lateness_s >= 0.5
    assert result.first_byte_s is not None
    assert result.first_byte_s > 0.5


async def test_five_hundred_concurrent_requests_all_complete_with_exact_text(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST, "--slots", "8") as engine:
        client = Client(engine.url)
        await client.open(500)
        results = await client.run([shot(at_s=at_s) for at_s in burst_arrivals(500, 0.1)])
        calls = engine.calls()
    verdict = judge_run(500, results)
    assert (verdict.holds, verdict.completed) == (True, 500)
    assert {result.text for result in results} == {SENTENCE}
    assert sum(bool(call["finished"]) for call in calls) == 500


def test_load_client_receives_complete_answers_on_uvloop(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        results = uvloop.run(send(engine.url, *(shot(at_s=i / 100) for i in range(10))))
    assert {result.text for result in results} == {SENTENCE}
    assert all(0 <= result.lateness_s <= (result.sent_s or 0) < (result.first_byte_s or 0) for result in results)


async def test_stale_keep_alive_connections_lose_no_request(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", "closes-keepalive-after-stream") as engine:
        streams = await send(engine.url, *(shot(at_s=i * 0.02) for i in range(5)), reuse=True)
        documents = await send(engine.url, *(shot(stream=False, at_s=i * 0.02) for i in range(5)), reuse=True)
    assert {result.ending for result in (*streams, *documents)} == {Ending.COMPLETED}


WHOLE = OK_STREAM + chunked(EVENTS) + b"0\r\n\r\n"


async def test_request_on_a_closed_keep_alive_connection_is_marked_as_resent() -> None:
    async with server_saying(WHOLE, b"", WHOLE) as url:
        client = Client(url, reuse=True)
        results = [await client.send(shot()), await client.send(shot())]  # one after the other, on one connection
        client.close()
    assert [(result.resent, result.ending) for result in results] == [
        (False, Ending.COMPLETED),
        (True, Ending.COMPLETED),
    ]


async def test_new_connection_closed_without_a_byte_counts_request_as_lost() -> None:
    async with server_saying(b"", WHOLE) as url:
        client = Client(url)
        await client.open(1)
        (result,) = await client.run([shot()])
    assert (result.resent, result.ending) == (False, Ending.LOST)


async def test_refused_connection_is_reported_as_lost_without_an_exception() -> None:
    (result,) = await send("http://127.0.0.1:9", shot())
    assert (result.ending, result.code, result.broken) == (Ending.LOST, "transport", "no connection")


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x:port"])
def test_invalid_url_is_rejected_with_the_expected_form(url: str) -> None:
    with pytest.raises(LoadError, match="http://HOST:PORT"):
        target_of(url)


def test_load_url_is_split_into_host_port_prefix_and_tls_without_v1() -> None:
    assert target_of("http://h:1/v1") == ("h", 1, "", False)
    assert target_of("https://h/openai/v1/") == ("h", 443, "/openai", True)


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


MESSAGES: Sequence[openai.types.chat.ChatCompletionUserMessageParam] = [{"role": "user", "content": "who are you"}]


async def test_official_openai_client_reads_answers_of_the_fake_engine(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        async with openai_client(engine.url) as client:
            whole = await client.chat.completions.create(model="ada", messages=MESSAGES)
            stream = await client.chat.completions.create(
                model="ada", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            old = await client.completions.create(model="ada", prompt="who", max_tokens=2)
            old_stream = await client.completions.create(model="ada", prompt="who", stream=True)
            old_text = "".join([chunk.choices[0].text async for chunk in old_stream])
            vectors = await client.embeddings.create(model="ada", input=["a", "bb"])
    assert whole.choices[0].message.content == SENTENCE
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(SENTENCE.split())
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SENTENCE
    assert chunks[-1].usage == whole.usage
    assert (old.choices[0].text, old.choices[0].finish_reason, old_text) == ("Hello, I", "length", SENTENCE)
    assert [len(item.embedding) for item in vectors.data] == [4, 4]


async def test_official_openai_client_raises_a_503_error_if_the_engine_is_busy(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST, "--fail", "busy-503") as engine:
        async with openai_client(engine.url) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="ada", messages=MESSAGES)
    assert caught.value.status_code == 503


async def test_official_anthropic_client_reads_answers_of_the_fake_engine(tmp_path: Path) -> None:
    with fake_engine(tmp_path, *FAST) as engine:
        async with anthropic.AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(
                model="ada", max_tokens=3, messages=[{"role": "user", "content": "who are you"}]
            )
            async with client.messages.stream(
                model="ada", max_tokens=50, messages=[{"role": "user", "content": "who are you"}]
            ) as stream:
                words = [text async for text in stream.text_stream]
                final = await stream.get_final_message()
    assert whole.content[0].type == "text"
    assert (whole.content[0].text, whole.stop_reason, whole.usage.output_tokens) == ("Hello, I am", "max_tokens", 3)
    assert ("".join(words), final.stop_reason) == (SENTENCE, "end_turn")


async def test_load_client_reads_anthropic_streams_of_the_fake_engine(tmp_path: Path) -> None:
    body = json.dumps({"model": "ada", "max_tokens": 50, "stream": True, "messages": []}).encode()
    with fake_engine(tmp_path, *FAST) as engine:
        (result,) = await send(engine.url, Shot(model="ada", body=body, path="/v1/messages"))
    assert (result.text, result.finish_reason, result.ending) == (SENTENCE, "end_turn", Ending.COMPLETED)
