"""The process that learns what room is worth: a TrainingInput on standard input, PlacementValues on standard output,
one a line.

Owns its own bounds: the lowest priority, so much CPU time and memory, and it dies with its parent. The first
PlacementValues is what is known at once, the second what was learnt. What goes wrong is one line on standard error, and
status 1.
"""

from __future__ import annotations

import os
import random
import resource
import sys

import msgspec

from autoscaler.placement.learning import training
from autoscaler.placement.learning.learner import Draw
from autoscaler.state.placement_value import PlacementValues, TrainingInput
from pilotlight import process

CPU_S_MAX = 1800
"""2,000 nodes of 8 Devices and 256 Kinds took 207 s."""
MEMORY_BYTES_MAX = 1 << 30
"""Addresses; of memory they took 54 MiB."""
EXERCISE_BYTES_MAX = 64 << 20


def main() -> None:
    """`python -m pilotlight.processes.learner PARENT_PID`."""
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
    """No more than that, nor than there was before."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def build_random_draw(seed: int) -> Draw:
    """The same each time."""
    return random.Random(seed).randrange  # noqa: S311 - what is played, not a secret


def write_lesson(lesson: PlacementValues) -> None:
    """One line."""
    sys.stdout.buffer.write(msgspec.json.encode(lesson) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
