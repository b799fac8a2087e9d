"""Why pods wait for volumes, from their Events: which Event counts, and how often they are queried."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from autoscaler.drivers.kubernetes.objects.pod_state import IMAGE_S_MAX, PodSeen
from autoscaler.drivers.kubernetes.volume_failures import LOOK_S, LOOK_S_MAX, PodEvents, find_volume_failure
from autoscaler.kubernetes.api import Api, Object, UnreachableError
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.unreadable_objects import Unreadable, UnreadableObjects
from autoscaler.kubernetes.watch import ObjectKey, Watched
from tests.unit.autoscaler.drivers.kubernetes.test_proof_of_clean import RUNS

SECRET = 'MountVolume.SetUp failed for volume "a" : secret "weights-login" not found'
WAITS = RUNS._replace(
    started_unix_s=None, waits="node n1 prepares its image and volumes", prepared=False, ip="", leaving=False
)


def event(reason: str, second: int, message: str = SECRET, version: int = 1, **more: Any) -> Object:
    at = f"2026-01-01T00:00:{second:02}Z"
    return {
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "metadata": {"resourceVersion": str(version)},
    } | more


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((), ""),
        ((event("Scheduled", 1, "assigned"),), ""),
        ((event("Scheduled", 1, "assigned"), event("FailedMount", 3)), f"FailedMount: {SECRET}"),
        ((event("FailedMount", 3), event("Pulling", 9, "pulling image")), ""),
        ((event("Pulling", 3, version=7), event("FailedMount", 3, version=4)), ""),
        (
            (event("FailedAttachVolume", 3, "no answer of 10.0.0.7:2049"),),
            "FailedAttachVolume: no answer of (address)",
        ),
        (
            (event("Pulling", 5), event("FailedMount", 1, series={"lastObservedTime": "2026-01-01T00:00:09.1Z"})),
            f"FailedMount: {SECRET}",
        ),
        (({"reason": "FailedMount"},), "FailedMount: "),
        ((event("FailedMount", 3), event("SuccessfulAttachVolume", 9, "of another volume")), f"FailedMount: {SECRET}"),
    ],
)
def test_volume_failure_event_counts_until_the_pod_pulls_its_image(events: tuple[Object, ...], message: str) -> None:
    assert find_volume_failure(events) == message


class Rig:
    """Watched pods, and a fake API server that returns their Events."""

    def __init__(self, *pods: PodSeen) -> None:
        self.now_s = 0.0
        self.items = {ObjectKey(pod.namespace, pod.name): pod for pod in pods}
        self.events: list[Object] = []
        self.asked: list[str] = []
        self.failing: list[str] = []
        """Selectors whose list fails."""
        self.changed: list[PodSeen] = []
        self.unreadable = UnreadableObjects()
        watched = cast("Watched[PodSeen]", self)
        self.one = PodEvents(cast("Api", self), "n", watched, self.changed.append, lambda: self.now_s)

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        """Like `Api.pages`: one page of Events, and one of which no Event can be decoded."""
        assert path == "/api/v1/namespaces/n/events"
        self.asked.append(query["fieldSelector"])
        if query["fieldSelector"] in self.failing:
            raise UnreachableError("GET: the answer is no list")
        yield ListPage("1", "next", self.events, [])
        yield ListPage("1", "", [], [Unreadable("Event", "n", "deep", "1", "nested")])

    async def look(self, after_s: float) -> int:
        """The number of queries that a look makes."""
        self.now_s += after_s
        before = len(self.asked)
        await self.one.look()
        return len(self.asked) - before


async def test_pod_with_failed_mount_reports_the_reason() -> None:
    rig = Rig(WAITS)
    assert await rig.look(0.0) == 1
    assert (rig.changed, rig.one.with_failure(WAITS)) == ([], WAITS)
    rig.events = [event("FailedMount", 3)]
    assert await rig.look(LOOK_S) == 1
    assert rig.changed == [WAITS]
    named = rig.one.with_failure(WAITS)
    assert (named.waits, named.patience_s) == (f"FailedMount: {SECRET}", IMAGE_S_MAX)
    rig.events.append(event("Pulling", 9))
    assert await rig.look(LOOK_S_MAX) == 1
    assert rig.one.with_failure(WAITS) == WAITS


async def test_events_that_cannot_be_decoded_are_counted_while_their_pod_waits() -> None:
    rig = Rig(WAITS)
    await rig.look(0.0)
    assert rig.unreadable.counts() == {"Event": 1}
    rig.items.clear()
    await rig.look(LOOK_S_MAX)
    assert not rig.unreadable.counts()


async def test_failed_list_for_one_pod_does_not_affect_another() -> None:
    rig = Rig(WAITS._replace(name="first", uid="first"), WAITS)
    rig.failing, rig.events = ["involvedObject.uid=first"], [event("FailedMount", 3)]
    assert await rig.look(0.0) == 2
    assert rig.changed == [WAITS]


async def test_events_of_a_pod_are_polled_after_5_s_and_then_every_10_s() -> None:
    rig = Rig(WAITS)
    asked_s = [second for second in range(100) if await rig.look(1.0 if second else 0.0)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked_s)]
    assert (pauses[:3], set(pauses[3:])) == ([5, 10, 10], {10})


@pytest.mark.parametrize(
    "pod",
    [
        RUNS,
        WAITS._replace(node=""),
        WAITS._replace(prepared=True),
        WAITS._replace(leaving=True),
        WAITS._replace(ended="Evicted"),
        WAITS._replace(waits="ErrImagePull: no", patience_s=60.0),
    ],
)
async def test_events_are_not_polled_for_pods_not_awaiting_volumes(pod: PodSeen) -> None:
    rig = Rig(pod)
    assert await rig.look(0.0) == 0
    assert rig.one.with_failure(pod) == pod
