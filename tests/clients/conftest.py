"""Writes the result of the client matrix to build/client-matrix.json, which `make bench-clients` prints."""

from __future__ import annotations

import json

import pytest

from tests.clients.matrix import ROOT, load


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests of the matrix; nothing if some were skipped or not selected."""
    ended = {
        state: [one for one in terminalreporter.stats.get(state, []) if "test_matrix.py" in one.nodeid]
        for state in ("passed", "failed", "skipped", "deselected", "error")
    }
    if ended["passed"] and not (ended["skipped"] or ended["deselected"] or ended["error"]):
        limited = sum(len(client.without) for client in load())
        counts = {"passed": len(ended["passed"]), "limited": limited, "failed": len(ended["failed"])}
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build/client-matrix.json").write_text(json.dumps(counts))
