"""The peers of the data plane benchmarks, and one engine behind all of them and Pilotlight.

Has their commands, and searches their programs on the PATH, then in the folder that BENCH_PEERS names, where
bench/peers.sh installs them. Each peer must complete a request before it is measured. Every proxy runs on core 0. A
peer that is missing or does not respond is omitted with the reason, and its figures are null.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import engine, kit, nginx
from bench.documents import Document, key, settings, tenant
from bench.kit import say
from bench.usage import family
from loadtest.client import Client
from loadtest.result import Ending, Shot

READY_S_MAX = 120.0
"""LiteLLM starts slowly on a busy machine."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight" / "peers"
AUTHORIZATION = ("Authorization", f"Bearer {key('a')}")
OURS = "Pilotlight"
_ROUTER = ("--policy", "round_robin", "--log-level", "error", "--max-concurrent-requests", "20000")
_ROUTER_S = ("--request-timeout-secs", "3600")
_LITELLM_ENV = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOG": "ERROR",
}


class Side(NamedTuple):
    """A running proxy. CPU time and memory are those of `processes`; `others` are processes that carry no bytes."""

    name: str
    url: str
    processes: list[psutil.Process]
    others: list[psutil.Process]


class Peer(NamedTuple):
    """How a peer is started: its program, and the command from (folder, program, port, engine)."""

    name: str
    program: str
    command: Callable[[Path, str, int, str], list[str]]
    install: str
    env: dict[str, str] = {}


def _router(*words: str) -> Callable[[Path, str, int, str], list[str]]:
    def command(_: Path, program: str, port: int, engine: str) -> list[str]:
        where = ["--host", kit.HOST, "--port", str(port), "--worker-urls", f"http://{engine}"]
        metrics = ["--prometheus-port", str(kit.free_port()), "--prometheus-host", kit.HOST]
        return [program, *words, *where, *metrics, *_ROUTER, *_ROUTER_S]

    return command


def _litellm(place: Path, program: str, port: int, engine: str) -> list[str]:
    parameters = {"model": "openai/t", "api_base": f"http://{engine}/v1", "api_key": "none"}
    more = {"request_timeout": 3600, "telemetry": False, "num_retries": 0}
    config = {"model_list": [{"model_name": "t", "litellm_params": parameters}], "litellm_settings": more}
    (place / "config.yaml").write_text(json.dumps(config))
    return [program, "--config", str(place / "config.yaml"), "--host", kit.HOST, "--port", str(port),
            "--num_workers", "1"]  # fmt: skip


def _aiohttp(_: Path, program: str, port: int, engine: str) -> list[str]:
    return [program, "-m", "bench.aiohttp_proxy", str(port), f"http://{engine}"]


PEERS = (
    Peer("nginx", "nginx", lambda place, _, port, at: nginx.nginx_proxy(place, port, at), "apt install nginx-light"),
    Peer("HAProxy", "haproxy", lambda place, _, port, at: nginx.haproxy(place, port, at), "apt install haproxy"),
    Peer("vLLM router", "vllm-router", _router(), "bench/peers.sh"),
    Peer("SGLang router", "smg", _router("launch"), "bench/peers.sh"),
    Peer("aiohttp", sys.executable, _aiohttp, "make venv"),
    Peer("LiteLLM", "litellm", _litellm, "bench/peers.sh", _LITELLM_ENV),
)


def program(name: str) -> str | None:
    """Return the path of a program, if it exists."""
    folder = Path(os.environ.get("BENCH_PEERS") or CACHE)
    path = [os.environ.get("PATH", ""), str(folder), *(str(one) for one in sorted(folder.glob("*/bin")))]
    return shutil.which(name, path=os.pathsep.join(path))


@contextlib.asynccontextmanager
async def sides(place: Path, model: Document, names: Sequence[str], ask: Shot) -> AsyncIterator[list[Side]]:
    """Run Pilotlight and the named peers in front of one engine: that of `model`, which `serve` starts in `place`.

    `ask`: a request that each program must complete. A program that fails is omitted and reported.
    """
    async with contextlib.AsyncExitStack() as stack:
        documents = [settings(), tenant("a"), model]
        one = await stack.enter_async_context(kit.serving(place / "serve", documents, core=kit.PROXY_CORE))
        gateways = one.gateways()
        ours = Side(OURS, one.url, gateways, [p for p in one.processes() if p not in gateways])
        await _completes(ours.url, ask, one.process, one.log)
        made = [ours]
        for peer in (peer for peer in PEERS if peer.name in names):
            found = program(peer.program)
            if found is None:
                say(f"{peer.name} is omitted: there is no {peer.program} ({peer.install})")
                continue
            try:
                made.append(await _start(stack, place, peer, found, ask))
            except kit.BenchError as error:
                say(f"{peer.name} is omitted: {error}")
        yield made


async def _start(stack: contextlib.AsyncExitStack, place: Path, peer: Peer, found: str, ask: Shot) -> Side:
    own, port = place / peer.program.rpartition("/")[2], kit.free_port()
    own.mkdir()
    command = [*kit.on_core(kit.PROXY_CORE), *peer.command(own, found, port, engine.address(place))]
    process = stack.enter_context(kit.running(command, own / "log", {**os.environ, **peer.env}))
    url = f"http://{kit.HOST}:{port}"
    await _completes(url, ask, process, own / "log")
    return Side(peer.name, url, family(process.pid), [])


async def _completes(url: str, ask: Shot, process: subprocess.Popen[bytes], log: Path) -> None:
    """Send the request until it completes. Raises BenchError if the process exits or the time is over."""
    deadline_s, last = time.monotonic() + READY_S_MAX, "nothing"
    while process.poll() is None and time.monotonic() < deadline_s:
        result = await Client(url).send(ask)
        if result.ending is Ending.COMPLETED:
            return
        last = f"{result.status} {result.code} {result.broken}".strip()
        await asyncio.sleep(0.2)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise kit.BenchError(f"it completes no request ({last}); its last line: {lines[-1] if lines else 'nothing'}")
