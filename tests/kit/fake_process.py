"""Starts fake engines for tests: on a free port, with knobs, and surely ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import loadtest

SCRIPT = Path(loadtest.__file__).parent / "fake_engine"  # the one that this run imports, wherever the tests lie


class FakeEngine(NamedTuple):
    """A fake engine that listens."""

    url: str
    process: subprocess.Popen[str]
    transcript: Path

    def calls(self) -> list[dict[str, object]]:
        """The transcript so far."""
        return [json.loads(line) for line in self.transcript.read_text().splitlines()]


def command(*knobs: str) -> list[str]:
    """How a fake engine is started."""
    return [sys.executable, "-S", "-E", str(SCRIPT), *knobs]


@contextmanager
def fake_engine(folder: Path, *knobs: str) -> Iterator[FakeEngine]:
    """A fake engine that has said where it listens. Killed at the end, whatever it ignores."""
    transcript = folder / "transcript.jsonl"
    process = subprocess.Popen(
        command("--transcript", str(transcript), *knobs), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "listening on" in said, said
        yield FakeEngine(said.split()[-1], process, transcript)
    finally:
        process.kill()
        process.communicate()
