"""Helpers for tests of the fold: short notation for observations, and a fold that is checked against a rebuild.

Owns nothing of the fold itself. After every batch, `after` compares the result with a `World` whose indices are
rebuilt.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName, Total
from autoscaler.fold.fold import Observation
from autoscaler.fold.indices import rebuild_indices
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.spec.model import StartLimits
from autoscaler.state.actions import Acted, Action
from autoscaler.state.events import ReplicaSeen, Reported, Seen, Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, World
from tests.support.builders.worlds import GI, T0, device, model, replica

M, R, G1 = ModelName("m"), ReplicaId("r"), GatewayId("g1")
DOC = model("m", start=StartLimits(seconds_max=100.0, retries=3), idle_seconds=60.0)


def seen(state: Seen, name: str = "r", of: str = "m", **fields: object) -> ReplicaSeen:
    """A driver's observation of a Replica."""
    known = ReplicaSeen(
        id=ReplicaId(name),
        model=ModelName(of),
        spec_hash="h",
        intent=name,
        slices=(device().id,),
        memory_bytes=GI,
        slots=4,
        seen=state,
    )
    return replace(known, **fields)


def pending(name: str = "r") -> Replica:
    return replica(DOC, name, state=S.PENDING, since_s=0.0, created_s=0.0, started_s=None)


def after(at: World, *batch: Observation | Action, now_s: float = T0) -> tuple[World, tuple[Transition, ...]]:
    """The `World` after a batch; it must equal its rebuild."""
    made, moves = advance(at, [o if not isinstance(o, Action) else Acted(action=o) for o in batch], now_s)
    assert made == rebuild_indices(made, now_s)
    return made, moves


def moved(moves: tuple[Transition, ...]) -> list[str]:
    """`ready --drain--> draining` for each move."""
    return [f"{m.before} --{m.verb}--> {m.after}" for m in moves]


def reported(
    sequence: int,
    *,
    levels: list[Level] | None = None,
    name: str = "g1",
    boot: str = "b",
    totals: tuple[Total, ...] = (),
    uses: tuple[ReplicaUse, ...] = (),
    epoch: int = 1,
    version: int = 1,
) -> Reported:
    return Reported(
        report=Report(
            gateway=GatewayId(name),
            boot=boot,
            sequence=sequence,
            epoch=epoch,
            version=version,
            levels=tuple(levels or ()),
            totals=totals,
            replicas=uses,
        )
    )


def total(**fields: float) -> Total:
    return replace(Total(model=M, tenant=TenantName("acme")), **fields)
