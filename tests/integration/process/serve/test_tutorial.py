"""The tutorial for one machine: every command and program of the page runs, in the order of the page.

Each worker has a network of its own, so the default ports are free. The page's folder for models and the home folder
are replaced by temporary ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.standard

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "tutorials" / "one-machine.md"
MODELS = "/tmp/pilotlight/models"  # noqa: S108  as the page says
S_MAX = 180.0
"""For one command, on a machine with other work."""


class Reader:
    """Follows the page: a folder like a clone, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = folder / "models"
        (folder / "examples").mkdir()
        for name in (".venv/bin/python", ".venv/bin/pilotlight"):
            script = folder / name
            script.parent.mkdir(parents=True, exist_ok=True)
            module = " -Pm pilotlight" if name.endswith("pilotlight") else ""
            script.write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
            script.chmod(0o755)
        for name in ("two-models.yaml",):
            (folder / "examples" / name).write_text(self.here((ROOT / "examples" / name).read_text()))
        self.environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
        self.environment.pop("XDG_STATE_HOME", None)

    def here(self, text: str) -> str:
        """With the temporary folder in place of the page's."""
        return text.replace(MODELS, str(self.models))

    def run(self, command: str) -> str:
        """Run a command of the page to its end; return its output."""
        done = subprocess.run(
            ["bash", "-euc", self.here(command)], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Run a command of the page that serves; Ctrl-C ends it."""
        with (self.folder / "serve.log").open("w+") as log:
            words = ["bash", "-euc", f"exec {self.here(command)}"]
            process = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
            try:
                until_s = time.monotonic() + S_MAX
                while "ready on" not in (said := (self.folder / "serve.log").read_text()):
                    assert process.poll() is None, said
                    assert time.monotonic() < until_s, said
                    time.sleep(0.05)
                yield
            finally:
                process.send_signal(signal.SIGINT)
                status = process.wait(S_MAX)
        assert status in {0, 128 + signal.SIGINT}, (self.folder / "serve.log").read_text()


def blocks(text: str) -> dict[str, list[str]]:
    """The contents of the fenced blocks by language, in order."""
    found: dict[str, list[str]] = {}
    for language, content in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        found.setdefault(language, []).append(content)
    return found


@pytest.fixture
def reader() -> Iterator[Reader]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:  # short: its state directory holds Unix sockets
        yield Reader(Path(folder))


def test_each_command_of_the_one_machine_tutorial_works(reader: Reader) -> None:
    page = blocks(PAGE.read_text())
    demo, make_models, serve, call, serve_documents, plan, make_key, serve_with_gateways = page["sh"]
    (program,) = page["python"]
    assert demo == "make demo\n"  # test_demo runs it
    reader.run(make_models)
    with reader.serving(serve):
        assert "This is what Ada says." in reader.run(call)
        (reader.folder / "call.py").write_text(program)
        assert reader.run(".venv/bin/python call.py").strip() == "This is what Ada says."
        (session,) = page["console"]
        for command in re.findall(r"^\$ (.+)$", session, re.MULTILINE):
            assert "ada" in reader.run(command)
    with reader.serving(serve_documents):
        assert "This is what Ada says." in reader.run(call)
        assert "And these are the words of Bob." in reader.run(call.replace('"ada"', '"bob"'))
        assert "This is what Ada says." in reader.run(call)
    assert "ada" in reader.run(plan)
    key = reader.run(make_key)
    assert "acme" in key
    with reader.serving(serve_with_gateways):
        secret = re.search(r"\bpl-\S+", key)
        assert secret is not None
        assert "This is what Ada says." in reader.run(f"{call.strip()} -H 'Authorization: Bearer {secret[0]}'")
