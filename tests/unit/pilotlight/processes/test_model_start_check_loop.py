"""The report of `serve` about Models that cannot start, when it checks, and what it reads before they start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from autoscaler.controller import loop
from autoscaler.spec.model import Model
from autoscaler.state.events import DocumentsSeen, Synced
from autoscaler.state.world import World
from pilotlight.processes import model_start_check_loop
from pilotlight.processes.console import SAID_MAX
from pilotlight.processes.model_start_check_loop import Preflight
from tests.support.builders.worlds import device, model, replace_fields, world
from tests.support.harness.manual_loop import SteppedLoop
from tests.support.waiting import until

A, B = model("a", 10), model("b", 10)
WHY = "/m/b.gguf does not exist; put the model there, or correct spec.artifact"
UNKNOWN = model("b", 0)
"""Its file could not be read yet, so its memory is unknown."""


class House:
    """A stepped loop with its Preflight. `messages`: its lines; `worlds`: all states of the loop."""

    def __init__(self) -> None:
        self.stepped = SteppedLoop(world([], [device()]))
        self.obstacles: dict[str, str] = {}
        self.raising: set[str] = set()
        self.looked: list[str] = []
        self.messages: list[str] = []
        self.worlds: list[World] = []
        self.preflight = Preflight(self.stepped.loop, self.obstacle, self.read_again, self.messages.append)
        self.stepped.loop.listeners += [self.preflight.on_step, lambda step: self.worlds.append(step.after)]

    def obstacle(self, of: Model) -> str:
        self.looked.append(of.name)
        if of.name in self.raising:
            raise ValueError("bad command")
        return self.obstacles.get(of.name, "")

    async def read_again(self) -> None:
        self.stepped.step(DocumentsSeen(models=(A, model("b", 7))))

    async def until(self, what: str, look: Callable[[World], bool]) -> None:
        """Step until the `World` satisfies the condition."""
        await until(what, lambda: look(self.stepped.step()))

    def play(self, scenario: Callable[[], object]) -> None:
        """Run a scenario in parallel with the Preflight."""

        async def both() -> None:
            looking = asyncio.create_task(self.preflight.run())
            made = scenario()
            assert asyncio.iscoroutine(made)
            await made
            looking.cancel()

        asyncio.run(both())


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(model_start_check_loop, "LOOK_EVERY_S", 0.01)
    return House()


def test_model_start_problem_and_its_fix_are_each_printed_once(house: House) -> None:
    house.obstacles = {"b": WHY}

    async def scenario() -> None:
        house.stepped.step(DocumentsSeen(models=(A, B)))
        await house.until("the obstacle is reported", lambda made: made.learned.obstacles == {"b": WHY})
        assert house.messages == [f"Model b cannot start: {WHY}; its requests get 503 model_start_failed"]
        looks = len(house.looked)
        await house.until("it looks again", lambda _: len(house.looked) >= looks + 6)
        house.obstacles = {}
        await house.until("it is gone", lambda made: not made.learned.obstacles)
        assert house.messages[1:] == ["the problem is fixed for b"]

    house.play(scenario)


def test_models_of_changed_documents_are_checked_before_the_next_interval(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_start_check_loop, "LOOK_EVERY_S", 3600.0)

    async def scenario() -> None:
        house.stepped.step(DocumentsSeen(models=(A,)))
        await house.until("a is looked at", lambda _: house.looked[-1:] == ["a"])
        house.stepped.step(DocumentsSeen(models=(A, B)))
        await house.until("b is looked at", lambda _: house.looked[-1:] == ["b"])

    house.play(scenario)


def test_models_are_not_checked_before_devices_are_listed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of an engine depends on the devices."""
    monkeypatch.setattr(model_start_check_loop, "LOOK_EVERY_S", 3600.0)
    house.stepped.loop.world = replace_fields(house.stepped.loop.world, synced=False)

    async def scenario() -> None:
        house.stepped.step(DocumentsSeen(models=(A,)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert house.looked == []
        house.stepped.step(Synced())
        await house.until("a is looked at", lambda _: house.looked == ["a"])

    house.play(scenario)


def test_memory_of_a_new_model_file_is_known_before_a_start_is_allowed(house: House) -> None:
    """Otherwise it would start on the whole device and restart when its memory is known."""
    house.obstacles = {"b": WHY}

    async def scenario() -> None:
        house.stepped.step(DocumentsSeen(models=(A, UNKNOWN)))
        await house.until("the obstacle is reported", lambda made: bool(made.learned.obstacles))
        house.obstacles = {}
        await house.until("it is gone", lambda made: not made.learned.obstacles)

    house.play(scenario)
    known = [made for made in house.worlds if made.models.get(B.name) and made.models[B.name].memory_bytes]
    assert known[0].learned.obstacles == {"b": WHY}, "the memory first"


def test_models_that_cannot_start_are_summarized_beyond_the_line_limit(house: House) -> None:
    many = tuple(model(f"m{number:03}", 1) for number in range(100))
    house.obstacles = {one.name: WHY for one in many}

    async def scenario() -> None:
        house.stepped.step(DocumentsSeen(models=many))
        await house.until("all are reported", lambda made: len(made.learned.obstacles) == 100)
        assert len(house.messages) == SAID_MAX + 1
        assert house.messages[-1] == f"{100 - SAID_MAX} more models cannot start: `pilotlight status` lists them"

    house.play(scenario)


def test_model_check_that_raises_quarantines_only_that_model(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str | None, str]] = []
    monkeypatch.setattr(loop, "report_fault", lambda name, what, reason: reported.append((name, what)))
    house.obstacles, house.raising = {"b": WHY}, {"a"}

    async def scenario() -> None:
        house.stepped.step(DocumentsSeen(models=(A, B)))
        await house.until("the obstacle of b is reported", lambda made: made.learned.obstacles == {"b": WHY})
        assert set(house.stepped.loop.world.learned.faults) == {"a"}
        assert reported == [("a", "preflight")]

    house.play(scenario)
