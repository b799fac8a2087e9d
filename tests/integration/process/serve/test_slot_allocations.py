"""Slots under load, on real processes: several gateways hold the slots of one replica (interfaces section 6, Holds).

Installations have 1, 2 and 4 gateways, each with one replica of 1, 4 and 64 slots, of two kinds: `stay-N` starts a
response and never ends it, so the test decides when a slot becomes free; `run-N` responds after a time set by the
request. Assertions use the engine's own counts (concurrency, order of requests) and what clients see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from autoscaler.contract import LEADER_SILENT_S
from bench.documents import key, tenant
from loadtest.client import Client
from loadtest.result import Ending, Shot
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.gateway_clients import Gates, Sent, gates
from tests.support.harness.serve.serve import (
    API,
    Serving,
    Transcribed,
    fake,
    most_at_once,
    serving,
    settings,
    shot,
    transcript,
)
from tests.support.slow_clock import PAUSE_S, Laps, laps, visit, visit_by
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("holds")  # the installations are started once

SLOTS = (1, 4, 64)
TOKENS_PER_S, TOKENS_MAX = 100, 6000
WAIT_S_MAX = 0.050
"""I4: the longest time that a request may wait while a slot that it may use is free."""
WAIT_LAPS_MAX = round(WAIT_S_MAX / PAUSE_S)
MESSAGES_MAX = 5
"""From a client's disconnect to another client's first byte: disconnect, report, grant, request, response."""
TYPICAL_LAPS_MAX = 2
"""The median is 4 ms in virtual time: less than a lap."""
MOVES = 8
"""How many times a slot passes to another request, one at a time."""
HOLDS_BACK_S = 10.0
"""Slots held by a dead gateway are available again within this time."""
A = (("Authorization", f"Bearer {key('a')}"),)
B = (("Authorization", f"Bearer {key('b')}"),)


class House(NamedTuple):
    """An installation that tests share."""

    serve: Serving
    folder: Path
    gateways: tuple[str, ...]

    def noted(self, model: str) -> list[Transcribed]:
        """Return what the engine of a Model has recorded so far."""
        return transcript(self.folder, model)


def engines(folder: Path) -> Sequence[dict[str, object]]:
    """Return the Models."""
    forever: dict[str, object] = {"replicas": {"min": 1}, "gpu": {"memory": "1Mi"}}
    stays = [
        fake(folder, f"stay-{n}", "--tokens-per-s", "0", "--fail", "hangs-after-first-byte", slots=n, **forever)
        for n in SLOTS
    ]
    knobs = ("--tokens-per-s", str(TOKENS_PER_S), "--tokens", str(TOKENS_MAX))
    return [*stays, *(fake(folder, f"run-{n}", *knobs, slots=n, **forever) for n in SLOTS)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2, 4], ids=["1gw", "2gw", "4gw"])
async def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """Start `serve` with this many gateways, Tenants a and b of equal weight, and every Model ready."""
    folder = tmp_path_factory.mktemp("holds")
    tenants = [{"apiVersion": API, **tenant(name)} for name in ("a", "b")]
    options = ("--gateways", str(request.param))
    async with serving(folder, *engines(folder), *tenants, settings(), options=options) as one:
        for n in SLOTS:
            await one.ready(f"stay-{n}")
            await one.ready(f"run-{n}")
        yield House(one, folder, tuple(f"gateway-{n}" for n in range(1, request.param + 1)))


async def settled(house: House, model: str) -> None:
    """Wait until engine and autoscaler report no request on the Model, so that the next test starts clean."""
    await until("the engine is left", lambda: house.serve.busy(model) == 0)
    await until("the autoscaler has the report", lambda: set(house.serve.demand(model).values()) == {0})


# --- work conservation -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def clock(house: House, model: str, gate: Gates) -> AsyncIterator[Laps]:
    """Count laps over all processes that a hold passes through: the gateways, the autoscaler, the engine."""
    (record,) = [record for record in house.serve.records() if record.model == model]
    visits = [visit_by(await gate.connection(gateway), "/health") for gateway in house.gateways]
    visits.append(await visit(house.serve.ops, "/healthz"))
    visits.append(await visit(f"http://127.0.0.1:{record.port}", "/metrics"))
    async with laps(visits) as one:
        yield one


async def began(calls: Sequence[Sent]) -> list[float]:
    """Wait until all requests have started; return their start times."""
    await until("all began", lambda: all(call.began_s is not None for call in calls), every_s=0.001)
    return [call.began_s or 0.0 for call in calls]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.standard
async def test_slot_freed_at_any_gateway_serves_a_waiting_request_promptly(house: House, slots: int) -> None:
    """One gateway holds the slots, requests arrive at another: all at once, and one by one as other clients leave.

    Time is counted in laps (`tests.support.slow_clock`): five in 50 ms on idle cores, and never more. The test fails if
    holds are not returned, if the report of that waits for the next heartbeat (1 s) or is late (100 ms instead of 50 on
    most moves), or if a gateway without requests keeps a slot.
    """
    model, here = f"stay-{slots}", house.gateways[0]
    await settled(house, model)
    before = len(house.noted(model))
    waited: list[int] = []
    async with gates(house.serve.url, A) as gate:
        for gateway in house.gateways:
            await gate.ready(gateway, slots + MOVES)
        async with clock(house, model, gate) as lap:
            running = deque([await gate.send(here, shot(model)) for _ in range(slots)])
            ends = await began(running)
            waited += [lap.between(call.sent_s, end_s) for call, end_s in zip(running, ends, strict=True)]
            one_by_one: list[int] = []
            for step in range(1, MOVES + 1):
                call = await gate.send(house.gateways[step % len(house.gateways)], shot(model))
                if step % 2:
                    await lap.wait(3)  # it has been waiting for long
                assert call.began_s is None, "all Slots are in use"
                left_s = running.popleft().leave()
                one_by_one.append(lap.between(left_s, *await began([call])))
                running.append(call)
            for call in running:
                call.leave()
            crowd = [await gate.send(house.gateways[-1], shot(model)) for _ in range(slots)]
            ends = await began(crowd)
            waited += [lap.between(call.sent_s, end_s) for call, end_s in zip(crowd, ends, strict=True)]
    assert statistics.median(one_by_one) <= TYPICAL_LAPS_MAX, one_by_one
    assert max(one_by_one + waited) <= WAIT_LAPS_MAX + MESSAGES_MAX, (one_by_one, waited)
    await settled(house, model)
    assert most_at_once(house.noted(model)[before:]) == slots


# --- the hold rule ---------------------------------------------------------------------------------------------------


def crowd(model: str, slots: int) -> list[Shot]:
    """Requests for three seconds of all slots, sent within one, in bursts; every fifth client disconnects early.

    They are long rather than numerous, so that all slots are in use even if a client sends slowly.
    """
    chance = random.Random(slots)
    shots: list[Shot] = []
    wanted_s = 3.0 * slots
    while wanted_s > 0:
        tokens = chance.randint(40, 160)
        wanted_s -= tokens / TOKENS_PER_S
        patience_s = chance.uniform(0.0, 0.3) if len(shots) % 5 == 4 else 60.0
        at_s = chance.choice((0.0, 0.3, 0.6, chance.random()))
        shots.append(shot(model, tokens=tokens, stream=len(shots) % 4 == 0, at_s=at_s, timeout_s=patience_s))
    return shots


@pytest.mark.parametrize("slots", SLOTS)
async def test_request_bursts_of_two_tenants_use_all_slots_and_never_more(house: House, slots: int) -> None:
    """Requests of two Tenants arrive in bursts at any gateway, and complete or are abandoned by their clients."""
    model = f"run-{slots}"
    await settled(house, model)
    before, shots = len(house.noted(model)), crowd(model, slots)
    halves = shots[::2], shots[1::2]
    results = await asyncio.gather(
        *(Client(house.serve.url, headers=who).run(half) for who, half in zip((A, B), halves, strict=True))
    )
    for half, ends in zip(halves, results, strict=True):
        for asked, result in zip(half, ends, strict=True):
            assert result.ending is Ending.COMPLETED or (asked.timeout_s < 1 and result.abandoned), result
    await settled(house, model)
    noted = house.noted(model)[before:]
    completed = sum(result.ending is Ending.COMPLETED for half in results for result in half)
    assert sum(call.finished for call in noted) >= completed
    assert most_at_once(noted) == slots, "all are used, and no more"


# --- fairness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("house", [2], ids=["2gw"], indirect=True)
@pytest.mark.parametrize("slots", [1, 4])
async def test_tenant_gets_half_of_the_slots_while_another_floods_a_gateway(house: House, slots: int) -> None:
    """A floods gateway 1; B uses gateway 2. While both wait, the engine starts as many requests of A as of B."""
    model, few = f"run-{slots}", 30
    await settled(house, model)
    before = len(house.noted(model))
    asked_a, asked_b = (shot(model, tokens=8 * slots, stream=False, headers=who) for who in (A, B))
    async with gates(house.serve.url) as gate:
        await gate.ready("gateway-1", 3 * few)
        await gate.ready("gateway-2", few)  # so that all of B's requests wait from the start
        flood = [await gate.send("gateway-1", asked_a, "a") for _ in range(3 * few)]
        await until("A has all Slots", lambda: house.serve.busy(model) == slots)
        calls = [await gate.send("gateway-2", asked_b, "b") for _ in range(few)]
        assert await whole(calls)
        assert not all(call.done.done() for call in flood), "A waited as long as B"
    await settled(house, model)
    order = [call.id for call in sorted(house.noted(model)[before:], key=lambda call: call.began_s)]
    both = order[order.index("b") : len(order) - order[::-1].index("b")]
    assert both.count("b") / len(both) == pytest.approx(0.5, abs=0.1), "".join(order)


# --- gateways that die -----------------------------------------------------------------------------------------------


async def replaced(house: House, gateway: str, before: int) -> None:
    """Wait until another process has replaced the gateway and responds."""
    await until("it is replaced", lambda: house.serve.gateways().get(gateway, before) != before)
    async with gates(house.serve.url) as gate:
        await gate.connection(gateway)


@pytest.mark.parametrize("house", [2], ids=["2gw"], indirect=True)
@pytest.mark.parametrize("slots", SLOTS)
async def test_slots_of_a_killed_gateway_are_used_by_another_within_10_seconds(house: House, slots: int) -> None:
    """Another gateway can then use all slots; if the Model has only one slot, the dead gateway held it."""
    model = f"run-{slots}"
    await settled(house, model)
    before, victim = len(house.noted(model)), house.serve.gateways()["gateway-2"]
    long = shot(model, tokens=500, stream=False)
    async with gates(house.serve.url, A) as gate:
        await gate.ready("gateway-1", 2 * slots)
        kept = [await gate.send("gateway-1", long) for _ in range(slots // 2)]
        lost = [await gate.send("gateway-2", long) for _ in range(slots - slots // 2)]
        await until("all run", lambda: house.serve.busy(model) == slots)
        os.kill(victim, signal.SIGKILL)
        more = [await gate.send("gateway-1", shot(model, tokens=TOKENS_MAX, stream=False)) for _ in range(slots)]
        await asyncio.wait([call.done for call in (*kept, *lost)], timeout=HOLDS_BACK_S)
        assert all(call.cut for call in lost)
        assert all(call.whole for call in kept)
        await until("all Slots are used again", lambda: house.serve.busy(model) == slots, HOLDS_BACK_S)
        assert not any(call.done.done() for call in more)
    await replaced(house, "gateway-2", victim)
    await settled(house, model)
    assert most_at_once(house.noted(model)[before:]) == slots


@pytest.mark.parametrize("house", [4], ids=["4gw"], indirect=True)
async def test_restarted_gateway_serves_ready_models_during_autoscaler_outage(house: House) -> None:
    """Every Model at once; once the leader is silent for all, the documented overcommit is not exceeded."""
    one, late = house.serve, "gateway-3"
    before = {slots: len(house.noted(f"run-{slots}")) for slots in SLOTS}
    for slots in SLOTS:
        await settled(house, f"run-{slots}")
    await until("it is kept that all are ready", lambda: kept_ready(one, late) == {f"run-{slots}" for slots in SLOTS})
    victim, autoscaler = one.gateways()[late], one.autoscaler()
    freeze(autoscaler)
    silent_s = time.monotonic() + LEADER_SILENT_S
    try:
        os.kill(victim, signal.SIGKILL)
        await replaced(house, late, victim)
        async with gates(one.url, A) as gate:
            assert await whole([await gate.send(late, brief(slots)) for slots in SLOTS])
            assert "event=serving_from_snapshot" in one.output()
            for gateway in house.gateways:
                await gate.ready(gateway, sum(SLOTS))
            await asyncio.sleep(max(0.0, silent_s - time.monotonic()))
            everywhere = [(gateway, slots) for slots in SLOTS for gateway in house.gateways for _ in range(slots)]
            assert await whole([await gate.send(gateway, longer(slots)) for gateway, slots in everywhere])
        assert one.autoscaler() == autoscaler
    finally:
        os.kill(autoscaler, signal.SIGCONT)
    await until("the autoscaler is back", one.answers)
    for slots in SLOTS:
        await settled(house, f"run-{slots}")
        most = most_at_once(house.noted(f"run-{slots}")[before[slots] :])
        assert slots <= most <= slots + max(slots, len(house.gateways)) - 1


def brief(slots: int) -> Shot:
    """A request that uses a slot for a moment."""
    return shot(f"run-{slots}", tokens=10, stream=False)


def longer(slots: int) -> Shot:
    """A request that uses a slot so long that many of them run at the same time."""
    return shot(f"run-{slots}", tokens=60, stream=False)


async def whole(calls: Sequence[Sent]) -> bool:
    """Wait for all requests; return whether all completed correctly."""
    await asyncio.wait([call.done for call in calls], timeout=90)
    return all(call.whole for call in calls)


def kept_ready(one: Serving, gateway: str) -> set[str]:
    """Return the `run-N` Models for which a gateway has stored that a replica is ready."""
    path = one.state / "run" / f"{gateway}.kept.json"
    routes = json.loads(path.read_bytes())["routes"] if path.exists() else {}
    ready = {route["model"] for route in routes.get("replicas", ()) if route["state"] == "ready"}
    return {model for model in ready if model.startswith("run-")}
