"""Runs the learner of placement values in a process of its own, passes results to the loop, and stores them.

Runs at most one learner (`pilotlight.processes.learner`) at a time and logs its results;
`autoscaler.placement.learning.training` decides when to learn and from what. Only the leader learns; the next
leader uses its own file or learns again. Nothing waits for the learner: until there is a result, the packer uses sizes
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
from autoscaler.drivers.local.learned_files import LessonFile
from autoscaler.exception_handling import Failure, attempt
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.placement.learning import training
from autoscaler.placement.learning.training import Tried
from autoscaler.state.events import LessonLearnt
from autoscaler.state.world import PlacementValues, TrainingInput, World
from pilotlight.processes.supervisor import select_module_flag
from pilotlight.safe_output import write_stderr

LOOK_EVERY_S = 15.0
"""Check interval. A check reads all Models and slices, in a thread."""
LEARNS_S_MAX = 7200.0
"""Time limit. The learner has the lowest priority and may take long on a busy machine."""
LINE_BYTES_MAX = 8 << 20
"""Limit of one PlacementValues line. The largest has 2 MiB, half of it the nodes and kinds of its input."""
REASON_BYTES_MAX = 4096
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class LearningError(Exception):
    """A run of the learner failed; `str()` is the reason, in one line."""


class LearnerRunner:
    """Runs the learner. `clock` is the loop's. `command` starts the learner; the parent's pid is appended."""

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
        """Restore the values that a previous process stored."""
        kept, problem = self._file.load()
        if problem:
            self._say(problem)
        if kept is not None:
            self._loop.observe((LessonLearnt(lesson=kept),))

    async def run(self) -> None:
        """Check until cancelled, which also ends a running learner."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Learn if it is due."""
        world = self._loop.world
        if not world.leadership.leads or not world.leadership.synced:
            return
        now_s = self._clock()
        done = await asyncio.to_thread(lambda: attempt(lambda: _due(world, self._tried, now_s)))
        if isinstance(done, Failure):  # finds the Models that cause it
            found = self._loop.contained("learning", lambda world: _due(world, self._tried, now_s))
        else:
            found = done
        if found is None:
            return
        exercise, why = found
        try:
            await self._learn(exercise)
        except LearningError as error:
            self._say(f"values for placement could not be learned ({error}); the previous ones stay in use")
            self._tried = Tried(self._clock(), failed=True)
        else:
            self._say(f"learnt: {training.describe_training_input(exercise)} ({why})")
            self._tried = Tried(self._clock(), failed=False)

    async def _learn(self, exercise: TrainingInput) -> None:
        """Run the learner. Raises LearningError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(os.getpid()),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=LINE_BYTES_MAX,
                env=os.environ | ONE_THREAD,
                start_new_session=True,  # so that Ctrl-C at the terminal does not reach it
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
        """Pass each PlacementValues to the loop and store the last, which is the learnt result."""
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise LearningError("it has no pipes")
        try:
            process.stdin.write(exercise)
            process.stdin.write_eof()
            last: PlacementValues | None = None
            while line := await process.stdout.readline():
                last = _read(line)
                self._loop.observe((LessonLearnt(lesson=last),))
        except (OSError, ValueError) as error:  # readline raises ValueError for an oversized line
            raise LearningError(f"its output cannot be decoded: {error}") from error
        if last is None or not last.learnt:
            said = await process.stderr.read(REASON_BYTES_MAX)
            status = await process.wait()
            reason = " ".join(said.decode(errors="replace").split())
            raise LearningError(reason or f"it exited with status {status}")
        try:
            await asyncio.to_thread(self._file.save, last)
        except OSError as error:
            self._say(
                f"the learned values for placement cannot be stored ({error.strerror}): check the disk of the state "
                "directory"
            )


def _due(world: World, tried: Tried | None, now_s: float) -> tuple[TrainingInput, str] | None:
    """Return the training input and the reason for learning now, or None. Quarantined Models are not learned."""
    world = mask_quarantined(world)
    exercise = training.build_training_input(world, now_s)
    why = "" if exercise is None else training.training_reason(exercise, world.learned.lesson, tried, now_s)
    return (exercise, why) if exercise is not None and why else None


def _read(line: bytes) -> PlacementValues:
    """Decode PlacementValues. Raises ValueError."""
    lesson = msgspec.json.decode(line, type=PlacementValues)
    training.decode_placement_values(lesson)
    return lesson
