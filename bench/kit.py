"""What every benchmark needs: a Pilotlight of its own, its processes, the engine by hand, and tables with spread.

Owns the processes that it starts and ends all of them. `serve` is started as a user starts it; its engines are the
children of its autoscaler and never counted as ours. It must not know what is measured.
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

from autoscaler.documents.load import parse_documents
from autoscaler.drivers.driver import Launch
from autoscaler.drivers.local.ports import Ports
from autoscaler.drivers.probes import probe_engine
from autoscaler.spec.model import Model
from bench.documents import ROOT, Document, text
from pilotlight.models.documents import build_launcher, fill_memory_estimate

HOST = "127.0.0.1"
PORTS = Ports()
PROXY_CORE, LOAD_CORE = 0, 1
"""Where throughput is measured: the proxy has a core of its own, engine and load share the other."""
START_S_MAX = 30.0
ZERO_S_MAX = 60.0
BARE_POLL_S = 0.002
"""How often the engine that is started by hand is asked whether it is ready."""
MIB, KIB = 1 << 20, 1 << 10

Figures = dict[str, float | int | None]


class BenchError(Exception):
    """A benchmark cannot go on; says what is wrong."""


class Serving:
    """One running Pilotlight."""

    def __init__(self, inference: Sequence[str], operations: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.urls = inference
        self.url = inference[0]
        self.operations = operations
        self.process = process
        self.log = log
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))

    def processes(self) -> list[psutil.Process]:
        """All of ours: supervisor, autoscaler, gateways. Engines are the autoscaler's children."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children()]

    def gateways(self) -> list[psutil.Process]:
        """The gateway processes."""
        return [process for process in self.processes() if "gateway" in process.cmdline()]

    async def ready(self) -> None:
        """Waits until every gateway answers; BenchError with the last line of the log when one does not."""
        for url in self.urls:
            await _answers(self._session, f"{url}/v1/models", self.process, self.log)

    async def model_ready(self, name: str, key: str) -> None:
        """Waits until the gateways know of a ready Replica; for Models that start without a Call."""
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s:
            headers = {"Authorization": f"Bearer {key}"}
            async with self._session.get(f"{self.url}/v1/models/{name}", headers=headers) as answer:
                if (await answer.json()).get("pilotlight", {}).get("state") == "ready":
                    return
            await asyncio.sleep(0.02)
        raise BenchError(f"{name} is not ready after {START_S_MAX:.0f} s; see {self.log}")

    async def zero(self) -> None:
        """Waits until nothing holds a device."""
        deadline_s = time.monotonic() + ZERO_S_MAX
        while time.monotonic() < deadline_s:
            async with self._session.get(f"{self.operations}/api/v1/devices") as answer:
                if not any(device["replicas"] for device in await answer.json()):
                    return
            await asyncio.sleep(0.02)
        raise BenchError(f"not at zero after {ZERO_S_MAX:.0f} s; see {self.log}")

    async def starts(self) -> int:
        """Replicas started so far."""
        async with self._session.get(f"{self.operations}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith("pilotlight_actions_total{") and 'kind="start"' in line:
                    return int(float(line.rsplit(" ", 1)[1]))
        return 0

    async def close(self) -> None:
        """Closes the connections of this object, not the server."""
        await self._session.close()


def compiled() -> bool:
    """Whether the gateway that we and all that we start find first is the compiled one (PYTHONPATH: the Makefile)."""
    spec = importlib.util.find_spec("gateway.dispatch.dispatcher")
    return spec is not None and (spec.origin or "").endswith(".so")


@contextlib.asynccontextmanager
async def serving(
    place: Path, documents: Sequence[Document], *, gateways: int = 1, core: int | None = None
) -> AsyncIterator[Serving]:
    """`pilotlight serve` with its state in `place`, ready; on one core if told so."""
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
    """A process whose output goes to `log`; at the end SIGTERM, and SIGKILL when that does not help."""
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
    """Waits until `url` answers anything; BenchError when the process ends or the time is over."""
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
    raise BenchError(f"{process.args!r} does not answer: {lines[-1] if lines else 'it said nothing'}")


# --- the engine by hand ---------------------------------------------------------------------------------------------


def model_of(document: Document) -> Model:
    """The Model that `serve` makes of a document."""
    return fill_memory_estimate(parse_documents([("bench", text([document]))], {}).models[0])


def launch_of(model: Model, port: int) -> Launch:
    """Exactly what Pilotlight starts for this Model."""
    return build_launcher()(model, HOST, port)


@contextlib.contextmanager
def by_hand(launch: Launch, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The engine, spawned as the driver spawns it: same words, same environment, its own session, output to a file."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PILOTLIGHT_")} | dict(launch.env)
    with running(launch.argv, log, {**env, "PILOTLIGHT_REPLICA": "bench/by-hand"}) as process:
        yield process


async def engine_ready(launch: Launch, port: int) -> None:
    """Asks every 2 ms until the engine says 200."""
    deadline_s = time.monotonic() + START_S_MAX
    while not await probe_engine(HOST, port, launch.readiness_path):
        if time.monotonic() > deadline_s:
            raise BenchError(f"the engine is not ready after {START_S_MAX:.0f} s: {launch.argv}")
        await asyncio.sleep(BARE_POLL_S)


# --- small things ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that is free now, below those that outgoing connections take: the Calls of a benchmark are many."""
    return PORTS.choose(time.monotonic())


def on_core(core: int | None) -> list[str]:
    """The words that pin a command to a core; none where there is no such core."""
    return [] if core is None or core >= (os.cpu_count() or 1) else ["taskset", "-c", str(core)]


def pin(core: int) -> None:
    """Pins this process to a core, if the machine has that core."""
    if core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of these processes so far, in ticks of the kernel (10 ms)."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def pss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Their proportional share of memory."""
    return sum(process.memory_full_info().pss for process in processes)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed, one that occurred (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`median [min-max]`."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def times(ratios: Sequence[float]) -> str:
    """`median [min-max] x`."""
    return f"{spread(ratios, 2)} x"


def say(line: str = "") -> None:
    """A line of the report, at once."""
    print(line, flush=True)


def title(line: str) -> None:
    """The headline of one part."""
    say(f"\n{line}")
