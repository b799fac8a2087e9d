"""Writes the result of a complete run of the client matrix to build/client-matrix.json."""

from __future__ import annotations

import pytest

from tests.clients import record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Save the result. With xdist this runs once, in the process that has the reports of all workers."""
    record.save_run(
        {
            state: [one.nodeid for one in terminalreporter.stats.get(state, ())]
            for state in ("passed", "failed", "error")
        }
    )
