"""Case 44: a key and a prompt go through every fault, and are told nowhere: not in a log, metric, page, file or error.

One real `serve`, as talkative as Python can make it, is led through the faults; then everything that anybody could
read is searched for both words in every spelling. Two places hold the prompt rightly and are left out: what an engine
itself answered, which is the client's own business, and STATE/logs, where each engine's own output lies as the engine
wrote it. That these two do hold it shows that the search finds what is there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kit import parrot
from tests.kit.betrayals import (
    BODY_BYTES_MAX,
    CHAT,
    GOOD,
    KEY,
    MESSAGES,
    PROMPT,
    REQUESTS,
    WRONG,
    Fault,
    chat,
    misbehaving,
    post,
)
from tests.kit.canary import connected, told
from tests.kit.rig import Client
from tests.kit.serving import API, Document, Serving, fake, model, serving, settings
from tests.kit.waiting import until

AT_ONCE = 16
TALKATIVE = """import logging
logging.basicConfig(level=logging.NOTSET)
logging.getLogger("talkative").debug("talks")
"""
"""Of the Python that all processes of `serve` run in."""
CLOCKS: Document = {"firstByteSecondsMax": 1, "responseSecondsMax": 1, "stallSecondsMax": 1}


def documents(folder: Path) -> list[Document]:
    """Models for every kind of fault, and a Tenant with the good key."""

    def engine(name: str, **spec: object) -> Document:
        command = parrot.command(folder / f"{name}.jsonl")
        return model(name, engine="command", command=command, gpu={"memory": "10Mi"}, slots=4 * AT_ONCE, **spec)

    small: Document = {"gpu": {"memory": "10Mi"}}
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    tenant: Document = {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "acme"},
                        "spec": {"keys": [{"name": "only", "sha256": hashed}]}}  # fmt: skip
    limits = {"bodyBytesMax": BODY_BYTES_MAX, "headerSecondsMax": 1, "bodySecondsMax": 1}
    # One for each Model, since a device has one start at a time.
    devices = [{"name": f"gpu{number}", "memory": "10Mi"} for number in range(6)]
    return [
        engine("talks", **CLOCKS), engine("mortal"), engine("patient"),
        fake(folder, "slow", "--start-delay", "60", **small),
        fake(folder, "full", "--start-delay", "60", **small, queue={"callsMax": 0}),
        fake(folder, "broken", "--fail", "dies-on-start", **small, start={"retries": 0}),
        tenant, settings(devices=devices, limits=limits, stream={"keepaliveSeconds": 0.2}),
    ]  # fmt: skip


@pytest.fixture
def talkative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python that is started from here on logs all it has, with asyncio in its debug mode."""
    folder = tmp_path / "talkative"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(TALKATIVE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    monkeypatch.setenv("PYTHONDEVMODE", "1")


class Heard:
    """A `serve`, and what clients and operators heard of it."""

    def __init__(self, one: Serving) -> None:
        self.one = one
        self.ours: dict[str, bytes] = {}
        """What we said ourselves, by fault or page."""
        self.engines = b""
        """What engines said."""
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def answer(self, data: bytes) -> bytes:
        """All that comes for one request on a connection of its own."""
        client = await connected(self.one.url)
        try:
            client.send(data)
            async with asyncio.timeout(20):
                return await client.reader.read()
        finally:
            client.leave()

    async def suffer(self, fault: Fault) -> None:
        """One fault, which must happen as it is meant to."""
        async with self._gate:
            got = await self.answer(fault.data)
        assert got.startswith(b"HTTP/1.1 %d " % fault.status if fault.status else b"HTTP/1.1 "), (fault.name, got)
        assert fault.code.encode() in got, (fault.name, got)
        if fault.engine:
            self.engines += got
        else:
            self.ours[fault.name + " " + str(len(self.ours))] = got

    async def running(self, name: str, *, stream: bool, manner: str = "silent") -> Client:
        """A client whose Call is on an engine of this Model that says nothing."""
        before = len(parrot.seen(self.one.folder / f"{name}.jsonl"))
        client = await connected(self.one.url)
        client.send(post(CHAT, chat(name, manner, stream=stream)))
        await until("it is there", lambda: len(parrot.seen(self.one.folder / f"{name}.jsonl")) > before)
        return client

    async def look(self) -> None:
        """Everything that an operator can read: pages, metrics, the read API, the command line, the process list."""
        paths = ["/", "/healthz", "/readyz", "/metrics", "/api/v1/openapi.json", "/api/v1/plan", "/api/v1/tenants",
                 "/api/v1/status", "/api/v1/models", "/api/v1/devices", "/api/v1/explain/last"]  # fmt: skip
        names = [
            str(row["model"]) for row in json.loads(await asyncio.to_thread(fetch, self.one.ops, "/api/v1/status"))
        ]
        paths += [f"/api/v1/{kind}/{name}" for kind in ("models", "explain/model") for name in names]
        for path in paths:
            self.ours[f"operations {path}"] = await asyncio.to_thread(fetch, self.one.ops, path)
        for words in (["status"], ["status", "--output", "json"], ["explain", "last"],
                      *(["explain", "model", name] for name in names)):  # fmt: skip
            command = [sys.executable, "-m", "pilotlight", *words, "--ops", self.one.ops]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=30)
            assert done.stdout
            self.ours[f"command {words}"] = done.stdout + done.stderr
        assert self.one.process is not None
        for child in psutil.Process(self.one.process.pid).children(recursive=True):
            self.ours[f"process {child.pid}"] = " ".join(child.cmdline()).encode()

    def hits(self) -> Iterator[str]:
        """Where either word was found."""
        sources = dict(self.ours) | {"output": self.one.said().encode()}
        logs = self.one.state / "logs"
        for path in sorted(self.one.state.rglob("*")):
            if path.is_file() and logs not in path.parents:
                sources[str(path.relative_to(self.one.state))] = path.read_bytes()
        for name, text in sources.items():
            for found in told(text, KEY, WRONG, PROMPT):
                yield f"{name}: {found!r}"


def fetch(ops: str, path: str, *, accept: str = "application/openmetrics-text") -> bytes:
    """A page of the operations port, whatever its status."""
    try:
        with urllib.request.urlopen(urllib.request.Request(ops + path, headers={"accept": accept}), timeout=10) as page:
            return bytes(page.read())
    except urllib.error.HTTPError as error:
        return error.read()


async def test_case_44_no_key_or_prompt_is_told_anywhere(tmp_path: Path, talkative: None) -> None:
    options = ("--gateways", "2", "--grace", "1")
    async with serving(tmp_path, *documents(tmp_path), options=options) as one:
        heard = Heard(one)
        await heard.suffer(Fault("nothing wrong", post(CHAT, chat("talks")), 200, engine=True))
        faults = [fault for family in REQUESTS for fault in family()]
        await asyncio.gather(*map(heard.suffer, [*faults, *misbehaving("talks")]))
        await refused_in_time(heard)
        await to_the_operations_port(heard)
        await engines_die(heard)
        await clients_leave(heard)
        await processes_die(heard)
        await heard.look()
        await ends(heard)
        assert list(heard.hits()) == []
        assert said_more_than_usual(one) >= 4
        logs = b"".join(path.read_bytes() for path in (one.state / "logs").glob("*.log"))
        for rightly in (heard.engines, logs):
            assert told(rightly, PROMPT), "a search that finds nothing where it is proves nothing"
        kept = b"".join(path.read_bytes() for path in tmp_path.glob("*.jsonl"))
        assert not told(logs + kept, KEY, WRONG), "an engine never sees a key"


def said_more_than_usual(one: Serving) -> int:
    """How many processes said what only a talkative one says."""
    return one.said().count("DEBUG:talkative:talks")


async def refused_in_time(heard: Heard) -> None:
    """Clocks that run out, a full queue, a start that fails, half a request."""
    body, wait = chat("slow"), "Prefer: wait=1"
    await asyncio.gather(
        heard.suffer(Fault("a full queue", post(CHAT, chat("full")), 429, "queue_full")),
        heard.suffer(Fault("a start that fails", post(CHAT, chat("broken")), 503, "model_start_failed")),
        heard.suffer(Fault("a deadline", post(CHAT, body, wait), 503, "model_starting")),
        heard.suffer(Fault("a deadline, Anthropic", post(MESSAGES, body, wait), 503, "model_starting")),
        heard.suffer(Fault("no time", post(CHAT, body, "Prefer: wait=0"), 503, "model_starting")),
        heard.suffer(Fault("a stream's deadline", post(CHAT, chat("slow", stream=True), wait), 200, "model_starting")),
        heard.suffer(Fault("half a head", f"POST {CHAT} HTTP/1.1\r\n{GOOD}\r\n".encode(), 408, "request_timeout")),
        heard.suffer(Fault("half a body", post(CHAT, chat("talks"))[:-4], 408, "request_timeout")),
    )


async def to_the_operations_port(heard: Heard) -> None:
    """Somebody mistakes the port: what is sent there is no more told than elsewhere."""
    port = int(heard.one.ops.rpartition(":")[2])
    good = f"Host: 127.0.0.1\r\n{GOOD}\r\nConnection: close\r\n"
    body = chat("talks")
    for data in (
        f"GET /{KEY}?key={KEY} HTTP/1.1\r\n{good}\r\n", f"GET /api/v1/models/{PROMPT} HTTP/1.1\r\n{good}\r\n",
        f"GET /api/v1/explain/model/{PROMPT} HTTP/1.1\r\n{good}\r\n", f"{KEY} / HTTP/1.1\r\n{good}\r\n",
        f"GET /metrics HTTP/1.1\r\nHost: {KEY}\r\nConnection: close\r\n\r\n",
        f"GET / HTTP/1.1\r\nAuthorization : Bearer {KEY}\r\n{good}\r\n", f"GET / HTTP/1.1\r\n{KEY}\0: x\r\n{good}\r\n",
        f"GET / HTTP/{KEY}\r\n{good}\r\n", f"{KEY}\r\n\r\n", f"GET / HTTP/1.1\r\nContent-Length: {KEY}\r\n{good}\r\n",
        f"GET / HTTP/1.1\r\nX-A: {KEY * 2000}\r\n{good}\r\n", f"GET /{KEY * 2000} HTTP/1.1\r\n{good}\r\n",
        post(CHAT, body).decode(), post(CHAT, body).decode().replace("Content-Length", "X-Length"),
    ):  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data.encode())
        async with asyncio.timeout(10):
            got = await reader.read()
        writer.transport.abort()
        assert got.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (data[:40], got)
        heard.ours[f"operations: {data[:20]!r} {len(heard.ours)}"] = got


async def engines_die(heard: Heard) -> None:
    """Of the Call: mid-stream, and before the first byte twice."""
    broke = "upstream_error"
    stream, whole = chat("mortal", "dies-mid-stream", stream=True), chat("mortal", "dies")
    await heard.suffer(Fault("an engine dies mid-stream", post(CHAT, stream), 200, broke))
    await heard.suffer(Fault("an engine dies", post(MESSAGES, whole), 502, broke))


async def clients_leave(heard: Heard) -> None:
    """While parked, and before and in the middle of an answer."""
    parked = await connected(heard.one.url)
    parked.send(post(CHAT, chat("slow", stream=True)))
    assert (await parked.head())[0] == 200, "with its early head"
    clients = [await heard.running("patient", stream=True, manner=manner) for manner in ("silent", "stalls")]
    for client in (parked, *clients):
        client.leave()
    await until("nothing runs", lambda: heard.one.demand("patient")["running"] == 0)


async def processes_die(heard: Heard) -> None:
    """The autoscaler and a gateway, each in the middle of a Call, and then once more a Call that fails."""
    one = heard.one
    client = await heard.running("patient", stream=True)
    (first, victim), *_ = one.gateways().items()
    os.kill(one.autoscaler(), signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    await until("both are back", lambda: one.answers() and one.gateways().get(first, victim) != victim)
    client.leave()
    for _ in range(4):  # with both gateways
        await heard.suffer(Fault("after a crash", post(CHAT, chat("talks", "garbage")), 502, "upstream_error"))


async def ends(heard: Heard) -> None:
    """SIGTERM while Calls run, wait and arrive."""
    running = [await heard.running("patient", stream=stream, manner="stalls") for stream in (True, True)]
    running.append(await heard.running("patient", stream=False))
    waiting = await connected(heard.one.url)
    waiting.send(post(CHAT, chat("slow")))
    await until("it waits", lambda: heard.one.demand("slow")["waiting"])
    assert await heard.one.stop() == 0
    for number, client in enumerate((*running, waiting)):
        got = await client.rest()
        assert b'"shutting_down"' in got, number
        heard.ours[f"at the end {number}"] = got
        client.leave()
