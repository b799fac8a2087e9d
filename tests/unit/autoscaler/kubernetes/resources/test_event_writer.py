"""Sending Events to an API server that fails some writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.controller.loop import LoopStep
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.resources import event_writer
from autoscaler.kubernetes.resources.event_writer import Events
from autoscaler.kubernetes.resources.events import FAILURES_MAX, ModelEvent, Regarding
from autoscaler.state.actions import Plan
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S
from tests.support.builders.worlds import device, model, world
from tests.support.harness.faults.fault_injection import inject

WOKEN = ModelEvent(ModelName("ada"), "Woken", "wake ada: 3 waiting")
PASSING = (
    ApiError(500, "InternalError", "etcdserver: leader changed"),
    ApiError(503, "ServiceUnavailable", "shutting down"),
    ApiError(429, "TooManyRequests", "slow down"),
    UnreachableError("no response"),
)


def about(name: str) -> Regarding:
    return Regarding("pilotlight.dev/v1alpha1", "Model", "default", name, f"uid-{name}")


class Server:
    """Raises the given errors for the Events of the object `ada`, and accepts all others."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.tries = 0
        """Attempts to write an Event about `ada`."""
        self.written: list[tuple[str, int]] = []
        """The object and the count of each Event."""

    async def create(self, path: str, body: Object) -> Object:
        """Like `Api.create`."""
        assert path == "/api/v1/namespaces/default/events"
        name = body["involvedObject"]["name"]
        if name == "ada":
            self.tries += 1
            if self._errors:
                raise self._errors.pop()
        self.written.append((name, body["count"]))
        return body


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0)


class House:
    """Events that are being sent to a server. The test moves the clock."""

    def __init__(self, server: Server) -> None:
        self.now_s = 0.0
        self.events = Events(cast("Api", server), clock=lambda: self.now_s, wall=lambda: self.now_s)

    def note(self, name: str) -> None:
        self.events.note(about(name), WOKEN)


@asynccontextmanager
async def sending(server: Server) -> AsyncIterator[House]:
    house = House(server)
    task = asyncio.create_task(house.events.run())
    yield house
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled(), "nothing ended it before"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "PER_S", 1e9)


@pytest.mark.parametrize("error", PASSING, ids=["500", "503", "429", "unreachable"])
async def test_event_is_sent_again_after_a_transient_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "RETRY_S", 0.0)
    server = Server(error)
    async with sending(server) as house:
        house.note("ada")
        await until(lambda: bool(server.written))
        assert (server.written, house.events.dropped, house.events.trouble) == ([("ada", 1)], 0, "")


async def test_rejected_event_is_dropped() -> None:
    server = Server(ApiError(403, "Forbidden", "no right"))
    async with sending(server) as house:
        house.note("ada")
        await until(lambda: house.events.dropped == 1)
        house.note("ben")
        await until(lambda: bool(server.written))
        assert (server.written, server.tries) == ([("ben", 1)], 1)


async def test_transient_error_of_one_object_does_not_delay_events_of_others() -> None:
    """The error may be that of a webhook for one namespace. The delayed Event contains the later occurrences."""
    server = Server(PASSING[0])
    async with sending(server) as house:
        house.note("ada")
        house.note("ben")
        await until(lambda: bool(server.written))
        house.now_s = event_writer.RETRY_S - 0.1
        house.note("ada")
        house.note("cat")
        await until(lambda: len(server.written) > 1)
        assert server.tries == 1
        house.now_s = event_writer.RETRY_S
        house.note("dan")
        await until(lambda: len(server.written) > 3)
        assert server.written == [("ben", 1), ("cat", 1), ("ada", 2), ("dan", 1)]


async def test_event_is_dropped_after_the_maximum_number_of_transient_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "RETRY_S", 0.0)
    server = Server(*PASSING[:1] * FAILURES_MAX)
    async with sending(server) as house:
        house.note("ada")
        await until(lambda: server.tries == FAILURES_MAX - 1)
        assert house.events.dropped == 0
        house.note("ada")
        await until(lambda: house.events.dropped == 2)
        house.note("ada")
        await until(lambda: bool(server.written))
        assert (server.written, server.tries) == ([("ada", 1)], FAILURES_MAX + 1)


async def test_unexpected_exception_drops_its_event_and_others_are_sent_at_once() -> None:
    server = Server(LookupError("injected"), LookupError("injected"))
    async with sending(server) as house:
        house.note("ada")
        house.note("ben")
        await until(lambda: bool(server.written))
        assert (server.written, house.events.dropped) == ([("ben", 1)], 1)


async def test_event_that_cannot_be_built_is_dropped_and_others_are_sent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, point = Server(), "autoscaler.kubernetes.resources.events:build_event_manifest"
    inject(monkeypatch, point, lambda due, *_: due.regarding.name == "ada", expected=False)
    async with sending(server) as house:
        for name in ("ada", "ben", "ada", "eve"):
            house.note(name)
        await until(lambda: len(server.written) == 2)
        assert ([name for name, _ in server.written], server.tries) == (["ben", "eve"], 0)


async def test_memory_error_while_sending_an_event_ends_the_event_writer() -> None:
    house = House(Server(MemoryError()))
    house.note("ada")
    with pytest.raises(MemoryError):
        await house.events.run()


def test_model_whose_event_raises_is_reported_and_others_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inject(
        monkeypatch, "autoscaler.kubernetes.resources.events:_transition_event",
        lambda move, _: move.model == "a", expected=False,
    )  # fmt: skip
    faults, models = list[tuple[str, str]](), [replace(model(name, 20), uid=name) for name in ("a", "b")]
    moves = tuple(
        Transition(at_s=0.0, replica=ReplicaId(one.name), model=one.name, slices=(), before=S.STARTING,
                   after=S.FAILED, verb="seen", reason="x")
        for one in models
    )  # fmt: skip
    at = world(models, [device("g1", 80, "n1")], [])
    events = Events(
        cast("Api", Server()),
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        fault=lambda name, what, _: faults.append((name, what)),
    )
    events.on_step(LoopStep(at, at, Plan(), (), moves, 0.0, 0.0, 0.0))
    due = events._book.take(0.0)
    assert due is not None
    assert (due.regarding.name, events._book.take(0.0), faults) == ("b", None, [("a", "events")])
