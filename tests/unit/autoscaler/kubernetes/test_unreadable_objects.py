"""The record of objects that cannot be decoded, and the Events about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from autoscaler.controller.loop import LoopStep
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.resources import events
from autoscaler.kubernetes.resources.event_writer import UNREADABLE_MAX, UNREADABLE_S, Events
from autoscaler.kubernetes.unreadable_objects import REASON_CHARACTERS_MAX, Unreadable, UnreadableObjects
from autoscaler.state.actions import Plan
from tests.support.builders.worlds import replace_fields, world

TOO_DEEP = "its values are nested more than 100 levels deep"


def claim(name: str = "c", reason: str = TOO_DEEP, kind: str = "ResourceClaim") -> Unreadable:
    return Unreadable(kind, "team-b", name, "7", reason, "resource.k8s.io/v1", "u7")


class House:
    """Events of one process. The test moves the clock and sends the due Events itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.unreadable = UnreadableObjects()
        self.events = Events(
            cast("Api", None), clock=lambda: self.now_s, wall=lambda: self.now_s, unreadable=self.unreadable
        )

    def step(self, *, leads: bool) -> None:
        at = replace_fields(world([]), leads=leads)
        self.events.on_step(LoopStep(at, at, Plan(), (), (), 0.0, 0.0, 0.0))

    def due(self) -> Iterator[Object]:
        """The manifests of all Events that are due."""
        while (due := self.events._book.take(self.now_s)) is not None:
            yield dict(events.build_event_manifest(due, "e", "us", str))


def test_object_unreadable_in_several_watches_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    objects, heard = UnreadableObjects(), list[str]()
    objects.listeners.append(lambda one: heard.append(one.reason))
    for watch in ("a", "b", "a"):
        objects.add(watch, claim(), f"/{watch}")
    objects.add("c", claim(kind="ResourceSlice"), "/c")
    objects.add("b", claim(reason="another"), "/b")
    assert objects.counts() == {"ResourceClaim": 1, "ResourceSlice": 1}
    assert heard == [TOO_DEEP, TOO_DEEP, "another"], "once for each object and reason"
    assert [record.getMessage().split("path=")[1][:2] for record in caplog.records] == ["/a", "/b", "/c", "/b"]
    objects.forget("c")
    objects.remove("a", "team-b", "c")
    assert objects.counts() == {"ResourceClaim": 1}
    objects.keep("b", {("team-b", "d")})
    assert objects.counts() == {}


def test_long_reason_of_an_unreadable_object_is_truncated() -> None:
    objects = UnreadableObjects()
    objects.add("a", claim(reason="x" * 10_000), "/a")
    assert [len(one.reason) for one in objects] == [REASON_CHARACTERS_MAX]


def test_leader_writes_one_event_per_unreadable_object_and_reason() -> None:
    house = House()
    house.unreadable.add("a", claim("before"), "/a")
    house.step(leads=False)
    assert list(house.due()) == [], "a follower writes none"
    house.step(leads=True)
    house.step(leads=True)
    (event,) = house.due()
    assert (event["reason"], event["type"], event["count"]) == ("Unreadable", "Warning", 1)
    assert event["message"] == f"Pilotlight skips this object: {TOO_DEEP}"
    assert event["metadata"]["namespace"] == "team-b"
    assert event["involvedObject"] == {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "namespace": "team-b", "name": "before",
        "uid": "u7",
    }  # fmt: skip
    for watch in ("a", "b"):
        house.unreadable.add(watch, claim("after"), "/a")
    assert [one["involvedObject"]["name"] for one in house.due()] == ["after"]
    house.unreadable.add("a", claim("after", "another reason"), "/a")
    assert [one["message"] for one in house.due()] == ["Pilotlight skips this object: another reason"]


def test_process_that_leads_again_reports_still_unreadable_objects_again() -> None:
    house = House()
    house.step(leads=True)
    house.unreadable.add("a", claim(), "/a")
    assert len(list(house.due())) == 1
    house.step(leads=False)
    house.step(leads=True)
    assert len(list(house.due())) == 1


def test_event_about_cluster_scoped_object_is_in_default_namespace() -> None:
    house = House()
    house.step(leads=True)
    house.unreadable.add("a", Unreadable("Node", "", "n1", "7", "bad", "v1", "u"), "/nodes")
    (event,) = house.due()
    assert event["metadata"]["namespace"] == "default"
    assert event["involvedObject"]["namespace"] == ""


def test_unreadable_object_without_a_name_has_no_event() -> None:
    house = House()
    house.step(leads=True)
    house.unreadable.add("a", Unreadable("Node", "", "", "", "bad"), "/nodes")
    assert list(house.due()) == []


def test_events_about_unreadable_objects_are_limited_per_interval() -> None:
    house = House()
    house.step(leads=True)
    for number in range(3 * UNREADABLE_MAX):
        house.unreadable.add("a", claim(f"c{number}"), "/a")
    assert len(list(house.due())) == UNREADABLE_MAX
    house.now_s = UNREADABLE_S
    house.unreadable.add("a", claim("later"), "/a")
    assert [one["involvedObject"]["name"] for one in house.due()] == ["later"]
    assert house.unreadable.counts() == {"ResourceClaim": 3 * UNREADABLE_MAX + 1}
