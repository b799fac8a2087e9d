"""Finds flaky tests: `python -m tests.flaky RUNS [TIER]` repeats a tier while two processes use the CPU.

Appends one line per run to tests/flaky-log.tsv: commit, tier, duration in seconds, result, failed tests. Exit status 1
if a run failed. The logs of a failed run are kept in build/flaky.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.run import LOGS

ROOT = Path(__file__).parent.parent
LOG = ROOT / "tests" / "flaky-log.tsv"
HEAD = "commit\ttier\tseconds\tresult\tfailed\n"
BUSY = 2
"""Number of CPU-bound processes: as many as CI has cores."""


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that use a core each."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failed(output: str) -> list[str]:
    """The node ids of the failed tests, each once, in order."""
    marked = (line.removeprefix("FAILED  ") for line in output.splitlines() if line.startswith("FAILED  "))
    return list(dict.fromkeys(marked))


def main() -> int:
    """Exit status 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=int, help="how often")
    parser.add_argument("tier", nargs="?", default="test", choices=("fast", "test", "deep"))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options for pytest")
    asked = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    if not LOG.exists():
        LOG.write_text(HEAD)
    bad = 0
    for number in range(1, asked.runs + 1):
        begin = time.monotonic()
        with busy(BUSY):
            command = [sys.executable, "-m", "tests.run", asked.tier, *asked.options]
            done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        seconds, tests = time.monotonic() - begin, failed(done.stdout)
        result = "failed" if done.returncode else "passed"
        with LOG.open("a") as log:
            log.write(f"{commit.stdout.strip()}\t{asked.tier}\t{seconds:.0f}\t{result}\t{' '.join(tests)}\n")
        print(f"run {number} of {asked.runs}: {result} after {seconds:.0f} s {' '.join(tests)}", flush=True)
        if done.returncode:
            bad += 1
            kept = ROOT / "build" / "flaky" / f"{commit.stdout.strip()}-{time.time():.0f}"
            shutil.copytree(LOGS, kept)
            (kept / "output.txt").write_text(done.stdout + done.stderr)
            print(done.stdout[-3000:], done.stderr[-1000:], flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
