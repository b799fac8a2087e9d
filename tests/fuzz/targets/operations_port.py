"""Fuzz target for responses of an operations port: each command prints its text, or one error in one line.

An input is one byte that selects the command, and lines with a path, a tab and the body of the response to it. The port
is a server on loopback, so that the commands run as in production.
"""

from __future__ import annotations

import atexit
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import Random
from typing import Final

from click.testing import CliRunner

from pilotlight.cli.main import cli
from tests.fuzz.inputs.json_mutations import mutated, written

COMMANDS: Final[tuple[tuple[str, ...], ...]] = (
    ("status",), ("status", "ada"), ("status", "--output", "json"), ("explain", "model", "ada"), ("explain", "last"),
    ("explain", "fit", "ada", "--output", "json"),
    ("wake", "ada"), ("stop", "ada"), ("cordon", "gpu0"), ("uncordon", "gpu0"), ("drain", "gpu0", "--no-wait"),
)  # fmt: skip
_ROW: Final[dict[str, object]] = {
    "model": "ada", "state": "ready", "replicas": {"ready": 1}, "waiting": 0, "running": 1, "devices": ["gpu0"],
    "since_s": 5.0,
    "why": "it serves", "adapters": ["a"],
}  # fmt: skip
_SAYS: Final = {"says": "done"}
RESPONSES: Final[dict[str, object]] = {
    "/api/v1/status": [_ROW, {**_ROW, "model": "bob", "adapters": []}],
    "/api/v1/off": {"sentences": ["no agent"], "degraded": "watch /api/v1/pods: OSError"},
    "/api/v1/models/ada": {"name": "ada"},
    **{f"/api/v1/explain/{what}": {"sentences": ["ada is ready."]} for what in ("model/ada", "fit/ada", "last")},
    "/api/v1/models/ada/wake": _SAYS, "/api/v1/models/ada/stop": _SAYS, "/api/v1/devices/gpu0/cordon": _SAYS,
    "/api/v1/devices/gpu0/uncordon": _SAYS, "/api/v1/devices/gpu0/drain": _SAYS,
    "/api/v1/devices": [{"device": "gpu0", "node": "n1", "replicas": [{"model": "ada", "state": "ready"}]}],
    "/api/v1/nodes": [{"name": "n1"}],
}  # fmt: skip


def _input(number: int, bodies: dict[str, bytes]) -> bytes:
    return bytes((number,)) + b"\n".join(path.encode() + b"\t" + body for path, body in bodies.items())


SEEDS: Final = tuple(
    _input(number, {path: written(body) for path, body in RESPONSES.items()}) for number in range(len(COMMANDS))
)
WORDS: Final = (
    b"\t",
    b"\n",
    b"{}",
    b"[]",
    b"null",
    b'"\\u001b[31m"',
    b'"sentences":',
    b'"says":',
    b"1e999",
    b"[[",
    b"\xff",
)


def case(random: Random) -> bytes:
    """One response that is changed in a few places, or a response of another server."""
    bodies = {path: written(body) for path, body in RESPONSES.items()}
    for path in random.sample(sorted(bodies), 3):
        other = (
            b"",
            b"<html>",
            b"null",
            b"[]",
            b"{}",
            b'"x"',
            b"1",
            b"[1]",
            b'[{"model":1}]',
            b'{"error":{}}',
            b"[" * 5_000,
        )
        bodies[path] = random.choice(
            (mutated(RESPONSES[path], random), mutated(RESPONSES[path], random), random.choice(other))
        )
    return _input(random.randrange(len(COMMANDS)), {path: body.replace(b"\n", b" ") for path, body in bodies.items()})


class _Port(BaseHTTPRequestHandler):
    bodies: Final[dict[bytes, bytes]] = {}

    def do_GET(self) -> None:
        """Send the body of the path."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = self.bodies.get(self.path.encode())
        self.send_response(404 if body is None else 200)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def do_POST(self) -> None:
        """As GET."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@cache
def _address() -> str:
    server = HTTPServer(("127.0.0.1", 0), _Port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    atexit.register(server.server_close)
    atexit.register(server.shutdown)
    return f"127.0.0.1:{server.server_port}"


def port(data: bytes) -> None:
    """One command and all responses."""
    if not data:
        return
    _Port.bodies.clear()
    parts = (line.partition(b"\t") for line in data[1:].split(b"\n"))
    _Port.bodies.update((path, body) for path, _, body in parts)
    command = COMMANDS[data[0] % len(COMMANDS)]
    done = CliRunner().invoke(cli, [*command, "--ops", _address()], prog_name="pilotlight")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(f"{' '.join(command)}: {type(done.exception).__name__}") from done.exception
    assert done.exit_code in {0, 1, 2}
    assert all(line.isprintable() for line in done.output.split("\n")), f"{' '.join(command)}: control characters"
    if done.exit_code == 1:
        assert len(done.output.strip().split("\n")) == 1, f"{' '.join(command)}: more than one line"
