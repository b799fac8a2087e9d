"""Builds programs of Go modules once for each set of sources, Go version and platform, into the project's cache.

A module's folder has go.mod and go.sum, which state the version and the checksum of every module, and creates the
folder `NAME-KEY` of the cache. Processes that need the same build at the same time build it once. Go's compile cache
is kept separately and removed afterwards: it takes up to 3 GB.
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
    """Prefix of its folder in the cache."""
    label: str
    folder: Path
    """The folder of go.mod and go.sum."""
    programs: tuple[tuple[str, str], ...]
    """(program, package) in build order. The presence of the last program means that the build is complete."""
    variable: str
    """The environment variable that names programs which exist already."""
    minutes: int
    """Approximate duration of the build on two cores."""
    definitions: tuple[str, ...] = ()
    """Folders of CustomResourceDefinitions, below packages of the module: copied to `crds`."""
    headers: tuple[tuple[str, str], ...] = ()
    """(path of an include, file of a module) for modules with C code that lack a header."""


class BuildError(Exception):
    """The build is not possible here; the message names the missing tool."""


def cache() -> Path:
    """The project's cache folder for results that are expensive to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight"


def key(sources: Sources) -> str:
    """Returns the cache key of a build: other sources, another Go version or platform result in another folder."""
    digest = hashlib.sha256()
    for file in (sources.folder / name for name in _FILES):
        if file.exists():
            digest.update(file.read_bytes())
    if shutil.which("go") is None:
        raise BuildError(f"{sources.label}: needs Go 1.26, or {sources.variable}, which names what is built")
    reported = subprocess.run(["go", "env", "GOVERSION", "GOOS", "GOARCH"], check=True, capture_output=True)
    digest.update(reported.stdout)
    return digest.hexdigest()[:16]


def find(sources: Sources) -> Path | None:
    """Returns the folder with the programs, or None if they have not been built. Raises BuildError."""
    folder = cache() / f"{sources.name}-{key(sources)}"
    if not (folder / sources.programs[-1][0]).exists():
        return None
    os.utime(folder)  # a build in another clone removes folders that were not used for a week
    return folder


def build(sources: Sources) -> Path:
    """Returns the folder with the programs, and builds them first if they are missing. Raises BuildError."""
    here = cache()
    here.mkdir(parents=True, exist_ok=True)
    folder = here / f"{sources.name}-{key(sources)}"
    with (here / f"{sources.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if find(sources) is None:
            sys.stderr.write(f"building {sources.label}, once: about {sources.minutes} minutes\n")
            folder.mkdir(exist_ok=True)
            _definitions(sources, folder)
            with tempfile.TemporaryDirectory(dir=here, prefix="go-build-") as compiled:
                environment = _environment(sources, Path(compiled))
                for name, package in sources.programs:
                    _go_build(sources, package, folder / name, environment)
            for old in here.glob(f"{sources.name}-*"):
                if time.time() - old.stat().st_mtime > UNUSED_S_MAX:  # another clone may use it now
                    shutil.rmtree(old)
        os.utime(folder)
    return folder


def _module(sources: Sources, module: str) -> Path:
    """The folder of a module that go.mod requires, in Go's own cache."""
    command = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module]
    subprocess.run(["go", "mod", "download", module], cwd=sources.folder, check=True)
    found = subprocess.run(command, cwd=sources.folder, check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def _definitions(sources: Sources, folder: Path) -> None:
    if not sources.definitions:
        return
    shutil.rmtree(folder / "crds", ignore_errors=True)
    (folder / "crds").mkdir()
    for path in sources.definitions:
        module = "/".join(path.split("/")[:2])
        for file in sorted((_module(sources, module) / path.removeprefix(f"{module}/")).glob("*.yaml")):
            shutil.copyfile(file, folder / "crds" / file.name)  # files of the module itself are read-only


def _environment(sources: Sources, compiled: Path) -> dict[str, str]:
    """The environment of the compiler. `compiled` is the folder of its cache, and of the headers."""
    environment = {**os.environ, "GOCACHE": str(compiled), "GOFLAGS": "", "CGO_ENABLED": "0"}
    for include, source in sources.headers:
        module = "/".join(source.split("/")[:3])
        file = compiled / "include" / include
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(_module(sources, module) / source.removeprefix(f"{module}/"))
        environment |= {"CGO_ENABLED": "1", "CPATH": str(compiled / "include")}
    return environment


def _go_build(sources: Sources, package: str, program: Path, environment: dict[str, str]) -> None:
    partial = program.with_suffix(".partial")
    command = ["go", "build", *FLAGS, "-o", str(partial), package]
    done = subprocess.run(command, cwd=sources.folder, env=environment, check=False)
    if done.returncode:
        raise BuildError(f"go build {package} failed, see its output above; {sources.variable} names existing programs")
    partial.replace(program)  # atomic: never a partial file
