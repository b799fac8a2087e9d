"""The summary of failures: for each failed test its seed, the command that repeats it, and its log file.

A log file has the traceback and the captured output, which includes that of child processes and pods. The files are in
`build/test-logs` (or `--failure-logs FOLDER`).
"""

from __future__ import annotations

import os
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

    def __init__(self, folder: Path, *, compiled: bool) -> None:
        self.folder = folder
        self.compiled = compiled
        self.found: list[Failure] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the log of a failed phase at once: it is there even if the run is killed."""
        if report.failed:
            self._write(report, report.when)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Writes the log of a file that cannot be imported."""
        if report.failed:
            self._write(report, "collect")

    def _write(self, report: pytest.TestReport | pytest.CollectReport, phase: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / (re.sub(r"[^\w.-]+", "-", report.nodeid)[-180:] + f".{phase}.log")
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
            terminalreporter.line(f"  repeat  {command(failure.test, compiled=self.compiled)}")
            terminalreporter.line(f"  log     {failure.log}")


def command(test: str, *, compiled: bool = False) -> str:
    """The shell command that runs one test as this run did: with its budget, and against the same gateway."""
    from tests.support.example_budget import is_deep  # not earlier: Hypothesis is to be imported by its own plug-in

    profile = "--hypothesis-profile=deep " if is_deep() else ""
    if compiled:
        return f"bash scripts/compiled.sh test {profile}-k {shlex.quote(test.rpartition('::')[2].partition('[')[0])}"
    sizes = "".join(f"{name}={os.environ[name]} " for name in ("SEEDS", "SURGES") if name in os.environ)
    python = ".venv/bin/python"
    network = (
        f"{python} -m tests.integration.network_namespace "
        if test.startswith(("tests/gpu/", "tests/integration/", "tests/wire/"))
        else ""
    )
    return f"{sizes}{network}{python} -m pytest {profile}{shlex.quote(test)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--failure-logs FOLDER`."""
    parser.addoption("--failure-logs", metavar="FOLDER", default="build/test-logs", help="folder of the log files")
    parser.addoption("--compiled", action="store_true", help="the gateway is the compiled one (scripts/compiled.sh)")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the summary, except in a worker of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        folder = Path(config.getoption("--failure-logs")).absolute()
        config.pluginmanager.register(Failures(folder, compiled=config.getoption("--compiled")), "failures")
