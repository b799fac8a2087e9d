"""Metrics of the autoscaler, including those of capacity orders, counted from real steps of the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.controller import inbox
from autoscaler.controller.loop import LoopStep
from autoscaler.fold.fold import Observation
from autoscaler.server.metrics import Counted, Metrics, count_capacity_events, state_of
from autoscaler.state.actions import Acted, CutNode, Plan, ReleaseLease
from autoscaler.state.capacity import LeaseRefused, LeasesSeen, ReleaseOrder
from autoscaler.state.events import ReplicaSeen, Seen, SlicesSeen, Tick, Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.mig import CutOrder
from autoscaler.state.world import Replica, World
from tests.support.builders.capacity import acted, arrived, listed, observe, offer, shown, surge
from tests.support.builders.fold import reported
from tests.support.builders.worlds import T0, device, gateway, level, model, replace_fields, replica, world
from tests.support.harness.driver_events import seen_of
from tests.support.harness.faults.fault_injection import concerns, inject
from tests.support.harness.manual_loop import SteppedLoop

A = model("a", 6)


class Scrape:
    """A parsed scrape of the metrics."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}

    def __getitem__(self, key: tuple[str, ...]) -> float:
        """The value for (sample, label values in order of label names)."""
        (value,) = [value for name, labels, value in self._samples() if (name, *labels) == key]
        return value

    def _samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for family in self.families.values():
            for sample in family.samples:
                yield sample.name, tuple(value for _, value in sorted(sample.labels.items())), sample.value


def seen(of: Replica, what: Seen, started_s: float) -> ReplicaSeen:
    return seen_of(of, what, started_s=started_s, proof="exited", reason="exit status 1")


def begun() -> tuple[SteppedLoop, Metrics, Replica]:
    """One request waits for `a`, and its replica was ordered 3 ms after the report arrived."""
    stepped = SteppedLoop(world([A], [device()], gateways=[gateway(levels=[level("a", 1)])]))
    metrics = Metrics(lambda: stepped.loop.world)
    stepped.loop.listeners.append(metrics.on_step)
    stepped.loop.observe(())
    stepped.now_s += 0.003
    stepped.step()
    (ordered,) = stepped.driver.started
    return stepped, metrics, ordered


def test_metrics_after_a_failed_start_have_all_documented_names() -> None:
    stepped, metrics, ordered = begun()
    stepped.step(seen(ordered, Seen.EXITED, T0))
    shown = Scrape(metrics.text()).families
    assert {name: shown[name].type for name in shown if not name.endswith("_created")} == {
        "pilotlight_replicas": "gauge",
        "pilotlight_start_seconds": "histogram",
        "pilotlight_start_failures": "counter",
        "pilotlight_decision_seconds": "histogram",
        "pilotlight_plan_seconds": "histogram",
        "pilotlight_reports_merged": "counter",
        "pilotlight_actions": "counter",
        "pilotlight_offers": "counter",
        "pilotlight_lease_seconds": "histogram",
        "pilotlight_slice_memory_bytes": "gauge",
        "pilotlight_leases": "gauge",
        "pilotlight_devices_on_offer": "gauge",
        "pilotlight_lease_leaving_seconds": "gauge",
        "pilotlight_machines_coming": "gauge",
        "pilotlight_lesson_kinds": "gauge",
        "pilotlight_unreadable_objects": "gauge",
        "pilotlight_models_quarantined": "gauge",
        "pilotlight_degraded": "gauge",
        "pilotlight_leader": "gauge",
    }


def test_driver_event_during_a_step_does_not_reset_the_decision_time() -> None:
    stepped = SteppedLoop(world([A], [device()], gateways=[gateway(levels=[level("a", 1)])]))
    metrics = Metrics(lambda: stepped.loop.world)
    stepped.loop.listeners.append(metrics.on_step)
    stepped.driver.on_start = lambda of: stepped.loop.observe((seen(of, Seen.STARTING, T0),))
    stepped.loop.observe((Tick(),))
    stepped.now_s += 0.003
    stepped.step()
    assert Scrape(metrics.text())["pilotlight_decision_seconds_sum",] == pytest.approx(0.003)


def test_ordered_mig_repartition_is_counted_as_an_action() -> None:
    """An action kind that the counter does not know would end the loop with its step."""
    there = world([A], [device()])
    metrics = Metrics(lambda: there)
    order = CutOrder(node="n1", config="pilotlight-1", cuts=(("7g.80gb",),))
    metrics.on_step(LoopStep(there, there, Plan(), (CutNode(order=order, reason="a fits then"),), (), T0, T0, T0))
    assert Scrape(metrics.text())["pilotlight_actions_total", "cut", "ordered"] == 1


def test_reports_merged_in_a_full_inbox_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_MAX", 2)
    stepped = SteppedLoop(world([A], [device()]))
    metrics = Metrics(lambda: stepped.loop.world)
    stepped.loop.listeners.append(metrics.on_step)
    stepped.step(*(reported(sequence) for sequence in range(1, 6)))
    stepped.step()
    assert Scrape(metrics.text())["pilotlight_reports_merged_total",] == 4.0


def test_start_is_counted_with_its_duration() -> None:
    stepped, metrics, ordered = begun()
    started_s = stepped.now_s
    stepped.step(seen(ordered, Seen.STARTING, started_s))
    assert Scrape(metrics.text())["pilotlight_replicas", "a", "starting"] == 1
    stepped.now_s += 2.0
    stepped.step(seen(ordered, Seen.READY, started_s))
    shown = Scrape(metrics.text())
    assert shown["pilotlight_replicas", "a", "ready"] == 1
    assert shown["pilotlight_actions_total", "start", "ordered"] == 1
    assert shown["pilotlight_start_seconds_count", "a", "load"] == 1
    assert math.isclose(shown["pilotlight_start_seconds_sum", "a", "load"], 2.0)
    assert shown["pilotlight_leader",] == 1


def test_failed_start_is_counted_as_failure_and_not_as_start() -> None:
    stepped, metrics, ordered = begun()
    stepped.step(seen(ordered, Seen.EXITED, T0))
    shown = Scrape(metrics.text())
    assert shown["pilotlight_start_failures_total", "a", "start"] == 1
    assert not shown.families["pilotlight_start_seconds"].samples


def test_step_with_an_action_is_counted_as_a_decision() -> None:
    _, metrics, _ = begun()
    shown = Scrape(metrics.text())
    assert shown["pilotlight_decision_seconds_count",] == 1
    assert shown["pilotlight_plan_seconds_count",] == 1


def test_step_without_an_action_is_not_counted_as_a_decision() -> None:
    stepped = SteppedLoop(world([A], [device()]))
    metrics = Metrics(lambda: stepped.loop.world)
    stepped.loop.listeners.append(metrics.on_step)
    stepped.step()
    shown = Scrape(metrics.text())
    assert (shown["pilotlight_decision_seconds_count",], shown["pilotlight_plan_seconds_count",]) == (0, 1)


def test_slice_memory_is_reported_as_used_and_free() -> None:
    whole = replica(model("b", 0), "r2", on=("gpu1",))
    made = world(
        [A], [device("gpu0", 24), device("gpu1", 8)], [replica(A, "r1"), replica(A, "r3", state=S.FAILED), whole]
    )
    shown = Scrape(Metrics(lambda: made).text())
    memory = {
        (d, s): shown["pilotlight_slice_memory_bytes", d, "n0", s] for d in ("gpu0", "gpu1") for s in ("used", "free")
    }
    gi = 1 << 30
    assert memory == {
        ("gpu0", "used"): 12 * gi,
        ("gpu0", "free"): 12 * gi,
        ("gpu1", "used"): 8 * gi,  # it has no memory request, so it has the whole device
        ("gpu1", "free"): 0,
    }


def test_occupied_exclusive_slice_has_no_free_memory() -> None:
    alone = device("gpu0", 24, shared=False)
    shown = Scrape(Metrics(lambda: world([A], [alone], [replica(A, "r1")])).text())
    assert shown["pilotlight_slice_memory_bytes", "gpu0", "n0", "free"] == 0


def test_removed_replica_is_no_longer_counted() -> None:
    now = world([A], [device()], [replica(A, "r1")])
    metrics = Metrics(lambda: now)
    assert Scrape(metrics.text())["pilotlight_replicas", "a", "ready"] == 1
    now = World(epoch=1)
    assert not Scrape(metrics.text()).families["pilotlight_replicas"].samples


def test_replica_id_does_not_appear_in_the_metrics() -> None:
    stepped, metrics, ordered = begun()
    stepped.step(seen(ordered, Seen.READY, T0))
    assert ordered.id not in metrics.text().decode()


def counted_between(before: World, after: World) -> list[Counted]:
    return [*count_capacity_events(before.capacity, after.capacity)]


def test_capacity_order_is_counted_when_placed_and_when_delivered() -> None:
    begin = surge(offer())
    after, _ = acted(begin)
    assert counted_between(begin, after) == [Counted("rack", "ordered")]
    here = arrived(after, T0 + 30)
    assert counted_between(after, here) == [Counted("rack", "came", 30.0)]
    assert not counted_between(here, here)


def test_refused_order_is_counted_as_failed() -> None:
    after, _ = acted(surge(offer()))
    (id,) = after.capacity.leases
    refused = observe(after, LeaseRefused(id=id, reason="none left"), now_s=T0 + 1)
    assert counted_between(after, refused) == [Counted("rack", "failed")]


def test_removed_order_counts_as_returned_if_released_and_else_as_lost() -> None:
    after, _ = acted(surge(offer()))
    here = arrived(after, T0 + 30)
    (id,) = here.capacity.leases
    release = ReleaseLease(order=ReleaseOrder(id=id, epoch=1), reason="idle")
    leaving = observe(here, Acted(action=release), now_s=T0 + 40)
    removed = observe(leaving, LeasesSeen(provider="rack", leases=(), began_s=T0 + 50), now_s=T0 + 50)
    assert counted_between(leaving, removed) == [Counted("rack", "returned")]
    once = observe(here, LeasesSeen(provider="rack", leases=(), began_s=T0 + 50), now_s=T0 + 50)
    twice = observe(once, LeasesSeen(provider="rack", leases=(), began_s=T0 + 60), now_s=T0 + 60)
    assert [*counted_between(here, once), *counted_between(once, twice)] == [Counted("rack", "lost")]


def test_order_of_another_leader_is_not_counted_again() -> None:
    after, _ = acted(surge(offer()))
    other = shown(after, T0 + 1)
    begin = surge(offer())
    leases = LeasesSeen(provider="rack", leases=tuple(
        one.listed for one in other.capacity.leases.values() if one.listed is not None
    ), began_s=T0 + 1)  # fmt: skip
    found = observe(begin, leases, now_s=T0 + 1)
    assert found.capacity.leases
    assert not counted_between(begin, found)


def counts_of(*steps: tuple[World, World]) -> dict[tuple[str, str], float]:
    """The `pilotlight_offers_total` values after these steps, by provider and result."""
    metrics = Metrics(lambda: steps[-1][1])
    for before, after in steps:
        metrics.on_step(LoopStep(before, after, Plan(), (), (), T0, T0, T0))
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    found = [one for one in families["pilotlight_offers"].samples if one.name == "pilotlight_offers_total"]
    return {(one.labels["provider"], one.labels["result"]): one.value for one in found}


def test_follower_counts_no_capacity_orders() -> None:
    here = arrived(acted(surge(offer()))[0], T0 + 30)
    lists = [listed(here, phase="here", committed=True, node="w1", device_ids=("new0",))]
    lists += [listed(here, phase="leaving", committed=True, node="w1", device_ids=("new0",)), (), ()]

    def steps(begin: World) -> list[tuple[World, World]]:
        """The steps of a process that did not order it: delivered, leaving, gone, still gone."""
        found = []
        for number, leases in enumerate(lists):
            now_s = T0 + 31 + 30 * number
            seen: list[Observation] = [LeasesSeen(provider="rack", leases=leases, began_s=now_s)]
            seen += [SlicesSeen(slices=tuple(here.nodes.slices.values()))] if not number else []
            found.append((begin, observe(begin, *seen, now_s=now_s)))
            begin = found[-1][1]
        return found

    followed = steps(replace_fields(surge(offer()), leads=False))
    (going,) = followed[1][1].capacity.leases.values()
    assert (going.leaving, state_of(going)) == (False, ("rack", "leaving"))
    assert not counts_of(*followed)
    assert counts_of(*steps(surge(offer()))) == {("rack", "returned"): 1.0}


def test_exception_for_one_model_keeps_the_metrics_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    b, faults = model("b", 20), list[tuple[str, str]]()
    before = [replica(A, "r1", ("g1",), S.STARTING), replica(b, "r2", ("g2",), S.STARTING)]
    at = world([A, b], [device("g1", 80), device("g2", 80)], before)
    metrics = Metrics(lambda: at, lambda: T0, fault=lambda name, what, _: faults.append((name, what)))
    moves = tuple(
        Transition(at_s=T0, replica=one.id, model=one.model, slices=(), before=S.STARTING, after=S.FAILED,
                   verb="seen", reason="x")
        for one in before
    )  # fmt: skip
    with monkeypatch.context() as patch:
        inject(patch, "autoscaler.server.metrics:Metrics._count_transition", concerns("a"), expected=False)
        inject(patch, "autoscaler.server.metrics:room_of", concerns("a"), expected=False)
        metrics.on_step(LoopStep(at, at, Plan(), (), moves, T0, T0, T0))
        shown = Scrape(metrics.text())
    assert shown["pilotlight_start_failures_total", "b", "start"] == 1
    assert faults == [("a", "metrics"), ("a", "metrics")]


def test_slice_of_a_model_that_raises_an_exception_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    b, faults = model("b", 20), list[tuple[str, str]]()
    ready = [replica(A, "r1", ("g1",), S.READY), replica(b, "r2", ("g2",), S.READY)]
    at = world([A, b], [device("g1", 80), device("g2", 80)], ready)
    metrics = Metrics(lambda: at, lambda: T0, fault=lambda name, what, _: faults.append((name, what)))
    memory = "pilotlight_slice_memory_bytes"
    with monkeypatch.context() as patch:
        inject(patch, "autoscaler.server.metrics:room_of", concerns("a"), expected=False)
        shown = Scrape(metrics.text())
    assert [shown[memory, "g1", "n0", one] for one in ("used", "free")] == [80 << 30, 0]
    assert [shown[memory, "g2", "n0", one] for one in ("used", "free")] == [20 << 30, 60 << 30]
    assert shown["pilotlight_models_quarantined",] == 0, "the rest of the page is complete"
    assert faults == [("a", "metrics")]
