"""Builds the test plane's programs once for each set of sources, Go version and platform, into the project's cache.

Owns the cache's `testplane-KEY` folders: `testplane` (etcd, API server, controllers, scheduler) and `kwok` (nodes and
pods that only seem to run). Processes that want it at once build it once. A cold build takes about five minutes of two
cores; Go's own compile cache for it (3 GB) is kept apart and removed afterwards.

    python -m tests.cluster.building
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "testplane"
FLAGS = ("-mod=readonly", "-buildvcs=false", "-ldflags=-s -w")
PROGRAMS = {"kwok": "sigs.k8s.io/kwok/cmd/kwok", "testplane": "."}
"""In the order of their building: `testplane` last, for it stands for the whole."""


def cache() -> Path:
    """Where the project keeps what is costly to make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight"


class BuildError(Exception):
    """It cannot be built here; the message says what is missing."""


def key() -> str:
    """Of what is built: other sources, another Go or another platform are another folder."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((SOURCES / name).read_bytes())
    if shutil.which("go") is None:
        raise BuildError("the cluster tests need Go 1.26, or PILOTLIGHT_TESTPLANE=FOLDER with the programs")
    said = subprocess.run(["go", "env", "GOVERSION", "GOOS", "GOARCH"], check=True, capture_output=True)
    digest.update(said.stdout)
    return digest.hexdigest()[:16]


def build() -> Path:
    """The folder with the programs, built now if they are not there."""
    here = cache()
    here.mkdir(parents=True, exist_ok=True)
    folder = here / f"testplane-{key()}"
    with (here / "testplane.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "testplane").exists():
            sys.stderr.write("building Kubernetes' control plane for tests, once: about five minutes\n")
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=here, prefix="go-build-") as compiled:
                for name, package in PROGRAMS.items():
                    _go_build(package, folder / name, compiled)
            for old in here.glob("testplane-*"):
                if old != folder:
                    shutil.rmtree(old)
    return folder


def _go_build(package: str, program: Path, compiled: str) -> None:
    partial = program.with_suffix(".partial")
    env = {**os.environ, "GOCACHE": compiled, "GOFLAGS": "", "CGO_ENABLED": "0"}
    done = subprocess.run(["go", "build", *FLAGS, "-o", str(partial), package], cwd=SOURCES, env=env, check=False)
    if done.returncode:
        raise BuildError(f"go build {package} failed (its words are above); PILOTLIGHT_TESTPLANE=FOLDER names programs")
    partial.replace(program)  # never half of one


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.exit(str(error))
