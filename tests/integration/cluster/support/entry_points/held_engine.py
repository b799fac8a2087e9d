"""A fake engine that generates no response before a file exists: `python -S -E held_engine.py FILE ARGUMENTS...`.

A test uses it for a request that must still run when the test looks. The request ends after the test creates the file.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

if not __package__:  # started with the path of this file
    sys.path[0] = str(Path(__file__).resolve().parents[5])

from loadtest.fake_engine import engine

LOOK_S = 0.02


class Held(engine.Call):
    """A request that has a slot, and waits for the file."""

    release = Path()
    """The file."""

    def begin(self) -> None:
        """Starts to generate once the file exists."""
        if self.release.exists():
            super().begin()
            return
        self.granted_s = time.monotonic()  # it has its slot, which it frees if its client disconnects
        self.timer = asyncio.get_running_loop().call_later(LOOK_S, self.begin)


def command(release: Path, *knobs: str) -> list[str]:
    """The command that starts such an engine; `release` is the file."""
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(release), *knobs]


def main(release: str, *knobs: str) -> None:
    """Runs until killed."""
    Held.release = Path(release)
    vars(engine).update(Call=Held)  # the engine creates its requests with this class
    engine.main(list(knobs))


if __name__ == "__main__":
    main(*sys.argv[1:])
