"""Properties of the fold: indices never drift, and the order in which levels arrive has no effect."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.agent_contract import NodeReport
from autoscaler.contract import ModelName, ReplicaId, TenantName, Total
from autoscaler.fold.fold import Observation, fold
from autoscaler.fold.indices import rebuild_indices
from autoscaler.routing import slots
from autoscaler.state.actions import Acted, Action, DrainReplica, FailReplica, ReviveReplica, StartReplica, StopReplica
from autoscaler.state.events import (
    CordonsSeen,
    DocumentsSeen,
    GatewayGone,
    GatewaySeen,
    ModelStopped,
    ModelWoken,
    NodeReported,
    ReplicaSeen,
    Reported,
    Seen,
    SignalsSeen,
    Synced,
    Tick,
)
from autoscaler.state.lifecycle import IllegalIntentError
from autoscaler.state.world import Cordon, CordonTarget, SignalTotal, Slice, World
from tests.support.builders.fold import DOC, G1, pending, reported, seen
from tests.support.builders.worlds import T0, level, model, replace_fields
from tests.support.example_budget import examples

# --- properties -----------------------------------------------------------------------------------------------------

names = st.sampled_from(["r1", "r2", "r3"])
sights = st.builds(
    lambda name, sight, of, slot: seen(sight, name, of, slices=(Slice(**slot).id,)),
    names,
    st.sampled_from(Seen),
    st.sampled_from(["m", "n"]),
    st.sampled_from([{"id": i, "device": "d", "node": "n", "memory_bytes": 1} for i in ("s1", "s2")]),
)
level_lists = st.lists(
    st.builds(
        level,
        st.sampled_from(["m", "n"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from([0.0, 2.5]),
        st.sampled_from(["x", "y"]),
    ),
    max_size=3,
    unique_by=lambda row: (row.model, row.tenant),
)
reports = st.builds(
    lambda name, boot, sequence, levels, epoch: reported(sequence, levels=levels, name=name, boot=boot, epoch=epoch),
    st.sampled_from(["g1", "g2"]),
    st.sampled_from(["b1", "b2"]),
    st.integers(1, 9),
    level_lists,
    st.sampled_from([0, 1]),
)
total_lists = st.lists(
    st.builds(
        lambda of, tenant, busy_slot_us: Total(
            model=ModelName(of), tenant=TenantName(tenant), busy_slot_us=busy_slot_us
        ),
        st.sampled_from(["m", "n"]),
        st.sampled_from(["x", "y"]),
        st.integers(0, 9_000_000),
    ),
    max_size=2,
    unique_by=lambda row: (row.model, row.tenant),
)
reports_of_service = st.builds(
    lambda said, totals: replace(said, report=replace(said.report, totals=tuple(totals))), reports, total_lists
)
others = st.sampled_from(
    [
        Synced(),
        Tick(),
        GatewaySeen(gateway=G1),
        GatewaySeen(gateway=G1, boot="b2"),
        GatewayGone(gateway=G1),
        DocumentsSeen(models=(DOC,)),
        DocumentsSeen(models=(DOC, model("n"))),
        DocumentsSeen(),
        CordonsSeen(cordons=(Cordon(place=CordonTarget("device", "d"), node="n", since_s=T0, drain=True),)),
        CordonsSeen(cordons=()),
        ModelWoken(model=DOC.name),
        ModelStopped(model=DOC.name),
        NodeReported(report=NodeReport(node="n", boot="b", sequence=1)),
        SignalsSeen(model=DOC.name, signals={"engineQueue": SignalTotal(total=1.0)}),
    ]
)
intents = st.one_of(
    st.builds(lambda name: StartReplica(replica=pending(name), reason=""), names),
    st.builds(lambda name: DrainReplica(replica=ReplicaId(name), reason=""), names),
    st.builds(lambda name: ReviveReplica(replica=ReplicaId(name), reason=""), names),
    st.builds(lambda name: StopReplica(replica=ReplicaId(name), grace_s=1.0, reason=""), names),
    st.builds(lambda name: FailReplica(replica=ReplicaId(name), reason=""), names),
)
batches = st.lists(
    st.tuples(
        st.lists(st.one_of(sights, reports_of_service, others), max_size=6), intents, st.sampled_from([0.0, 0.2, 6.0])
    ),
    max_size=10,
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(batches)
def test_indices_updated_by_each_batch_equal_a_full_rebuild(
    batches: list[tuple[list[Observation], Action, float]],
) -> None:
    at, now_s = World(epoch=1), T0
    for batch, intent, pause_s in batches:
        now_s += pause_s
        at, _ = fold(at, batch, now_s)
        assert at == rebuild_indices(at, now_s)
        try:
            at, _ = fold(at, [Acted(action=intent)], now_s)
        except IllegalIntentError:
            continue
        assert at == rebuild_indices(at, now_s)
        granted = slots.divide_slots(at, now_s)
        if granted is not None:
            at, _ = fold(at, [granted], now_s)
            assert at == rebuild_indices(at, now_s)
        for known in at.gateways.values():
            for row in known.grants.values():
                assert [g.hold for g in row] == sorted({g.hold for g in row}, reverse=True)


truths = st.tuples(
    st.lists(
        st.builds(seen, st.sampled_from([Seen.STARTING, Seen.READY, Seen.UNREADY]), names), unique_by=lambda o: o.id
    ),
    st.lists(reports.filter(lambda r: r.report.boot == "b1"), max_size=6),
)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(truths, st.randoms(use_true_random=False), st.integers(1, 4))
def test_state_does_not_depend_on_order_or_repeats_of_observations(
    truth: tuple[list[ReplicaSeen], list[Reported]], order: object, size: int
) -> None:
    """All fields but the version, which counts batches."""
    sights, reported = truth
    newest = {(r.report.gateway, r.report.sequence): r for r in reported}
    fixed: list[Observation] = [*sights, *newest.values(), DocumentsSeen(models=(DOC,)), Synced()]
    once, _ = fold(World(epoch=1), fixed, T0)
    mixed = fixed + fixed
    assert hasattr(order, "shuffle")
    order.shuffle(mixed)
    at = World(epoch=1)
    for first in range(0, len(mixed), size):
        at, _ = fold(at, mixed[first : first + size], T0)
    assert quiet(at) == quiet(once)


def quiet(at: World) -> World:
    """The path-independent part of a `World`: without the count of batches and intermediate peaks of demand."""
    gateways = {id: replace(g, in_epoch=False) for id, g in at.gateways.items()}
    return replace_fields(
        at, version=0, histories={}, attained={}, undivided=frozenset(), handed_over=False, gateways=gateways
    )
