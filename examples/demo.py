"""`make demo`: two real models of one tiny real engine on one device that holds only one, from zero and back.

It writes two models that each say their own sentence, starts `pilotlight serve`, sends 40 Calls through the official
`openai` client, kills one engine with SIGKILL while it starts, checks every answer word for word, waits until nothing
is left, and says what it cost. Everything it prints happened.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
from openai import AsyncOpenAI

from loadtest import tinygguf
from pilotlight import snippets

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".demo"
SENTENCES = {
    "ada": "Hello, I am Ada, asleep until you called.",
    "bob": "Bob here, I wake whenever somebody asks for me.",
}
DOCUMENTS = """\
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
devices: [{{name: gpu0, model: tiny, memory: 100Mi}}]
---
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {{name: ada}}
spec:
  engine: llama.cpp
  artifact: file://{place}/ada.gguf
  gpu: {{memory: 64Mi}}
  slots: 4
  args: [--threads=1]
  idleSeconds: 1.5
  residencySeconds: 0.5
---
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {{name: bob}}
spec:
  engine: llama.cpp
  artifact: file://{place}/bob.gguf
  gpu: {{memory: 64Mi}}
  slots: 4
  args: [--threads=1]
  idleSeconds: 1.5
  residencySeconds: 0.5
"""
COLD_ROUNDS = 3
"""Times each model is woken from nothing, alone: the cold start that is reported."""
CALLS = 40


class Demo:
    """One run: what was asked, what was answered, and what the device did meanwhile."""

    def __init__(self, inference: str, operations: str, server: subprocess.Popen[bytes]) -> None:
        self.operations = operations
        self.server = server
        self.client = AsyncOpenAI(base_url=f"{inference}/v1", api_key="none-needed", max_retries=0)
        self.completed = self.lost = self.wrong = 0
        self.cold_s: list[float] = []
        self.used_s = 0.0

    async def call(self, model: str) -> float:
        """One streaming Call, checked word for word; seconds until its first token."""
        started_s = time.perf_counter()
        first_s: float | None = None
        words: list[str] = []
        try:
            stream = await self.client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Who is there?"}], stream=True
            )
            async for chunk in stream:
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    first_s = first_s or time.perf_counter() - started_s
                    words.append(piece)
        except Exception as error:  # noqa: BLE001  whatever it is, the Call is lost, and the demo says so at its end
            print(f"{clock()}  {model}  LOST: {type(error).__name__}: {error}", flush=True)
            self.lost += 1
            return time.perf_counter() - started_s
        said = "".join(words).strip()
        self.completed += said == SENTENCES[model]
        if said != SENTENCES[model]:
            self.wrong += 1
            print(f"{clock()}  {model}  WRONG: {said!r}", flush=True)
        return first_s or 0.0

    async def cold(self, model: str) -> None:
        """One Call from zero, alone on the device."""
        await self.zero()
        self.cold_s.append(await self.call(model))

    async def zero(self) -> None:
        """Waits until no Replica is left."""
        while await asyncio.to_thread(self.replicas):
            await asyncio.sleep(0.05)

    def replicas(self) -> list[dict[str, object]]:
        """All that hold the device now."""
        with urllib.request.urlopen(f"{self.operations}/api/v1/devices", timeout=5) as response:
            return [replica for device in json.load(response) for replica in device["replicas"]]

    async def meter(self) -> None:
        """Adds up the seconds in which somebody holds the device."""
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.02)
            held = bool(await asyncio.to_thread(self.replicas))
            now_s = time.perf_counter()
            self.used_s += (now_s - last_s) * held
            last_s = now_s

    async def kill_starting(self, model: str) -> None:
        """SIGKILL for the first engine of `model` that appears, while it still starts."""
        while True:
            for process in psutil.Process(self.server.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "PILOTLIGHT_REPLICA" in process.environ() and f"{model}.gguf" in " ".join(process.cmdline()):
                        process.send_signal(signal.SIGKILL)
                        print(f"{clock()}  {model}  SIGKILL while it starts (pid {process.pid})", flush=True)
                        return
            await asyncio.sleep(0.002)

    async def story(self) -> None:
        """The 40 Calls."""
        for _ in range(COLD_ROUNDS):
            for model in SENTENCES:
                await self.cold(model)
        await self.zero()
        print(f"{clock()}  both are called at once; the device holds only one; bob's engine is killed while it starts")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.kill_starting("bob"))
            for number in range(CALLS - 2 * COLD_ROUNDS):
                tasks.create_task(self.call("ada" if number % 2 else "bob"))
                await asyncio.sleep(0.02)


def clock() -> str:
    """The time of day with milliseconds."""
    return time.strftime("%H:%M:%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(listen: str, ops: str) -> Iterator[subprocess.Popen[bytes]]:
    """`pilotlight serve` in a process of its own, stopped at the end."""
    command = [sys.executable, "-m", "pilotlight", "serve", "-c", str(PLACE / "two-models.yaml")]
    command += ["--listen", listen, "--ops", ops, "--state", str(PLACE / "state")]
    server = subprocess.Popen(command, cwd=ROOT, stdout=sys.stdout, stderr=sys.stderr)
    try:
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


async def ready(url: str) -> None:
    """Waits until the gateway answers."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            await asyncio.to_thread(urllib.request.urlopen, f"{url}/v1/models", None, 5)
            return
        await asyncio.sleep(0.05)
    raise SystemExit("demo: pilotlight did not get ready in 30 s")


@contextlib.asynccontextmanager
async def metered(demo: Demo) -> AsyncIterator[None]:
    """Meters the device while the body runs."""
    meter = asyncio.create_task(demo.meter())
    try:
        yield
    finally:
        meter.cancel()
        await asyncio.gather(meter, return_exceptions=True)


def engine_alone_s(model: str) -> float:
    """The same engine started by hand: spawn to first token, polled every 2 ms."""
    from autoscaler.documents import load
    from pilotlight.gathering import launcher

    (found,) = [m for m in load([("demo", (PLACE / "two-models.yaml").read_text())], {}).models if m.name == model]
    port = free_port()
    started = launcher()(found, "127.0.0.1", port)
    started_s = time.perf_counter()
    environment = {**os.environ, **started.env}
    with subprocess.Popen(
        started.argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as engine:
        try:
            return asyncio.run(first_token(port, started.readiness_path)) - started_s
        finally:
            engine.terminate()


async def first_token(port: int, readiness_path: str) -> float:
    """When the first token came, by hand."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {readiness_path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            head = await reader.read(64)
            writer.close()
            if b" 200 " in head:
                break
        await asyncio.sleep(0.002)
    body = b'{"stream": true, "messages": [{"role": "user", "content": "Who is there?"}]}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    while b'"content":"' not in await reader.readline():
        pass
    writer.close()
    return time.perf_counter()


async def play(inference: str, operations: str, server: subprocess.Popen[bytes], *, keep: bool) -> tuple[str, bool]:
    """The whole run: its two last lines, and whether all went well."""
    await ready(inference)
    demo = Demo(inference, operations, server)
    started_s = time.perf_counter()
    async with metered(demo):
        await demo.story()
        await demo.zero()
    both_s = len(SENTENCES) * (time.perf_counter() - started_s)
    alone_ms = 1000 * statistics.median([await asyncio.to_thread(engine_alone_s, "ada") for _ in range(3)])
    replicas = len(demo.replicas())
    if keep:
        print(f"\n{snippets.curl(inference, 'ada', key=False)}\n\n{snippets.python(inference, 'ada', key=False)}\n")
        print(f"the operations page: {operations}/    (Ctrl-C ends it)", flush=True)
        await asyncio.to_thread(server.wait)
    summary = (
        f"device-seconds: {demo.used_s:.1f} used, {both_s:.1f} if both were always on\n"
        f"demo: {CALLS} calls, {demo.completed} completed, {demo.lost} lost, {demo.wrong} from the wrong model; "
        f"cold start median {1000 * statistics.median(demo.cold_s):.0f} ms (engine alone {alone_ms:.0f} ms); "
        f"replicas now: {replicas}"
    )
    return summary, (demo.completed, demo.lost, demo.wrong, replicas) == (CALLS, 0, 0, 0)


def main() -> None:
    """Sets the scene and plays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="stay up afterwards")
    keep = parser.parse_args().keep
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    for model, sentence in SENTENCES.items():
        tinygguf.make(PLACE / f"{model}.gguf", sentence)
    (PLACE / "two-models.yaml").write_text(DOCUMENTS.format(place=PLACE))
    listen, ops = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with serving(listen, ops) as server:
        summary, well = asyncio.run(play(f"http://{listen}", f"http://{ops}", server, keep=keep))
    print(summary)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
