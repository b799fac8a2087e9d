"""Starts fake engines for tests, on a free port and with options, and always stops them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import loadtest

SCRIPT = Path(loadtest.__file__).parent / "fake_engine"  # the package that this run imports, wherever the tests are


class FakeEngine(NamedTuple):
    """A fake engine that is listening."""

    url: str
    process: subprocess.Popen[str]
    transcript: Path

    def calls(self) -> list[dict[str, object]]:
        """The transcript so far."""
        return [json.loads(line) for line in self.transcript.read_text().splitlines()]


def command(*knobs: str) -> list[str]:
    """The command that starts a fake engine."""
    return [sys.executable, "-S", "-E", str(SCRIPT), *knobs]


@contextmanager
def fake_engine(folder: Path, *knobs: str) -> Iterator[FakeEngine]:
    """Runs a fake engine that has reported its address. It is killed at the end, whichever signals it ignores."""
    transcript = folder / "transcript.jsonl"
    process = subprocess.Popen(
        command("--transcript", str(transcript), *knobs), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        output = process.stdout.readline()
        assert "listening on" in output, output
        yield FakeEngine(output.split()[-1], process, transcript)
    finally:
        process.kill()
        process.communicate()
