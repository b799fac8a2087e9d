"""The real Ollama server, as a process on loopback: its build, its start, and models in it.

It is built from the Go module of `SOURCES`, whose go.sum states all checksums, into the project's cache. The module's
archive lacks three headers: two are Debian packages, and the third is in another module of the same go.mod.
PILOTLIGHT_OLLAMA names a program of that version instead. A test never builds it, because that takes ten minutes:

    .venv/bin/python -m tests.support.real_services.ollama
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.go_programs import BuildError, Sources, build, find
from tests.support.net.ports import free_port

VERSION = "0.17.4"
VARIABLE = "PILOTLIGHT_OLLAMA"
SOURCES = Sources(
    "ollama", f"Ollama {VERSION} for tests", Path(__file__).parent.parent / "go_ollama",
    (("ollama", "github.com/ollama/ollama"),), VARIABLE, minutes=10,
    headers=(("miniaudio/miniaudio.h", "github.com/gen2brain/malgo/miniaudio.h"),),
)  # fmt: skip
INSTALL = (
    "Debian: apt install golang g++ nlohmann-json3-dev libstb-dev, Go 1.26 or newer; then "
    ".venv/bin/python -m tests.support.real_services.ollama, about ten minutes"
)
CHAT_TEMPLATE = "{{ range .Messages }}{{ .Content }}\n{{ end }}<|say|>"
"""For the models of `loadtest.tiny_gguf`: Ollama ignores the template in the file."""
_HEADERS = ("/usr/include/nlohmann/json.hpp", "/usr/include/stb/stb_image.h")
STARTS_S_MAX, STOPS_S_MAX = 90.0, 30.0


def can_build() -> bool:
    """Whether the compilers and the headers of Debian's packages exist."""
    return all(map(shutil.which, ("go", "g++"))) and all(Path(header).exists() for header in _HEADERS)


def program() -> Path:
    """Returns the path of the program. Raises BuildError if it has not been built."""
    named = os.environ.get(VARIABLE)
    folder = None if named else find(SOURCES)
    if named:
        return Path(named)
    if folder is None:
        raise BuildError(f"Ollama {VERSION} has not been built ({INSTALL}), and {VARIABLE} names no program")
    return folder / "ollama"


def why_missing() -> str:
    """The reason why `program` returns no path; empty if it returns one."""
    try:
        found = program()
    except BuildError as error:
        return str(error)
    return "" if found.exists() else f"{VARIABLE} names no file"


class OllamaServer(NamedTuple):
    """A running server."""

    program: Path
    url: str
    environment: dict[str, str]
    folder: Path

    def create(self, name: str, weights: Path, template: str) -> None:
        """Creates a model of a GGUF file, with a template in Go's language. Raises CalledProcessError."""
        modelfile = self.folder / f"{name}.Modelfile"
        modelfile.write_text(f'FROM {weights}\nTEMPLATE """{template}"""\nPARAMETER temperature 0\n')
        command = [str(self.program), "create", name, "-f", str(modelfile)]
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=STARTS_S_MAX)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[OllamaServer]:
    """Runs a server with its own folder until the context ends. Raises BuildError."""
    found = program()
    host = f"127.0.0.1:{free_port()}"
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "OLLAMA_HOST": host, "OLLAMA_MODELS": str(folder / "models"),
    }  # fmt: skip
    with (folder / "ollama.log").open("wb") as log:
        process = subprocess.Popen([found, "serve"], env=environment, stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{host}", process, folder / "ollama.log")
        yield OllamaServer(found, f"http://{host}", environment, folder)
    finally:
        process.terminate()  # it stops its runners; SIGKILL would leave them
        try:
            process.wait(STOPS_S_MAX)
        finally:
            process.kill()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + STARTS_S_MAX
    while True:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{url}/api/version", timeout=5),
        ):
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(SOURCES)}\n")
    except BuildError as error:
        sys.exit(f"{error} ({INSTALL})")
