"""A real `pilotlight serve` for tests: started, looked at from outside, killed in parts, and surely ended.

What it tells comes from outside the product: processes by their mark and arguments, the engines' transcripts and logs,
the operations port, and what was printed. At the end nothing of it may be left: no process with the mark of its state
directory and no child, else the test fails.
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

from autoscaler.drivers.local.processes import read_process, read_process_mark
from autoscaler.drivers.local.state_directory import ReplicaRecord
from loadtest.cli import request_body
from loadtest.client import Client
from loadtest.result import Result, Shot
from tests.kit.fake_process import command
from tests.kit.ports import free_port
from tests.kit.waiting import WITHIN_S, until

API = "pilotlight.dev/v1alpha1"
START_S, STOP_S = 120.0, 90.0
_LINE = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3})  (\S+) +(\S+) +(.*)$")

Document = dict[str, object]


class Move(NamedTuple):
    """One transition as `serve` printed it."""

    at_s: float
    """When, by the clock of `serve` (Unix, thousandths)."""
    model: str
    state: str
    reason: str


class Transcribed(NamedTuple):
    """One Call as a fake engine wrote it down. Times are Unix seconds."""

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
    """A Model whose engine is the fake one; its transcript is FOLDER/NAME.jsonl."""
    slots = str(spec.get("slots", 4))
    told = ("--name", name, "--port", "{port}", "--slots", slots, "--transcript", str(folder / f"{name}.jsonl"))
    return model(name, engine="command", command=command(*told, *knobs), **spec)


def transcript(folder: Path, name: str) -> list[Transcribed]:
    """What the fake engines of a Model wrote down so far, in the order of the ends."""
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
    """One chat Call."""
    body = request_body(model, tokens, 30, stream=stream)
    return Shot(model=model, body=body, stream=stream, at_s=at_s, timeout_s=timeout_s, headers=headers)


class Serving:
    """One installation: a state directory, documents, and `serve` on it, which may be started again and again."""

    def __init__(self, folder: Path, documents: Sequence[Document], *options: str) -> None:
        self.folder = folder
        self.state = Path(tempfile.mkdtemp(prefix="pilotlight-"))
        """Short, because a Unix socket's path is."""
        self.options = options
        self.config = folder / "documents.yaml"
        self.config.write_text(yaml.safe_dump_all(documents))
        self.output = folder / "output.txt"
        self.url, self.ops = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.faults = False
        """A test injects internal errors; else one that was contained fails the test."""
        self.tree: Path | None = None
        """Where another version of it is; None: here."""
        self._sending: list[asyncio.Task[list[Result]]] = []

    # --- its life ----------------------------------------------------------------------------------------------------

    @property
    def argv(self) -> list[str]:
        """The command."""
        ports = ("--listen", self.url.removeprefix("http://"), "--ops", self.ops.removeprefix("http://"))
        given = ("-c", str(self.config), "--state", str(self.state), *ports, *self.options)
        return [sys.executable, "-m", "pilotlight", "serve", *given]

    def begin_start(self) -> None:
        """Starts it and waits for nothing."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.tree
            )

    async def start(self) -> None:
        """Returns when it says that it is ready."""
        said = self.said().count("ready on")
        self.begin_start()
        await until(
            "serve says that it is ready", lambda: self.said().count("ready on") > said or self._ended(), START_S
        )
        assert not self._ended(), self.said()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it in order and gives its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Waits for its end; the exit status."""
        assert self.process is not None
        await until("serve ends", self._ended, STOP_S)
        return self.process.wait()

    async def kill(self) -> None:
        """SIGKILL for the supervisor; returns when its children are gone too."""
        children = [self.autoscaler(), *self.gateways().values()]
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        await until("the children of a killed supervisor die", lambda: not any(map(running, children)))

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    async def close(self) -> None:
        """Ends it if it runs, and says what is left of it: that must be nothing."""
        ours: list[psutil.Process] = []
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                ours = psutil.Process(self.process.pid).children(recursive=True)
        try:
            if not self._ended():
                await self.stop()
            left = [*self.marked(), *(child.pid for child in ours if running(child.pid))]
            assert not left, f"left behind: {[*map(describe, left)]}"
            assert "Traceback" not in self.said()
            assert self.faults or not re.search("event=(model_faulty|degraded)", self.said()), self.said()
        finally:
            for task in self._sending:
                task.cancel()
            for pid in {*self.marked(), *(child.pid for child in ours if running(child.pid))}:
                os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            print(self.said())  # pytest shows it for a test that failed
            shutil.rmtree(self.state)

    # --- its processes -----------------------------------------------------------------------------------------------

    def autoscaler(self) -> int:
        """The pid of the autoscaler's process; 0 while there is none."""
        return next((pid for pid, line in self._children() if "autoscaler" in line[:4]), 0)

    def gateways(self) -> dict[str, int]:
        """Name -> pid of the gateways' processes that there are."""
        return {line[line.index("--id") + 1]: pid for pid, line in self._children() if "gateway" in line[:4]}

    def children(self) -> int:
        """How many children the supervisor has, the dead that nobody has reaped included."""
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
        """Living processes that carry a mark of this state directory, whoever their parent is."""
        installation = self.state / "installation"
        if not installation.exists():
            return []
        prefix = installation.read_text().strip() + "/"
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return sorted(pid for pid in pids if (read_process_mark(pid) or "").startswith(prefix) and running(pid))

    def engines(self, model: str = "") -> list[int]:
        """The main processes of Replicas (of one Model) that live."""
        pids = [record.pid or self._leader(record.id) for record in self.records() if model in {"", record.model}]
        return sorted(pid for pid in pids if pid and running(pid))

    def _leader(self, replica: str) -> int:
        """The process of a Replica that leads a session, while its record has no pid yet; 0: there is none."""
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                if (read_process_mark(pid) or "").endswith(f"/{replica}") and os.getsid(pid) == pid:
                    return pid
        return 0

    def records(self) -> list[ReplicaRecord]:
        """What the state directory says of Replicas. A record is written beside the old one, which is then removed
        before the new one gets its name: in between it is found under the other name, or a moment later under its own.
        """
        found = dict[str, ReplicaRecord]()
        for pattern in ("*.json", ".*.json.new", "*.json"):
            for path in (self.state / "replicas").glob(pattern):
                name = path.name.removeprefix(".").removesuffix(".new")
                if name not in found:
                    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                        found[name] = msgspec.json.decode(path.read_bytes(), type=ReplicaRecord)
        return [found[name] for name in sorted(found)]

    def starts(self, model: str) -> int:
        """Engine processes of a Model that were ever started: each Replica has a log of its own."""
        return len([*(self.state / "logs").glob(f"{model}-????????-*.log")])

    # --- what it says ------------------------------------------------------------------------------------------------

    def said(self) -> str:
        """All that it printed."""
        return self.output.read_text() if self.output.exists() else ""

    def moves(self, model: str) -> list[Move]:
        """The transitions of a Model, as printed."""
        found = [match.groups() for line in self.said().splitlines() if (match := _LINE.match(line))]
        return [Move(_unix_s(clock), *rest) for clock, *rest in found if rest[0] == model]

    def states(self, model: str) -> list[str]:
        """The states that a Model's Replicas went through."""
        return [move.state for move in self.moves(model)]

    def get(self, path: str) -> object:
        """JSON of the operations port."""
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        """What the operations port answers."""
        with urllib.request.urlopen(self.ops + path, timeout=60) as response:
            return str(response.read().decode())

    def answers(self) -> bool:
        """Whether the operations port answers (it does not while the autoscaler is replaced)."""
        try:
            return bool(self.get("/api/v1/status"))
        except OSError:
            return False

    def demand(self, model: str) -> dict[str, int]:
        """Calls waiting and running, as the autoscaler knows them."""
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
        """Until so many Replicas of the Model are ready."""
        await until(f"{count} of {model} ready", lambda: self.replicas(model).get("ready", 0) == count)

    async def zero(self, model: str, within_s: float = WITHIN_S) -> None:
        """Until no Replica of the Model is left."""
        await until(f"{model} at zero", lambda: not self.replicas(model), within_s)

    def busy(self, model: str) -> int:
        """Calls that the engines of a Model are working on, by their own count."""
        total = 0
        for record in self.records():
            if record.model == model:
                with contextlib.suppress(OSError):  # it does not listen yet, or not any more
                    url = f"http://127.0.0.1:{record.port}/metrics"
                    with urllib.request.urlopen(url, timeout=60) as response:
                        found = re.search(rb"requests_processing (\d+)", response.read())
                    total += int(found[1]) if found else 0
        return total

    # --- Calls -------------------------------------------------------------------------------------------------------

    async def send(self, *shots: Shot, on_result: Callable[[Result], None] | None = None) -> list[Result]:
        """The Results of an open-loop run."""
        return await Client(self.url).run(shots, on_result)

    def begin(self, *shots: Shot, on_result: Callable[[Result], None] | None = None) -> asyncio.Task[list[Result]]:
        """The same in the background; await it for the Results."""
        task = asyncio.create_task(self.send(*shots, on_result=on_result))
        self._sending.append(task)
        return task

    async def call(self, model: str, *, stream: bool = True, tokens: int = 100, timeout_s: float = WITHIN_S) -> Result:
        """One Call's Result."""
        (result,) = await self.send(shot(model, stream=stream, tokens=tokens, timeout_s=timeout_s))
        return result


@asynccontextmanager
async def serving(
    folder: Path, *documents: Document, options: Sequence[str] = (), start: bool = True
) -> AsyncIterator[Serving]:
    """`serve` on a fresh state directory, ready; at the end nothing of it may be left."""
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
    """Whether the process lives (a zombie does not)."""
    one = read_process(pid)
    return one is not None and not one.gone


def describe(pid: int) -> str:
    """A process in words."""
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.Error:
        return str(pid)


def _unix_s(clock: str) -> float:
    """The last moment at which local clocks showed this."""
    now = dt.datetime.now().astimezone()
    shown = dt.datetime.combine(now.date(), dt.time.fromisoformat(clock)).astimezone()
    return (shown if shown <= now else shown - dt.timedelta(days=1)).timestamp()


def full_s(calls: Sequence[Transcribed], slots: int, since_s: float) -> float:
    """When, from `since_s` on (Unix), an engine process first took a Call that filled so many Slots; it must have."""
    begins = sorted(call.began_s + call.queued_s for call in calls)
    runs = [(call.began_s + call.queued_s, call.ended_s) for call in calls]
    found = [at_s for at_s in begins if at_s >= since_s and sum(a <= at_s < b for a, b in runs) >= slots]
    assert found, f"{slots} Slots were never used at once"
    return found[0]


def most_at_once(calls: Sequence[Transcribed]) -> int:
    """The most Calls that one engine process had at the same time, waiting in it or running, as it counted itself."""
    return max((call.at_once for call in calls), default=0)
