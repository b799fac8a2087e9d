"""Real container runtimes, with storage of their own and an image without files.

Docker's daemon is started on a Unix socket. podman runs containers with runc. Both need root. A container mounts the
system's Python and the sources, read-only, so the image may be empty.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fakes.engines.fake_engine_process import SCRIPT

STARTS_S_MAX = 90.0
MOUNTS = tuple(
    word
    for folder in ("/usr", "/lib", "/lib64", str(SCRIPT.parent.parent))
    if Path(folder).exists()
    for word in ("--volume", f"{folder}:{folder}:ro")
)
IMAGE = "empty:1"


def _client(client: tuple[str, ...], *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run((*client, *words), input=given, capture_output=True, check=False, timeout=STARTS_S_MAX)


def _import_image(client: tuple[str, ...]) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("placeholder"))
    done = _client(client, "import", "-", IMAGE, given=archive.getvalue())
    assert not done.returncode, done.stderr


@contextmanager
def docker(folder: Path) -> Iterator[tuple[str, ...]]:
    """Runs Docker's daemon; yields the words of its client."""
    client = ("docker", "--host", f"unix://{folder}/docker.sock")
    words = ("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--storage-driver", "vfs")
    own = ("--host", client[2], "--pidfile", f"{folder}/pid")
    with (folder / "log").open("wb") as log, subprocess.Popen((*words, *own), stdout=log, stderr=log) as daemon:
        try:
            until_s = time.monotonic() + STARTS_S_MAX
            while _client(client, "info").returncode:
                assert daemon.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < until_s, "docker does not become ready"
                time.sleep(0.1)
            _import_image(client)
            yield client
        finally:
            daemon.terminate()


@contextmanager
def podman(folder: Path) -> Iterator[tuple[str, ...]]:
    """Prepares storage; yields the words of its client."""
    storage = ("--root", f"{folder}/data", "--runroot", f"{folder}/exec", "--storage-driver", "vfs")
    client = ("podman", *storage, "--cgroup-manager", "cgroupfs", "--runtime", "runc")
    _import_image(client)
    yield client


LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
"""podman sets the limits of its own process, which a container of these tests may not raise."""
OPTIONS = {"docker": (), "podman": ("--network", "host")}
"""podman's published ports need a firewall, which not every test machine has."""
RUNTIMES = {"docker": (docker, ("docker", "dockerd")), "podman": (podman, ("podman", "runc"))}


@contextmanager
def real_runtime(name: str) -> Iterator[tuple[str, ...]]:
    """Yields the words of its client; skips if it is not installed or this is not root."""
    serve, programs = RUNTIMES[name]
    absent = [program for program in programs if shutil.which(program) is None]
    if absent or os.geteuid():
        pytest.skip(f"{name}: needs root and the programs {', '.join(programs)}")
    with (
        tempfile.TemporaryDirectory(
            prefix="pilotlight-", ignore_cleanup_errors=True
        ) as folder,  # paths of sockets are short
        serve(Path(folder)) as client,
    ):
        yield client
