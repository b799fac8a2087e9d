"""`make demo`: two models share one device that has memory for only one of them, and scale from zero and back to zero.

The demo writes two tiny models, each of which generates one fixed sentence. It serves them with two-models.yaml and
shorter timeouts. It sends 40 requests through the official `openai` client, kills one engine with SIGKILL during
its start, and compares every response with the model's sentence. Then it waits for the scale to zero and prints the
device time. Each run uses its own ports and directory, so that several runs are possible at once. All files and
processes of a run are removed at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import yaml
from openai import AsyncOpenAI, NotFoundError

from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.local.ports import HOST, Ports
from autoscaler.drivers.probes import probe_engine
from loadtest import tiny_gguf
from pilotlight.models.document_loading import build_launcher
from pilotlight.processes import console

ROOT = Path(__file__).parent.parent
EXAMPLE = Path(__file__).with_name("two-models.yaml")
SENTENCES = {
    "ada": "Hello, I am Ada, asleep until you called.",
    "bob": "Bob here, I wake whenever somebody asks for me.",
}
WINDOWS = {"idleSeconds": 1.5, "residencySeconds": 0.5}
"""Timeouts of both models, which replace those of the example and are short enough to watch."""
COLD_ROUNDS = 3
"""Number of cold starts of each model on an idle device; their median is reported."""
READY_S_MAX = 120.0
"""Time limit for `pilotlight serve` or an engine to become ready: usually a second, but more on a busy machine."""
CALLS = 40


class Demo:
    """One run: sends the requests, counts their results, and measures the time in which the device is in use."""

    def __init__(self, inference: str, operations: str, server: subprocess.Popen[bytes]) -> None:
        self.operations = operations
        self.server = server
        self.client = official(inference)
        self.completed = self.lost = self.wrong = 0
        self.cold_s: list[float] = []
        self.used_s = 0.0

    async def call(self, model: str) -> float:
        """Send a request and check the response; return the seconds until the first token."""
        try:
            first_s, text = await ask(self.client, model)
        except Exception as error:  # noqa: BLE001 - any error counts as a lost request, and the demo reports it
            print_line(f"{model}  LOST       {type(error).__name__}: {error}")
            self.lost += 1
            return 0.0
        self.completed += text == SENTENCES[model]
        if text != SENTENCES[model]:
            self.wrong += 1
            print_line(f"{model}  WRONG      {text!r}")
        return first_s

    async def cold(self, model: str) -> None:
        """Send one request to a model without replicas while the device is idle."""
        await self.zero()
        print_line(f"{model}  parked     one request waits, because no replica runs")
        answered = self.completed
        first_s = await self.call(model)
        self.cold_s.append(first_s)
        if self.completed > answered:
            print_line(f"{model}  answered   first word after {1000 * first_s:.0f} ms: {SENTENCES[model]}")

    async def zero(self) -> None:
        """Wait until no replica is left."""
        while await asyncio.to_thread(self.replicas):
            await asyncio.sleep(0.05)

    def replicas(self) -> list[dict[str, object]]:
        """Return the replicas that hold the device now."""
        with urllib.request.urlopen(f"{self.operations}/api/v1/devices", timeout=30) as response:
            return [replica for device in json.load(response) for replica in device["replicas"]]

    async def meter(self) -> None:
        """Add up the seconds in which a replica holds the device."""
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.05)
            held = bool(await asyncio.to_thread(self.replicas))
            now_s = time.perf_counter()
            self.used_s += (now_s - last_s) * held
            last_s = now_s

    async def killed_starting(self, model: str, call: asyncio.Task[float]) -> bool:
        """Send SIGKILL to the engine that starts for `call`. False: it already listens and may have the request."""
        while not call.done():
            for process in psutil.Process(self.server.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "PILOTLIGHT_REPLICA" in process.environ() and f"{model}.gguf" in " ".join(process.cmdline()):
                        process.suspend()  # otherwise it could begin to listen after this check
                        if any(socket.status == psutil.CONN_LISTEN for socket in process.net_connections("tcp")):
                            process.resume()
                            return False
                        process.kill()
                        print_line(f"{model}  SIGKILL    while it starts (pid {process.pid})")
                        return True
            await asyncio.sleep(0.002)
        return False

    async def story(self) -> None:
        """Send the 40 requests."""
        for _ in range(COLD_ROUNDS):
            for model in SENTENCES:
                await self.cold(model)
        await self.zero()
        print_line("both get requests at once; the device holds only one; bob's engine is killed while it starts")
        cold, rest = self.completed, CALLS - 2 * COLD_ROUNDS
        async with asyncio.TaskGroup() as tasks:
            first, sent = tasks.create_task(self.call("bob")), 1
            while not await self.killed_starting("bob", first):  # on a busy machine the engine may be found too late
                await first
                await self.zero()
                first, sent = tasks.create_task(self.call("bob")), sent + 1
            for number in range(sent, rest):
                tasks.create_task(self.call("ada" if number % 2 else "bob"))
                await asyncio.sleep(0.02)
        print_line(f"{self.completed - cold} of {rest} are answered, each with the model's sentence")


def print_line(words: str) -> None:
    """Print a line that begins with the time of day, like the lines of `serve`."""
    seconds, rest_ns = divmod(time.time_ns(), 1_000_000_000)
    now = time.strftime("%H:%M:%S", time.localtime(seconds))
    line = f"{now}.{rest_ns // 1_000_000:03d}  {words}\n"
    print(line, end="", flush=True)  # one write, so that no line of `serve` is printed in between


def official(url: str) -> AsyncOpenAI:
    """Return the official client, without retries that would hide a failed request."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none-needed", max_retries=0)


async def ask(client: AsyncOpenAI, model: str) -> tuple[float, str]:
    """Send a streaming request; return the seconds until its first token, and the text."""
    started_s = time.perf_counter()
    first_s = 0.0
    words: list[str] = []
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Who is there?"}], stream=True
    )
    async for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first_s = first_s or time.perf_counter() - started_s
            words.append(piece)
    return first_s, "".join(words).strip()


def documents(place: Path) -> str:
    """Return the example's documents, with the weights and timeouts of this run."""
    found = list(yaml.safe_load_all(EXAMPLE.read_text()))
    for document in found:
        if document["kind"] == "Model":
            document["spec"] |= {"artifact": f"file://{place}/{document['metadata']['name']}.gguf", **WINDOWS}
    return yaml.safe_dump_all(found)


@contextlib.contextmanager
def serving(place: Path, listen: str, ops: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `pilotlight serve` in its own process, and stop it at the end."""
    (place / "documents.yaml").write_text(documents(place))
    command = [sys.executable, "-m", "pilotlight", "serve", "-c", str(place / "documents.yaml")]
    command += ["--listen", listen, "--ops", ops, "--state", str(place / "state")]
    # Its own process group: Ctrl-C reaches only this process, because a second signal would end `serve` at once.
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0)
    try:
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


async def ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the gateway responds."""
    until_s = time.monotonic() + READY_S_MAX
    while server.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(urllib.request.urlopen, f"{url}/v1/models", None, 5)
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"demo: pilotlight was not ready within {READY_S_MAX:g} s")


@contextlib.asynccontextmanager
async def metered(demo: Demo) -> AsyncIterator[None]:
    """Measure the use of the device while the body runs."""
    meter = asyncio.create_task(demo.meter())
    try:
        yield
    finally:
        meter.cancel()
        await asyncio.gather(meter, return_exceptions=True)


async def engine_alone_s(place: Path, model: str) -> float:
    """Start the engine without Pilotlight; return the seconds from its start to the first token of a request."""
    (found,) = [m for m in parse_documents([("demo", documents(place))], {}).models if m.name == model]
    port = Ports().choose(time.monotonic())
    client, launch = official(f"http://{HOST}:{port}"), build_launcher()(found, HOST, port)
    started_s = time.perf_counter()
    engine = subprocess.Popen(
        launch.argv, env={**os.environ, **launch.env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(READY_S_MAX):
            while not await probe_engine(HOST, port, launch.readiness_path):
                if engine.poll() is not None:
                    raise SystemExit(f"demo: the engine started by hand ended with status {engine.returncode}")
                await asyncio.sleep(0.002)
            start_s = time.perf_counter() - started_s
            first_s, _ = await ask(client, model)
            return start_s + first_s
    finally:
        engine.kill()
        engine.wait()


async def run_demo(place: Path, inference: str, operations: str, server: subprocess.Popen[bytes]) -> tuple[str, bool]:
    """Run the demo; return its last two lines, and whether it succeeded."""
    await ready(inference, server)
    demo = Demo(inference, operations, server)
    with contextlib.suppress(NotFoundError):  # the client's first request loads code for 50 ms
        await ask(demo.client, "nobody")
    started_s = time.perf_counter()
    async with metered(demo):
        await demo.story()
        await demo.zero()
    both_s = len(SENTENCES) * (time.perf_counter() - started_s)
    alone_ms = 1000 * statistics.median([await engine_alone_s(place, "ada") for _ in range(COLD_ROUNDS)])
    replicas = len(demo.replicas())
    summary = (
        f"device-seconds: {demo.used_s:.1f} used, {both_s:.1f} if both were always on\n"
        f"demo: {CALLS} calls, {demo.completed} completed, {demo.lost} lost, {demo.wrong} from the wrong model; "
        f"cold start median {1000 * statistics.median(demo.cold_s):.0f} ms (engine alone {alone_ms:.0f} ms); "
        f"replicas now: {replicas}"
    )
    return summary, (demo.completed, demo.lost, demo.wrong, replicas) == (CALLS, 0, 0, 0)


def stay(inference: str, operations: str, server: subprocess.Popen[bytes]) -> None:
    """Print commands to try, and wait until `serve` ends."""
    print(
        f"\n{console.format_curl_command(inference, 'ada', key=False)}\n"
        f"\n{console.format_python_program(inference, 'ada', key=False)}\n"
    )
    print(f"the operations page: {operations}/    (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()


def main() -> None:
    """Prepare the models, and run the demo."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep serving after the demo")
    keep = parser.parse_args().keep
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = HOST  # a proxy from the environment cannot reach this machine
    ports = Ports()
    listen, ops = (f"{HOST}:{ports.choose(time.monotonic())}" for _ in range(2))
    inference, operations = f"http://{listen}", f"http://{ops}"
    with tempfile.TemporaryDirectory(prefix="pilotlight-demo-") as folder:
        place = Path(folder)
        for model, sentence in SENTENCES.items():
            tiny_gguf.make_model(place / f"{model}.gguf", sentence)
        with serving(place, listen, ops) as server:
            summary, well = asyncio.run(run_demo(place, inference, operations, server))
            if keep:
                print(summary)
                stay(inference, operations, server)
    if not keep:
        print(summary)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.default_int_handler
        )  # `serve` is stopped before this process ends, for any of these signals
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as in shells
