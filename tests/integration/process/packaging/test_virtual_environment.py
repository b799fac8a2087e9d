"""scripts/venv.sh: works with any suitable Python; one clear error if there is none. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
NO_ENSUREPIP = f"""#!/bin/sh
case "$*" in *ensurepip*) exit 1;; esac
exec {sys.executable} "$@"
"""
"""Like Debian's python3 without python3-venv."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with an empty lock file, in a folder with a space; `python3` is a stub that records its arguments."""
    folder = tmp_path / "a clone"
    (folder / "scripts").mkdir(parents=True)
    (folder / "requirements").mkdir()
    (folder / "requirements" / "dev.lock").touch()
    shutil.copy(ROOT / "scripts" / "venv.sh", folder / "scripts")
    stub(tmp_path / "bin" / "python3", f'#!/bin/sh\necho "$*" >> "{tmp_path}/commands"\n')
    return folder


def stub(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make(clone: Path, python: Path) -> subprocess.CompletedProcess[str]:
    path = f"{clone.parent}/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", clone / "scripts" / "venv.sh"], env={**os.environ, "PATH": path, "PYTHON": str(python)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_python_without_ensurepip_installs_with_the_pip_of_another_python(clone: Path) -> None:
    made = make(clone, stub(clone.parent / "python", NO_ENSUREPIP))
    assert made.returncode == 0, made.stderr
    commands = (clone.parent / "commands").read_text().splitlines()
    assert commands[-1].startswith("-m pip --python .venv/bin/python install ")
    assert commands[-1].endswith("--require-hashes --no-deps -r requirements/dev.lock")
    assert (clone / ".venv" / "ready").exists()
    where = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-c", "import sys; print(sys.path)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(clone) in where.stdout, "the clone is importable"
    package = clone / "pilotlight"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print('runs', sys.argv[1:])")
    ran = subprocess.run(
        [clone / ".venv" / "bin" / "pilotlight", "a b"], cwd="/", capture_output=True, text=True, check=True
    )
    assert ran.stdout == "runs ['a b']\n"


def test_missing_pip_is_reported_and_leaves_the_environment_not_ready(clone: Path) -> None:
    stub(clone.parent / "bin" / "python3", "#!/bin/sh\nexit 1\n")
    made = make(clone, stub(clone.parent / "python", NO_ENSUREPIP))
    assert made.returncode == 1
    assert made.stderr.strip().endswith("has pip: install python3-venv")
    assert not (clone / ".venv" / "ready").exists()


@pytest.mark.skipif(find_spec("ensurepip") is None, reason="this Python has no ensurepip, so there is no pip to ask")
def test_locked_packages_for_other_platforms_are_skipped(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels of atheris exist for one platform only: its line in the lock file has hashes and a platform marker."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lock = clone / "requirements" / "dev.lock"
    lock.write_text("none==1.0 ; platform_machine == 'pdp11' \\\n    --hash=sha256:" + "0" * 64 + "\n")
    made = make(clone, Path(sys.executable))
    assert made.returncode == 0, made.stderr
    lock.write_text("none==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    assert make(clone, Path(sys.executable)).returncode != 0


def test_failed_install_does_not_mark_the_environment_as_ready(clone: Path) -> None:
    stub(clone.parent / "bin" / "python3", '#!/bin/sh\ncase "$*" in *install*) exit 1;; esac\n')
    assert make(clone, stub(clone.parent / "python", NO_ENSUREPIP)).returncode != 0
    assert not (clone / ".venv" / "ready").exists()


@pytest.mark.standard
def test_make_targets_depend_on_a_ready_virtual_environment() -> None:
    text = (ROOT / "Makefile").read_text()
    rules = dict(
        line.split(":", 1) for line in text.splitlines() if line[:1].isalpha() and ":" in line and ":=" not in line
    )
    needing = {name for name in rules if name not in {"venv", "clean", "lock", "SEEDS"}}  # lock: needed by venv itself
    ready = {"venv", "check", "compiled"}
    assert all(ready & set(rules[name].split("##")[0].split()) for name in needing), needing
    assert rules["venv"].split("##")[0].strip() == ".venv/ready"
