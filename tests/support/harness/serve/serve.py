"""A real `pilotlight serve` for tests: starts it, inspects it from outside, kills parts of it, and always stops it.

The information comes from outside the product: processes by their mark and arguments, the engines' transcripts and
logs, the operations port, and the output. The test fails if a process is left at the end: one with the mark of the
state directory or a child.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import yaml

from autoscaler.drivers.local.replica_processes import read_process, read_process_mark
from autoscaler.drivers.local.state_directory import ReplicaRecord
from loadtest.cli import request_body
from loadtest.client import Client
from loadtest.result import Result, Shot
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.net.ports import free_port
from tests.support.waiting import WITHIN_S, until

API = "pilotlight.dev/v1alpha1"
START_S, STOP_S = 120.0, 90.0
_LINE = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3})  (\S+) +(\S+) +(.*)$")

Document = dict[str, object]


class Move(NamedTuple):
    """One transition as `serve` printed it."""

    at_s: float
    """When, by the clock of `serve` (Unix, milliseconds)."""
    model: str
    state: str
    reason: str


class Transcribed(NamedTuple):
    """One request as recorded by a fake engine. Times are Unix seconds."""

    pid: int
    id: str
    began_s: float
    ended_s: float
    queued_s: float
    at_once: int
    finished: bool
    aborted: bool


def settings(memory: str = "100Mi", **keys: object) -> Document:
    """Settings with one declared device."""
    devices = [{"name": "gpu0", "model": "tiny", "memory": memory}]
    return {"apiVersion": API, "kind": "Settings", "devices": devices, **keys}


def model(name: str, **spec: object) -> Document:
    """A Model with short windows; keys of `spec` replace the defaults."""
    defaults: Document = {"gpu": {"memory": "40Mi"}, "slots": 4, "idleSeconds": 30, "residencySeconds": 0.3}
    return {"apiVersion": API, "kind": "Model", "metadata": {"name": name}, "spec": {**defaults, **spec}}


def fake(folder: Path, name: str, *knobs: str, **spec: object) -> Document:
    """A Model with the fake engine; its transcript is FOLDER/NAME.jsonl."""
    slots = str(spec.get("slots", 4))
    options = ("--name", name, "--port", "{port}", "--slots", slots, "--transcript", str(folder / f"{name}.jsonl"))
    return model(name, engine="command", command=command(*options, *knobs), **spec)


def transcript(folder: Path, name: str) -> list[Transcribed]:
    """What the fake engines of a Model recorded so far, in the order in which requests ended."""
    path = folder / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        Transcribed(
            r["pid"],
            r["id"],
            r["time"],
            r["time"] + r["after_s"],
            r["queued_s"],
            r["at_once"],
            r["finished"],
            r["aborted"],
        )
        for r in rows
    ]


def shot(
    model: str, *, stream: bool = True, at_s: float = 0.0, timeout_s: float = WITHIN_S, tokens: int = 100,
    headers: tuple[tuple[str, str], ...] = (),
) -> Shot:  # fmt: skip
    """One chat request."""
    body = request_body(model, tokens, 30, stream=stream)
    return Shot(model=model, body=body, stream=stream, at_s=at_s, timeout_s=timeout_s, headers=headers)


class Serving:
    """One installation: a state directory, documents, and `serve` on it, which can be restarted."""

    def __init__(self, folder: Path, documents: Sequence[Document], *options: str) -> None:
        self.folder = folder
        self.state = Path(tempfile.mkdtemp(prefix="pilotlight-"))
        """Short, because the path of a Unix socket is limited."""
        self.options = options
        self.config = folder / "documents.yaml"
        self.config.write_text(yaml.safe_dump_all(documents))
        self.output_file = folder / "output.txt"
        self.url, self.ops = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.faults = False
        """Whether the test injects internal errors; if not, a contained error fails the test."""
        self.tree: Path | None = None
        """The folder of another version of the product; None: this one."""
        self._sending: list[asyncio.Task[list[Result]]] = []

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    @property
    def argv(self) -> list[str]:
        """The command."""
        ports = ("--listen", self.url.removeprefix("http://"), "--ops", self.ops.removeprefix("http://"))
        given = ("-c", str(self.config), "--state", str(self.state), *ports, *self.options)
        return [sys.executable, "-m", "pilotlight", "serve", *given]

    def begin_start(self) -> None:
        """Starts it without waiting."""
        with self.output_file.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.tree
            )

    async def start(self) -> None:
        """Starts it; returns when it reports that it is ready."""
        count = self.output().count("ready on")
        self.begin_start()
        await until(
            "serve logs that it is ready", lambda: self.output().count("ready on") > count or self._ended(), START_S
        )
        assert not self._ended(), self.output()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stops it in order; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Waits until it ends; returns the exit status."""
        assert self.process is not None
        await until("serve ends", self._ended, STOP_S)
        return self.process.wait()

    async def kill(self) -> None:
        """Sends SIGKILL to the supervisor; returns when its children have ended too."""
        children = [self.autoscaler(), *self.gateways().values()]
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        await until("the children of a killed supervisor die", lambda: not any(map(running, children)))

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    async def close(self) -> None:
        """Stops it if it runs; fails if anything of it is left."""
        own: list[psutil.Process] = []
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                own = psutil.Process(self.process.pid).children(recursive=True)
        try:
            if not self._ended():
                await self.stop()
            left = [*self.marked(), *(child.pid for child in own if running(child.pid))]
            assert not left, f"left behind: {[*map(describe, left)]}"
            assert "Traceback" not in self.output()
            assert self.faults or not re.search("event=(model_faulty|degraded)", self.output()), self.output()
        finally:
            for task in self._sending:
                task.cancel()
            for pid in {*self.marked(), *(child.pid for child in own if running(child.pid))}:
                os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            print(self.output())  # pytest shows it if the test fails
            shutil.rmtree(self.state)

    # --- processes ---------------------------------------------------------------------------------------------------

    def autoscaler(self) -> int:
        """The pid of the autoscaler's process; 0 while there is none."""
        return next((pid for pid, line in self._children() if "autoscaler" in line[:4]), 0)

    def gateways(self) -> dict[str, int]:
        """Name -> pid of the running gateway processes."""
        return {line[line.index("--id") + 1]: pid for pid, line in self._children() if "gateway" in line[:4]}

    def children(self) -> int:
        """Number of the supervisor's children, including zombies."""
        assert self.process is not None
        return len(psutil.Process(self.process.pid).children())

    def _children(self) -> list[tuple[int, list[str]]]:
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                found.append((child.pid, child.cmdline()))
        return [(pid, line) for pid, line in found if "pilotlight" in line and running(pid)]

    def marked(self) -> list[int]:
        """Running processes that carry a mark of this state directory, whatever their parent is."""
        installation = self.state / "installation"
        if not installation.exists():
            return []
        prefix = installation.read_text().strip() + "/"
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return sorted(pid for pid in pids if (read_process_mark(pid) or "").startswith(prefix) and running(pid))

    def engines(self, model: str = "") -> list[int]:
        """The main processes of running replicas (of one Model)."""
        pids = [record.pid or self._leader(record.id) for record in self.records() if model in {"", record.model}]
        return sorted(pid for pid in pids if pid and running(pid))

    def _leader(self, replica: str) -> int:
        """The process of a replica that leads a session, while its record has no pid yet; 0 if there is none."""
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                if (read_process_mark(pid) or "").endswith(f"/{replica}") and os.getsid(pid) == pid:
                    return pid
        return 0

    def records(self) -> list[ReplicaRecord]:
        """The records of replicas in the state directory."""
        # The old record is removed before the new one, a separate file, gets its name. Meanwhile it is found under its
        # temporary name, or shortly after under the final one.
        found = dict[str, ReplicaRecord]()
        for pattern in ("*.json", ".*.json.new", "*.json"):
            for path in (self.state / "replicas").glob(pattern):
                name = path.name.removeprefix(".").removesuffix(".new")
                if name not in found:
                    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                        found[name] = msgspec.json.decode(path.read_bytes(), type=ReplicaRecord)
        return [found[name] for name in sorted(found)]

    def starts(self, model: str) -> int:
        """Number of engine processes of a Model that were ever started: each replica has its own log."""
        return len([*(self.state / "logs").glob(f"{model}-????????-*.log")])

    # --- output ------------------------------------------------------------------------------------------------------

    def output(self) -> str:
        """Everything that it printed."""
        return self.output_file.read_text() if self.output_file.exists() else ""

    def moves(self, model: str) -> list[Move]:
        """The transitions of a Model, as printed."""
        found = [match.groups() for line in self.output().splitlines() if (match := _LINE.match(line))]
        return [Move(_unix_s(clock), *rest) for clock, *rest in found if rest[0] == model]

    def states(self, model: str) -> list[str]:
        """The states that a Model's replicas went through."""
        return [move.state for move in self.moves(model)]

    def get(self, path: str) -> object:
        """JSON of a path of the operations port."""
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        """Text of a path of the operations port."""
        with urllib.request.urlopen(self.ops + path, timeout=60) as response:
            return str(response.read().decode())

    def answers(self) -> bool:
        """Whether the operations port responds (it does not while the autoscaler is replaced)."""
        try:
            return bool(self.get("/api/v1/status"))
        except OSError:
            return False

    def demand(self, model: str) -> dict[str, int]:
        """Waiting and running requests, as the autoscaler counts them."""
        row = self.get(f"/api/v1/models/{model}")
        assert isinstance(row, dict)
        return dict(row["demand"])

    def replicas(self, model: str) -> dict[str, int]:
        """State -> number of Replicas."""
        row = self.get(f"/api/v1/models/{model}")
        assert isinstance(row, dict)
        return dict(row["replicas"])

    def reported_state(self, model: str) -> str:
        """The Model's state as a gateway reports it: zero, starting, ready, draining or failed."""
        with urllib.request.urlopen(f"{self.url}/v1/models/{model}", timeout=60) as response:
            return str(json.load(response)["pilotlight"]["state"])

    async def ready(self, model: str, count: int = 1) -> None:
        """Waits until that many replicas of the Model are ready."""
        await until(f"{count} of {model} ready", lambda: self.replicas(model).get("ready", 0) == count)

    async def zero(self, model: str, within_s: float = WITHIN_S) -> None:
        """Waits until the Model has no Replica."""
        await until(f"{model} at zero", lambda: not self.replicas(model), within_s)

    def busy(self, model: str) -> int:
        """Requests that the engines of a Model are processing, as they count them."""
        total = 0
        for record in self.records():
            if record.model == model:
                with contextlib.suppress(OSError):  # it does not listen yet, or no longer
                    url = f"http://127.0.0.1:{record.port}/metrics"
                    with urllib.request.urlopen(url, timeout=60) as response:
                        found = re.search(rb"requests_processing (\d+)", response.read())
                    total += int(found[1]) if found else 0
        return total

    # --- requests ----------------------------------------------------------------------------------------------------

    async def send(self, *shots: Shot, on_result: Callable[[Result], None] | None = None) -> list[Result]:
        """The Results of an open-loop run."""
        return await Client(self.url).run(shots, on_result)

    def begin(self, *shots: Shot, on_result: Callable[[Result], None] | None = None) -> asyncio.Task[list[Result]]:
        """The same in the background; await it for the Results."""
        task = asyncio.create_task(self.send(*shots, on_result=on_result))
        self._sending.append(task)
        return task

    async def call(self, model: str, *, stream: bool = True, tokens: int = 100, timeout_s: float = WITHIN_S) -> Result:
        """Sends one request; returns its Result."""
        (result,) = await self.send(shot(model, stream=stream, tokens=tokens, timeout_s=timeout_s))
        return result


@asynccontextmanager
async def serving(
    folder: Path, *documents: Document, options: Sequence[str] = (), start: bool = True
) -> AsyncIterator[Serving]:
    """Runs `serve` on a fresh state directory until it is ready; at the end no process of it may be left."""
    folder.mkdir(exist_ok=True)
    given = documents if any(d["kind"] == "Settings" for d in documents) else (*documents, settings())
    one = Serving(folder, given, *options)
    try:
        if start:
            await one.start()
        yield one
    finally:
        await one.close()


def running(pid: int) -> bool:
    """Whether the process is running (a zombie is not)."""
    one = read_process(pid)
    return one is not None and not one.gone


def describe(pid: int) -> str:
    """A description of a process."""
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.Error:
        return str(pid)


def _unix_s(clock: str) -> float:
    """The last moment at which the local clock showed this time."""
    now = dt.datetime.now().astimezone()
    shown = dt.datetime.combine(now.date(), dt.time.fromisoformat(clock)).astimezone()
    return (shown if shown <= now else shown - dt.timedelta(days=1)).timestamp()


def full_s(calls: Sequence[Transcribed], slots: int, since_s: float) -> float:
    """When an engine process, from `since_s` on (Unix), first had that many requests; fails if none had."""
    begins = sorted(call.began_s + call.queued_s for call in calls)
    runs = [(call.began_s + call.queued_s, call.ended_s) for call in calls]
    found = [at_s for at_s in begins if at_s >= since_s and sum(a <= at_s < b for a, b in runs) >= slots]
    assert found, f"{slots} Slots were never used at once"
    return found[0]


def most_at_once(calls: Sequence[Transcribed]) -> int:
    """The largest number of concurrent requests in one engine process, waiting or running, by its own count."""
    return max((call.at_once for call in calls), default=0)
