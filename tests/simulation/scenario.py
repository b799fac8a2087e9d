"""One whole run from one seed: a random town, a stormy phase, a calm one, and the invariants after each.

First safety (messages may be lost, late or duplicated, processes killed), then liveness (all faults end: every request
gets an outcome, and without requests nothing is left), as in TigerBeetle's VOPR. Replay one:
`python -m tests.simulation SEED`, with `--trace` to print all events.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from autoscaler.contract import ModelName, TenantName
from autoscaler.spec.model import Gpu, Model, ModelSpec, Queue, ReplicaRange, StartLimits
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.tenant import Tenant, TenantSpec
from gateway.dispatch.call import Outcome
from tests.simulation.checks import continuous_invariants, fault_containment, final_invariants, liveness
from tests.simulation.environment.machine import Manners, one_device
from tests.simulation.environment.network import CALM, Rates
from tests.simulation.environment.virtual_loop import run as run_virtual
from tests.simulation.installations.documented_town import DocumentedTown
from tests.simulation.installations.gateway import SimGateway
from tests.simulation.installations.installation import Town

MIB, GIB = 1 << 20, 1 << 30
STORM_S = 20.0
HEAL_S = 40.0
"""After the storm: late reports arrive (30 s) and expire (10 s)."""

QUIET_S = 300.0
"""After the last request: the idle timeout, or twice the longest Retry-After (2 x 120 s), then the stop."""

WAITS_S = (1.0, 30.0, 120.0, 600.0, 600.0)
"""Deadlines: most are far beyond the storm and the phases after it, so that expiry hides no starving request."""


class Result(NamedTuple):
    """Results of a seed; `calls`, `completed` and `full` (rejected by a full queue) are without probes."""

    broken: list[str]
    trace: str
    """SHA-256 of the notes, each with its line end."""
    calls: int
    completed: int
    full: int
    starts: int
    contained: int
    """How often the injected fault quarantined its Model."""


def play(seed: int, on_note: Callable[[str], None] = lambda _line: None) -> Result:
    """Run one seed. `on_note` gets every note: the virtual second and the event."""
    random.seed(seed)  # for the product's own jitter
    with pytest.MonkeyPatch.context() as patch:
        return run_virtual(_play(seed, on_note, patch))


def draw(seed: int, rng: random.Random) -> tuple[Town, bool]:
    """A town, and whether it has no faults."""
    calm = rng.random() < 0.25
    models = tuple(
        Model(
            name=ModelName(f"m{number}"),
            spec=ModelSpec(
                engine="command", command=("engine", "{port}"), gpu=Gpu(growth_percent=100 if number % 2 else None),
                idle_seconds=rng.choice([0.5, 2.0, 5.0]),
                residency_seconds=rng.choice([0.0, 0.5, 2.0]), drain_seconds_max=15.0,
                replicas=ReplicaRange(max=rng.choice([1, 1, 2, 4])), start=StartLimits(seconds_max=30.0),
                queue=Queue(calls_max=rng.choice([5, 20, 1000, 1000]), bytes_max=Bytes(rng.choice([1, 1, 1000]) * MIB)),
            ),
            memory_bytes=rng.choice([4, 8, 16]) * GIB,
            slots=rng.choice([1, 2, 4, 8, 16]),
            order=number,
        )
        for number in range(rng.randint(1, 4))
    )  # fmt: skip
    tenants = tuple(
        Tenant(name=TenantName(name), spec=TenantSpec(weight=rng.choice([1.0, 1.0, 3.0]))) for name in ("acme", "lab")
    )
    storm = Rates(
        lost=rng.choice([0.0, 0.02, 0.1]), doubled=rng.choice([0.0, 0.05]), late=rng.choice([0.0, 0.0, 0.01]),
        delay_s=(0.0002, rng.choice([0.001, 0.003, 0.01])),
    )  # fmt: skip
    longest_s = rng.choice([0.1, 0.5, 2.0])
    start_s = rng.choice([0.1, 0.5, 3.0])
    manners = Manners(
        start_s=(start_s / 3, start_s), serve_s=(0.01, longest_s), dies_at_start=0.0 if calm else rng.choice([0.0, 0.1])
    )
    kind = DocumentedTown if fault_containment.has_documents(seed) else Town
    town = kind(
        seed, models=models, slices=tuple(one_device(16 * GIB, f"gpu{n}") for n in range(rng.randint(1, 2))),
        tenants=tenants, gateways=rng.randint(1, 4), manners=manners, rates=CALM if calm else storm,
    )  # fmt: skip
    return town, calm


async def _play(seed: int, on_note: Callable[[str], None], patch: pytest.MonkeyPatch) -> Result:
    rng = random.Random(seed)
    town, calm = draw(seed, rng)
    town.on_note = on_note
    contained = fault_containment.Contained(town, patch, None if calm else seed)
    await asyncio.sleep(0.5)
    watcher = continuous_invariants.Watcher(town, strict=calm)
    jobs = [town.task(clients(town, rng))]
    if not calm:
        jobs += [town.task(faults(town, rng)), town.task(contained.inject())]
        jobs += [town.task(contained.edit()), town.task(contained.read())]
    await asyncio.sleep(STORM_S)
    for job in jobs:
        job.cancel()
    heal(town)
    broken = await contained.others_are_current()
    contained.stop()
    healed_s = town.now()
    broken += await liveness.after_storm(town, watcher)
    storm = [journey for journey in town.journeys.values() if not contained.hit(journey.call.model)]
    await asyncio.sleep(max(0.0, healed_s + HEAL_S - town.now()))
    broken += await silence(town)
    broken += await liveness.probe(town)
    broken += await silence(town)
    broken += contained.all_are_current()
    watcher.stop()
    broken += watcher.broken + watcher.churned()
    broken += final_invariants.everybody_was_answered(town) + final_invariants.only_such_errors(town, calm=calm)
    broken = [*contained.of_others(broken), *contained.broken]
    broken += [f"a task ended: {error!r}" for error in town.crashes]
    await town.close()
    ended = [j.ended[0] for j in storm if j.ended]
    completed = sum(end.outcome == Outcome.COMPLETED for end in ended)
    full = sum(end.error is not None and end.error.code == "queue_full" for end in ended)
    if calm and not completed:
        broken.append(f"I7: none of {len(storm)} Calls completed, though nothing ever failed")
    starts = len(town.machine.started)
    return Result(broken, town.trace.hexdigest(), len(storm), completed, full, starts, contained.contained)


async def silence(town: Town) -> list[str]:
    """Wait until nothing is left and no failed start delays a retry, QUIET_S at most; return what is left."""
    began_s = town.now()
    while town.now() < began_s + QUIET_S:
        histories = town.autoscaler.loop.world.learned.histories.values() if town.autoscaler is not None else ()
        backs_off = any(history.refused_until_s > town.now() for history in histories)
        if not backs_off and not final_invariants.nothing_is_left(town):
            break
        await asyncio.sleep(5.0)
    return final_invariants.nothing_is_left(town) + final_invariants.nothing_has_grown(town)


async def clients(town: Town, rng: random.Random) -> None:
    """Open-loop arrivals in phases: steady, bursts, silence; some clients leave early, some have short deadlines."""
    while True:
        model = rng.choice(town.models).name
        kind = rng.random()
        count, gap_s = (rng.randint(20, 80), 0.0005) if kind < 0.3 else (rng.randint(1, 30), rng.uniform(0.01, 0.3))
        for _ in range(count):
            if any(gateway.alive for gateway in town.gateways):
                journey = town.call(
                    model, rng.choice(["acme", "acme", "lab"]), wait_s=rng.choice(WAITS_S),
                    priority=rng.choice([0, 0, 5]), body_bytes=rng.choice([1000, 1000, 100_000]),
                )  # fmt: skip
                if rng.random() < 0.05:
                    asyncio.get_running_loop().call_later(rng.uniform(0.0, 5.0), town.leave, journey)
            await asyncio.sleep(gap_s)
        await asyncio.sleep(rng.choice([0.0, 0.5, 4.0]))


async def faults(town: Town, rng: random.Random) -> None:
    """Kills, cuts and partitions, one after another."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        kind, gateway = rng.choice(["engine", "gateway", "autoscaler", "cut", "partition"]), rng.choice(town.gateways)
        town.note(f"fault {kind} {gateway.id}")
        if kind == "engine" and town.machine.engines:
            town.machine.kill(rng.choice(sorted(town.machine.engines)))
        elif kind == "gateway" and gateway.alive:
            gateway.crash()
            loop.call_later(rng.choice([0.1, 2.0]), restart, gateway)
        elif kind == "autoscaler" and town.autoscaler is not None:
            town.crash_autoscaler()
            loop.call_later(rng.choice([0.1, 1.0, 7.0]), town.start_autoscaler)
        elif kind == "cut":
            gateway.link.cut()
        elif kind == "partition":
            link = gateway.link
            link.reachable = False
            link.cut()
            loop.call_later(rng.choice([1.0, 8.0, 14.0, 14.0]), setattr, link, "reachable", True)


def restart(gateway: SimGateway) -> None:
    """Restart a gateway process that is down."""
    if not gateway.alive:
        gateway.start()


def heal(town: Town) -> None:
    """End all faults; processes that are down restart by themselves (their restart is already scheduled)."""
    town.network.rates = CALM
    town.machine.manners = town.machine.manners._replace(dies_at_start=0.0)
