"""Leader changes: the state that is kept, a follower that takes no actions, and which leader is followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest

from autoscaler.contract import CatalogueDelta, GatewayId, ModelName, ReplicaUse, Report, RoutesDelta
from autoscaler.fold.fold import Observation, fold
from autoscaler.planner.plan import plan
from autoscaler.routing import slots
from autoscaler.server import gateways
from autoscaler.server.gateways import Feed, accept_report
from autoscaler.state.events import FollowingSeen, LeadingSeen, Reported, Seen, SlicesSeen, Synced
from autoscaler.state.lifecycle import ReplicaState as S
from gateway.control.discovery import Discovery
from gateway.control.sync import Link, Sync
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, use, world
from tests.support.harness.driver_events import seen_of
from tests.support.harness.manual_loop import SteppedLoop

A, B = model("a"), model("b")
M, G = ModelName("a"), GatewayId("g1")
RUNS = replica(A, "r1", address="127.0.0.1:9")
LED = LeadingSeen(epoch=7)


def there() -> tuple[Observation, ...]:
    """The driver reports the replica again."""
    return (SlicesSeen(slices=(device(),)), seen_of(RUNS, Seen.READY, address=RUNS.runtime.address), Synced())


def waits(epoch: int, sequence: int = 5, version: int = 1, name: str = "b") -> Report:
    return Report(
        gateway=G, boot="b", sequence=sequence, epoch=epoch, version=version, levels=(level(name, 1),),
        replicas=(ReplicaUse(replica=RUNS.id, hold=2, in_use=1),),
    )  # fmt: skip


def reported(report: Report) -> Reported:
    return Reported(report=report)


# --- the `World` ------------------------------------------------------------------------------------------------------


def test_new_leader_keeps_only_replicas_that_are_observed_again() -> None:
    """Intents of the previous leadership are void: the orders may never have been carried out."""
    starting = replica(A, "never-made", S.STARTING)
    draining = replica(A, "r1", S.DRAINING, address=RUNS.runtime.address)
    before = world([A, B], [device()], [starting, draining], [gateway("g1", uses=[use("r1", 1)])])
    after, _ = fold(before, (LED, *there()), T0)
    now = after.leadership
    assert (after.epoch, now.leads, now.leading_since_s, now.synced) == (7, True, T0, True)
    assert {id: one.state for id, one in after.replicas.items()} == {RUNS.id: S.READY}
    assert after.by_model == {M: (RUNS.id,)}
    known = after.gateways[G]
    assert (known.in_epoch, known.grants, known.uses) == (False, {}, {RUNS.id: use("r1", 1)})
    assert not after.leadership.handed_over
    assert after.version > before.version


def test_new_leader_starts_replicas_at_once_but_stops_none() -> None:
    idle = replica(A, "r1", ready_s=T0 - 9999, address=RUNS.runtime.address)
    before = world([A, B], [device(memory_gi=99)], [idle], [gateway("g1", [level("b", 1)])], leads=False)
    after, _ = fold(before, (LED, SlicesSeen(slices=(device(memory_gi=99),)), *there()[1:]), T0)
    assert [type(action).__name__ for action in plan(after, T0).actions] == ["StartReplica"]


def test_new_leader_divides_no_slots_until_every_gateway_has_reported() -> None:
    led, _ = fold(world([A], [device()], leads=False), (LED, *there()), T0)
    assert slots.divide_slots(led, T0) is None
    old, _ = fold(led, (reported(waits(epoch=1)),), T0)
    assert slots.divide_slots(old, T0) is None
    new, _ = fold(old, (reported(waits(epoch=7, sequence=6, version=old.version)),), T0)
    assert slots.divide_slots(new, T0) is not None


def test_slots_of_new_replicas_are_divided_despite_a_silent_gateway() -> None:
    """The silent gateway can hold no slots there; once it reports, the slots of found replicas are divided too."""
    before = world([A, B], [device()], gateways=[gateway("g1"), gateway("g2")], leads=False)
    led, _ = fold(before, (LED, *there()), T0)
    fresh = replica(B, "fresh", address="127.0.0.1:10")
    by_model = {**led.by_model, B.name: (fresh.id,)}
    led = msgspec.structs.replace(led, replicas={**led.replicas, fresh.id: fresh}, by_model=by_model)
    acts, _ = fold(led, (reported(waits(epoch=7, sequence=6, version=led.version)),), T0)
    moved = slots.divide_slots(acts, T0)
    assert moved is not None
    assert moved.holds == ((G, fresh.id, fresh.slots),)
    given, _ = fold(acts, (moved,), T0)
    assert slots.divide_slots(given, T0) is None
    other = msgspec.structs.replace(waits(7, version=given.version, name="a"), gateway=GatewayId("g2"), replicas=())
    all_, _ = fold(given, (reported(other),), T0)
    moved = slots.divide_slots(all_, T0)
    assert moved is not None
    assert RUNS.id in {id for _, id, _ in moved.holds}


def test_follower_neither_plans_nor_divides_slots() -> None:
    known = world([A, B], [device()], [RUNS], [gateway("g1", [level("b", 1)])], handed_over=True)
    assert plan(known, T0).actions
    after, _ = fold(known, (FollowingSeen(),), T0)
    assert plan(after, T0).actions == ()
    assert slots.divide_slots(msgspec.structs.replace(after, undivided=frozenset({M})), T0) is None
    assert after.replicas == known.replicas, "it goes on seeing"


# --- the loop --------------------------------------------------------------------------------------------------------


def test_loop_with_an_expired_leader_lease_executes_no_actions() -> None:
    """It was paused while it led, so by its state it still leads."""
    loop = SteppedLoop(world([A, B], [device()], [], [gateway("g1")]))
    loop.writes_s = 0.0
    loop.step(reported(waits(epoch=1)))
    assert (loop.driver.started, loop.loop.plan.actions, loop.loop.world.leadership.leads) == ([], (), True)
    loop.writes_s = 5.0
    loop.step()
    assert [one.model for one in loop.driver.started] == ["b"]


# --- what gateways receive -------------------------------------------------------------------------------------------


async def test_route_stream_of_a_follower_is_silent_until_election(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "HEARTBEAT_S", 0.01)
    loop = SteppedLoop(world([A], [device()], [RUNS], [gateway("g1")], leads=False))
    feed = Feed(loop.loop)
    routes, catalogue = feed.routes(G, "b"), feed.catalogue()
    async with asyncio.timeout(60):
        assert [await anext(routes) for _ in range(3)] == [b"", b"", b""]
        first = msgspec.json.decode(await anext(catalogue), type=CatalogueDelta)
        assert (first.full, [entry.name for entry in first.models]) == (True, ["a"])
        loop.step(LED, *there())
        reported = msgspec.json.decode(await anext(routes), type=RoutesDelta)
        assert (reported.epoch, reported.full, [one.replica for one in reported.replicas]) == (7, True, ["r1"])
        loop.step(FollowingSeen())
        while await anext(routes):
            assert loop.loop.world.leadership.leads, "the heartbeat of before"


def test_follower_accepts_a_report_and_answers_as_not_leading() -> None:
    loop = SteppedLoop(world([A], [device()], leads=False))
    answer = accept_report(loop.loop, waits(epoch=3))
    assert (answer.leads, loop.step().loads[ModelName("b")].waiting) == (False, 1)


# --- which leader is followed ----------------------------------------------------------------------------------------


class Silent:
    """A link that receives nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Noted:
    """A fake Sync that records which addresses are followed."""

    def __init__(self) -> None:
        self.links: list[str] = []

    def join(self, link: Silent) -> None:
        self.links.append(link.address)

    def leave(self, link: Silent) -> None:
        self.links.remove(link.address)


async def test_discovery_follows_the_dns_addresses_of_a_name_as_they_change() -> None:
    now: list[Sequence[str] | OSError] = [["b", "a", "b"], ["b", "c"], OSError("no DNS"), [], ["c"]]
    sync, links = Noted(), list[Silent]()

    async def resolve(_name: str, _port: int) -> Sequence[str]:
        found = now.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    def link(address: str) -> Silent:
        links.append(Silent(address))
        return links[-1]

    finding = Discovery("autoscaler", 8443, cast("Callable[[str], Link]", link), cast("Sync", sync), resolve)
    followed = []
    for _ in range(5):
        await finding.look()
        followed.append("".join(sorted(sync.links)))
    assert followed == ["ab", "bc", "bc", "bc", "c"], "without an answer those of before stay"
    assert [(one.address, one.closed) for one in links] == [("a", True), ("b", True), ("c", False)]
