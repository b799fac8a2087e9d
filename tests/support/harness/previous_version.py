"""The previous version, as a folder from which its processes run: the starting point of an upgrade.

It is the commit in the environment variable BASE, else the last release. Before the first release it is a commit that
is known to run (BEFORE). It is read from the project's history.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3]
BEFORE = "3cdf5248ef4715ab2dee7d7bdb717099dcd02932"
PACKAGES = ("pilotlight", "autoscaler", "gateway", "artifacts", "loadtest")


def older(folder: Path) -> Path:
    """Extracts the tree of that version. Skips the test if the project history is missing."""
    commit = os.environ.get("BASE") or _git("describe", "--tags", "--abbrev=0") or BEFORE
    tarred = subprocess.run(
        ["git", "-C", str(HERE), "archive", "--format=tar", commit, *PACKAGES],
        capture_output=True, check=False, timeout=30,
    )  # fmt: skip
    if tarred.returncode:
        pytest.skip("the version before this one is not here: it needs the project's history (git fetch --unshallow)")
    with tarfile.open(fileobj=io.BytesIO(tarred.stdout)) as archive:
        archive.extractall(folder / "older")  # noqa: S202  our own archive
    return folder / "older"


def _git(*words: str) -> str:
    command = ["git", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=30, text=True).stdout.strip()
