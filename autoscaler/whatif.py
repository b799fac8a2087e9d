"""What would be started where, if these Models were called so, and nothing ran yet. Pure; touches nothing.

Owns the question and how it is answered: by the plan itself, again and again, as if every start got ready at once and
served whom it is for. So the answer is the plan's own; what differs is that no time passes. Promises: it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoscaler.actions import Acted, StartReplica, Unmet
from autoscaler.contract import GatewayId, Level, ModelName, ReplicaUse, Report, TenantName
from autoscaler.documents import Documents
from autoscaler.fold import fold
from autoscaler.observations import DocumentsSeen, GatewaySeen, ReplicaSeen, Reported, Seen, SlicesSeen, Synced
from autoscaler.plan import Planner
from autoscaler.world import Fact, Replica, Slice, SliceId, World

GATEWAY = GatewayId("what-if")
TENANT = TenantName("default")
BEGIN_S, STEP_S = 10_000.0, 0.001
"""Between two looks hardly any time passes: whoever was started is within its residency, and nobody has to go."""
WAITED_S = 3600.0
"""So long all have waited: nothing is put off until somebody has waited longer."""
ROUNDS_MAX = 10_000
"""Each starts something, or is the last."""


class Asked(NamedTuple):
    """The Calls of one Model."""

    waiting: int = 0
    running: int = 0


class Start(Fact, frozen=True):
    """One Replica that would be started, in this order."""

    model: ModelName
    slices: tuple[SliceId, ...]
    memory_bytes: int
    """Of each Slice."""
    reason: str


class Left(Fact, frozen=True):
    """What would be free of a Slice in the end."""

    slice: SliceId
    memory_bytes: int
    free_bytes: int


class Answer(Fact, frozen=True):
    """Everything that would happen."""

    starts: tuple[Start, ...]
    unmet: tuple[Unmet, ...]
    left: tuple[Left, ...]


def what_if(documents: Documents, slices: Sequence[Slice], asked: Mapping[ModelName, Asked]) -> Answer:
    """The answer. Every Model of `asked` is one of the documents."""
    seen = DocumentsSeen(models=documents.models, tenants=documents.tenants, settings=documents.settings)
    now_s, planner, starts = BEGIN_S, Planner(), list[Start]()
    world, _ = fold(
        World(epoch=1), (seen, SlicesSeen(slices=tuple(slices)), Synced(), GatewaySeen(gateway=GATEWAY)), now_s
    )
    for sequence in range(1, ROUNDS_MAX):
        now_s += STEP_S
        world, _ = fold(world, (_report(world, asked, sequence),), now_s)
        plan = planner.plan(world, now_s)
        begun = [action.replica for action in plan.actions if isinstance(action, StartReplica)]
        starts += [Start(model=r.model, slices=r.slices, memory_bytes=r.memory_bytes, reason=r.reason) for r in begun]
        if not begun:
            break
        acted = [Acted(action=action) for action in plan.actions if isinstance(action, StartReplica)]
        world, _ = fold(world, (*acted, *map(_ready, begun)), now_s)
    return Answer(starts=tuple(starts), unmet=plan.unmet, left=_left(world))


def _report(world: World, asked: Mapping[ModelName, Asked], sequence: int) -> Reported:
    """Who waits is served by what is there; the rest waits."""
    levels, uses = list[Level](), list[ReplicaUse]()
    for name, calls in asked.items():
        on = [world.replicas[id] for id in world.by_model.get(name, ())]
        total = calls.waiting + calls.running
        running = min(total, sum(one.slots for one in on))
        waiting = total - running
        if total:
            waits_s = WAITED_S if waiting else 0.0
            levels.append(Level(model=name, tenant=TENANT, waiting=waiting, running=running, oldest_wait_s=waits_s))
        for one in on:
            here = min(running, one.slots)
            running -= here
            uses.append(ReplicaUse(replica=one.id, hold=one.slots, in_use=here))
    report = Report(
        gateway=GATEWAY, boot="what-if", sequence=sequence, epoch=world.epoch, version=world.version,
        levels=tuple(levels), replicas=tuple(uses),
    )  # fmt: skip
    return Reported(report=report)


def _ready(one: Replica) -> ReplicaSeen:
    return ReplicaSeen(
        id=one.id, model=one.model, spec_hash=one.spec_hash, intent=one.intent, slices=one.slices, seen=Seen.READY,
        memory_bytes=one.memory_bytes, compute_percent=one.compute_percent, slots=one.slots,
    )  # fmt: skip


def _left(world: World) -> tuple[Left, ...]:
    found: list[Left] = []
    for id, one in sorted(world.slices.items()):
        held = [world.replicas[replica] for replica in world.by_slice.get(id, ())]
        alone = any(not one.shared or len(r.slices) > 1 or not r.memory_bytes for r in held)
        used = one.memory_bytes if alone else sum(r.memory_bytes for r in held)
        found.append(Left(slice=id, memory_bytes=one.memory_bytes, free_bytes=one.memory_bytes - used))
    return tuple(found)
