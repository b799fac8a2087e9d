"""A real or fake engine as a process on loopback, started with the command line that Pilotlight would use."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from autoscaler.contract import ModelName
from autoscaler.engines import build_launch_command
from autoscaler.engines.command_line import LaunchCommand
from autoscaler.spec.model import Model, ModelSpec
from tests.support.net.ports import HOST, free_port

STARTS_S_MAX = 900.0
"""vLLM needs 90 s of CPU time."""
ANSWERS_S_MAX = 120.0

Json = dict[str, Any]
T = TypeVar("T")


class Reply(NamedTuple):
    """A response of an engine."""

    status: int
    text: str

    @property
    def document(self) -> Any:
        """The JSON document in the body."""
        return json.loads(self.text)


class Running(NamedTuple):
    """A running engine."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    statuses: frozenset[int]
    """Of its readiness path before the first 200."""
    log: Path

    @contextmanager
    def response(self, method: str, path: str, body: object = None, *, port: int = 0) -> Iterator[Any]:
        """Yields an `http.client.HTTPResponse` whose body has not been read; closes its connection afterwards."""
        with closing(http.client.HTTPConnection(HOST, port or self.port, timeout=ANSWERS_S_MAX)) as connection:
            content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response

    def request(self, method: str, path: str, body: object = None, *, port: int = 0) -> Reply:
        """Sends a request and reads the whole response."""
        with self.response(method, path, body, port=port) as response:
            return Reply(response.status, response.read().decode())

    def metrics(self, path: str = "/metrics") -> str:
        """The metrics, as text."""
        return self.request("GET", path, port=self.metrics_port).text

    def until(self, what: str, condition: Callable[[], T], every_s: float = 0.01) -> T:
        """Polls until the condition is true and returns its value; fails if the engine hangs."""
        end_s = time.monotonic() + ANSWERS_S_MAX
        while not (found := condition()):
            assert time.monotonic() < end_s, f"not within {ANSWERS_S_MAX:g} s: {what}; {self.log.read_text()[-2000:]}"
            time.sleep(every_s)
        return found

    def until_exit(self) -> int:
        """Waits for the end of the process and returns its exit status."""
        return self.process.wait(ANSWERS_S_MAX)


def events(response: Any) -> Iterator[str]:
    """Yields the data of the server-sent events of a response until its end."""
    while line := response.readline():
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip().decode()


def launch_command(
    engine: str, programs: Mapping[str, str], artifact: Path, port: int, *, slots: int = 1, **spec: Any
) -> LaunchCommand:
    """Returns the command line of Pilotlight for the Model `ada` with these weights."""
    model = ModelSpec(engine=engine, artifact=f"file://{artifact}", **spec)  # type: ignore[arg-type]
    return build_launch_command(Model(name=ModelName("ada"), spec=model, slots=slots), None, HOST, port, programs)


@contextmanager
def running(
    folder: Path, launch: Callable[[int, int], LaunchCommand], *, has_metrics_port: bool = False
) -> Iterator[Running]:
    """Starts an engine, waits until its readiness path returns 200, and kills it at the end.

    `launch` returns the command for a port and a port of metrics. The latter differs if `has_metrics_port`.
    """
    port = free_port()
    metrics_port = free_port() if has_metrics_port else port
    command = launch(port, metrics_port)
    log = folder / f"engine-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            cwd=folder, start_new_session=True,
        )  # fmt: skip
    try:
        statuses = _statuses_until_ready(process, port, command.readiness_path, log)
        yield Running(process, port, metrics_port, statuses, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()


def _statuses_until_ready(process: subprocess.Popen[bytes], port: int, path: str, log: Path) -> frozenset[int]:
    """Returns the statuses before the first 200."""
    statuses, until_s = set[int](), time.monotonic() + STARTS_S_MAX
    while True:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection,
        ):
            connection.request("GET", path)
            status = connection.getresponse().status
            if status == http.HTTPStatus.OK:
                return frozenset(statuses)
            statuses.add(status)
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < until_s, log.read_text()[-4000:]
        time.sleep(0.01)
