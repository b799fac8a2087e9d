"""The narrator: one line for each important transition, written to a descriptor without blocking."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.controller.loop import LoopStep
from autoscaler.explain.decision_log import RefusedCalls
from autoscaler.state.actions import Plan
from autoscaler.state.capacity import Capacity
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import World
from pilotlight.processes.console import Narrator
from tests.support.harness.faults.fault_injection import inject

LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3}  (.*)$")


def step(*moves: tuple[str, S], reason: str = "why") -> LoopStep:
    rows = tuple(
        Transition(at_s=1.0, replica=ReplicaId("r"), model=ModelName(model), slices=(), before=None, after=after,
                   verb="seen", reason=reason)
        for model, after in moves
    )  # fmt: skip
    world = World(epoch=1)
    return LoopStep(world, world, Plan(), (), rows, 0.0, 0.0, 0.0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(write)


def lines(read: int) -> list[str]:
    output = b""
    while True:
        try:
            piece = os.read(read, 1 << 16)
        except BlockingIOError:
            break
        if not piece:
            break
        output += piece
    matches = [LINE.match(line) for line in output.decode().splitlines()]
    return [match[1] for match in matches if match]


def test_replica_transitions_are_printed_except_transient_states(pipe: tuple[int, int]) -> None:
    narrator = Narrator(pipe[1])
    narrator.on_step(step(("ada", S.PENDING), ("ada", S.STARTING), ("ada", S.SCRUBBING)))
    narrator.on_step(step(("barbara", S.READY), ("ada", S.GONE), reason="a line\nbroken"))
    assert lines(pipe[0]) == [
        "ada  starting   why",
        "barbara  ready      a line broken",
        "ada      gone       a line broken",
    ]
    os.close(pipe[0])


def test_rejection_of_requests_for_an_unplaceable_model_is_printed(pipe: tuple[int, int]) -> None:
    Narrator(pipe[1]).refused([RefusedCalls(at_s=1.0, model=ModelName("huge"), reason="fits on no device: needs 30Gi")])
    assert lines(pipe[0]) == ["huge  refused    fits on no device: needs 30Gi"]
    os.close(pipe[0])


def test_provider_fault_is_printed_once_until_the_fault_changes(pipe: tuple[int, int]) -> None:
    narrator = Narrator(pipe[1])
    quiet = World(epoch=1, capacity=Capacity(providers=("g4",)))

    def wrong(**fields: dict[str, str]) -> World:
        return World(epoch=1, capacity=replace(quiet.capacity, **fields))

    closed, silent = wrong(closed={"g4": "NodePool g4 does not exist"}), wrong(trouble={"g4": "does not respond"})
    for before, after in ((quiet, closed), (closed, quiet), (quiet, closed), (closed, silent), (silent, silent)):
        narrator.on_step(step()._replace(before=before, after=after))
    assert lines(pipe[0]) == [
        "g4  provider   offers nothing: NodePool g4 does not exist",
        "g4  provider   does not respond",
    ]
    os.close(pipe[0])


def test_narrator_drops_lines_instead_of_blocking_on_a_stalled_reader(pipe: tuple[int, int]) -> None:
    narrator = Narrator(pipe[1])
    for _ in range(3000):
        narrator.on_step(step(("ada", S.READY), reason="x" * 100))
    shown = len(lines(pipe[0]))
    assert shown < 3000
    narrator.on_step(step(("ada", S.GONE)))
    assert lines(pipe[0]) == [f"({3000 - shown} lines were not shown)", "ada  gone       why"]
    os.close(pipe[0])


def test_writing_to_a_closed_pipe_raises_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    Narrator(pipe[1]).on_step(step(("ada", S.READY)))


def test_exception_for_one_model_does_not_suppress_the_lines_of_others(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = list[tuple[str, str]]()
    inject(
        monkeypatch, "pilotlight.processes.console:Narrator._tell", lambda _, name, *rest: name == "ada", expected=False
    )
    narrator = Narrator(pipe[1], lambda name, what, _: faults.append((name, what)))
    narrator.on_step(step(("ada", S.READY), ("ben", S.READY)))
    assert lines(pipe[0]) == ["ben  ready      why"]
    assert faults == [("ada", "console")]
