"""Learned lead times of offers are kept across leader changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import inf

import pytest
from msgspec.structs import replace

from autoscaler.fold.fold import Observation
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.lead_time_store import (
    BYTES_MAX,
    NAME,
    SAVE_S,
    LeadTimeStore,
    encode_lead_times,
    parse_lead_times,
)
from autoscaler.providers.reconciler import REST_S
from autoscaler.state.capacity import STARTS_MAX, Capacity, LeadTimeStats, LearntSeen, OfferKind
from autoscaler.state.world import World
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.worlds import replace_fields
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.async_tests import call_with

KIND, OTHER = OfferKind("rack", "A100", "w1"), OfferKind("cloud", "T4", "")
ONCE = {KIND: LeadTimeStats(took_s=(1.5, 2.0), came=2, failed=1, gaps_s=(3.0, inf)), OTHER: LeadTimeStats(failed=4)}
KEY = "pilotlight"
PATH = f"/api/v1/namespaces/home/configmaps/{NAME}"


class Bench:
    """One autoscaler process."""

    def __init__(self, server: PlayedServer, epoch: int = 1) -> None:
        self.server, self.may_write = server, True
        self.world = World(epoch=epoch, capacity=Capacity(providers=("rack",)))
        self.seen: list[Observation] = []
        self.one = LeadTimeStore(server, ("home", KEY), lambda: self.world, self.seen.extend, lambda: self.may_write)
        self.task = asyncio.create_task(self.one.run())

    async def looks(self, learnt: dict[OfferKind, LeadTimeStats] | None = None, **fields: int | bool) -> str:
        """The stored text after a `World` with these fields was seen."""
        capacity = self.world.capacity if learnt is None else replace(self.world.capacity, learnt=learnt)
        self.world = replace_fields(self.world, capacity=capacity, **fields)
        self.one.look()
        await asyncio.sleep(0.1)
        found = self.server.objects.get(PATH)
        return "" if found is None else str(found["data"].get(KEY))


def bench(scenario: Callable[[Bench], Coroutine[object, object, None]], **objects: str) -> None:
    async def whole() -> None:
        server = PlayedServer(lambda: 0.0)
        for text in objects.values():
            server.put(PATH, {"data": {KEY: text}})
        one = Bench(server)
        await scenario(one)
        one.task.cancel()

    run(whole())


@call_with(bench)
async def test_next_leader_restores_saved_lead_times(one: Bench) -> None:
    await one.looks()
    assert parse_lead_times(await one.looks(ONCE)) == ONCE
    other = Bench(one.server, epoch=2)
    await other.looks()
    assert other.seen == [LearntSeen(learnt=ONCE)]
    other.task.cancel()


@call_with(bench)
async def test_changed_lead_times_are_saved_at_most_once_per_interval(one: Bench) -> None:
    await one.looks()
    await one.looks({KIND: LeadTimeStats(came=1)})
    for came in (2, 3):
        assert parse_lead_times(await one.looks({KIND: LeadTimeStats(came=came)}))[KIND].came == 1
    await asyncio.sleep(SAVE_S)
    assert parse_lead_times(await one.looks())[KIND].came == 3
    assert len(one.server.writes) == 2
    await asyncio.sleep(3 * SAVE_S)
    await one.looks({KIND: LeadTimeStats(came=3)})
    assert len(one.server.writes) == 2, "the same is not written again"


@pytest.mark.parametrize("may", [{"leads": False}, {}])
def test_follower_neither_saves_nor_loads_lead_times(may: dict[str, bool]) -> None:
    async def scenario(one: Bench) -> None:
        one.may_write = "leads" in may
        kept = await one.looks({KIND: LeadTimeStats(came=9)}, **may)
        assert parse_lead_times(kept) == ONCE
        assert not one.seen
        one.may_write = True
        await one.looks(leads=True, epoch=2)
        assert one.seen == [LearntSeen(learnt=ONCE)], "once it leads it does"

    bench(scenario, kept=encode_lead_times(ONCE))


@call_with(bench)
async def test_no_api_request_is_made_without_capacity_providers(one: Bench) -> None:
    one.world = World(epoch=1)
    await one.looks({KIND: LeadTimeStats(came=1)})
    assert one.server.requests == 0


@pytest.mark.parametrize("text", ["{", "[{}]", '[{"kind": ["a"]}]', "null"])
def test_invalid_saved_lead_times_are_logged_and_overwritten(text: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(one: Bench) -> None:
        assert await one.looks() == text
        assert not one.seen
        assert parse_lead_times(await one.looks(ONCE)) == ONCE

    bench(scenario, kept=text)
    assert f"event=lead_times_invalid config_map={NAME} " in caplog.text


def test_failed_save_of_lead_times_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(one: Bench) -> None:
        one.server.refused["POST"] = AnswerError(403, "Forbidden", "no right")
        await one.looks()
        assert not await one.looks(ONCE)
        del one.server.refused["POST"]
        await asyncio.sleep(REST_S[0])
        assert parse_lead_times(await one.looks()) == ONCE
        del one.server.objects[PATH]  # deleted externally
        await asyncio.sleep(SAVE_S)
        assert not await one.looks({KIND: LeadTimeStats(came=7)})
        await asyncio.sleep(REST_S[0])
        assert parse_lead_times(await one.looks())[KIND].came == 7

    bench(scenario)
    assert "no right" in caplog.text


def test_oldest_lead_times_are_dropped_at_the_size_limit() -> None:
    long = tuple(float(number) for number in range(STARTS_MAX + 5))
    assert parse_lead_times(encode_lead_times({KIND: LeadTimeStats(took_s=long)}))[KIND].took_s == long[-STARTS_MAX:]
    many = {
        OfferKind("rack", "A100", f"n{number}"): LeadTimeStats(took_s=(123.456,) * 32, gaps_s=(99.9,) * 32)
        for number in range(4000)
    }
    text = encode_lead_times(many)
    assert len(text) <= BYTES_MAX
    kept = [*parse_lead_times(text)]
    assert kept == [*many][-len(kept) :]
    assert len(kept) > 1000
