"""A watched collection matches the server even if events are duplicated, reordered, late or lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.drivers.kubernetes import driver
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.fold.fold import fold
from autoscaler.kubernetes import watch
from autoscaler.kubernetes.api import BURST, WRITES_PER_S, Api, ApiError, Object, RequestRateLimiter, UnreachableError
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.state.world import Replica, World
from tests.support.example_budget import examples
from tests.support.fakes.kubernetes.api_server import Event, Server
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import launch, replica


def thing(name: str, version: int, text: str = "") -> Object:
    return {"metadata": {"name": name, "namespace": "n", "resourceVersion": str(version)}, "text": text}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the waits, during which nothing else happens here."""
    for name in ("RETRY_S", "SUSPECT_S"):
        monkeypatch.setattr(watch, name, 0.0)
    monkeypatch.setattr(driver, "ADOPT_SECONDS_MAX", 0.0)


@asynccontextmanager
async def following(server: Server) -> AsyncIterator[Watched[str]]:
    changes: list[Change[str]] = []
    watched = Watched(cast("Api", server), "/things", lambda found: cast("str", found["text"]), changes.extend)
    run = asyncio.create_task(watched.run())
    try:
        async with asyncio.timeout(60):
            await watched.synced.wait()
            yield watched
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def known(watched: Watched[str]) -> dict[str, str]:
    return {key.name: text for key, text in watched.items.items()}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


OPS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12)


def history(ops: list[tuple[str, bool]]) -> tuple[list[Event], dict[str, Object]]:
    """The events of (name, deleted) operations, and the objects that remain."""
    events, truth = list[Event](), dict[str, Object]()
    for version, (name, deleted) in enumerate(ops, 2):
        found = thing(name, version, f"{name}{version}")
        if deleted and name not in truth:
            continue
        events.append(("DELETED" if deleted else "MODIFIED" if name in truth else "ADDED", found))
        truth.pop(name, None) if deleted else truth.update({name: found})
    return events, truth


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(OPS, st.data())
def test_watched_objects_after_reordered_events_match_a_fresh_list(ops: list[tuple[str, bool]], data: Any) -> None:
    events, truth = history(ops)
    sent = data.draw(st.permutations(events + data.draw(st.lists(st.sampled_from(events))) if events else []))

    async def scenario() -> None:
        server = Server()
        server.stream = list(sent)
        async with following(server) as watched:
            await server.idle.wait()
            assert known(watched) == {name: found["text"] for name, found in truth.items()}
            assert server.lists == 1

    asyncio.run(scenario())


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(OPS, st.data())
def test_lost_events_are_recovered_by_a_new_list(ops: list[tuple[str, bool]], data: Any) -> None:
    events, truth = history(ops)
    kept = data.draw(st.lists(st.sampled_from(events), unique_by=lambda e: e[1]["metadata"]["resourceVersion"])
                     if events else st.just([]))  # fmt: skip

    async def scenario() -> None:
        server = Server()
        server.stream = [event for event in events[:-1] if event in kept]  # the last one is always lost
        async with following(server) as watched:
            await server.idle.wait()
            server.truth, server.version = truth, 100
            watched.expect("100")
            await until(lambda: server.lists == 2)
            await until(lambda: known(watched) == {name: found["text"] for name, found in truth.items()})

    asyncio.run(scenario())


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
LIFE: tuple[dict[str, Any], ...] = (
    {},
    {"conditions": [UNSCHEDULABLE]},
    {"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
    {"containerStatuses": [{"name": "engine", "state": {"terminated": {"exitCode": 3}}}]},
)
"""Statuses of a pod, in order."""


def simulate_watch(ends: list[int]) -> tuple[list[Event], dict[str, Object]]:
    """Events of pods that reach these stages of LIFE (one beyond it: deleted), and the objects that remain."""
    events, truth = list[Event](), dict[str, Object]()
    for number, end in enumerate(ends):
        one, model = replica(f"r{number}", ("engine", "{port}"), (f"n/gpu{number}",))
        made = pod_manifest.build_pod_manifest(one, model, launch(model, "", 1), "image")
        for stage in range(end + 1):
            version = 2 + stage * len(ends) + number
            metadata = {**made["metadata"], "uid": one.id, "namespace": "n", "resourceVersion": str(version)}
            found = {**made, "metadata": metadata, "status": LIFE[min(stage, len(LIFE) - 1)]}
            events.append(("DELETED" if stage == len(LIFE) else "MODIFIED", found))
            truth[one.id] = found
        if end == len(LIFE):
            del truth[one.id]
    return events, truth


async def world_of(server: Server) -> World:
    """An empty `World` after all observations of a driver that has read everything."""
    one = KubernetesDriver(cast("Api", server), "n", launch, lambda _: "image", assume_after_s=0.0, inventory=False)
    async with running(one) as observed:
        await server.idle.wait()
        for _ in range(20):  # a replica that is gone is reported clean one turn later
            await asyncio.sleep(0)
        return fold(World(epoch=1), observed.all, 1.0)[0]


def shown(one: Replica) -> tuple[object, ...]:
    """The fields of a replica on which decisions depend."""
    return one.state, one.model, one.resources.slices, one.runtime.waits, one.failure


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(st.lists(st.integers(0, len(LIFE)), min_size=1, max_size=3), st.data())
def test_replica_states_after_reordered_events_match_a_fresh_list(ends: list[int], data: Any) -> None:
    """Case 28: events duplicated and in any order, including the end of each pod."""
    events, truth = simulate_watch(ends)
    again = data.draw(st.lists(st.sampled_from(events), max_size=4))
    sent = data.draw(st.permutations(events + again))

    async def scenario() -> None:
        followed, listed = Server(), Server()
        followed.stream, listed.truth = list(sent), truth
        worlds = [await world_of(server) for server in (followed, listed)]
        first, second = ({id: shown(one) for id, one in world.replicas.items()} for world in worlds)
        assert first == second

    asyncio.run(scenario())


async def test_watch_that_reaches_the_expected_version_in_time_does_not_relist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SUSPECT_S", 30.0)
    server = Server()
    async with following(server) as watched:
        await server.idle.wait()
        watched.expect("5")
        doubted = [watched._due_s is not None]
        watched._reach("5")
        doubted.append(watched._due_s is not None)
        watched.expect("4")
        doubted.append(watched._due_s is not None)
        assert doubted == [True, False, False], "the last was long ago"
    assert server.lists == 1


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "in pages"])
async def test_expired_version_restarts_list_and_reports_deleted_objects(streams: bool) -> None:
    server = Server()
    server.streams = streams
    server.truth = {"a": thing("a", 1, "a1"), "b": thing("b", 1, "b1")}
    removed = [ApiError(410, "Expired", "too old resource version")]

    def ends() -> None:
        if removed:
            server.truth.pop("a")
            raise removed.pop()

    server.ends = ends
    async with following(server) as watched:
        await until(lambda: server.lists == 2 and known(watched) == {"b": "b1"})


async def test_watch_accepts_older_versions_after_api_server_restore() -> None:
    server = Server()
    server.truth, server.version = {"a": thing("a", 900, "new")}, 900
    restored = [ApiError(410, "Expired", "too large resource version")]

    def ends() -> None:
        if restored:
            server.truth, server.version = {"a": thing("a", 3, "old")}, 4
            raise restored.pop()

    server.ends = ends
    async with following(server) as watched:
        await until(lambda: known(watched) == {"a": "old"})


async def test_repeatedly_interrupted_watch_is_reopened_with_growing_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY_S", 0.001)
    slept: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    server = Server()

    def cut() -> None:
        raise UnreachableError("cut")

    server.ends = cut
    async with following(server) as watched:
        monkeypatch.setattr(asyncio, "sleep", counted)
        while len(slept) < 12:
            await sleep(0)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert watched.trouble == "cut"
    assert slept[10] > 100 * slept[0]
    assert max(slept) <= watch.RETRY_S_MAX


def test_rate_limiter_allows_a_burst_then_enforces_its_rate() -> None:
    now_s = [0.0]
    budget = RequestRateLimiter(lambda: now_s[0])
    waits = [budget.take(1.0) for _ in range(int(BURST) + 50)]
    assert waits[: int(BURST)] == [0.0] * int(BURST)
    assert waits[-1] == pytest.approx(50 / WRITES_PER_S)
    now_s[0] += 60.0
    assert budget.take(1.0) == 0.0


async def test_unreadable_object_is_logged_once_and_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    """An unreadable object, listed or watched, keeps its last readable version; its deletion is still reported."""
    server = Server()
    odd = [{**thing(name, version), "text": None} for name, version in (("a", 3), ("a", 4), ("new", 5))]
    server.truth = {"a": thing("a", 1, "a1"), "odd": {**thing("odd", 1), "text": None}}
    server.stream = [*(("MODIFIED", one) for one in odd), ("MODIFIED", thing("b", 6, "b6"))]
    changes = list[Change[str]]()
    watched = Watched(cast("Api", server), "/things", lambda found: cast("str", found["text"].strip()), changes.extend)
    run = asyncio.create_task(watched.run())
    try:
        async with asyncio.timeout(60):
            await server.idle.wait()
        assert known(watched) == {"a": "a1", "b": "b6"}
        assert sum(server.unreadable.counts().values()) == 3
        assert [record.getMessage().count("name=a ") for record in caplog.records].count(1) == 1
        assert len(caplog.records) == 3
        watched._see("DELETED", {**thing("a", 7), "text": None}, None)
        assert known(watched) == {"b": "b6"}
        assert sum(server.unreadable.counts().values()) == 2
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert server.unreadable.counts() == {}


def test_bound_on_remembered_deletions_does_not_drop_unreadable_objects(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Existing unreadable objects do not count towards the limit of deleted objects, and each is logged once."""
    monkeypatch.setattr(watch, "GONE_MAX", 4)
    server = Server()
    watched = Watched(cast("Api", server), "/things", lambda found: cast("str", found["text"].strip()), lambda _: None)
    for version in (1, 2):
        for number in range(20):
            watched._see("MODIFIED", {**thing(f"odd-{number}", version), "text": None}, None)
    for number in range(50):
        for event in ("ADDED", "DELETED"):
            watched._see(event, thing(f"gone-{number}", 3), None)
        assert sum(server.unreadable.counts().values()) == 20
        assert len(watched._versions) <= 20 + 4
    assert len(caplog.records) == 20
    watched._see("MODIFIED", {**thing("odd-0", 1), "text": None}, None)
    assert watched._versions["n", "odd-0"] == 2, "an older event of an unreadable object is late"  # type: ignore[index]


async def test_only_the_object_whose_callback_raises_is_unknown_until_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FAULT_RETRY_S", 0.0)
    server, seen, reported = Server(), list[tuple[str, bool]](), list[tuple[str, str]]()
    server.truth, server.version = {name: thing(name, 2, f"{name}2") for name in "abc"}, 2
    server.unreadable.fault = lambda what, reason: reported.append((what, reason))
    raises = True

    def changed(changes: list[Change[str]]) -> None:
        seen.extend((one.key.name, one.new is not None) for one in changes)
        if raises and any(one.key.name == "b" for one in changes):
            raise KeyError(7)

    watched = Watched(cast("Api", server), "/things", lambda found: cast("str", found["text"]), changed)
    run = asyncio.create_task(watched.run())
    async with asyncio.timeout(60):
        await watched.synced.wait()
        assert known(watched) == {"a": "a2", "c": "c2"}
        assert [name for _, name in server.unreadable.names(watched)] == ["b"]
        raises = False
        await until(lambda: not watched.fault)
    assert known(watched) == {"a": "a2", "b": "b2", "c": "c2"}
    assert not server.unreadable.names(watched)
    assert [one for one in seen if one[0] != "b"] == [("a", True), ("c", True)]
    raises = True
    watched._report_gone(set(watched.items))
    assert known(watched) == {"b": "b2"}
    raises = False
    async with asyncio.timeout(60):
        await until(lambda: not watched.fault)
    run.cancel()
    assert known(watched) == {}
    assert [(what, reason.partition(" ")[0]) for what, reason in reported] == [
        ("watch /things", "KeyError"), ("watch /things", ""), ("watch /things", "KeyError"), ("watch /things", ""),
    ]  # fmt: skip


async def test_failing_callback_is_retried_after_5_10_and_at_most_300_s() -> None:
    def changed(_: list[Change[str]]) -> None:
        raise KeyError(7)

    server, waits = Server(), list[float]()
    server.unreadable.fault = lambda *_: None  # the exception is expected
    watched = Watched(cast("Api", server), "/things", lambda found: cast("str", found["text"]), changed)
    watched._see("ADDED", thing("a", 1, "a1"), None)
    for _ in range(8):
        (failed,) = watched._failed.values()
        waits.append(failed.wait_s)
        watched._report_failed(failed.due_s - 0.001)
        assert [*watched._failed.values()] == [failed], "it is not due yet"
        watched._report_failed(failed.due_s)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]


async def test_failed_object_that_becomes_unreadable_is_not_reported_again() -> None:
    seen, raises = list[str](), True

    def changed(changes: list[Change[str]]) -> None:
        seen.extend(one.new or "" for one in changes)
        if raises:
            raise KeyError(7)

    server = Server()
    server.unreadable.fault = lambda *_: None  # the exception is expected
    watched = Watched(cast("Api", server), "/things", lambda found: cast("str", found["text"].strip()), changed)
    watched._see("ADDED", thing("a", 1, "a1"), None)
    raises = False
    watched._see("MODIFIED", {**thing("a", 2), "text": None}, None)
    watched._report_failed(math.inf)
    assert (seen, watched.fault, known(watched)) == (["a1"], "", {})
    assert [name for _, name in server.unreadable.names(watched)] == ["a"]
