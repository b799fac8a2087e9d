"""The process that learns placement values: reads a TrainingInput on standard input and writes PlacementValues to
standard output, one per line.

It runs at the lowest priority with limited CPU time and memory, and exits with its parent. The first PlacementValues is
the initial estimate, the second the learnt result. An error is one line on standard error with exit status 1.
"""

from __future__ import annotations

import os
import random
import resource
import sys

import msgspec

from autoscaler.placement.learning import training
from autoscaler.placement.learning.learner import Draw
from autoscaler.state.world import PlacementValues, TrainingInput
from pilotlight import process

CPU_S_MAX = 1800
"""2,000 nodes with 8 devices and 256 kinds took 207 s."""
MEMORY_BYTES_MAX = 1 << 30
"""Address space. Those took 54 MiB of memory."""
EXERCISE_BYTES_MAX = 64 << 20


def main() -> None:
    """Run `python -m pilotlight.processes.learner PARENT_PID`."""
    process.die_with_parent(int(sys.argv[1]))
    os.nice(19)
    limit_resource(resource.RLIMIT_CPU, CPU_S_MAX)
    limit_resource(resource.RLIMIT_AS, MEMORY_BYTES_MAX)
    try:
        exercise = msgspec.json.decode(sys.stdin.buffer.read(EXERCISE_BYTES_MAX), type=TrainingInput)
        write_lesson(training.build_initial_values(exercise))
        write_lesson(training.learn_placement_values(exercise, build_random_draw))
    except (ValueError, MemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def limit_resource(what: int, most: int) -> None:
    """Set a resource limit without exceeding the current hard limit."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def build_random_draw(seed: int) -> Draw:
    """Return a reproducible random generator."""
    return random.Random(seed).randrange  # noqa: S311 - simulation, not a secret


def write_lesson(lesson: PlacementValues) -> None:
    """Write one line."""
    sys.stdout.buffer.write(msgspec.json.encode(lesson) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
