"""Runs the commands of a tutorial as its reader does: in one folder, with the page's folders replaced by that one.

A test runs the blocks that `Reader.following` returns. The test fails if a command of the page is left at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from loadtest import tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
FOLDERS = re.compile(r"/tmp/pilotlight(?=/)|(?<=\s)(?=/(?:models|opt)/)")  # noqa: S108  as the pages say
"""Matches where the pages name a folder outside of the reader's."""
S_MAX = 180.0
"""For one command, on a machine with other work."""
COMMANDS = ("sh", "console", "python")
"""Languages of blocks that the reader executes: as a whole, line by line after `$ `, and as a program."""
CONTENT = ("", "yaml", "dockerfile")
"""Languages of blocks with output, documents and files."""


class Reader:
    """Follows the page: a folder like a clone, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: dict[str, str] = {}
        """Words of the page that its reader replaces, and what this one writes in their place."""
        self._done: set[str] = set()
        for name, module in (("python", ""), ("pilotlight", " -Pm pilotlight")):
            self.write(f".venv/bin/{name}", f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n', 0o755)
        for name in ("two-models.yaml",):
            self.write(f"examples/{name}", (ROOT / "examples" / name).read_text())
        path = f"{folder}/.venv/bin:{os.environ['PATH']}"
        self.environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT), "PATH": path}
        self.environment.pop("XDG_STATE_HOME", None)

    @contextlib.contextmanager
    def following(self, page: str) -> Iterator[dict[str, list[str]]]:
        """The blocks of a page by language. Fails if a command was not executed at the end."""
        found = blocks((TUTORIALS / page).read_text())
        yield found
        sessions = [command for session in found.get("console", []) for command in commands(session)]
        left = [one for one in (*found.get("sh", []), *sessions, *found.get("python", [])) if one not in self._done]
        assert not left, "\n".join([f"{page}: the test did not execute these commands:", *left])

    def omit(self, *others: str) -> None:
        """Leaves out commands of the page that another test executes."""
        self._done.update(others)

    def here(self, text: str) -> str:
        """With the temporary folder in place of the page's, and the words that the reader replaces."""
        for word, replacement in self.words.items():
            text = text.replace(word, replacement)
        return FOLDERS.sub(str(self.folder), text)

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the page."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.here(text))
        file.chmod(mode)

    def make_model(self, name: str, sentence: str) -> Path:
        """Write the weights of a tiny model."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        tiny_gguf.make_model(file, sentence)
        return file

    def export(self, command: str) -> None:
        """Sets the variables of a command `export NAME=VALUE...` of the page for the commands after it."""
        self._done.add(command)
        self.environment |= dict(re.findall(r"(\w+)=(\S+)", self.here(command).replace("$PWD", str(ROOT))))

    def run(self, command: str) -> str:
        """Run a command of the page to its end; return its output."""
        done = self.attempt(command)
        log = self.folder / "serve.log"
        output = log.read_text() if log.exists() else ""
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{output}"
        return done.stdout

    def attempt(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the page to its end, whatever its exit status is."""
        self._done.add(command)
        return subprocess.run(
            ["bash", "-euc", self.here(command)], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=S_MAX, check=False,
        )  # fmt: skip

    def run_program(self, program: str) -> str:
        """Run a Python program of the page; return its output."""
        self._done.add(program)
        self.write("program.py", program)
        return self.run(".venv/bin/python program.py")

    @contextlib.contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Run a command of the page that serves; Ctrl-C ends it."""
        self._done.add(command)
        with (self.folder / "serve.log").open("w+") as log:
            words = ["bash", "-euc", f"exec {self.here(command)}"]
            process = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
            try:
                until_s = time.monotonic() + S_MAX
                while "ready on" not in (output := (self.folder / "serve.log").read_text()):
                    assert process.poll() is None, output
                    assert time.monotonic() < until_s, output
                    time.sleep(0.05)
                yield
            finally:
                process.send_signal(signal.SIGINT)
                status = process.wait(S_MAX)
        assert status in {0, 128 + signal.SIGINT}, (self.folder / "serve.log").read_text()


def blocks(text: str) -> dict[str, list[str]]:
    """The contents of the fenced blocks by language, in order."""
    found: dict[str, list[str]] = {}
    for language, content in re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        found.setdefault(language, []).append(content)
    return found


def commands(session: str) -> list[str]:
    """The commands of a console session."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)", session, re.MULTILINE)
