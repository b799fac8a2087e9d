"""Shared parts of the benchmarks: a Pilotlight with its processes, an engine started by hand, and tables with spread.

Starts and stops these processes. `serve` is started as users start it; its engines are children of its autoscaler and
never count as Pilotlight's processes. Independent of the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import psutil

from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.driver import Launch
from autoscaler.drivers.local.ports import Ports
from autoscaler.drivers.probes import probe_engine
from autoscaler.spec.model import Model
from bench.documents import ROOT, Document, text
from pilotlight.models.document_loading import build_launcher, fill_memory_estimate

HOST = "127.0.0.1"
PORTS = Ports()
PROXY_CORE, LOAD_CORE = 0, 1
"""For throughput: the proxy has its own core; engine and load share the other one."""
START_S_MAX = 30.0
ZERO_S_MAX = 60.0
BARE_POLL_S = 0.002
"""The interval at which the readiness of an engine started by hand is polled."""
MIB, KIB = 1 << 20, 1 << 10

Figures = dict[str, float | int | None]


class BenchError(Exception):
    """A benchmark cannot continue. The message is the reason."""


class Serving:
    """A running Pilotlight."""

    def __init__(self, inference: Sequence[str], operations: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.urls = inference
        self.url = inference[0]
        self.operations = operations
        self.process = process
        self.log = log
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))

    def processes(self) -> list[psutil.Process]:
        """Return Pilotlight's processes: supervisor, autoscaler, gateways. Engines are children of the autoscaler."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children()]

    def gateways(self) -> list[psutil.Process]:
        """Return the gateway processes."""
        return [process for process in self.processes() if "gateway" in process.cmdline()]

    async def ready(self) -> None:
        """Wait until every gateway responds. Raises BenchError with the last line of the log otherwise."""
        for url in self.urls:
            await _answers(self._session, f"{url}/v1/models", self.process, self.log)

    async def model_ready(self, name: str, key: str) -> None:
        """Wait until the gateways have a ready replica, for Models that start without a request."""
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s:
            headers = {"Authorization": f"Bearer {key}"}
            async with self._session.get(f"{self.url}/v1/models/{name}", headers=headers) as answer:
                if (await answer.json()).get("pilotlight", {}).get("state") == "ready":
                    return
            await asyncio.sleep(0.02)
        raise BenchError(f"{name} is not ready after {START_S_MAX:.0f} s; see {self.log}")

    async def zero(self) -> None:
        """Wait until no replica holds a device."""
        deadline_s = time.monotonic() + ZERO_S_MAX
        while time.monotonic() < deadline_s:
            async with self._session.get(f"{self.operations}/api/v1/devices") as answer:
                if not any(device["replicas"] for device in await answer.json()):
                    return
            await asyncio.sleep(0.02)
        raise BenchError(f"not at zero after {ZERO_S_MAX:.0f} s; see {self.log}")

    async def starts(self) -> int:
        """Return the number of replicas started so far."""
        async with self._session.get(f"{self.operations}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith("pilotlight_actions_total{") and 'kind="start"' in line:
                    return int(float(line.rsplit(" ", 1)[1]))
        return 0

    async def close(self) -> None:
        """Close the connections of this object, not the server."""
        await self._session.close()


def compiled() -> bool:
    """Return whether the gateway that is found first is the compiled one (PYTHONPATH: see the Makefile)."""
    spec = importlib.util.find_spec("gateway.dispatch.dispatcher")
    return spec is not None and (spec.origin or "").endswith(".so")


@contextlib.asynccontextmanager
async def serving(
    place: Path, documents: Sequence[Document], *, gateways: int = 1, core: int | None = None
) -> AsyncIterator[Serving]:
    """Run `pilotlight serve` with its state in `place`, on one core if given, and wait until it is ready."""
    place.mkdir(parents=True)
    (place / "documents.yaml").write_text(text(documents))
    listen, ops = free_port(), free_port()
    command = [*on_core(core), sys.executable, "-Pm", "pilotlight", "serve", "-c", str(place / "documents.yaml")]
    command += ["--listen", f"{HOST}:{listen}", "--ops", f"{HOST}:{ops}", "--state", str(place / "state")]
    command += ["--gateways", str(gateways), "--grace", "1"]
    with running(command, place / "serve.log") as process:
        one = Serving([f"http://{HOST}:{listen}"], f"http://{HOST}:{ops}", process, place / "serve.log")
        try:
            await one.ready()
            yield one
        finally:
            await one.close()


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output in `log`; at the end send SIGTERM, then SIGKILL if it does not exit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `url` responds. Raises BenchError if the process exits or the time is over."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        await _answers(session, url, process, log)


async def _answers(session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(url):
                return
        await asyncio.sleep(0.05)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise BenchError(f"{process.args!r} does not respond: {lines[-1] if lines else 'it printed nothing'}")


# --- the engine by hand ---------------------------------------------------------------------------------------------


def model_of(document: Document) -> Model:
    """Return the Model that `serve` builds from a document."""
    return fill_memory_estimate(parse_documents([("bench", text([document]))], {}).models[0])


def launch_of(model: Model, port: int) -> Launch:
    """Return exactly what Pilotlight starts for this Model."""
    return build_launcher()(model, HOST, port)


@contextlib.contextmanager
def by_hand(launch: Launch, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the engine as the driver does: same command, same environment, its own session, output to a file."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PILOTLIGHT_")} | dict(launch.env)
    with running(launch.argv, log, {**env, "PILOTLIGHT_REPLICA": "bench/by-hand"}) as process:
        yield process


async def engine_ready(launch: Launch, port: int) -> None:
    """Poll every 2 ms until the engine returns 200."""
    deadline_s = time.monotonic() + START_S_MAX
    while not await probe_engine(HOST, port, launch.readiness_path):
        if time.monotonic() > deadline_s:
            raise BenchError(f"the engine is not ready after {START_S_MAX:.0f} s: {launch.argv}")
        await asyncio.sleep(BARE_POLL_S)


# --- helpers --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a free port below those of outgoing connections, because a benchmark opens many of these."""
    return PORTS.choose(time.monotonic())


def on_core(core: int | None) -> list[str]:
    """Return the words that pin a command to a core. Empty: the machine has no such core."""
    return [] if core is None or core >= (os.cpu_count() or 1) else ["taskset", "-c", str(core)]


def pin(core: int) -> None:
    """Pin this process to a core, if the machine has that core."""
    if core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of these processes so far, in kernel ticks (10 ms)."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def pss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the proportional set size (PSS) of the processes in bytes."""
    return sum(process.memory_full_info().pss for process in processes)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least `share` of them do not exceed (the quantile by nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Format as `median [min-max]`."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def times(ratios: Sequence[float]) -> str:
    """Format as `median [min-max] x`."""
    return f"{spread(ratios, 2)} x"


def say(line: str = "") -> None:
    """Print a line of the report and flush it."""
    print(line, flush=True)


def title(line: str) -> None:
    """Print the headline of one part."""
    say(f"\n{line}")
