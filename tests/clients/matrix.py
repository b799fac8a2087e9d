"""The client matrix: which clients are tested, how their programs are installed and started, and what they lack.

`clients.toml` has the facts. tests/clients/test_matrix.py tests each client and behaviour except those in `without`,
and docs/clients.py writes the same facts into docs/reference/clients.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.go_programs import UNUSED_S_MAX, cache

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BEHAVIOURS = {
    "list": "list", "chat": "chat", "stream": "stream", "tools": "tools", "structured": "structured output",
    "embeddings": "embeddings", "upload": "form upload", "error": "error", "cold_start": "cold start",
    "cancel": "cancelled stream",
}  # fmt: skip
"""Argument of a program -> name in the documentation."""


class Remark(NamedTuple):
    """Why a client does not have a behaviour, or what the behaviour needs."""

    text: str
    link: str
    """The client's documentation, issue or source line that shows it."""


class Client(NamedTuple):
    """One client."""

    name: str
    """Name of its folder."""
    title: str
    language: str
    package: str
    error: str
    """The client's exception for an unknown model."""
    error_shows: str
    """What the exception shows: our code, or the text of our message if the client's API has no codes."""
    without: Mapping[str, Remark]
    """Behaviours that it does not have."""
    notes: Mapping[str, Remark]
    """What behaviours need."""
    is_standard: bool
    """Whether `make test` runs it, with the packages of requirements/dev.lock."""

    @property
    def folder(self) -> Path:
        """The folder of its program."""
        return HERE / self.name

    @property
    def tool(self) -> str:
        """The program that it needs."""
        return "chromium" if self.name == "browser" else LANGUAGES[self.language].tool

    @property
    def version(self) -> str:
        """The locked version of the package."""
        path = ROOT / "requirements/dev.lock" if self.is_standard else self.folder / LANGUAGES[self.language].lock
        text = path.read_text()
        if self.language == "Node":
            return str(json.loads(text)["packages"][f"node_modules/{self.package}"]["version"])
        found = re.search(rf"(?m){re.escape(self.package)}(?:==| v|</artifactId>\s*<version>)([\w.]+)", text)
        if found is None:
            raise ValueError(f"{path}: {self.package} is missing; lock it")
        return found[1]

    @property
    def installation(self) -> Path:
        """The folder of its installation. Other packages or another program result in another folder."""
        digest = hashlib.sha256(sys.version.encode())
        folders = [self.folder, HERE / "openai_node"] if self.name == "browser" else [self.folder]
        files = [file for folder in folders for file in folder.rglob("*.*") if file.is_file()]
        for file in [self.folder / "requirements.txt"] if self.language == "Python" else sorted(files):
            digest.update(file.name.encode() + file.read_bytes())
        return cache() / "clients" / f"{self.name}-{digest.hexdigest()[:16]}"

    def install(self) -> None:
        """Install it, unless the cache has it. Raises CalledProcessError."""
        clients = self.installation.parent
        clients.mkdir(parents=True, exist_ok=True)
        with (clients / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.installation.exists():
                with tempfile.TemporaryDirectory(dir=clients) as made:
                    work = Path(made) / "work"
                    shutil.copytree(self.folder, work)
                    for command in LANGUAGES[self.language].install(self):
                        subprocess.run(command, cwd=work, check=True)
                    work.rename(self.installation)
            os.utime(self.installation)
            for old in clients.glob(f"{self.name}-*"):
                if time.time() - old.stat().st_mtime > UNUSED_S_MAX:  # another clone may use it now
                    shutil.rmtree(old)

    def command(self) -> Sequence[str]:
        """The command that starts its program."""
        return LANGUAGES[self.language].command(self)


class Language(NamedTuple):
    """How programs of a language are installed and started."""

    tool: str
    lock: str
    install: Callable[[Client], Sequence[Sequence[str]]]
    """The commands, which run in a copy of the program's folder."""
    command: Callable[[Client], Sequence[str]]


def _npm(client: Client) -> Sequence[Sequence[str]]:
    install = ["npm", "ci", "--ignore-scripts", "--prefer-offline"]
    if client.name != "browser":
        return [install]
    behaviours = str(HERE / "openai_node/behaviours.mjs")
    bundle = ["node_modules/.bin/esbuild", "page.mjs", "--bundle", "--outfile=page.js"]
    return [install, ["cp", behaviours, "."], bundle]


def _python(client: Client) -> Sequence[str]:
    python = sys.executable if client.is_standard else str(client.installation / "venv/bin/python")
    return [python, str(client.folder / "main.py")]


LANGUAGES = {
    "Python": Language(
        sys.executable, "requirements.txt",
        lambda _: [
            [sys.executable, "-m", "venv", "venv"],
            ["venv/bin/pip", "install", "-q", "--require-hashes", "--no-deps", "-r", "requirements.txt"],
        ],
        _python,
    ),
    "Node": Language(
        "npm", "package-lock.json", _npm, lambda client: ["node", str(client.installation / "main.mjs")],
    ),
    "Go": Language(
        "go", "go.mod", lambda _: [["go", "build", "-mod=readonly", "-buildvcs=false", "-o", "main", "."]],
        lambda client: [str(client.installation / "main")],
    ),
    "Java": Language(
        "mvn", "pom.xml",
        lambda _: [["mvn", "-q", "-B", "compile", "dependency:copy-dependencies"]],
        lambda client: [
            "java", "-cp", f"{client.installation}/target/classes:{client.installation}/target/dependency/*", "Main",
        ],
    ),
}  # fmt: skip


def load() -> list[Client]:
    """The clients, in the order of the documentation."""

    def remarks(found: Mapping[str, tuple[str, str]]) -> dict[str, Remark]:
        return {behaviour: Remark(*two) for behaviour, two in found.items()}

    clients = tomllib.loads((HERE / "clients.toml").read_text())
    return [
        Client(
            name=name,
            title=facts["title"],
            language=facts["language"],
            package=facts["package"],
            error=facts["error"],
            error_shows=facts.get("error_shows", "model_not_found"),
            without=remarks(facts.get("without", {})),
            notes=remarks(facts.get("notes", {})),
            is_standard=facts.get("standard", False),
        )
        for name, facts in clients.items()
    ]


if __name__ == "__main__":
    for one in load():
        if one.is_standard:
            print(f"{one.name}: in requirements/dev.lock", flush=True)
        elif shutil.which(one.tool):
            print(f"{one.name}: {one.installation}", flush=True)
            one.install()
        else:
            print(f"{one.name}: skipped, because {one.tool} is missing", flush=True)
