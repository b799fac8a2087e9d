"""The fake engine as a process: it answers like a real engine, and each fault behaves as its name says."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.fakes.engines.fake_engine_process import FakeEngine, command, fake_engine

WITHIN_S = 60.0
"""Limit of each wait for the engine: on a busy machine its process may be paused for 20 s."""
SENTENCE = "Hello, I am ada, asleep until you called."


def connect(engine: FakeEngine) -> http.client.HTTPConnection:
    parts = urlsplit(engine.url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WITHIN_S)


def get(engine: FakeEngine, path: str) -> tuple[int, str]:
    with closing(connect(engine)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.mark.parametrize(("host", "text"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1")])
def test_reported_address_has_brackets_around_an_ipv6_address(host: str, text: str, tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--host", host) as engine:
        parts = urlsplit(engine.url)
        assert engine.url == f"http://{text}:{parts.port}"
        assert get(engine, "/health")[0] == 200
        again = subprocess.run(
            command("--host", host, "--port", str(parts.port)),
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert again.returncode == 1
        assert f"cannot listen on {text}:{parts.port}: " in again.stderr


def begin(engine: FakeEngine, *, path: str = "/v1/chat/completions", **members: object) -> http.client.HTTPConnection:
    connection = connect(engine)
    body = {"model": "ada", "messages": [{"role": "user", "content": "who are you"}], **members}
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "X-Request-Id": "r1"})
    return connection


def post(engine: FakeEngine, *, path: str = "/v1/chat/completions", **members: object) -> tuple[int, str]:
    with closing(begin(engine, path=path, **members)) as connection:
        response = connection.getresponse()
        return response.status, response.read().decode()


def until(engine: FakeEngine, calls: int) -> list[dict[str, object]]:
    """Return the transcript once it has this many lines."""
    ends = time.monotonic() + WITHIN_S
    while len(engine.calls()) < calls and time.monotonic() < ends:
        time.sleep(0.005)
    return engine.calls()


def wait_for_metrics(engine: FakeEngine, words: str) -> None:
    """Wait until the metrics contain this text."""
    ends = time.monotonic() + WITHIN_S
    while words not in (metrics := get(engine, "/metrics")[1]):
        assert time.monotonic() < ends, metrics
        time.sleep(0.005)


@contextmanager
def raw(engine: FakeEngine, request: bytes) -> Iterator[socket.socket]:
    parts = urlsplit(engine.url)
    with socket.create_connection((parts.hostname, parts.port), WITHIN_S) as connection:
        connection.sendall(request)
        yield connection


def to_the_end(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def chat_bytes(**members: object) -> bytes:
    body = json.dumps({"model": "ada", "messages": [], **members}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.standard
def test_fake_engine_answers_its_default_sentence_cut_at_max_tokens(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--name", "ada", "--tokens-per-s", "0") as engine:
        choice = json.loads(post(engine)[1])["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (SENTENCE, "stop")
        choice = json.loads(post(engine, max_tokens=3)[1])["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello, I am", "length")


def test_answer_repeats_the_sentence_up_to_the_configured_token_count(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--sentence", "a b", "--tokens", "5", "--tokens-per-s", "0") as engine:
        assert json.loads(post(engine)[1])["choices"][0]["message"]["content"] == "a b a b a"


def test_stream_includes_usage_only_if_the_request_asks_for_it(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--name", "ada", "--tokens-per-s", "0") as engine:
        plain = post(engine, stream=True)[1]
        asked = post(engine, stream=True, stream_options={"include_usage": True})[1]
        assert plain.endswith("data: [DONE]\n\n")
        assert '"usage"' not in plain
        events = [json.loads(line[6:]) for line in asked.split("\n\n") if line.startswith("data: {")]
        assert events[-1]["usage"]["completion_tokens"] == len(SENTENCE.split())
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == SENTENCE


def test_fake_engine_streams_tokens_no_faster_than_the_configured_rate(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--name", "ada", "--tokens-per-s", "100") as engine:
        began_s = time.monotonic()
        post(engine, stream=True)
        assert time.monotonic() - began_s > 0.07


def test_requests_beyond_the_slots_queue_in_arrival_order(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--slots", "1", "--tokens-per-s", "10", "--tokens", "1000") as engine:
        connections = []
        for number, tokens in enumerate((1000, 2, 2)):
            connections.append(begin(engine, max_tokens=tokens, model=str(number)))
            wait_for_metrics(engine, f"llamacpp:requests_processing 1\nllamacpp:requests_deferred {number}\n")
        assert get(engine, "/slots")[1] == '[{"id": 0, "is_processing": true}]'
        time.sleep(0.3)
        connections[0].close()
        for connection in connections[1:]:
            with closing(connection):
                connection.getresponse().read()
        calls = until(engine, 3)
        assert [call["model"] for call in calls] == ["0", "1", "2"]
        waits = [float(str(call["queued_s"])) for call in calls]
        assert waits[0] < 0.3 <= min(waits[1:])
        assert float(str(calls[2]["after_s"])) - waits[2] >= 0.2


def test_client_disconnect_frees_the_slot_and_is_recorded_as_aborted(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--slots", "1", "--tokens-per-s", "10", "--tokens", "1000") as engine:
        first = begin(engine, stream=True)
        response = first.getresponse()
        response.read1(10)
        waiting = begin(engine, model="waiting")
        response.close()
        first.close()
        (line,) = until(engine, 1)
        assert (line["id"], line["finished"], line["aborted"]) == ("r1", False, True)
        assert 0.05 < float(str(line["after_s"])) < WITHIN_S
        assert "requests_deferred 0\n" in get(engine, "/metrics")[1]
        waiting.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/3\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length : 1\r\n\r\nx",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 8\r\n\r\nnot json",
        b"POST /v1/chat/completions HTTP/1.1\r\nX: " + b"x" * 70_000,
    ],
)
def test_malformed_request_is_rejected_with_400_and_connection_closed(tmp_path: Path, request_bytes: bytes) -> None:
    with fake_engine(tmp_path) as engine, raw(engine, request_bytes) as connection:
        assert to_the_end(connection).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_on_one_connection_are_answered_in_order(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "500") as engine:
        last = chat_bytes().replace(b"Host: x", b"Host: x\r\nConnection: close")
        with raw(engine, chat_bytes() + b"GET /health HTTP/1.1\r\n\r\n" + last) as connection:
            _, *responses = to_the_end(connection).split(b"HTTP/1.1 200 OK")
            assert [b"chat.completion" in one for one in responses] == [True, False, True]


def test_embeddings_request_returns_one_vector_per_input(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine:
        body = json.loads(post(engine, path="/v1/embeddings", input=["a", "bb"])[1])
        assert [len(item["embedding"]) for item in body["data"]] == [4, 4]


@pytest.mark.standard
def test_engine_with_a_start_delay_listens_only_after_the_delay(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with fake_engine(tmp_path, "--start-delay", "0.2") as engine:
        assert time.monotonic() - began_s > 0.2
        assert get(engine, "/health") == (200, '{"status": "ok"}')


def test_loading_503_option_answers_503_until_the_model_is_loaded(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--start-delay", "3600", "--loading-503") as engine:
        assert get(engine, "/health") == (503, '{"status": "loading"}')
        assert post(engine)[0] == 503
    with fake_engine(tmp_path, "--start-delay", "0.5", "--loading-503") as engine:
        ends = time.monotonic() + WITHIN_S
        while get(engine, "/health")[0] != 200:
            assert time.monotonic() < ends
        assert post(engine)[0] == 200


@pytest.mark.standard
def test_sigterm_ends_the_engine_without_finishing_running_requests(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0.1") as engine, closing(begin(engine, stream=True)):
        wait_for_metrics(engine, "requests_processing 1\n")
        engine.process.terminate()
        assert engine.process.wait(WITHIN_S) == 0, "a token would have come after 10 s"
        (line,) = engine.calls()
        assert (line["finished"], line["aborted"]) == (False, False)


def test_port_in_use_fails_with_a_one_line_error(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine:
        port = str(urlsplit(engine.url).port)
        done = subprocess.run(command("--port", port), capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_unknown_fault_is_rejected_and_known_faults_are_listed() -> None:
    done = subprocess.run(command("--fail", "explodes"), capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 2
    assert "no such fault 'explodes'; expected one of never-ready" in done.stderr


def test_never_ready_fault_keeps_health_at_503(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--fail", "never-ready", "--loading-503") as engine:
        time.sleep(0.1)
        assert get(engine, "/health")[0] == 503


def test_dies_on_start_fault_exits_with_its_code_after_the_start_delay() -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        command("--start-delay", "0.2", "--fail", "dies-on-start:7"), capture_output=True, timeout=WITHIN_S, check=False
    )
    assert (done.returncode, done.stdout) == (7, b"")
    assert time.monotonic() - began_s > 0.2


def test_dies_after_fault_exits_at_the_given_time_even_during_start(tmp_path: Path) -> None:
    # With --loading-503 the engine reports its address before the time begins to run.
    with fake_engine(tmp_path, "--fail", "dies-after:0.2", "--loading-503") as engine:
        assert engine.process.wait(WITHIN_S) == 1
    done = subprocess.run(
        command("--start-delay", "9", "--fail", "dies-after:0.1"), capture_output=True, timeout=WITHIN_S, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_dies_mid_stream_fault_exits_after_the_given_number_of_tokens(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--fail", "dies-mid-stream:3") as engine:
        with raw(engine, chat_bytes(stream=True)) as connection:
            received = to_the_end(connection)
        assert received.count(b'"content": "') == 3
        assert b"[DONE]" not in received
        assert engine.process.wait(WITHIN_S) == 1
        assert engine.calls()[0]["bytes"] == len(received)


def test_dies_before_first_byte_fault_closes_connection_without_data(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--fail", "dies-before-first-byte") as engine:
        with raw(engine, chat_bytes()) as connection:
            assert to_the_end(connection) == b""
        assert engine.calls()[0]["bytes"] == 0


@pytest.mark.parametrize(("fault", "some"), [("hangs-before-first-byte", False), ("hangs-after-first-byte", True)])
@pytest.mark.parametrize("stream", [False, True])
def test_hanging_response_leaves_the_health_endpoint_at_200(
    tmp_path: Path, fault: str, some: bool, stream: bool
) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", fault) as engine:
        with raw(engine, chat_bytes(stream=stream)) as connection:
            received = connection.recv(65536) if some else b""
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                to_the_end(connection)
            assert bool(received) is some
            assert get(engine, "/health")[0] == 200
        assert until(engine, 1)[0]["aborted"]


def test_closes_keepalive_fault_closes_the_connection_after_a_stream(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", "closes-keepalive-after-stream") as engine:
        with raw(engine, chat_bytes(stream=True)) as connection:
            received = to_the_end(connection)
        assert b"Keep-Alive: timeout=5" in received
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_ignores_sigterm_fault_keeps_the_engine_running_after_sigterm(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--fail", "ignores-sigterm") as engine:
        engine.process.terminate()
        assert get(engine, "/health")[0] == 200
        assert engine.process.poll() is None


def test_leaves_child_fault_leaves_a_child_running_in_its_own_session(tmp_path: Path) -> None:
    # The child must still run when the test looks for it, also if the test was paused for 20 s.
    with fake_engine(tmp_path, "--fail", "leaves-child:60") as engine:
        mine = psutil.Process(engine.process.pid).cmdline()
        engine.process.kill()
        engine.process.wait()
        (child,) = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == mine]
        try:
            assert os.getsid(child.pid) not in (os.getsid(0), engine.process.pid)
        finally:
            child.send_signal(signal.SIGKILL)


def test_busy_503_and_error_500_faults_apply_to_every_nth_request(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", "busy-503:2", "--fail", "error-500:3") as engine:
        assert [post(engine)[0] for _ in range(6)] == [200, 503, 500, 503, 200, 503]


def test_slow_health_fault_delays_health_checks_but_not_requests(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", f"slow-health:{2 * WITHIN_S}") as engine:
        assert post(engine)[0] == 200, "no request waits that long"
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", "slow-health:1") as engine:
        began_s = time.monotonic()
        assert get(engine, "/health")[0] == 200
        assert time.monotonic() - began_s > 1.0


def test_bad_chunk_fault_breaks_chunked_encoding_after_the_first_token(tmp_path: Path) -> None:
    knobs = ("--tokens-per-s", "0", "--fail", "bad-chunk")
    with fake_engine(tmp_path, *knobs) as engine, raw(engine, chat_bytes(stream=True)) as connection:
        assert to_the_end(connection).endswith(b"zz\r\nnot a chunk\r\n")


def test_cl_mismatch_fault_sends_fewer_bytes_than_the_content_length(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", "cl-mismatch") as engine:
        with raw(engine, chat_bytes()) as connection:
            head, _, body = to_the_end(connection).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body) + 10}".encode() in head


def test_flood_1xx_fault_sends_1xx_responses_before_the_final_response(tmp_path: Path) -> None:
    with fake_engine(tmp_path, "--tokens-per-s", "0", "--fail", "flood-1xx:50") as engine:
        with raw(engine, chat_bytes().replace(b"Host: x", b"Host: x\r\nConnection: close")) as connection:
            received = to_the_end(connection)
        assert received.count(b"HTTP/1.1 100 Continue\r\n\r\n") == 50
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 1


def test_once_option_limits_a_fault_to_one_occurrence_across_processes(tmp_path: Path) -> None:
    knobs = ("--fail", "dies-on-start", "--once", str(tmp_path / "struck"))
    done = subprocess.run(command(*knobs), capture_output=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 1
    with fake_engine(tmp_path, *knobs) as engine:
        assert get(engine, "/health")[0] == 200
