"""Released capacity that does not detach: its duration is counted, and one event of its model reports it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from autoscaler.controller.loop import LoopStep
from autoscaler.fold.indices import rebuild_indices
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.resources.event_log import Regarding
from autoscaler.kubernetes.resources.event_writer import Events
from autoscaler.provisioning.release import STUCK_S, Leaving
from autoscaler.server.metrics import Metrics
from autoscaler.state.actions import Acted, Plan, ReleaseLease
from autoscaler.state.capacity_orders import ReleaseOrder
from autoscaler.state.world import World
from tests.support.builders.capacity import A, acted, arrived, offer, shown, surge, told
from tests.support.builders.worlds import T0, replace_fields, replica
from tests.support.chart import CHART

BEGUN_S = T0 + 40
THERE: dict[str, Any] = {"committed": True, "node": "w1", "device_ids": ("new0",)}


def here() -> World:
    return arrived(acted(surge(offer()))[0], T0 + 30)


def leaving() -> World:
    """An order that was delivered and released; its operator reports what blocks the detach."""
    begin = here()
    (id,) = begin.capacity.leases
    release = ReleaseLease(order=ReleaseOrder(id=id, epoch=1), reason="idle for 60 s")
    return shown(told(begin, Acted(action=release), now_s=BEGUN_S), BEGUN_S, phase="leaving", says="busy", **THERE)


class Silent(Api):
    """An API that answers no requests, and must not get any."""

    def __init__(self) -> None:
        pass


class Teller:
    """The events of one autoscaler that observes the given Worlds."""

    def __init__(self) -> None:
        self.now_s = BEGUN_S
        about = Regarding("pilotlight.dev/v1alpha1", "Model", "default", "a", "u1")
        self.events = Events(Silent(), regarding=lambda model: about, clock=lambda: self.now_s, wall=lambda: self.now_s)

    def sees(self, world: World, after_s: float) -> list[tuple[str, str, str]]:
        """The (reason, type, note) of each event due after `after_s` seconds."""
        self.now_s = BEGUN_S + after_s
        self.events.on_step(LoopStep(world, world, Plan(), (), (), self.now_s, self.now_s, self.now_s))
        dues = iter(lambda: self.events._book.take(self.now_s), None)
        return [(due.happening.reason, due.happening.type, due.happening.note) for due in dues if due is not None]


def test_stuck_release_emits_one_event_after_the_timeout() -> None:
    teller, world = Teller(), leaving()
    assert not teller.sees(world, 0)
    assert not teller.sees(world, STUCK_S)
    note = "1 x A100 on w1 of rack is not released after 5 min: busy"
    assert teller.sees(world, STUCK_S + 1) == [("CapacityStuck", "Warning", note)]
    assert not teller.sees(world, STUCK_S + 2)
    assert not teller.sees(world, 10 * STUCK_S)


def test_follower_emits_no_event_and_the_next_leader_does() -> None:
    teller, world = Teller(), leaving()
    follows = replace_fields(world, leads=False)
    assert not teller.sees(follows, 0)
    assert not teller.sees(follows, STUCK_S + 1)
    assert [reason for reason, *_ in teller.sees(world, STUCK_S + 2)] == ["CapacityStuck"]


def test_release_completed_or_reverted_before_the_timeout_is_not_stuck() -> None:
    world = leaving()
    for other in (replace(world, capacity=replace(world.capacity, leases={})), here()):
        teller = Teller()
        assert not teller.sees(world, 0)
        assert not teller.sees(other, STUCK_S - 1)
        assert not teller.sees(other, STUCK_S + 1)
        assert not teller.sees(world, STUCK_S + 2), "the timeout starts again"


def test_release_of_a_device_still_in_use_does_not_count_as_stuck() -> None:
    begin = here()
    on = replica(A, "r", ["new0"], ready_s=T0 + 30)
    used = shown(rebuild_indices(replace(begin, replicas={on.id: on}), BEGUN_S), BEGUN_S, phase="leaving", **THERE)
    assert [one.in_use for one in used.capacity.leases.values()] == [True]
    watch = Leaving()
    for after_s in (0.0, STUCK_S, 2 * STUCK_S):
        watch.look(used.capacity, BEGUN_S + after_s)
    assert (watch.stuck(), watch.longest_s()) == (frozenset(), {})


@pytest.mark.parametrize("leads", [True, False])
def test_time_since_the_release_is_exported_as_a_metric_per_provider(*, leads: bool) -> None:
    world = replace_fields(leaving(), leads=leads)
    metrics = Metrics(lambda: world)
    for now_s in (BEGUN_S, BEGUN_S + 30.0, BEGUN_S + 90.0):
        metrics.on_step(LoopStep(world, world, Plan(), (), (), now_s, now_s, now_s))
    assert 'pilotlight_lease_leaving_seconds{provider="rack"} 90.0\n' in metrics.text().decode()


def test_stuck_capacity_alert_and_event_have_the_same_threshold() -> None:
    rules = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"][0]["rules"]
    (rule,) = [one for one in rules if one["alert"] == "PilotlightCapacityStuck"]
    assert re.findall(r"pilotlight_lease_leaving_seconds\) > (\d+)$", rule["expr"]) == [f"{STUCK_S:.0f}"]
