"""The version before this one, as a folder that its processes run in: what an upgrade replaces.

It is the commit in the environment variable BASE, else the last release, or, before there is one, a commit that is
known to run (BEFORE). It is read from the project's history.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
BEFORE = "3cdf5248ef4715ab2dee7d7bdb717099dcd02932"
PACKAGES = ("pilotlight", "autoscaler", "gateway", "artifacts", "loadtest")


def older(folder: Path) -> Path:
    """Its tree. Without the history of the project there is none, and the test says so."""
    commit = os.environ.get("BASE") or _git("describe", "--tags", "--abbrev=0") or BEFORE
    tarred = subprocess.run(
        ["git", "-C", str(HERE), "archive", "--format=tar", commit, *PACKAGES],
        capture_output=True, check=False, timeout=30,
    )  # fmt: skip
    if tarred.returncode:
        pytest.skip("the version before this one is not here: it needs the project's history (git fetch --unshallow)")
    with tarfile.open(fileobj=io.BytesIO(tarred.stdout)) as archive:
        archive.extractall(folder / "older")  # noqa: S202  our own
    return folder / "older"


def _git(*words: str) -> str:
    command = ["git", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=30, text=True).stdout.strip()
