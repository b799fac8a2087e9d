"""The summary of failures: for each failed test its seed, the command that repeats it, and its log file.

A log file has the traceback and the captured output, which includes that of child processes and pods. The files are in
`build/test-logs` (or `--failure-logs FOLDER`).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

SEED = re.compile(r"python -m tests\.sim\S* (\d+)")
"""How a failed simulation names its seed."""

GROUP = re.compile(r"@[^@\[\]]+$")
"""What pytest-xdist appends to the node ids of a group."""


class Failure(NamedTuple):
    """A failed phase of a test."""

    test: str
    seed: str | None
    log: Path


class Failures:
    """Writes the log files and the summary; runs in the process that the user started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[Failure] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the log of a failed phase at once: it is there even if the run is killed."""
        if not report.failed:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / (re.sub(r"[^\w.-]+", "-", report.nodeid)[-180:] + f".{report.when}.log")
        sections = [f"----- {title} -----\n{content}" for title, content in report.sections]
        log.write_text("\n".join([report.longreprtext, *sections]), errors="replace")
        seed = SEED.search(report.longreprtext)
        self.found.append(Failure(GROUP.sub("", report.nodeid), seed.group(1) if seed else None, log))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints one block per failure."""
        if not self.found:
            return
        terminalreporter.section("how to repeat the failures")
        for failure in self.found:
            terminalreporter.line(f"FAILED  {failure.test}")
            if failure.seed:
                terminalreporter.line(f"  seed    {failure.seed}")
            terminalreporter.line(f"  repeat  {command(failure.test)}")
            terminalreporter.line(f"  log     {failure.log}")


def command(test: str) -> str:
    """The shell command that runs one test."""
    python = ".venv/bin/python"
    network = (
        f"{python} -m tests.cluster.network "
        if test.startswith(("tests/cluster/", "tests/gpu/", "tests/process/", "tests/wire/"))
        else ""
    )
    return f"{network}{python} -m pytest {shlex.quote(test)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--failure-logs FOLDER`."""
    parser.addoption("--failure-logs", metavar="FOLDER", default="build/test-logs", help="folder of the log files")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the summary, except in a worker of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(config.getoption("--failure-logs")).absolute()), "failures")
