"""The test bed: models on disk, the engine's command, `pilotlight serve`, and the same engine started manually."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import psutil
import pynvml

from loadtest.client import Client
from loadtest.result import Result, Shot
from tests.gpu.report import Report
from tests.gpu.watch import GAP_S_MAX, Watch
from tests.support.harness.serve.serve import API, Document, Serving
from tests.support.net.ports import free_port

ENGINES = Path(__file__).parent / "engines"
HOST = "127.0.0.1"
END_S = 20.0
"""Time for `serve` to shut down; then it is killed, and the step reports that."""
CALL_S = 150.0
LOOK_S = 0.002
SIMULATED_SLOWER = 100
"""Queries of the simulated device use files, on a machine that may be busy."""
RATE_PIECE_BYTES, RATE_PIECES = 16 << 20, 8
FREE_BYTES = 256 << 20
"""Memory in use beyond an idle device that is no engine: a CUDA context alone takes more."""

T = TypeVar("T")

REAL = {
    "small": {"kind": "llama", "width": 2048, "inner": 5504, "layers": 10, "rows": 8, "vocabulary": 32000},
    "medium": {"kind": "qwen2", "width": 3072, "inner": 8192, "layers": 12, "rows": 8, "vocabulary": 32000},
    "large": {"kind": "llama", "width": 4096, "inner": 11008, "layers": 15, "rows": 8, "vocabulary": 32000},
}
"""Models of about 1.1, 2.8 and 5.8 GB."""
SIMULATED = {
    name: one | {"width": 512, "inner": 1024, "layers": layers, "rows": 1, "vocabulary": 4000}
    for (name, one), layers in zip(REAL.items(), (4, 8, 16), strict=True)
}


class GpuRunError(Exception):
    """A step cannot continue; the text is one line."""


class Phase(NamedTuple):
    """One line of the phases file."""

    model: str
    pid: int
    phase: str
    at_s: float
    more: dict[str, float]


class Bed:
    """State that all steps share."""

    def __init__(
        self, folder: Path, report: Report, *, simulated: bool, quick: bool, uuid: str, engine: str = "torch"
    ) -> None:
        self.folder, self.report = folder, report
        self.simulated, self.quick, self.uuid = simulated, quick, uuid
        device = "cpu" if simulated else "cuda"
        self.backend = (
            *("--backend", f"{engine}_model", "--device", device, "--phases", str(folder / "phases.jsonl")),
            *("--nvml", str(pynvml.__file__)),
        )
        """Arguments of the engine's command line that are the same for all models."""
        self.watch = Watch(uuid)
        self.phases_file = folder / "phases.jsonl"
        self.shapes = SIMULATED if simulated else REAL
        self.weights_bytes: dict[str, int] = {}
        self.copy_bytes_per_s = 0.0
        self.start_s = 0.0
        """Duration of one start by hand; the step `start` measures it."""
        self.by_hand_free_s: float | None = None
        """Seconds from the SIGKILL of an engine started manually until its memory was free."""
        self.device_bytes = 0
        """Memory of the device as Pilotlight reports it; the inventory step sets it."""

    def weights(self, name: str) -> Path:
        """The folder of a model."""
        return self.folder / "models" / name

    def need_bytes(self, name: str) -> int:
        """A claim that the model fits into with a margin: its weights, a context, caches and working memory."""
        return self.weights_bytes[name] + ((256 << 20) if self.simulated else (2 << 30))

    def command(self, name: str, weights: str, *words: str) -> list[str]:
        """The engine's command, with the placeholders of `spec.command`."""
        return [
            *(sys.executable, "-E", str(ENGINES / "server.py"), "--port", "{port}", "--name", name),
            *("--weights", str(self.weights(weights)), *self.backend, *words),
        ]  # fmt: skip

    def model(self, name: str, weights: str, *words: str, memory_bytes: int = 0, **spec: object) -> Document:
        """A Model that uses our engine; `memory_bytes`: its claim."""
        given = {
            "engine": "command", "command": self.command(name, weights, *words), "readinessPath": "/health",
            "gpu": {"memory": memory_bytes or self.need_bytes(weights)}, "slots": 4, "idleSeconds": 300,
            "residencySeconds": 0.3,
        }  # fmt: skip
        return document(name, **(given | spec))

    def phases(self, began_s: float = 0.0, model: str = "") -> list[Phase]:
        """Lines that engines wrote since that time, in order."""
        if not self.phases_file.exists():
            return []
        rows = [json.loads(line) for line in self.phases_file.read_text().splitlines()]
        found = [
            Phase(row.pop("model"), row.pop("pid"), row.pop("phase"), row.pop("at_s"), row)
            for row in rows
        ]  # fmt: skip
        return sorted(
            (one for one in found if one.at_s >= began_s and model in {"", one.model}), key=lambda one: one.at_s
        )

    def spawns(self, began_s: float, model: str = "") -> list[Phase]:
        """Starts of engine processes since that time."""
        return [one for one in self.phases(began_s, model) if one.phase == "process"]

    def reused_too_soon(self, step: str, began_s: float) -> int | None:
        """Number of starts since that time while another engine held memory, as a figure of a step that has one engine
        at a time. If NVML lists no engine (its process ids may be of another namespace), the memory in use decides.
        Starts around which NVML was not polled often enough are left out; None: there is no other.
        """
        engines = {one.pid for one in self.phases()}
        listed = any(not engines.isdisjoint(one.by_pid) for one in self.watch.since(began_s))
        spawns = self.spawns(began_s)
        gaps_s = [self.watch.gap_s(one.at_s) for one in spawns]
        gap_s_max = GAP_S_MAX * (SIMULATED_SLOWER if self.simulated else 1)
        valid = [one for one, gap_s in zip(spawns, gaps_s, strict=True) if gap_s <= gap_s_max]
        found = sum(self._is_reused(one, engines, listed=listed) for one in valid) if valid else None
        if len(valid) < len(spawns) or not listed:
            note = f"longest gap {max(gaps_s, default=inf):.3g} s"
            note += "" if listed else "; NVML lists no engine: memory in use was compared with the idle device"
            self.report.row(step, "starts with samples around them", f"{len(valid)} of {len(spawns)}", "", note)
        seen = f"0, {len(valid)} of {len(spawns)} starts seen"
        self.report.figure(
            step, "device reused before its memory was free", found, seen, holds=None if found is None else found == 0
        )
        return found

    def _is_reused(self, spawn: Phase, engines: set[int], *, listed: bool) -> bool:
        """Whether another engine held memory in the first sample after a start, even if it was ending."""
        after = self.watch.first_after(spawn.at_s)
        if after is None:
            return False
        if listed:
            return bool((engines - {spawn.pid}) & after.by_pid.keys())
        return after.used_bytes > self.watch.idle_bytes() + FREE_BYTES

    @asynccontextmanager
    async def serving(
        self, name: str, *documents: Document, path: str = "", env: Mapping[str, str | None] = MappingProxyType({})
    ) -> AsyncIterator[Serving]:
        """Run `pilotlight serve` with these Models on the devices that NVML lists; end it at the end.

        `path` comes first in the PATH of `serve` and its engines, which also inherit `env` (None: without it).
        """
        folder = self.folder / name
        folder.mkdir()
        one = Serving(folder, [*documents, SETTINGS])
        changed = {**env, "PATH": f"{path}:{os.environ['PATH']}"} if path else env
        before = {name: os.environ.get(name) for name in changed}
        _set_environment(changed)
        try:
            await one.start()
            yield one
        finally:
            _set_environment(before)
            await self._end(name, one)

    async def _end(self, name: str, one: Serving) -> None:
        """Shut down; on a timeout kill, and report that."""
        if one.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            one.process.send_signal(signal.SIGTERM)
        ended = one.process
        if not await seen(lambda: ended.poll() is not None, END_S):
            self.report.say(f"{name:<10} `pilotlight serve` did not end within {END_S:g} s of SIGTERM and was killed")
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(one.process.pid).children(recursive=True):
                    child.kill()
            one.process.kill()
        for pid in one.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(one.state, ignore_errors=True)

    async def until_free(self, pids: Sequence[int], within_s: float = 30.0) -> None:
        """Wait until NVML lists none of these processes."""
        if not await seen(lambda: not {*pids} & self.watch.look().by_pid.keys(), within_s):
            raise GpuRunError(f"NVML still lists processes {[*pids]} after {within_s:g} s")

    async def kill_by_hand(self, process: subprocess.Popen[bytes]) -> tuple[float, float | None]:
        """Kill an engine that was started manually: the time of SIGKILL, and the seconds until NVML no longer listed
        it. None: NVML did not list it before.
        """
        listed = process.pid in self.watch.look().by_pid
        killed_s = time.time()
        process.kill()
        process.wait()
        await self.until_free([process.pid])
        return killed_s, time.time() - killed_s if listed else None

    @contextmanager
    def by_hand(self, name: str, weights: str, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """The engine started manually: (process, port). Killed at the end."""
        port = free_port()
        argv = [word.replace("{port}", str(port)) for word in self.command(name, weights, *words)]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": self.uuid}
        with (self.folder / "by-hand.log").open("ab") as log, subprocess.Popen(argv, env=env, stderr=log) as process:
            try:
                yield process, port
            finally:
                process.kill()

    def tail(self, one: Serving, lines: int = 12) -> None:
        """Print the end of the output of `serve` and its engines, for a failed step."""
        logs = sorted((one.state / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        texts = [("serve", one.output()), *((path.name, path.read_text(errors="replace")) for path in logs[-3:])]
        for what, text in texts:
            for line in text.splitlines()[-lines:]:
                print(f"    {what[:24]}: {line[:200]}", flush=True)


def _set_environment(changed: Mapping[str, str | None]) -> None:
    for key, value in changed.items():
        os.environ.pop(key, None)
        os.environ.update({} if value is None else {key: value})


SETTINGS: Document = {"apiVersion": API, "kind": "Settings", "stream": {"keepaliveSeconds": 0}}
"""Without keepalives: the first byte of a stream that waits for a cold start is the engine's."""


def document(name: str, **spec: object) -> Document:
    """A Model."""
    return {"apiVersion": API, "kind": "Model", "metadata": {"name": name}, "spec": spec}


def shot(model: str, *, tokens: int = 16, at_s: float = 0.0, prompt: str = "Hello", stream: bool = True) -> Shot:
    """One chat request."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}).encode()
    return Shot(model=model, body=body, stream=stream, at_s=at_s, timeout_s=CALL_S)


async def call(url: str, model: str, *, prompt: str = "Hello") -> Result:
    """Send one request and return its result; it must complete."""
    client = Client(url)
    result = await client.send(shot(model, prompt=prompt))
    client.close()
    if result.ending != "completed" or result.first_byte_s is None:
        raise GpuRunError(f"a request for {model} ended as {result.ending}: status {result.status} {result.code}")
    return result


async def listens(process: subprocess.Popen[bytes], port: int, within_s: float = 100.0) -> None:
    """Wait until a manually started engine accepts connections, which it does once it is ready."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        with socket.socket() as trial:
            if trial.connect_ex((HOST, port)) == 0:
                return
        if process.poll() is not None:
            raise GpuRunError(f"the engine by hand ended with status {process.returncode}; by-hand.log says why")
        await asyncio.sleep(LOOK_S)
    raise GpuRunError(f"the engine by hand does not listen after {within_s:g} s")


async def seen(look: Callable[[], T], within_s: float) -> T | None:
    """Poll until the result is true, and return it; None: timed out."""
    end_s = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() >= end_s:
            return None
        await asyncio.sleep(0.01)
    return found


def drop_from_page_cache(path: Path) -> None:
    """Evict the file from the page cache, so that the next read comes from the disk."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_fraction(path: Path) -> float:
    """The fraction of the file's pages that are in memory (mincore, which also works on overlayfs)."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.size // mmap.PAGESIZE), np.uint8)
    size, libc = ctypes.c_size_t(mapped.size), ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(mapped.ctypes.data), size, ctypes.c_void_p(pages.ctypes.data)) != 0:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return float((pages & 1).mean())


def disk_bytes_per_s(path: Path) -> float:
    """The rate of reading the beginning of a file that is not in the page cache."""
    began_s = time.monotonic()
    with path.open("rb", buffering=0) as file:
        size = sum(len(file.read(RATE_PIECE_BYTES)) for _ in range(RATE_PIECES))
    return size / (time.monotonic() - began_s)


def read_into_page_cache(path: Path) -> None:
    """Read the file, so that the next read comes from memory."""
    with path.open("rb", buffering=0) as file:
        while file.read(32 << 20):
            pass
