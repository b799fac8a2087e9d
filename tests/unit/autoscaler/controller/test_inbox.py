"""The inbox keeps order, is bounded by merging reports, and drops no other observation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ModelName, TenantName, Total
from autoscaler.controller import inbox
from autoscaler.controller.inbox import INBOX_MAX, Inbox, merge_reports
from autoscaler.fold.fold import Observation, fold
from autoscaler.state.events import Reported, Seen, Tick
from tests.support.builders.fold import DOC, reported, seen, total
from tests.support.builders.worlds import T0, level, use, world
from tests.support.example_budget import examples


def describe(batch: list[Observation]) -> list[str]:
    """`g1/b 7` for a report, otherwise the type name."""
    return [
        f"{one.report.gateway}/{one.report.boot} {one.report.sequence}"
        if isinstance(one, Reported)
        else type(one).__name__
        for one in batch
    ]


def test_inbox_below_its_bound_keeps_all_observations_in_order() -> None:
    box = Inbox()
    for sequence in range(1, INBOX_MAX):
        box.put((reported(sequence),))
    box.put((Tick(),))
    batch, count = box.take()
    assert (describe(batch)[0], describe(batch)[-1], len(batch), count) == ("g1/b 1", "Tick", INBOX_MAX, 0)
    assert box.take() == ([], 0)


def test_inbox_above_its_bound_keeps_the_newest_report_per_gateway_boot() -> None:
    box = Inbox()
    box.put(
        (seen(Seen.STARTING), reported(1), seen(Seen.READY), reported(1, boot="b2"), reported(1, name="g2"), Tick())
    )
    for sequence in range(2, 2 * INBOX_MAX):
        box.put((reported(sequence),))
        assert len(box) <= INBOX_MAX
    batch, count = box.take()
    first = describe(batch)[:6]
    assert first.pop(1).startswith("g1/b "), "a later one, in the place of the first"
    assert first == ["ReplicaSeen", "ReplicaSeen", "g1/b2 1", "g2/b 1", "Tick"]
    assert describe(batch)[-1] == f"g1/b {2 * INBOX_MAX - 1}"
    assert len(batch) + count == 2 * INBOX_MAX + 4


def test_merged_report_keeps_totals_that_only_the_earlier_report_has() -> None:
    other = Total(model=ModelName("other"), tenant=TenantName("acme"), refused_cold=1)
    (one,) = merge_reports([reported(1, totals=(total(admitted=1), other)), reported(2, totals=(total(admitted=2),))])
    assert isinstance(one, Reported)
    assert (one.report.sequence, set(one.report.totals)) == (2, {total(admitted=2), other})


def test_merged_report_has_the_totals_of_the_highest_sequence_number() -> None:
    (one,) = merge_reports([reported(2, totals=(total(admitted=2),)), reported(1, totals=(total(admitted=1),))])
    assert isinstance(one, Reported)
    assert (one.report.sequence, one.report.totals) == (2, (total(admitted=2),))


def test_inbox_of_1000_unmergeable_observations_is_scanned_7_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_MAX", 10)
    looks: list[int] = []

    def look(batch: list[Observation]) -> list[Observation]:
        looks.append(len(batch))
        return merge_reports(batch)

    monkeypatch.setattr(inbox, "merge_reports", look)
    box = Inbox()
    for _ in range(1000):
        box.put((seen(Seen.READY),))
    assert len(box.take()[0]) == 1000
    assert looks == [11, 23, 47, 95, 191, 383, 767]


REPORTS = st.lists(st.tuples(st.sampled_from(("g1", "g2")), st.integers(0, 3), st.integers(0, 2)), max_size=20)


@given(REPORTS)
@settings(derandomize=True, deadline=None, max_examples=examples(100))
def test_merged_reports_give_the_same_demand_as_all_single_reports(steps: list[tuple[str, int, int]]) -> None:
    """Demand, use and service are the same; only peaks between two merged reports are lost."""
    batch: list[Observation] = []
    admitted = dict.fromkeys(("g1", "g2"), 0)
    for number, (name, waiting, grown) in enumerate(steps, 1):
        admitted[name] += grown
        counts = total(admitted=admitted[name], busy_slot_us=1_000_000 * admitted[name])
        totals = (counts,) if grown else ()
        levels = [level("m", waiting)] if waiting else []
        batch.append(reported(number, name=name, levels=levels, uses=(use("r", waiting),), totals=totals))
    begin = world([DOC], gateways=[])
    all_of_them, _ = fold(begin, batch, T0)
    fewer, _ = fold(begin, merge_reports(batch), T0)
    assert len(merge_reports(batch)) == len({name for name, _, _ in steps})
    assert fewer.loads == all_of_them.loads
    assert {id: (g.levels, g.uses, g.totals) for id, g in fewer.gateways.items()} == {
        id: (g.levels, g.uses, g.totals) for id, g in all_of_them.gateways.items()
    }
    attained = [at.learned.attained.get(ModelName("m"), {}).get(TenantName("acme"), 0.0) for at in (fewer, all_of_them)]
    assert attained[0] == attained[1]
