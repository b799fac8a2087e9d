"""A real `serve` with the most verbose logging that Python offers, and everything that it outputs (case 44).

`Heard` records what clients and operators received, apart from what engines sent; `hits` searches these records, the
output and the state directory for the words of `tests.support.net.secret_leaks`, in every spelling. Two places may
contain the prompt and are excluded: the response of an engine itself, and STATE/logs, which contains each engine's own
output. That the prompt is in these two shows that the search works.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.fakes.engines import echo_engine
from tests.support.harness.gateway.gateway_rig import Client
from tests.support.harness.serve.serve import API, Document, Serving, model
from tests.support.net.canary import connected, occurrences
from tests.support.net.secret_leaks import CHAT, KEY, PROMPT, WRONG, Fault, chat, post
from tests.support.waiting import until

AT_ONCE = 16
TALKATIVE = """import logging
logging.basicConfig(level=logging.NOTSET)
logging.getLogger("talkative").debug("talks")
"""
"""For the Python of all processes of `serve`."""
CLOCKS: Document = {"firstByteSecondsMax": 6, "responseSecondsMax": 6, "stallSecondsMax": 6}


def talk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every Python that is started from here on log everything, with asyncio in debug mode."""
    place = folder / "talkative"
    place.mkdir()
    (place / "sitecustomize.py").write_text(TALKATIVE)
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    monkeypatch.setenv("PYTHONDEVMODE", "1")


def tenant() -> Document:
    """The Tenant with the valid key."""
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    keys = {"keys": [{"name": "only", "sha256": hashed}]}
    return {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "acme"}, "spec": keys}


def repeating(folder: Path, name: str, **spec: object) -> Document:
    """A Model whose engine repeats its input and records it in FOLDER/NAME.jsonl."""
    command = echo_engine.command(folder / f"{name}.jsonl")
    return model(name, engine="command", command=command, **{"gpu": {"memory": "10Mi"}, "slots": 4 * AT_ONCE, **spec})


class Heard:
    """A `serve`, and what its clients and operators received."""

    def __init__(self, one: Serving) -> None:
        self.one = one
        self.outputs: dict[str, bytes] = {}
        """Output of our own, by fault or page."""
        self.engines = b""
        """Output of the engines."""
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def answer(self, data: bytes) -> bytes:
        """The whole response to one request on its own connection."""
        client = await connected(self.one.url)
        try:
            client.send(data)
            async with asyncio.timeout(90):
                return await client.reader.read()
        finally:
            client.leave()

    async def suffer(self, fault: Fault) -> None:
        """Sends one fault and checks that it occurs as intended."""
        async with self._gate:
            got = await self.answer(fault.data)
        # A stream that has waited for the engine got its head before the fault, and the error as an event.
        status = 200 if b": keepalive\n" in got or b"event: ping\n" in got else fault.status
        assert got.startswith(b"HTTP/1.1 %d " % status if status else b"HTTP/1.1 "), (fault.name, got)
        assert fault.code.encode() in got, (fault.name, got)
        if fault.engine:
            self.engines += got
        else:
            self.outputs[fault.name + " " + str(len(self.outputs))] = got

    async def running(self, name: str, *, stream: bool, manner: str = "silent") -> Client:
        """A client whose request runs on an engine of this Model that does not respond."""
        before = len(echo_engine.seen(self.one.folder / f"{name}.jsonl"))
        client = await connected(self.one.url)
        client.send(post(CHAT, chat(name, manner, stream=stream)))
        await until("it is there", lambda: len(echo_engine.seen(self.one.folder / f"{name}.jsonl")) > before)
        return client

    async def look(self) -> None:
        """Reads everything that an operator can: pages, metrics, the read API, the command line, the process list."""
        paths = ["/", "/healthz", "/readyz", "/metrics", "/api/v1/openapi.json", "/api/v1/plan", "/api/v1/tenants",
                 "/api/v1/status", "/api/v1/models", "/api/v1/devices", "/api/v1/explain/last"]  # fmt: skip
        names = [
            str(row["model"]) for row in json.loads(await asyncio.to_thread(fetch, self.one.ops, "/api/v1/status"))
        ]
        paths += [f"/api/v1/{kind}/{name}" for kind in ("models", "explain/model") for name in names]
        for path in paths:
            self.outputs[f"operations {path}"] = await asyncio.to_thread(fetch, self.one.ops, path)
        for words in (["status"], ["status", "--output", "json"], ["explain", "last"],
                      *(["explain", "model", name] for name in names)):  # fmt: skip
            command = [sys.executable, "-m", "pilotlight", *words, "--ops", self.one.ops]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=120)
            assert done.stdout
            self.outputs[f"command {words}"] = done.stdout + done.stderr
        assert self.one.process is not None
        for child in psutil.Process(self.one.process.pid).children(recursive=True):
            self.outputs[f"process {child.pid}"] = " ".join(child.cmdline()).encode()

    def hits(self) -> Iterator[str]:
        """Where one of the words was found."""
        sources = dict(self.outputs) | {"output": self.one.output().encode()}
        logs = self.one.state / "logs"
        for path in sorted(self.one.state.rglob("*")):
            if path.is_file() and logs not in path.parents:
                sources[str(path.relative_to(self.one.state))] = path.read_bytes()
        for name, text in sources.items():
            for found in occurrences(text, KEY, WRONG, PROMPT):
                yield f"{name}: {found!r}"

    def assert_nothing_disclosed(self, *, talkers: int) -> None:
        """Checks at the end: no word leaked, `talkers` processes were verbose, the search finds the prompt in its
        places.
        """
        hits = list(self.hits())
        assert not hits, hits
        assert self.one.output().count("DEBUG:talkative:talks") >= talkers
        logs = b"".join(path.read_bytes() for path in (self.one.state / "logs").glob("*.log"))
        for rightly in (self.engines, logs):
            assert occurrences(rightly, PROMPT), "a search that finds nothing where it is proves nothing"
        kept = b"".join(path.read_bytes() for path in self.one.folder.glob("*.jsonl"))
        assert not occurrences(logs + kept, KEY, WRONG), "an engine never sees a key"


def fetch(ops: str, path: str, *, accept: str = "application/openmetrics-text") -> bytes:
    """A page of the operations port, whatever its status."""
    try:
        with urllib.request.urlopen(urllib.request.Request(ops + path, headers={"accept": accept}), timeout=60) as page:
            return bytes(page.read())
    except urllib.error.HTTPError as error:
        return error.read()
