"""A credential program: `docker-credential-fake` on the PATH, a shell script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = folder / "docker-credential-fake"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
