"""`make demo`: two real models of one tiny real engine on one device that holds only one, from zero and back.

It writes two models that each say their own sentence, serves them as two-models.yaml says (with shorter windows), sends
40 Calls through the official `openai` client, kills one engine with SIGKILL while it starts, checks every answer word
for word, waits until nothing is left, and says what it cost. Everything it prints happened. Ports and folder are its
own, so that several can run at once; at the end nothing of it is left.
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
from pilotlight.models.documents import build_launcher
from pilotlight.processes import console

ROOT = Path(__file__).parent.parent
EXAMPLE = Path(__file__).with_name("two-models.yaml")
SENTENCES = {
    "ada": "Hello, I am Ada, asleep until you called.",
    "bob": "Bob here, I wake whenever somebody asks for me.",
}
WINDOWS = {"idleSeconds": 1.5, "residencySeconds": 0.5}
"""Of both models, in place of the example's: short enough to watch."""
COLD_ROUNDS = 3
"""Times each model is woken from nothing, alone: the cold start that is reported."""
READY_S_MAX = 120.0
"""Time for `pilotlight serve`, or an engine, to get ready: a second, but much more on a machine with other work."""
CALLS = 40


class Demo:
    """One run: what was asked, what was answered, and what the device did meanwhile."""

    def __init__(self, inference: str, operations: str, server: subprocess.Popen[bytes]) -> None:
        self.operations = operations
        self.server = server
        self.client = official(inference)
        self.completed = self.lost = self.wrong = 0
        self.cold_s: list[float] = []
        self.used_s = 0.0

    async def call(self, model: str) -> float:
        """One Call, checked word for word; seconds until its first token."""
        try:
            first_s, said = await ask(self.client, model)
        except Exception as error:  # noqa: BLE001  whatever it is, the Call is lost, and the demo says so at its end
            tell(f"{model}  LOST       {type(error).__name__}: {error}")
            self.lost += 1
            return 0.0
        self.completed += said == SENTENCES[model]
        if said != SENTENCES[model]:
            self.wrong += 1
            tell(f"{model}  WRONG      {said!r}")
        return first_s

    async def cold(self, model: str) -> None:
        """One Call from zero, alone on the device."""
        await self.zero()
        tell(f"{model}  parked     one Call waits, for nothing runs")
        answered = self.completed
        first_s = await self.call(model)
        self.cold_s.append(first_s)
        if self.completed > answered:
            tell(f"{model}  answered   first word after {1000 * first_s:.0f} ms: {SENTENCES[model]}")

    async def zero(self) -> None:
        """Waits until no replica is left."""
        while await asyncio.to_thread(self.replicas):
            await asyncio.sleep(0.05)

    def replicas(self) -> list[dict[str, object]]:
        """All that hold the device now."""
        with urllib.request.urlopen(f"{self.operations}/api/v1/devices", timeout=30) as response:
            return [replica for device in json.load(response) for replica in device["replicas"]]

    async def meter(self) -> None:
        """Adds up the seconds in which somebody holds the device."""
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.05)
            held = bool(await asyncio.to_thread(self.replicas))
            now_s = time.perf_counter()
            self.used_s += (now_s - last_s) * held
            last_s = now_s

    async def killed_starting(self, model: str, call: asyncio.Task[float]) -> bool:
        """SIGKILL for the engine that starts for `call`. Once it listens it stays, for the Call may be in it: False."""
        while not call.done():
            for process in psutil.Process(self.server.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "PILOTLIGHT_REPLICA" in process.environ() and f"{model}.gguf" in " ".join(process.cmdline()):
                        process.suspend()  # or it could begin to listen after this look at it
                        if any(socket.status == psutil.CONN_LISTEN for socket in process.net_connections("tcp")):
                            process.resume()
                            return False
                        process.kill()
                        tell(f"{model}  SIGKILL    while it starts (pid {process.pid})")
                        return True
            await asyncio.sleep(0.002)
        return False

    async def story(self) -> None:
        """The 40 Calls."""
        for _ in range(COLD_ROUNDS):
            for model in SENTENCES:
                await self.cold(model)
        await self.zero()
        tell("both are called at once; the device holds only one; bob's engine is killed while it starts")
        cold, rest = self.completed, CALLS - 2 * COLD_ROUNDS
        async with asyncio.TaskGroup() as tasks:
            first, sent = tasks.create_task(self.call("bob")), 1
            while not await self.killed_starting("bob", first):  # a busy machine may show the engine too late
                await first
                await self.zero()
                first, sent = tasks.create_task(self.call("bob")), sent + 1
            for number in range(sent, rest):
                tasks.create_task(self.call("ada" if number % 2 else "bob"))
                await asyncio.sleep(0.02)
        tell(f"{self.completed - cold} of {rest} are answered, each word for word")


def tell(words: str) -> None:
    """A line that begins with the time of day, in milliseconds, as those of `serve` do."""
    seconds, rest_ns = divmod(time.time_ns(), 1_000_000_000)
    now = time.strftime("%H:%M:%S", time.localtime(seconds))
    line = f"{now}.{rest_ns // 1_000_000:03d}  {words}\n"
    print(line, end="", flush=True)  # one write, or a line of `serve` may come in between


def official(url: str) -> AsyncOpenAI:
    """The official client, which must not hide a failed Call by asking again."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none-needed", max_retries=0)


async def ask(client: AsyncOpenAI, model: str) -> tuple[float, str]:
    """One streaming Call: seconds until its first token, and all that was said."""
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
    """The example's documents, with the weights of this run and its windows."""
    found = list(yaml.safe_load_all(EXAMPLE.read_text()))
    for document in found:
        if document["kind"] == "Model":
            document["spec"] |= {"artifact": f"file://{place}/{document['metadata']['name']}.gguf", **WINDOWS}
    return yaml.safe_dump_all(found)


@contextlib.contextmanager
def serving(place: Path, listen: str, ops: str) -> Iterator[subprocess.Popen[bytes]]:
    """`pilotlight serve` in a process of its own, stopped at the end."""
    (place / "documents.yaml").write_text(documents(place))
    command = [sys.executable, "-m", "pilotlight", "serve", "-c", str(place / "documents.yaml")]
    command += ["--listen", listen, "--ops", ops, "--state", str(place / "state")]
    # In a group of its own: a Ctrl-C reaches this process alone, and a second signal would end `serve` at once.
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
    """Waits until the gateway answers."""
    until_s = time.monotonic() + READY_S_MAX
    while server.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(urllib.request.urlopen, f"{url}/v1/models", None, 5)
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"demo: pilotlight did not get ready within {READY_S_MAX:g} s")


@contextlib.asynccontextmanager
async def metered(demo: Demo) -> AsyncIterator[None]:
    """Meters the device while the body runs."""
    meter = asyncio.create_task(demo.meter())
    try:
        yield
    finally:
        meter.cancel()
        await asyncio.gather(meter, return_exceptions=True)


async def engine_alone_s(place: Path, model: str) -> float:
    """The same engine started by hand and asked by the same client: from its spawn to its first token."""
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


async def play(place: Path, inference: str, operations: str, server: subprocess.Popen[bytes]) -> tuple[str, bool]:
    """The whole run: its two last lines, and whether all went well."""
    await ready(inference, server)
    demo = Demo(inference, operations, server)
    with contextlib.suppress(NotFoundError):  # the client's first Call loads 50 ms of code, whatever it is answered
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
    """Says what to try, and waits until `serve` ends."""
    print(
        f"\n{console.format_curl_command(inference, 'ada', key=False)}\n"
        f"\n{console.format_python_program(inference, 'ada', key=False)}\n"
    )
    print(f"the operations page: {operations}/    (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()


def main() -> None:
    """Sets the scene and plays."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="stay up afterwards")
    keep = parser.parse_args().keep
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = HOST  # a proxy of the environment has no way to this machine
    ports = Ports()
    listen, ops = (f"{HOST}:{ports.choose(time.monotonic())}" for _ in range(2))
    inference, operations = f"http://{listen}", f"http://{ops}"
    with tempfile.TemporaryDirectory(prefix="pilotlight-demo-") as folder:
        place = Path(folder)
        for model, sentence in SENTENCES.items():
            tiny_gguf.make_model(place / f"{model}.gguf", sentence)
        with serving(place, listen, ops) as server:
            summary, well = asyncio.run(play(place, inference, operations, server))
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
        )  # `serve` is stopped before this process ends, whatever ends it
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells say it
