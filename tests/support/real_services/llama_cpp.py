"""Starts the real llama.cpp server as a driver does, and always stops it."""

from __future__ import annotations

import http.client
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoscaler.engines.programs.installed import find_installed_programs
from tests.support.net.ports import free_port
from tests.support.real_services.engine_process import launch_command

START_S = 90.0


@contextmanager
def started(
    folder: Path, *args: str, file: str = "ada.gguf", slots: int = 2, context_tokens: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], int, set[int]]]:
    """Yield the process, its port, and the statuses of its readiness path until 200 (or until it exits)."""
    port, statuses = free_port(), set[int]()
    found = {"xllamacpp": find_installed_programs()["xllamacpp"]}
    start = launch_command(
        "llama.cpp", found, folder / file, port, slots=slots, args=("--threads=1", *args), context_tokens=context_tokens
    )
    process = subprocess.Popen(start.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline_s = time.monotonic() + START_S
        while 200 not in statuses and process.poll() is None and time.monotonic() < deadline_s:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
                connection.request("GET", start.readiness_path)
                statuses.add(connection.getresponse().status)
                connection.close()
            except (OSError, http.client.HTTPException):
                time.sleep(0.001)
        yield process, port, statuses
    finally:
        process.kill()
        process.communicate(timeout=60)
