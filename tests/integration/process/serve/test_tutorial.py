"""The tutorials for one machine and one GPU: every command and program of a page runs, in the order of the page.

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
TUTORIALS = ROOT / "docs" / "tutorials"
FOLDER = "/tmp/pilotlight"  # noqa: S108  as the pages say
S_MAX = 180.0
"""For one command, on a machine with other work."""


class Reader:
    """Follows the page: a folder like a clone, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        return text.replace(FOLDER, str(self.folder))

    def run(self, command: str) -> str:
        """Run a command of the page to its end; return its output."""
        done = subprocess.run(
            ["bash", "-euc", self.here(command)], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=S_MAX, check=False,
        )  # fmt: skip
        log = self.folder / "serve.log"
        said = log.read_text() if log.exists() else ""
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{said}"
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
    page = blocks((TUTORIALS / "one-machine.md").read_text())
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


def test_each_command_of_the_one_gpu_tutorial_works(reader: Reader) -> None:
    """With the simulated NVIDIA driver, as on a machine without a GPU."""
    page = blocks((TUTORIALS / "one-gpu.md").read_text())
    simulate, make_models = page["sh"]
    (documents,) = page["yaml"]
    serve, calls, kill = (commands(session) for session in page["console"])
    reader.environment |= dict(re.findall(r"(\w+)=(\S+)", reader.here(simulate).replace("$PWD", str(ROOT))))
    reader.run(make_models)
    (reader.folder / "models.yaml").write_text(reader.here(documents))
    with reader.serving(serve[0]):
        call_ada, status, call_bob, _ = calls
        assert "Hello, I am Ada" in reader.run(call_ada)
        assert re.search(r"^ada +ready +1 ready .*GPU-51313131", reader.run(status), re.MULTILINE)
        assert "Good day, my name is Bob" in reader.run(call_bob)
        assert re.search(r"^bob +ready +1 ready .*GPU-51313131", reader.run(status), re.MULTILINE)
        kill_bob, call_bob_again = kill
        reader.run(kill_bob)
        assert "Good day, my name is Bob" in reader.run(call_bob_again)
    said = (reader.folder / "serve.log").read_text()
    assert re.search(r"ada +draining +make room for bob", said)
    assert re.search(r"bob +failed +was killed by SIGKILL", said)


def commands(session: str) -> list[str]:
    """The commands of a console session."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)", session, re.MULTILINE)
