"""The duration of `plan()`: nothing to do, 50 to place, 2,000 full nodes, 1 % of 10,000 Models changed. Medians.

Prints a table with spread. The last line is one JSON object (interfaces, section 10). `QUICK=1` or `--quick` uses fewer
rounds of the same sizes. Each figure is of one plan on a `World` that is already folded, by a Planner that has computed
the previous plan. In the last case other Models wait, and other replicas run, in every round.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.plan import Planner
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.actions import Acted, Plan
from autoscaler.state.events import Reported
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import (
    DeviceId,
    Gateway,
    History,
    Leadership,
    Learned,
    NodeId,
    Nodes,
    Replica,
    ReplicaResources,
    ReplicaTimes,
    Slice,
    SliceId,
    World,
)
from bench.parts import quick

GI = 1 << 30
NOW_S = 10_000.0
DEVICE_GI = 80
SIZES_GI = (8, 12, 20, 30, 40, 60)


def models(count: int) -> list[Model]:
    """Return Models of mixed sizes, with 4 slots each."""
    spec = ModelSpec(engine="command")
    return [
        Model(name=ModelName(f"m{i:05}"), spec=spec, memory_bytes=SIZES_GI[i % len(SIZES_GI)] * GI, slots=4)
        for i in range(count)
    ]


def devices(count: int) -> list[Slice]:
    """Return shared devices of 80Gi, eight per node."""
    return [
        Slice(
            id=SliceId(f"d{i:04}"), device=DeviceId(f"d{i:04}"), node=NodeId(f"n{i // 8}"), memory_bytes=DEVICE_GI * GI
        )
        for i in range(count)
    ]


def replicas(of: Iterable[Model], slices: list[Slice], used: float) -> list[Replica]:
    """Return ready replicas, first fit, until `used` of all memory is taken."""
    free = {slice_.id: DEVICE_GI * GI for slice_ in slices}
    goal = int(len(slices) * DEVICE_GI * GI * (1 - used))
    made: list[Replica] = []
    for model in of:
        if sum(free.values()) <= goal:
            break
        id = next((id for id, room in free.items() if room >= model.memory_bytes), None)
        if id is None:
            continue
        free[id] -= model.memory_bytes
        made.append(
            Replica(
                id=ReplicaId(f"{model.name}-r"),
                model=model.name,
                spec_hash=model.spec_hash(),
                intent="i",
                slots=4,
                state=ReplicaState.READY,
                since_s=9000.0,
                resources=ReplicaResources(slices=(id,), memory_bytes=model.memory_bytes),
                times=ReplicaTimes(created_s=8990.0, started_s=8990.0, ready_s=9000.0),
            )
        )
    return made


def build(model_count: int, device_count: int, used: float, waiting: int) -> World:
    """Return a `World` with `used` of its memory taken by replicas with one request each, and `waiting` cold Models."""
    documents, slices = models(model_count), devices(device_count)
    running = replicas(documents, slices, used)
    there = {replica.model for replica in running}
    cold = [model.name for model in documents if model.name not in there][:waiting]
    return compose_world(documents, slices, running, cold)


def compose_world(documents: list[Model], slices: list[Slice], running: list[Replica], cold: list[ModelName]) -> World:
    """Return a `World` of these, with a request on each replica and some waiting for each cold Model."""
    there = {replica.model for replica in running}
    tenant = TenantName("acme")
    levels = [Level(model=replica.model, tenant=tenant, running=1) for replica in running]
    levels += [Level(model=name, tenant=tenant, waiting=3, oldest_wait_s=0.01) for name in cold]
    uses = tuple(ReplicaUse(replica=replica.id, hold=4, in_use=1) for replica in running)
    report = Report(
        gateway=GatewayId("g"), boot="b", sequence=1, epoch=1, version=1, levels=tuple(levels), replicas=uses
    )
    known = History(starts_s=tuple(4.0 + i / 8 for i in range(32)), last_activity_s=NOW_S)
    world = World(
        epoch=1,
        version=1,
        leadership=Leadership(synced=True),
        models={model.name: model for model in documents},
        nodes=Nodes(slices={slice_.id: slice_ for slice_ in slices}),
        replicas={replica.id: replica for replica in running},
        gateways={GatewayId("g"): Gateway(id=GatewayId("g"), boot="b", seen_s=NOW_S, report=report, in_epoch=True)},
        learned=Learned(histories=dict.fromkeys(there, known)),
    )
    return rebuild_indices(world, NOW_S)


def crowded(device_count: int, waiting: int) -> World:
    """Return a `World` with full devices, busy replicas after their residency, and waiting Models of various sizes."""
    slices, spec, documents, running = (
        devices(device_count),
        ModelSpec(engine="command"),
        list[Model](),
        list[Replica](),
    )
    parts = ((40, 40), (20, 60), (30, 30, 20), (8, 12, 60), (80,), (12, 28, 40))
    for number, slice_ in enumerate(slices):
        there = [
            Model(name=ModelName(f"m{number:05}-{at}"), spec=spec, memory_bytes=size * GI, slots=4)
            for at, size in enumerate(parts[number % len(parts)])
        ]
        documents += there
        running += replicas(there, [slice_], 1.0)
    cold = [
        Model(name=ModelName(f"w{i:03}"), spec=spec, memory_bytes=2 * GI + i * 75 * GI // waiting, slots=4)
        for i in range(waiting)
    ]
    return compose_world([*documents, *cold], slices, running, [model.name for model in cold])


def measure(name: str, world: World, rounds: int) -> float:
    """Return the median milliseconds of one plan; print the row."""
    return measure_plans(name, (world for _ in range(rounds + 1)))


def changing(world: World, rounds: int) -> Iterator[World]:
    """Yield Worlds in which 1 % of the Models wait, others each round; the previous ones have started as planned."""
    gateway, planner = world.gateways[GatewayId("g")], Planner()
    running = [level for level in last_report(gateway).levels if not level.waiting]
    cold = [name for name in world.models if name not in world.by_model]
    many = len(world.models) // 100
    for number in range(rounds + 1):
        waiting = [
            Level(model=name, tenant=running[0].tenant, waiting=3, oldest_wait_s=0.01)
            for name in cold[number * many : (number + 1) * many]
        ]
        report = replace(last_report(gateway), sequence=number + 2, levels=tuple(running + waiting))
        world, _ = advance(world, (Reported(report=report),), NOW_S)
        yield world
        world, _ = advance(world, [Acted(action=action) for action in planner.plan(world, NOW_S).actions], NOW_S)


def last_report(gateway: Gateway) -> Report:
    """Return its last report."""
    if gateway.report is None:
        raise ValueError("the gateway has not reported")
    return gateway.report


def measure_plans(name: str, worlds: Iterable[World]) -> float:
    """Plan one `World` after the other, the first one as a warm-up; print the row."""
    planner, took_ms, plan = Planner(), list[float](), Plan()
    last = World(epoch=0)
    for number, world in enumerate(worlds):
        begin_s = time.perf_counter()
        plan = planner.plan(world, NOW_S)
        took_ms += [(time.perf_counter() - begin_s) * 1000] if number else []
        last = world
    took_ms.sort()
    median = statistics.median(took_ms)
    row = f"{name:<42} {len(last.replicas):>8} {len(plan.actions):>7} {len(plan.unmet):>6}"
    print(f"{row} {took_ms[0]:>8.2f} {median:>8.2f} {took_ms[-1]:>8.2f}", flush=True)
    return median


def main() -> None:
    """Run all cases."""
    rounds = 20 if quick() or "--quick" in sys.argv else 100
    gc.freeze()
    print(f"{'case':<42} {'replicas':>8} {'actions':>7} {'unmet':>6} {'min ms':>8} {'median':>8} {'max':>8}")
    figures = {
        "idle_ms_1000": measure("1,000 Models, 200 devices, idle", build(1000, 200, 0.7, 0), rounds),
        "place50_ms_1000": measure("1,000 Models, 200 devices, 50 wait", build(1000, 200, 0.7, 50), rounds),
    }
    measure("the same, devices full", build(1000, 200, 0.97, 50), rounds)
    measure("the same, devices empty", build(1000, 200, 0.0, 50), rounds)
    figures["crowded_ms_2000"] = measure("2,000 full nodes of 8, 100 wait", crowded(16_000, 100), min(rounds, 10))
    large = build(10_000, 16_000, 0.12, 0)
    figures["changed1pct_ms_10000"] = measure_plans(
        "10,000 Models, 2,000 nodes of 8, 100 wait", changing(large, min(rounds, 40))
    )
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
