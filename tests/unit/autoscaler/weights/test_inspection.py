"""Which agent inspects an artifact that was not inspected yet, and which one takes over from it."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from autoscaler.agent_contract import NodeReport, WeightsReport, WeightsRequest
from autoscaler.contract import ModelName
from autoscaler.fold.fold import fold
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.events import NodeReported
from autoscaler.state.world import NodeId, World
from autoscaler.weights.inspection import SILENT_S, SLOW_S, InspectionAssigner
from tests.support.builders.worlds import T0, replace_fields, world

ADA = Model(name=ModelName("ada"), spec=ModelSpec(engine="llama.cpp", artifact="oci://r.io/ada:1"))
LOOK = WeightsRequest("oci://r.io/ada:1", look=True)
AGENTS = [NodeId("n1"), NodeId("n2"), NodeId("n3")]


def heard(
    at: World, now_s: float, *weights: WeightsReport, by: Iterable[NodeId] = AGENTS, brings: bool = True
) -> World:
    sequence = int(now_s * 10)
    reports = [NodeReport(node=node, boot="b", sequence=sequence, brings=brings, weights=weights) for node in by]
    return fold(at, [NodeReported(report=one) for one in reports], now_s)[0]


def looker(of: InspectionAssigner, at: World, now_s: float, agents: Iterable[NodeId] = AGENTS) -> NodeId:
    ((node, wish),) = of.looks(at, list(agents), now_s)
    assert wish == LOOK
    return node


def test_silent_inspector_is_replaced_by_each_agent_in_turn() -> None:
    lookers, at = InspectionAssigner(), world([ADA])
    seen = list[NodeId]()
    for turn in range(7):
        now_s = T0 + turn * SILENT_S
        at = heard(at, now_s)
        seen.append(looker(lookers, at, now_s))
        assert lookers.next_s == now_s + SILENT_S
        assert looker(lookers, at, now_s + SILENT_S / 2) == seen[-1]
    assert sorted(seen[:3]) == AGENTS
    assert seen[3:6] == seen[:3], "all had it: from the first on again"


def test_agent_that_reports_its_inspection_is_awaited_longer() -> None:
    lookers, at = InspectionAssigner(), heard(world([ADA]), T0)
    first = looker(lookers, at, T0)
    for now_s in (T0 + SILENT_S, T0 + SLOW_S - 0.1):
        at = heard(at, now_s, WeightsReport(**LOOK._asdict()))
        assert looker(lookers, at, now_s) == first
    assert lookers.next_s == T0 + SLOW_S
    failed = heard(at, T0 + SLOW_S, WeightsReport(**LOOK._asdict(), failed="away"))
    assert looker(lookers, failed, T0 + SLOW_S) != first, "another may reach its registry"


def test_agent_that_is_silent_or_cannot_pull_is_assigned_no_inspection() -> None:
    at = heard(world([ADA]), T0)
    first = looker(InspectionAssigner(), at, T0)
    others = [one for one in AGENTS if one != first]
    silent = heard(at, T0 + 60, by=others)
    assert looker(InspectionAssigner(), silent, T0 + 60) in others
    nothing = heard(silent, T0 + 61, by=[first], brings=False)
    assert looker(InspectionAssigner(), nothing, T0 + 61) in others
    assert looker(InspectionAssigner(), world([ADA]), T0) == first, "of none is anything known"
    assert looker(InspectionAssigner(), at, T0, others) in others, "the agent no longer receives requests"


def test_agents_that_join_later_share_the_inspections() -> None:
    models = [
        replace(ADA, name=ModelName(f"m{n}"), spec=replace(ADA.spec, artifact=f"oci://r.io/m:{n}")) for n in range(30)
    ]
    lookers, at = InspectionAssigner(), heard(world(models), T0)
    assert {node for node, _ in lookers.looks(at, AGENTS[:1], None)} == {"n1"}
    spread = [node for node, _ in lookers.looks(at, AGENTS, T0 + 1)]
    assert min(spread.count(node) for node in AGENTS) > 3


def test_artifact_that_was_inspected_is_not_inspected_again() -> None:
    lookers, at = InspectionAssigner(), heard(world([ADA]), T0)
    first = looker(lookers, at, T0)
    known = replace_fields(at, looked={LOOK: WeightsReport(**LOOK._asdict(), digest="sha256:aa", header="{}")})
    assert list(lookers.looks(known, AGENTS, T0 + 1)) == []
    late_s = T0 + 2 * SILENT_S
    assert looker(lookers, heard(at, late_s), late_s) == first, "the first agent is assigned again"
