"""A small OpenAI-compatible server for one model, started by path; standard library only, the model is a backend.

    server.py --port 8000 --name tiny --weights FOLDER --backend torch --phases FILE

It also accepts vLLM's command line (`serve FOLDER --served-model-name ...`), so that a script named `vllm` can start
it. It listens once the model is loaded. It writes each phase of its start, and the first token of its first request,
as a line of JSON to the phases file. The options --leak-mib, --worker-mib and --excess-mib make it misbehave.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

MIB = 1 << 20
TOKENS_MAX = 16
"""Tokens of one answer if the request sets no limit."""
HOLDS = "import sys, time; sys.path[:0] = {paths!r}; import {backend} as b; b.hold({size}, {device!r}); time.sleep(600)"
"""The program of a worker process that only holds memory of the device."""


class Phases:
    """Appends events with process and time (Unix seconds) to the phases file."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._lock = threading.Lock()

    def note(self, phase: str, at_s: float | None = None, **more: object) -> None:
        """Append one line."""
        row = {"model": self._name, "pid": os.getpid(), "phase": phase, "at_s": at_s or time.time(), **more}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Backend(Protocol):
    """A model on a device."""

    def generate(self, prompt: bytes, tokens: int) -> Iterator[int]:
        """The tokens of one answer. Several threads may call it at once."""

    def grow(self, size_bytes: int) -> None:
        """Allocate this many more bytes of the device until the process ends."""


def options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line, its own or vLLM's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if argv[:1] == ["serve"]:
        argv = ["--weights", *argv[1:]]
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--name", "--served-model-name", required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--slots", "--max-num-seqs", type=int, default=4)
    parser.add_argument("--context-tokens", "--max-model-len", type=int, default=1024)
    parser.add_argument(
        "--memory-bytes", type=int, default=0, help="take so much of the device in all; 0: what it needs"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.0, help="the same, as a part of the device")
    parser.add_argument("--backend", choices=("torch_model", "simulated_model"), default="torch_model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nvml", type=Path, help="file of NVML's Python bindings; torch needs it on a GPU")
    parser.add_argument("--phases", type=Path, default=Path("/dev/null"))
    parser.add_argument("--prompt-tokens", type=int, default=0, help="compute prompts of so many tokens; 0: short ones")
    parser.add_argument("--empty", action="store_true", help="do not read the weights: all else of a start remains")
    for knob in ("leak", "worker", "excess"):
        parser.add_argument(f"--{knob}-mib", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.backend == "torch_model" and arguments.device != "cpu" and arguments.nvml is None:
        parser.error("--backend torch_model needs --nvml on a GPU")
    return arguments


def started_s() -> float:
    """Start time of this process (Unix seconds; the kernel counts hundredths)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


class Handler(BaseHTTPRequestHandler):
    """One connection. `main` sets `backend` and the other attributes on a subclass."""

    protocol_version = "HTTP/1.1"
    backend: Backend
    phases: Phases
    arguments: argparse.Namespace
    slots: threading.Semaphore
    answered: threading.Event

    def do_GET(self) -> None:
        """Answer health checks and the list of models."""
        if self.path == "/health":
            self._json(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": self.arguments.name, "object": "model"}]})
        else:
            self._json(404, {"error": {"message": f"no such path: {self.path}", "type": "not_found"}})

    def do_POST(self) -> None:
        """Answer one completion, streamed or not."""
        try:
            body = dict(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0)))))
        except (TypeError, ValueError) as error:
            self._json(400, {"error": {"message": f"the body is no JSON object: {error}", "type": "invalid_request"}})
            return
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            self._json(404, {"error": {"message": f"no such path: {self.path}", "type": "not_found"}})
            return
        prompt = json.dumps(body.get("messages") if chat else body.get("prompt")).encode()
        tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or TOKENS_MAX)
        if self.arguments.leak_mib:
            self.backend.grow(self.arguments.leak_mib * MIB)
        with self.slots:
            words = (f"{chr(97 + token % 26)} " for token in self._tokens(prompt, tokens))
            if body.get("stream"):
                self._stream(words, chat=chat)
            else:
                self._whole("".join(words), chat=chat)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the phases file has the relevant events."""

    def _tokens(self, prompt: bytes, tokens: int) -> Iterator[int]:
        for token in self.backend.generate(prompt, tokens):
            if not self.answered.is_set():
                self.answered.set()
                self.phases.note("first token")
            yield token

    def _stream(self, words: Iterator[str], *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in words:
            piece = {"delta": {"content": word}} if chat else {"text": word}
            self._event({"choices": [{"index": 0, "finish_reason": None, **piece}]}, chat=chat)
        end: dict[str, object] = {"delta": {}} if chat else {"text": ""}
        self._event({"choices": [{"index": 0, "finish_reason": "length", **end}]}, chat=chat)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _whole(self, text: str, *, chat: bool) -> None:
        piece = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        self._json(200, self._head(chat=chat) | {"choices": [{"index": 0, "finish_reason": "length", **piece}]})

    def _head(self, *, chat: bool) -> dict[str, object]:
        kind = "chat.completion" if chat else "text_completion"
        return {"id": "one", "object": kind, "created": int(time.time()), "model": self.arguments.name}

    def _event(self, value: Mapping[str, object], *, chat: bool) -> None:
        self._chunk(b"data: " + json.dumps(self._head(chat=chat) | dict(value)).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, value: Mapping[str, object]) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server(ThreadingHTTPServer):
    """Threads that end with the process; a backlog for bursts."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Ignore clients that disconnect; report any other error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def start_worker(arguments: argparse.Namespace) -> None:
    """Start a process in a session of its own that holds memory and does not end with this one."""
    paths = [str(Path(__file__).parent), *sys.path]
    size = arguments.worker_mib * MIB
    program = HOLDS.format(paths=paths, backend=arguments.backend, size=size, device=arguments.device)
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.DEVNULL)


def main(argv: list[str]) -> None:
    """Load the model, then serve it until a signal ends the process."""
    arguments = options(argv)
    phases = Phases(arguments.phases, arguments.name)
    phases.note("process", started_s())
    backend = importlib.import_module(arguments.backend).load(arguments, phases)
    if arguments.worker_mib:
        start_worker(arguments)
    if arguments.excess_mib:
        backend.grow(arguments.excess_mib * MIB)
    values = {
        "backend": backend,
        "phases": phases,
        "arguments": arguments,
        "slots": threading.Semaphore(arguments.slots),
        "answered": threading.Event(),
    }
    server = Server((arguments.host, arguments.port), type("Bound", (Handler,), values))
    phases.note("listening", used_bytes=backend.used_bytes())
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
