"""Builds the test plane's programs once for each set of sources, Go version and platform, into the project's cache.

Owns the cache's folders: `testplane-KEY` with `testplane` (etcd, API server, controllers, scheduler) and `kwok` (nodes
and pods that only seem to run), and `karpenter-KEY` with Karpenter and its provider for such nodes, which only its own
tests want. Processes that want one at once build it once. A cold build takes about five minutes of two cores; Go's own
compile cache for it (3 GB) is kept apart and removed afterwards.

    python -m tests.cluster.building [karpenter]
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
from typing import NamedTuple

FLAGS = ("-mod=readonly", "-buildvcs=false", "-ldflags=-s -w")
_FILES = ("go.mod", "go.sum", "main.go")


class Sources(NamedTuple):
    """One module of Go and what is built of it."""

    name: str
    """Of its folder beside this file, and the beginning of the cache's."""
    says: str
    programs: tuple[tuple[str, str], ...]
    """(program, package), in the order of their building: the last stands for the whole."""
    definitions: tuple[str, ...] = ()
    """Folders of CustomResourceDefinitions, below packages of the module: copied to `crds`."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return Path(__file__).parent / self.name


TESTPLANE = Sources(
    "testplane", "Kubernetes' control plane for tests", (("kwok", "sigs.k8s.io/kwok/cmd/kwok"), ("testplane", "."))
)
KARPENTER = Sources(
    "karpenter", "Karpenter for tests", (("karpenter", "sigs.k8s.io/karpenter/kwok"),),
    ("sigs.k8s.io/karpenter/pkg/apis/crds", "sigs.k8s.io/karpenter/kwok/apis/crds"),
)  # fmt: skip


def cache() -> Path:
    """Where the project keeps what is costly to make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight"


class BuildError(Exception):
    """It cannot be built here; the message says what is missing."""


def key(sources: Sources = TESTPLANE) -> str:
    """Of what is built: other sources, another Go or another platform are another folder."""
    digest = hashlib.sha256()
    for file in (sources.folder / name for name in _FILES):
        if file.exists():
            digest.update(file.read_bytes())
    if shutil.which("go") is None:
        raise BuildError("the cluster tests need Go 1.26, or PILOTLIGHT_TESTPLANE=FOLDER with the programs")
    said = subprocess.run(["go", "env", "GOVERSION", "GOOS", "GOARCH"], check=True, capture_output=True)
    digest.update(said.stdout)
    return digest.hexdigest()[:16]


def build(sources: Sources = TESTPLANE) -> Path:
    """The folder with the programs, built now if they are not there."""
    here = cache()
    here.mkdir(parents=True, exist_ok=True)
    folder = here / f"{sources.name}-{key(sources)}"
    with (here / f"{sources.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / sources.programs[-1][0]).exists():
            sys.stderr.write(f"building {sources.says}, once: about five minutes\n")
            folder.mkdir(exist_ok=True)
            _definitions(sources, folder)
            with tempfile.TemporaryDirectory(dir=here, prefix="go-build-") as compiled:
                for name, package in sources.programs:
                    _go_build(sources, package, folder / name, compiled)
            for old in here.glob(f"{sources.name}-*"):
                if old != folder:
                    shutil.rmtree(old)
    return folder


def _definitions(sources: Sources, folder: Path) -> None:
    if not sources.definitions:
        return
    shutil.rmtree(folder / "crds", ignore_errors=True)
    (folder / "crds").mkdir()
    for path in sources.definitions:
        module = "/".join(path.split("/")[:2])
        command = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module]
        subprocess.run(["go", "mod", "download", module], cwd=sources.folder, check=True)
        found = subprocess.run(command, cwd=sources.folder, check=True, capture_output=True, text=True)
        for file in sorted((Path(found.stdout.strip()) / path.removeprefix(f"{module}/")).glob("*.yaml")):
            shutil.copyfile(file, folder / "crds" / file.name)  # the module's own may not be written to


def _go_build(sources: Sources, package: str, program: Path, compiled: str) -> None:
    partial = program.with_suffix(".partial")
    env = {**os.environ, "GOCACHE": compiled, "GOFLAGS": "", "CGO_ENABLED": "0"}
    command = ["go", "build", *FLAGS, "-o", str(partial), package]
    done = subprocess.run(command, cwd=sources.folder, env=env, check=False)
    if done.returncode:
        raise BuildError(f"go build {package} failed (its words are above); PILOTLIGHT_TESTPLANE=FOLDER names programs")
    partial.replace(program)  # never half of one


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(KARPENTER if sys.argv[1:] == ['karpenter'] else TESTPLANE)}\n")
    except BuildError as error:
        sys.exit(str(error))
