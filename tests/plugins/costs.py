"""Measures what each test costs: `pytest --costs FILE` writes one JSON line per test.

A line has the wall time of set-up, call and teardown, the CPU time of this process and of the child processes that it
reaped, the number of processes that the test started, the time spent in starting them, and the number of sockets that
it bound or connected. `python -m tests.plugins.report FILE` summarises such files. All times are in seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest

PROCESS_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
SOCKET_EVENTS = frozenset({
    "socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname",
    "socket.gethostbyaddr",
})  # fmt: skip
"""Audit events (PEP 578) of a test that starts a process or uses the network. `socketpair` raises none of these."""


@dataclass
class Meter:
    """Counters of this process; they only grow."""

    processes: int = 0
    sockets: int = 0
    starting_s: float = 0.0
    collecting_s: float = 0.0

    def audit(self, event: str, _: tuple[object, ...]) -> None:
        """An audit hook. It cannot be removed, so it must stay cheap."""
        if event in PROCESS_EVENTS:
            self.processes += 1
        elif event in SOCKET_EVENTS:
            self.sockets += 1

    def reading(self) -> dict[str, float]:
        """The current counters and CPU times."""
        times = os.times()
        return {
            "cpu_s": times.user + times.system,
            "children_cpu_s": times.children_user + times.children_system,
            "processes": self.processes,
            "sockets": self.sockets,
            "starting_s": self.starting_s,
        }


@dataclass(eq=False)
class Costs:
    """The plug-in: it measures in the process that runs the test, and writes in the one that the user started."""

    output: TextIO | None
    meter: Meter = field(default_factory=Meter)
    before: dict[str, float] = field(default_factory=dict)
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """Adds up the time of imports: a module is imported when it is collected."""
        begin = time.perf_counter()
        report = yield
        if isinstance(collector, pytest.Module):
            self.meter.collecting_s += time.perf_counter() - begin
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Reads the counters before a test."""
        self.before = self.meter.reading()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Generator[None, Any, pytest.TestReport]:
        """Adds the differences to the report of the teardown, which is the last of a test."""
        report: pytest.TestReport = yield
        if call.when == "teardown":
            now = self.meter.reading()
            report.user_properties.append(("costs", {key: now[key] - self.before[key] for key in now}))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the line of a test once its three phases are reported."""
        if self.output is None:
            return
        line = self.phases.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed"})
        line[f"{report.when}_s"] = round(report.duration, 6)
        if report.outcome != "passed":
            line["outcome"] = report.outcome
        if report.when == "teardown":
            costs = dict(report.user_properties).get("costs", {})
            line |= {key: round(value, 6) for key, value in costs.items()}  # type: ignore[attr-defined]
            self.output.write(json.dumps(self.phases.pop(report.nodeid)) + "\n")
            self.output.flush()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Writes what a worker of pytest-xdist spent on imports."""
        self.write_collection(getattr(node, "workeroutput", {}).get("collecting_s"))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Reports the time of imports to the process that writes."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["collecting_s"] = self.meter.collecting_s
        else:
            self.write_collection(self.meter.collecting_s)
            if self.output is not None:
                self.output.close()

    def write_collection(self, seconds: float | None) -> None:
        """One line per process that collected."""
        if self.output is not None and seconds:
            self.output.write(json.dumps({"collecting_s": round(seconds, 3)}) + "\n")


def time_process_starts(meter: Meter) -> None:
    """Adds the time in `Popen`, which asyncio uses too, to the meter."""
    start = subprocess.Popen.__init__

    def timed(self: Any, *arguments: Any, **options: Any) -> None:
        begin = time.perf_counter()
        try:
            start(self, *arguments, **options)
        finally:
            meter.starting_s += time.perf_counter() - begin

    subprocess.Popen.__init__ = timed  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--costs FILE`."""
    parser.addoption("--costs", metavar="FILE", help="append what each test costs to FILE, one JSON line per test")


def pytest_configure(config: pytest.Config) -> None:
    """Measures if requested; a worker of pytest-xdist measures and leaves the writing to the first process."""
    file = config.getoption("--costs")
    if not file:
        return
    writes = not hasattr(config, "workerinput")
    costs = Costs(Path(file).open("a") if writes else None)  # noqa: SIM115 - closed when the session ends
    sys.addaudithook(costs.meter.audit)
    time_process_starts(costs.meter)
    config.pluginmanager.register(costs, "costs")
