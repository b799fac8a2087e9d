"""Builds the test plane's programs once for each set of sources, Go version and platform, into the project's cache.

Creates the cache's folders: `testplane-KEY` with `testplane` (etcd, API server, controllers, scheduler, kubectl) and
`kwok` (simulated nodes and pods), and `karpenter-KEY` with Karpenter and its provider for such nodes, which only its
own tests need. Processes that need the same build at the same time build it once. A cold build takes about five minutes
on two cores. Go's compile cache for it (3 GB) is kept separately and removed afterwards.

    python -m tests.integration.cluster.support.programs.build [karpenter]
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FLAGS = ("-mod=readonly", "-buildvcs=false", "-ldflags=-s -w")
UNUSED_S_MAX = 7 * 86_400.0
"""Programs of other sources are deleted after this many seconds without a use."""
_FILES = ("go.mod", "go.sum", "main.go")


class Sources(NamedTuple):
    """One Go module and what is built from it."""

    name: str
    """Name of its folder next to this file, and prefix of its cache folder."""
    label: str
    programs: tuple[tuple[str, str], ...]
    """(program, package) in build order. The presence of the last program means that the build is complete."""
    definitions: tuple[str, ...] = ()
    """Folders of CustomResourceDefinitions, below packages of the module: copied to `crds`."""

    @property
    def folder(self) -> Path:
        """The folder of the module's sources."""
        return Path(__file__).parent / self.name


TESTPLANE = Sources(
    "testplane", "Kubernetes' control plane for tests", (("kwok", "sigs.k8s.io/kwok/cmd/kwok"), ("testplane", "."))
)
KARPENTER = Sources(
    "karpenter", "Karpenter for tests", (("karpenter", "sigs.k8s.io/karpenter/kwok"),),
    ("sigs.k8s.io/karpenter/pkg/apis/crds", "sigs.k8s.io/karpenter/kwok/apis/crds"),
)  # fmt: skip


def cache() -> Path:
    """The project's cache folder for results that are expensive to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight"


class BuildError(Exception):
    """The build is not possible here; the message names the missing tool."""


def key(sources: Sources = TESTPLANE) -> str:
    """Returns the cache key of a build: other sources, another Go version or platform result in another folder."""
    digest = hashlib.sha256()
    for file in (sources.folder / name for name in _FILES):
        if file.exists():
            digest.update(file.read_bytes())
    if shutil.which("go") is None:
        raise BuildError("the cluster tests need Go 1.26, or PILOTLIGHT_TESTPLANE=FOLDER with the programs")
    reported = subprocess.run(["go", "env", "GOVERSION", "GOOS", "GOARCH"], check=True, capture_output=True)
    digest.update(reported.stdout)
    return digest.hexdigest()[:16]


def build(sources: Sources = TESTPLANE) -> Path:
    """Returns the folder with the programs, and builds them first if they are missing."""
    here = cache()
    here.mkdir(parents=True, exist_ok=True)
    folder = here / f"{sources.name}-{key(sources)}"
    with (here / f"{sources.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / sources.programs[-1][0]).exists():
            sys.stderr.write(f"building {sources.label}, once: about five minutes\n")
            folder.mkdir(exist_ok=True)
            _definitions(sources, folder)
            with tempfile.TemporaryDirectory(dir=here, prefix="go-build-") as compiled:
                for name, package in sources.programs:
                    _go_build(sources, package, folder / name, compiled)
            for old in here.glob(f"{sources.name}-*"):
                if time.time() - old.stat().st_mtime > UNUSED_S_MAX:  # another clone may use it now
                    shutil.rmtree(old)
        os.utime(folder)
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
            shutil.copyfile(file, folder / "crds" / file.name)  # files of the module itself are read-only


def _go_build(sources: Sources, package: str, program: Path, compiled: str) -> None:
    partial = program.with_suffix(".partial")
    env = {**os.environ, "GOCACHE": compiled, "GOFLAGS": "", "CGO_ENABLED": "0"}
    command = ["go", "build", *FLAGS, "-o", str(partial), package]
    done = subprocess.run(command, cwd=sources.folder, env=env, check=False)
    if done.returncode:
        raise BuildError(f"go build {package} failed (its words are above); PILOTLIGHT_TESTPLANE=FOLDER names programs")
    partial.replace(program)  # atomic: never a partial file


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(KARPENTER if sys.argv[1:] == ['karpenter'] else TESTPLANE)}\n")
    except BuildError as error:
        sys.exit(str(error))
