"""Unmodified clients, through `serve`, with the fake engine: ten behaviours each, with the same assertions for all.

Each client runs as a process of its own, with its default timeout and retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.matrix import BEHAVIOURS, ROOT, Client, load
from tests.support.harness.serve.serve import Serving, fake, serving, settings, transcript
from tests.support.net.ports import free_port
from tests.support.waiting import until

SENTENCE = "Hello, I am ada, asleep until you called."
PERSON = {"name": "text", "age": 1}
VECTORS = [[0.03, 0.5, 0.25, 0.125], [0.09, 0.5, 0.25, 0.125]]
START_S = 2.0
"""Time that the engine of a cold start needs."""
PROGRAM_S = 180.0
"""Limit of each program, to detect a hang."""
FILE = bytes(range(256)) * 40 + b"\r\n--boundary\r\n\r\n"
CLIENTS = load()


class Bench(NamedTuple):
    """`serve`, and the files of the test."""

    serve: Serving
    folder: Path
    runner: asyncio.Runner
    page_port: int

    @property
    def file(self) -> Path:
        """The file to upload."""
        return self.folder / "speech.wav"

    def begin(self, client: Client, behaviour: str, model: str) -> subprocess.Popen[str]:
        """Start the client's program."""
        words = (self.serve.url, model, behaviour, str(self.file))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PAGE_PORT": str(self.page_port),
            "HOME": str(self.folder),
        }
        return subprocess.Popen(
            [*client.command(), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=self.folder,
        )  # fmt: skip

    def run(self, client: Client, behaviour: str, model: str) -> Any:
        """Run the client's program and return its outcome."""
        with self.begin(client, behaviour, model) as process:
            try:
                output, _ = process.communicate(timeout=PROGRAM_S)
            finally:
                process.kill()
        assert process.returncode == 0, output
        return json.loads(output.splitlines()[-1])

    def requests(self, code: str) -> int:
        """Number of requests that ended with an error code."""
        rows = re.findall(rf'pilotlight_calls_total\{{[^}}]*code="{code}"[^}}]*\}} (\d+)', self.serve.text("/metrics"))
        return sum(map(int, rows))

    def until(self, what: str, condition: Any) -> None:
        """Wait for a condition."""
        self.runner.run(until(what, condition))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder, page_port = tmp_path_factory.mktemp("clients"), free_port()
    slow = [fake(folder, f"cold-{client.name}", f"--start-delay={START_S}", idleSeconds=1) for client in CLIENTS]
    documents = [
        fake(folder, "ada", gpu={"memory": "1Mi"}, aliases=["text-embedding-3-small"]),
        fake(folder, "long", "--tokens=5000", "--tokens-per-s=20", slots=1, gpu={"memory": "1Mi"}),
        *slow,
        settings(cors={"origins": [f"http://127.0.0.1:{page_port}"]}),
    ]
    with asyncio.Runner() as runner:
        context = serving(folder / "serve", *documents)
        made = Bench(runner.run(context.__aenter__()), folder, runner, page_port)
        made.file.write_bytes(FILE)
        try:
            yield made
        finally:
            runner.run(context.__aexit__(None, None, None))


def cases() -> Iterator[object]:
    """Each client with each of its behaviours; the cases of one client run in one worker."""
    for number, client in enumerate(CLIENTS):
        group = pytest.mark.xdist_group(f"clients {number % 2}")
        marks = (group, pytest.mark.standard) if client.is_standard else (group,)
        for behaviour in BEHAVIOURS:
            if behaviour not in client.without:
                yield pytest.param(client, behaviour, id=f"{client.name}-{behaviour}", marks=marks)


@pytest.mark.parametrize(("client", "behaviour"), [*cases()])
def test_unmodified_client_passes_each_behaviour_check_through_serve(
    bench: Bench, client: Client, behaviour: str
) -> None:
    if not shutil.which(client.tool):
        pytest.skip(f"needs {client.tool}")
    if not client.is_standard and not client.installation.exists():
        pytest.fail("run `.venv/bin/python -m tests.clients.matrix` first: it installs the clients")
    CHECKS[behaviour](bench, client)


def check_list(bench: Bench, client: Client) -> None:
    """All models are listed."""
    tag = ":latest" if client.package == "ollama" else ""
    assert {f"ada{tag}", f"long{tag}"} <= set(bench.run(client, "list", "ada")["models"])


def check_chat(bench: Bench, client: Client) -> None:
    """The text is complete."""
    assert bench.run(client, "chat", "ada") == {"text": SENTENCE}


def check_stream(bench: Bench, client: Client) -> None:
    """The text is complete and comes in several parts."""
    parts = bench.run(client, "stream", "ada")["parts"]
    assert "".join(parts) == SENTENCE
    assert len(parts) > 1


def check_tools(bench: Bench, client: Client) -> None:
    """The model calls the tool, and answers to its result."""
    outcome = bench.run(client, "tools", "ada")
    assert (outcome["tool"], as_object(outcome["arguments"]), outcome["text"]) == (
        "weather",
        {"city": "text"},
        SENTENCE,
    )


def check_structured(bench: Bench, client: Client) -> None:
    """The object follows the schema."""
    assert as_object(bench.run(client, "structured", "ada")["object"]) == PERSON


def check_embeddings(bench: Bench, client: Client) -> None:
    """The vectors arrive exactly."""
    vectors = bench.run(client, "embeddings", "ada")["vectors"]
    assert [pytest.approx(vector) for vector in vectors] == VECTORS


def check_upload(bench: Bench, client: Client) -> None:
    """The engine gets the bytes of the file: it answers with their SHA-256."""
    assert bench.run(client, "upload", "ada") == {"text": hashlib.sha256(FILE).hexdigest()}


def check_error(bench: Bench, client: Client) -> None:
    """An unknown model raises the client's own exception with our code, and the client sends one request."""
    before = bench.requests("model_not_found")
    outcome = bench.run(client, "error", "unknown")
    assert outcome["error"] == client.error
    assert outcome["status"] in {404, None}
    assert client.error_shows in f"{outcome['code']} {outcome['message']}"
    bench.until("the request is counted", lambda: bench.requests("model_not_found") > before)
    assert bench.requests("model_not_found") == before + 1, "it was not sent again"


def check_cold_start(bench: Bench, client: Client) -> None:
    """The client waits for the start of a model, and sends one request."""
    name = f"cold-{client.name}"
    assert bench.serve.starts(name) == 0
    assert bench.run(client, "cold_start", name)["text"] == SENTENCE.replace("ada", name)
    calls = transcript(bench.folder, name)
    assert [call.finished for call in calls] == [True]
    assert bench.serve.starts(name) == 1


def check_cancel(bench: Bench, client: Client) -> None:
    """The engine notices that the client closed the stream: its only slot becomes free."""
    before = len(transcript(bench.folder, "long"))
    with bench.begin(client, "cancel", "long") as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["text"]
            bench.until("the slot is free", lambda: len(transcript(bench.folder, "long")) > before)
            assert process.poll() is None, "the client closed the connection, not the end of its process"
            output, _ = process.communicate(timeout=PROGRAM_S)
        finally:
            process.kill()
    call = transcript(bench.folder, "long")[-1]
    assert (process.returncode, call.aborted, call.finished) == (0, True, False), output


CHECKS = {
    "list": check_list, "chat": check_chat, "stream": check_stream, "tools": check_tools,
    "structured": check_structured, "embeddings": check_embeddings, "upload": check_upload, "error": check_error,
    "cold_start": check_cold_start, "cancel": check_cancel,
}  # fmt: skip


def as_object(value: object) -> object:
    """A value that some clients return as JSON text."""
    with contextlib.suppress(TypeError):
        return json.loads(value)  # type: ignore[arg-type]
    return value
