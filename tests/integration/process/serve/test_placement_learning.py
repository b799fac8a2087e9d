"""A separate process learns placement values for the autoscaler; they are stored and used for placement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from autoscaler.drivers.local.learned_files import LessonFile
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.placement.learning import training as lessons
from autoscaler.state.events import LessonLearnt
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, SliceClass
from autoscaler.state.world import Alike, PlacementValues, TrainingInput, World
from loadtest.result import Ending
from pilotlight.processes.learner_runner import LearnerRunner
from tests.support.builders.placement_values import cluster, exercise_of, lesson
from tests.support.builders.worlds import replace_fields
from tests.support.harness.manual_loop import SteppedLoop
from tests.support.harness.serve.serve import Serving, fake, running, serving, settings
from tests.support.waiting import until

MIB = 1 << 20
GPUS = [{"name": name, "model": "tiny", "memory": "100Mi"} for name in ("gpu0", "gpu1")]


class House:
    """A stepped loop with a LearnerRunner whose process is `command`, and its output."""

    def __init__(self, folder: Path, one: World, command: Sequence[str] | None = None) -> None:
        self.stepped = SteppedLoop(one)
        self.messages: list[str] = []
        self.file = LessonFile(StateDirectory.open(folder / "state"))
        self.tutor = LearnerRunner(
            self.stepped.loop, self.file, lambda: self.stepped.now_s, self.messages.append, command
        )

    @property
    def lessons(self) -> list[PlacementValues]:
        """Return all observed placement values."""
        return [one.lesson for one in self.stepped.loop.observed if isinstance(one, LessonLearnt)]


async def test_learning_in_a_child_process_gives_the_same_values_as_in_process(tmp_path: Path) -> None:
    one = cluster(2)
    house, exercise = House(tmp_path, one), exercise_of(one)
    looking = asyncio.create_task(house.tutor.look())
    await until("sizes are known at once", lambda: house.lessons or looking.done(), 120)
    # While this process is paused, the other one goes on: the final values may be there, too.
    assert house.lessons[:1] == [lessons.build_initial_values(exercise)], house.messages
    await asyncio.wait_for(looking, 300)
    expected = lessons.learn_placement_values(exercise, lambda seed: random.Random(seed).randrange)
    assert house.lessons[1:] == [expected]
    assert house.messages == ["learnt: 2 request shapes, 2 nodes, seed 5000 (no training has succeeded yet)"]
    assert house.file.load() == (expected, "")
    house.stepped.step()
    assert house.stepped.loop.world.learned.lesson == expected
    house.stepped.now_s += 2 * lessons.AGAIN_S
    await house.tutor.look()
    assert len(house.messages) == 1, "it does not drift by itself"


def script(what: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import os, sys; sys.stdin.read(); {what}")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (script("sys.exit('MemoryError: no room')"), "MemoryError: no room"),
        (script("os.kill(os.getpid(), 9)"), "it exited with status -9"),
        (script("print('{}')"), "its output cannot be decoded: Object missing required field `exercise`"),
        (("/nowhere/python",), "its process cannot be started: No such file or directory"),
    ],
)
async def test_failed_learning_process_logs_one_line_and_is_retried(
    tmp_path: Path, command: tuple[str, ...], reason: str
) -> None:
    house = House(tmp_path, cluster(), command)
    for after_s in (0.0, lessons.FAILED_S - 1, 1.0):
        house.stepped.now_s += after_s
        await house.tutor.look()
    line = f"values for placement could not be learned ({reason}); the previous ones stay in use"
    assert house.messages == [line, line]
    assert house.lessons == []


async def test_follower_autoscaler_does_not_start_the_learning_process(tmp_path: Path) -> None:
    house = House(tmp_path, replace_fields(cluster(), leads=False), ("/nowhere/python",))
    await house.tutor.look()
    assert house.messages == []


async def test_cancelled_placement_learning_kills_its_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    house = House(
        tmp_path, cluster(), script(f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} '); import time; time.sleep(99)")
    )
    looking = asyncio.create_task(house.tutor.look())
    pid = int(await until("it runs", lambda: note.exists() and note.read_text()))
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- in `serve` -------------------------------------------------------------------------------------------------------


def gauge(one: Serving, by: str) -> bool:
    """Return whether /metrics reports that placements are chosen by this method."""
    return f'pilotlight_lesson_kinds{{by="{by}"}} 2.0' in one.text("/metrics")


async def test_serve_restores_learned_placement_values_after_a_restart(tmp_path: Path) -> None:
    ada, bob = (fake(tmp_path, name, "--tokens-per-s", "0", gpu={"memory": size}) for name, size in SIZES)
    async with serving(tmp_path, ada, bob, {**settings(), "devices": GPUS}) as one:
        for name, _ in SIZES:
            assert (await one.call(name)).ending is Ending.COMPLETED
        await until(
            "it is learnt", lambda: "pilotlight: learnt: 2 request shapes, 1 nodes, seed 5000" in one.output(), 480
        )
        await until("it is in force", lambda: gauge(one, "replays"))
        before = (one.state / "lesson.json").read_bytes()
        await one.stop()
        await one.start()
        await until("it is remembered", lambda: gauge(one, "replays"))
        assert (one.state / "lesson.json").read_bytes() == before
        assert one.output().count("learnt: ") == 1


async def test_learning_process_ends_with_the_autoscaler(tmp_path: Path) -> None:
    """`serve` leaves no process behind, whether it is killed or stopped meanwhile: `serving` checks this."""
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, {**settings(), "devices": GPUS}) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        (first,) = await until("it learns", lambda: learners(one), 180)
        killed = one.autoscaler()
        os.kill(killed, signal.SIGKILL)
        await until("it is gone", lambda: not running(first))
        await until("another leads", lambda: one.autoscaler() not in {0, killed} and one.answers(), 120)
        assert (await one.call("ada")).ending is Ending.COMPLETED
        (second,) = await until("that one learns", lambda: learners(one), 180)
        await until("it gives way to others", lambda: psutil.Process(second).nice() == 19)
        await one.stop()
        assert not running(second)
        assert "could not be learned" not in one.output()


def learners(one: Serving) -> list[int]:
    """Return the pids of its learner processes."""
    found = []
    for child in psutil.Process(one.autoscaler()).children():
        with contextlib.suppress(psutil.Error):  # it has exited meanwhile
            if "pilotlight.processes.learner" in child.cmdline():
                found.append(child.pid)
    return found


SIZES = (("ada", "40Mi"), ("bob", "60Mi"))


@pytest.mark.parametrize("apart", [False, True], ids=["untaught", "taught"])
@pytest.mark.standard
async def test_serve_places_models_by_the_learned_placement_values(tmp_path: Path, apart: bool) -> None:
    """By size alone bob is packed with ada and fills a device; a lesson that full devices are a loss separates them."""
    ada, bob = (fake(tmp_path, name, "--tokens-per-s", "0", gpu={"memory": size}, idleSeconds=600)
                for name, size in SIZES)  # fmt: skip
    async with serving(tmp_path, ada, bob, {**settings(), "devices": GPUS}) as one:
        if apart:
            await one.stop()
            lane = SliceClass(100 * MIB, "tiny")
            of = TrainingInput(nodes=(Alike((lane, lane), CPU_MAX, BYTES_MAX, 1),), demand=(), seed=1)
            LessonFile(StateDirectory.attach(one.state)).save(lesson(of, 1, apart=True))
            await one.start()
        for name, _ in SIZES:
            assert (await one.call(name)).ending is Ending.COMPLETED
        places = {record.slices for record in one.records()}
        assert len(places) == (2 if apart else 1)
