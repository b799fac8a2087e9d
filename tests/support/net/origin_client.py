"""Sends bytes to independent servers (`tests.support.net.origin_servers`, or proxies before one) and returns how they
parse them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.engines import build_launch_command
from autoscaler.engines.programs.installed import find_installed_programs
from autoscaler.spec.model import Model, ModelSpec
from loadtest import tiny_gguf
from tests.support.net.ports import free_port

ROOT = Path(__file__).parents[3]
SILENT_S = 4.0
"""A server that sends nothing for this long is waiting for more bytes."""
ANSWERS_S_MAX = 60.0
"""Limit for responses that must come: a busy machine may pause a server for longer than SILENT_S."""
STARTS_S_MAX = 90.0
HEAD_BYTES_MAX = 1 << 20


class Reading(NamedTuple):
    """One request as a server parsed it."""

    method: str
    target: str
    body: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def bare(self) -> tuple[str, str, str]:
        """The request without its headers and without the mark of an empty query."""
        return self.method, self.target.removesuffix("?"), self.body


class Step(NamedTuple):
    """Bytes to send, and the number of responses to read then."""

    data: bytes
    answers: int
    silent_s: float = SILENT_S
    """The server is silent if the responses do not come within this time."""


class Heard(NamedTuple):
    """What one connection returned: the requests that were parsed, and how it ended."""

    readings: list[Reading]
    end: str
    """`enough`: the expected number of responses; `refused`: the server's own error response; `closed`; `silent`."""


async def ask(port: int, *steps: Step) -> Heard:
    """Uses one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=HEAD_BYTES_MAX)
    heard = Heard([], "enough")
    try:
        for step in steps:
            async with asyncio.timeout(step.silent_s):
                writer.write(step.data)
                for _ in range(step.answers):
                    reading = await _reading(reader)
                    if reading is None:
                        return heard._replace(end="refused")
                    heard.readings.append(reading)
    except (asyncio.IncompleteReadError, ConnectionError):
        return heard._replace(end="closed")
    except TimeoutError:
        return heard._replace(end="silent")
    finally:
        writer.transport.abort()
    return heard


async def _reading(reader: asyncio.StreamReader) -> Reading | None:
    """Parses the next response into what the server read; None if the server rejects the request."""
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    while lines[0].startswith(b"HTTP/1.1 1"):
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    for line in lines:
        if line[:8].lower() == b"x-read: ":
            method, target, body, headers = json.loads(line[8:])
            return Reading(method, target, body, tuple((name, value) for name, value in headers))
    return None


@contextmanager
def origins(*names: str, python_parsers: bool = False) -> Iterator[dict[str, int]]:
    """Runs the servers of these names in a separate process; yields their ports."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"AIOHTTP_NO_EXTENSIONS": "1"} if python_parsers else {})
    command = [sys.executable, "-m", "tests.support.net.origin_servers", *names]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            ports: dict[str, int] = json.loads(process.stdout.readline())
            for port in ports.values():
                listens(port, process)
            yield ports
        finally:
            process.kill()


def listens(port: int, process: subprocess.Popen[bytes], path: str = "/") -> None:
    """Waits until a GET on the path returns 200."""
    deadline_s = time.monotonic() + STARTS_S_MAX
    while time.monotonic() < deadline_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SILENT_S)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.02)
        finally:
            connection.close()
    raise AssertionError(f"nothing answers on port {port}")


NGINX = """daemon off; master_process off; pid {folder}/pid; error_log /dev/null;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; keepalive_requests 1000000; proxy_buffer_size 128k;
  proxy_buffers 8 128k; proxy_busy_buffers_size 256k; large_client_header_buffers 4 128k;
  server {{ listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{origin}; proxy_http_version 1.1; proxy_set_header Host $http_host;
    }} }} }}
"""
HAPROXY = """global
  tune.bufsize 262144
defaults
  mode http
  timeout connect 5s
  timeout client 30s
  timeout server 30s
frontend in
  bind 127.0.0.1:{port}
  default_backend out
backend out
  server origin 127.0.0.1:{origin}
"""
PROXIES = {"nginx": NGINX, "haproxy": HAPROXY}
ARGUMENTS: dict[str, Sequence[str]] = {
    "nginx": ("-p", "{folder}", "-e", "/dev/null", "-c", "{config}"),
    "haproxy": ("-db", "-q", "-f", "{config}"),
    "caddy": ("run", "--adapter", "caddyfile", "--config", "{config}"),
}
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def program(name: str) -> str | None:
    """Path of an installed proxy, if any; also searches Debian's directories, which are not on every user's PATH."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *SBIN)))


@contextmanager
def running_proxy(name: str, folder: Path, config: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an installed proxy with this configuration; yields its process, which may not listen yet."""
    path = folder / f"{name}.conf"
    path.write_text(config)
    command = [program(name) or name, *(argument.format(folder=folder, config=path) for argument in ARGUMENTS[name])]
    environment = os.environ | {"HOME": str(folder)}
    output = folder / f"{name}.log"
    try:
        with (
            output.open("wb") as log,
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log) as process,
        ):
            try:
                yield process
            finally:
                process.kill()
    finally:
        print(output.read_text(errors="replace"))  # pytest shows it if the test fails


@contextmanager
def proxy(name: str, folder: Path, origin: int, config: str = "", ready: str = "/") -> Iterator[int]:
    """Runs an installed proxy in front of an HTTP server; yields its port. GET `ready` must return 200 through it."""
    port = free_port()
    with running_proxy(
        name, folder, (config or PROXIES[name]).format(folder=folder, port=port, origin=origin)
    ) as process:
        listens(port, process, ready)
        yield port


@contextmanager
def llama(folder: Path) -> Iterator[int]:
    """Runs the real llama.cpp server with a tiny model; yields its port. Its package must be installed."""
    tiny_gguf.make_model(folder / "ada.gguf", "Hello, I am Ada.")
    port = free_port()
    spec = ModelSpec(engine="llama.cpp", artifact=f"file://{folder / 'ada.gguf'}", args=("--threads=1", "--embeddings"))
    installed = {"xllamacpp": find_installed_programs()["xllamacpp"]}
    start = build_launch_command(Model(name=ModelName("ada"), spec=spec, slots=2), None, "127.0.0.1", port, installed)
    with subprocess.Popen(start.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            listens(port, process, start.readiness_path)
            yield port
        finally:
            process.kill()
