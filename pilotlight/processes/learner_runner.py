"""Has learnt what room is worth, in a process of its own, and tells the loop; keeps the result for the next start.

Owns the pace of the looks, the one process that learns at a time (`pilotlight.processes.learner`), and what is said of
it. When to learn and from what is `autoscaler.placement.learning.training`' to say. Only who leads learns; who leads
next has a file of its own or learns anew. It holds nothing up: until something was learnt the packer goes by sizes
alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence

import msgspec

from autoscaler.controller.loop import Loop
from autoscaler.drivers.local.lessons import LessonFile
from autoscaler.placement.learning import training
from autoscaler.placement.learning.training import Tried
from autoscaler.state.events import LessonLearnt
from autoscaler.state.placement_value import PlacementValues, TrainingInput
from autoscaler.state.world import World
from pilotlight.output import write_stderr
from pilotlight.processes.supervisor import select_module_flag

LOOK_EVERY_S = 15.0
"""A look goes over all Models and Slices, in a thread."""
LEARNS_S_MAX = 7200.0
"""It has the lowest priority; on a machine that is busy it may take long."""
LINE_BYTES_MAX = 8 << 20
"""Of one PlacementValues. The largest has 2 MiB, half of it the nodes and Kinds it was learnt from."""
REASON_BYTES_MAX = 4096
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class LearningError(Exception):
    """`str()` says in one line why nothing was learnt."""


class LearnerRunner:
    """`clock` is the loop's. `command` starts the process that learns; its parent's pid is added."""

    def __init__(
        self,
        loop: Loop,
        file: LessonFile,
        clock: Callable[[], float],
        say: Callable[[str], None] = write_stderr,
        command: Sequence[str] | None = None,
    ) -> None:
        self._loop = loop
        self._file = file
        self._clock = clock
        self._say = say
        self._command = command or (sys.executable, select_module_flag(), "pilotlight.processes.learner")
        self._tried: Tried | None = None

    def remember(self) -> None:
        """What was learnt before this process started is in force."""
        kept, problem = self._file.load()
        if problem:
            self._say(problem)
        if kept is not None:
            self._loop.observe((LessonLearnt(lesson=kept),))

    async def run(self) -> None:
        """Looks until cancelled; then the process that learns is gone, too."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Learns if it is time to."""
        world = self._loop.world
        if not world.leads or not world.synced:
            return
        found = await asyncio.to_thread(_due, world, self._tried, self._clock())
        if found is None:
            return
        exercise, why = found
        try:
            await self._learn(exercise)
        except LearningError as error:
            self._say(f"what room is worth could not be learnt ({error}): places go by what was known before")
            self._tried = Tried(self._clock(), failed=True)
        else:
            self._say(f"learnt: {training.describe_training_input(exercise)} ({why})")
            self._tried = Tried(self._clock(), failed=False)

    async def _learn(self, exercise: TrainingInput) -> None:
        """Raises LearningError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(os.getpid()),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=LINE_BYTES_MAX,
                env=os.environ | ONE_THREAD,
                start_new_session=True,  # a Ctrl-C at the terminal is not for it
            )
        except OSError as error:
            raise LearningError(f"its process cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(LEARNS_S_MAX):
                await self._hear(process, msgspec.json.encode(exercise))
        except TimeoutError:
            raise LearningError(f"not ready after {LEARNS_S_MAX:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()  # also closes its pipes

    async def _hear(self, process: asyncio.subprocess.Process, exercise: bytes) -> None:
        """Takes each PlacementValues that it tells, the last one being what was learnt."""
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise LearningError("it has no pipes")
        try:
            process.stdin.write(exercise)
            process.stdin.write_eof()
            last: PlacementValues | None = None
            while line := await process.stdout.readline():
                last = _read(line)
                self._loop.observe((LessonLearnt(lesson=last),))
        except (OSError, ValueError) as error:  # readline's for a line that is too long is a ValueError
            raise LearningError(f"what it says cannot be read: {error}") from error
        if last is None or not last.learnt:
            said = await process.stderr.read(REASON_BYTES_MAX)
            status = await process.wait()
            reason = " ".join(said.decode(errors="replace").split())
            raise LearningError(reason or f"it ended with status {status}")
        try:
            await asyncio.to_thread(self._file.save, last)
        except OSError as error:
            self._say(f"what was learnt of room cannot be kept ({error.strerror}): look at the state directory's disk")


def _due(world: World, tried: Tried | None, now_s: float) -> tuple[TrainingInput, str] | None:
    """(what is to be learnt from now, why); None: nothing is."""
    exercise = training.build_training_input(world, now_s)
    why = "" if exercise is None else training.training_reason(exercise, world.lesson, tried, now_s)
    return (exercise, why) if exercise is not None and why else None


def _read(line: bytes) -> PlacementValues:
    """Raises ValueError."""
    lesson = msgspec.json.decode(line, type=PlacementValues)
    training.decode_placement_values(lesson)
    return lesson
