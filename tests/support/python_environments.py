"""Virtual environments with locked packages that only tests need, installed once into the project's cache.

The packages of the environment NAME are those of `requirements/NAME.lock`, with their hashes. A test never installs
one, because that needs a network; a part of the tier does (tests/run.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.go_programs import UNUSED_S_MAX, cache

LOCKS = Path(__file__).parents[2] / "requirements"
_COMPLETE = "complete"
"""The file that is written last."""


class InstallError(Exception):
    """The environment cannot be installed here, or has not been; the message names the reason."""


def _no_more_steps(_: Path) -> None:
    pass


class PythonEnvironment(NamedTuple):
    """One virtual environment."""

    name: str
    """Name of its lock, and prefix of its folder in the cache."""
    finish: Callable[[Path], None] = _no_more_steps
    """Further steps after the installation of the packages, with the folder of the environment."""
    is_large: bool = False
    """Whether uv installs the packages, with hard links to its cache, so that environments share gigabytes of torch."""

    @property
    def folder(self) -> Path:
        """The folder of the environment. Other packages, steps or another Python result in another folder."""
        digest = hashlib.sha256((LOCKS / f"{self.name}.lock").read_bytes())
        digest.update(f"{sys.version}{inspect.getsource(self.finish)}".encode())
        return cache() / f"{self.name}-{digest.hexdigest()[:16]}"

    def find(self) -> Path:
        """Returns the folder of the environment. Raises InstallError if it has not been installed."""
        folder = self.folder
        if not (folder / _COMPLETE).exists():
            raise InstallError(f"the packages of requirements/{self.name}.lock are not installed")
        os.utime(folder)  # an installation in another clone removes folders that were not used for a week
        return folder

    def why_missing(self, install: str) -> str:
        """The reason why `find` returns no folder, with the fix `install`; empty if it returns one."""
        try:
            self.find()
        except InstallError as error:
            return f"{error} ({install})"
        return ""

    def install(self) -> Path:
        """Returns the folder of the environment, and installs it first if it is missing. Raises InstallError."""
        folder = self.folder
        cache().mkdir(parents=True, exist_ok=True)
        with (cache() / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                self._install_packages(folder)
            for old in cache().glob(f"{self.name}-*"):
                if time.time() - old.stat().st_mtime > UNUSED_S_MAX:  # another clone may use it now
                    shutil.rmtree(old)
        return self.find()

    def _install_packages(self, folder: Path) -> None:
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
        if self.is_large:
            uv = PythonEnvironment("installers").install() / "bin" / "uv"
            pip = [str(uv), "pip", "install", "--python", python]
        locked = ["-q", "--require-hashes", "--no-deps", "-r", str(LOCKS / f"{self.name}.lock")]
        for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *locked]):
            if subprocess.run(command, check=False).returncode:
                raise InstallError(f"requirements/{self.name}.lock: `{' '.join(command[1:3])}` failed, see its output")
        self.finish(folder)
        (folder / _COMPLETE).touch()
