"""The real Triton Inference Server, as a process on loopback: its installation, its start, and models in it.

tritonserver and its Python backend come with the package nvidia-pytriton (332 MB), whose lock is
`requirements/engines-triton.lock`. A test never installs it:

    .venv/bin/python -m tests.support.real_services.triton

The models are those of the folder `triton_models`.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.net.ports import free_port
from tests.support.python_environments import InstallError, PythonEnvironment

VERSION = "2.51.0"
MODELS = Path(__file__).parent / "triton_models"
STARTS_S_MAX, LOADS_S_MAX, STOPS_S_MAX = 90.0, 90.0, 60.0
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALL = f"Debian: apt install libpython{_PYTHON}; .venv/bin/python -m tests.support.real_services.triton, from PyPI"


def _finish(folder: Path) -> None:
    """Adds the stub of this Python version and numpy to the Python backend, and a launcher `bin/tritonserver`.

    The stub embeds libpython of the system and searches modules next to the backend. The package has its own copies of
    all other libraries.
    """
    if ctypes.util.find_library(f"python{_PYTHON}") is None:
        raise InstallError(f"Triton's Python backend needs libpython{_PYTHON}.so (Debian: libpython{_PYTHON})")
    packages = folder / "lib" / f"python{_PYTHON}" / "site-packages"
    server = packages / "pytriton" / "tritonserver"
    backend = server / "backends" / "python"
    stub = server / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        raise InstallError(f"nvidia-pytriton has no Python backend for Python {_PYTHON}")
    shutil.copy(stub, backend)
    for name in ("numpy", "numpy.libs"):
        (backend / name).symlink_to(packages / name)
    launcher = folder / "bin" / "tritonserver"
    launcher.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{packages}/nvidia_pytriton.libs" \\\n'
        f'exec "{server}/bin/tritonserver" --backend-directory="{server}/backends" "$@"\n'
    )
    launcher.chmod(0o755)


ENVIRONMENT = PythonEnvironment("engines-triton", _finish)


def program() -> Path:
    """Returns the path of the program. Raises InstallError if it has not been installed."""
    return ENVIRONMENT.find() / "bin" / "tritonserver"


def why_missing() -> str:
    """The reason why `program` returns no path; empty if it returns one."""
    return ENVIRONMENT.why_missing(INSTALL)


def add_model(repository: Path, kind: str, name: str = "") -> None:
    """Adds a model of the folder `triton_models` to a repository, by default under the same name. It is not loaded."""
    version = repository / (name or kind) / "1"
    version.mkdir(parents=True)
    shutil.copy(MODELS / f"{kind}.py", version / "model.py")


class TritonServer(NamedTuple):
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    metrics_url: str
    repository: Path

    def load(self, name: str) -> None:
        """Loads a model, or loads it again. Raises HTTPError if the load fails."""
        self._post(f"{name}/load")

    def unload(self, name: str) -> None:
        """Begins to unload a model."""
        self._post(f"{name}/unload")

    def status(self, path: str) -> int:
        """The status of a GET."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=LOADS_S_MAX) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def states(self) -> dict[str, str]:
        """The state of each model in the repository, empty for one that was never loaded."""
        request = urllib.request.Request(f"{self.url}/v2/repository/index", data=b"{}")
        with urllib.request.urlopen(request, timeout=LOADS_S_MAX) as response:
            return {model["name"]: model.get("state", "") for model in json.load(response)}

    def _post(self, path: str) -> None:
        request = urllib.request.Request(f"{self.url}/v2/repository/models/{path}", data=b"{}")
        with urllib.request.urlopen(request, timeout=LOADS_S_MAX):
            pass


@contextlib.contextmanager
def serving(folder: Path, *models: str) -> Iterator[TritonServer]:
    """Runs a server with these models loaded until the context ends. Raises InstallError.

    Kill the process of a server with a load that hangs: SIGTERM does not end it.
    """
    found, log = program(), folder / "triton.log"
    repository = folder / "models"
    repository.mkdir(parents=True, exist_ok=True)
    for name in models:
        add_model(repository, name)
    port, metrics_port = free_port(), free_port()
    command = [
        str(found), f"--model-repository={repository}", "--model-control-mode=explicit",
        "--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false",
        "--metrics-address=127.0.0.1", f"--metrics-port={metrics_port}",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    server = TritonServer(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", repository)
    try:
        _wait_until_ready(server, log)
        for name in models:
            server.load(name)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOPS_S_MAX)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the process of each model


def _wait_until_ready(server: TritonServer, log: Path) -> None:
    until_s = time.monotonic() + STARTS_S_MAX
    while True:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{server.url}/v2/health/live", timeout=5),
        ):
            return
        assert server.process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{ENVIRONMENT.install()}\n")
    except InstallError as error:
        sys.exit(f"{error} ({INSTALL})")
