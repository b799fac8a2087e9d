"""The real llama.cpp server, started as by a driver: its responses match the description in the engine catalogue."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.engines import ENGINES
from autoscaler.signals.metric_responses import read_metric
from gateway.dialects.rerank import RerankConverter, find_target, translate_rerank
from gateway.request.api_routes import RERANK_AND_TOKENIZE
from loadtest import tiny_gguf
from tests.support.real_services.llama_cpp import START_S, started

pytestmark = pytest.mark.standard

SENTENCE = "Hello, I am Ada, asleep until you called."

SCORE = RERANK_AND_TOKENIZE[b"/v1/score"]
ASK = {"model": "ada", "max_tokens": 50, "messages": [{"role": "user", "content": "Who are you?"}]}


def post(port: int, path: str, body: dict[str, object]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_gguf.make_model(path / "ada.gguf", SENTENCE)
    (path / "cut.gguf").write_bytes((path / "ada.gguf").read_bytes()[:300_000])
    return path


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with started(folder) as (_, port, statuses):
        assert 200 in statuses
        assert statuses <= {503, 200}, "anything but 503 while it loads would look ready"
        yield port


def test_chat_request_to_the_tiny_model_returns_its_exact_sentence(port: int) -> None:
    status, body = post(port, "/v1/chat/completions", ASK)
    assert status == 200
    answer = json.loads(body)
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("ada", SENTENCE)


def test_tiny_model_returns_the_same_sentence_at_high_temperature(port: int) -> None:
    _, body = post(port, "/v1/chat/completions", ASK | {"temperature": 1.5, "seed": 3})
    assert json.loads(body)["choices"][0]["message"]["content"] == SENTENCE


def test_anthropic_api_returns_the_exact_sentence_and_a_token_count(port: int) -> None:
    assert "anthropic" in ENGINES["llama.cpp"].dialects
    status, body = post(port, "/v1/messages", ASK)
    assert (status, json.loads(body)["content"][0]["text"]) == (200, SENTENCE)
    status, body = post(port, "/v1/messages/count_tokens", ASK)
    assert status == 200
    assert json.loads(body)["input_tokens"] > 0


def test_scaling_signals_are_read_from_the_metrics_of_llama_cpp(port: int) -> None:
    metrics = ENGINES["llama.cpp"].behavior.metrics
    assert metrics is not None

    def read(signal: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{metrics.path}", timeout=60) as response:
            reading = read_metric(response.read(), metrics.metric_names(signal))
        assert reading.value is not None, reading.problem
        return reading.value

    before = read("tokensPerSecond")
    _, body = post(port, "/v1/chat/completions", ASK)
    assert read("tokensPerSecond") - before == json.loads(body)["usage"]["completion_tokens"]
    assert read("engineQueue") == 0.0


def test_own_rerank_has_the_form_of_jina_and_is_translated_to_score(folder: Path, port: int) -> None:
    """The score of the tiny model depends on the last byte of a document."""
    dialects = ENGINES["llama.cpp"].dialects
    target = find_target(dialects)
    assert target is not None
    assert "score" not in dialects
    asked = {"model": "ada", "text_1": "q", "text_2": ["a", "a\0", "b"]}
    request = translate_rerank(SCORE, json.dumps(asked).encode(), target)
    path, body = target.engine_path.decode(), json.loads(request.body)
    assert post(port, path, body)[0] == 501
    with started(folder, "--reranking") as (_, reranking_port, _):
        status, reply = post(reranking_port, path, body)
    assert status == 200
    assert {"index", "relevance_score"} <= json.loads(reply)["results"][0].keys()
    found = json.loads(RerankConverter(request, "ada", "1", 0).convert(status, reply))
    first, best, last = (row["score"] for row in found["data"])
    assert best > max(first, last)
    assert found["usage"]["total_tokens"] > 0


def test_embeddings_endpoint_returns_501_without_the_embeddings_flag(folder: Path, port: int) -> None:
    assert post(port, "/v1/embeddings", {"model": "ada", "input": "hi"})[0] == 501
    with started(folder, "--embeddings") as (_, embedding_port, _):
        status, body = post(embedding_port, "/v1/embeddings", {"model": "ada", "input": "hi"})
        assert status == 200
        assert len(json.loads(body)["data"][0]["embedding"]) > 0
        assert post(embedding_port, "/v1/chat/completions", ASK)[0] == 200, "it still chats"


def test_engine_closes_the_connection_after_a_stream_despite_keep_alive(port: int) -> None:
    assert ENGINES["llama.cpp"].closes_after_stream
    body = json.dumps(ASK | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    assert b"Keep-Alive:" in received
    assert b"[DONE]" in received
    assert received.endswith(b"\r\n0\r\n\r\n")


def test_llama_cpp_exits_with_status_0_and_no_output_on_sigterm(folder: Path) -> None:
    with started(folder) as (process, port, _):
        assert process.stdout is not None
        timer = threading.Timer(START_S, process.kill)  # a missing line must not block the tests
        timer.start()
        listening = f"listening on http://127.0.0.1:{port}\n"
        assert any(line == listening for line in iter(process.stdout.readline, ""))
        timer.cancel()
        assert post(port, "/v1/chat/completions", ASK)[0] == 200
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), "and its log has no word of a Call"


def test_truncated_weights_file_makes_the_engine_exit_with_one_error_line(folder: Path) -> None:
    with started(folder, file="cut.gguf") as (process, _, statuses):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert 200 not in statuses
        assert "corrupted or incomplete" in out
        reported = [
            line for line in out.splitlines() if line.startswith("xllamacpp server: the model could not be served")
        ]
        assert len(reported) == 1, "the library writes its own line, which may come later"
