"""Replica pods tell Karpenter not to disrupt them while they start and drain, but not while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from autoscaler.providers.karpenter.disruption_guard import DisruptionGuard
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.reconciler import REST_S
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.spec.pod import DO_NOT_DISRUPT, SAFE_TO_EVICT, Pod
from autoscaler.spec.settings import Settings
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Cordon, CordonTarget, PodRef, Replica, World
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.worlds import T0, device, model, replica, world
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.async_tests import call_with

PODS = "/api/v1/namespaces/engines/pods"
LABELS = {"app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/intent": "i"}
ADA = model("ada")


class Bench:
    """Pods as the driver creates them, and the `World` that the guard sees."""

    def __init__(self) -> None:
        self.server, self.writes, self.world = PlayedServer(lambda: 0.0), True, World(epoch=1)
        self.begin()

    def begin(self) -> None:
        """Start a new process; the previous one has ended."""
        self.one = DisruptionGuard(self.server, "engines", lambda: self.world, lambda: self.writes)
        self.task = asyncio.create_task(self.one.run())

    def made(self, *names: str) -> None:
        """Create these pods as a driver does."""
        for name in names:
            notes = {DO_NOT_DISRUPT: "true", SAFE_TO_EVICT: "false"}
            self.server.put(
                f"{PODS}/{name}", {"metadata": {"uid": f"u-{name}", "labels": LABELS, "annotations": notes}}
            )

    async def looks(self, at: World) -> list[str]:
        """The pods that carry the annotation after the guard has seen this `World`."""
        self.world = at
        self.one.look()
        await asyncio.sleep(0.1)
        found = [one["metadata"] for path, one in sorted(self.server.objects.items()) if path.startswith(PODS)]
        assert all(one["annotations"][SAFE_TO_EVICT] == "false" for one in found), (
            "the annotation for Cluster Autoscaler stays"
        )
        return [one["name"] for one in found if one["annotations"].get(DO_NOT_DISRUPT) == "true"]


def bench(scenario: Callable[[Bench], Coroutine[object, object, None]]) -> None:
    async def whole() -> None:
        one = Bench()
        await scenario(one)
        one.task.cancel()

    run(whole())


def one(name: str, state: S, **fields: Any) -> Replica:
    """A replica with its pod."""
    return replica(ADA, name, state=state, pod=PodRef(namespace="engines", name=name, uid=f"u-{name}"), **fields)


def at(*replicas: Replica, of: Iterable[Any] = (ADA,), **fields: Any) -> World:
    """The `World` of a leader."""
    return world(of, (device(),), replicas, **fields)


@call_with(bench)
async def test_pod_is_protected_from_disruption_only_while_starting_or_draining(of: Bench) -> None:
    of.made("a")
    for state in (S.PENDING, S.STARTING):
        assert await of.looks(at(one("a", state))) == ["a"]
    assert not of.server.writes, "it was made so"
    assert not await of.looks(at(one("a", S.READY)))
    assert not await of.looks(at(one("a", S.UNREADY)))
    assert await of.looks(at(one("a", S.DRAINING))) == ["a"]
    assert not await of.looks(at(one("a", S.READY))), "it was revived"
    assert await of.looks(at(one("a", S.DRAINING))) == ["a"]
    assert await of.looks(at(one("a", S.STOPPING))) == ["a"]
    assert len(of.server.writes) == 4, "one for each change"
    (first, *_) = of.server.writes
    fields = {"metadata": {"uid": "u-a", "annotations": {DO_NOT_DISRUPT: None}}}
    assert first == ("PATCH", f"{PODS}/a", fields), "and nothing else of it"


@call_with(bench)
async def test_state_change_during_an_annotation_write_is_applied_afterwards(of: Bench) -> None:
    of.made("r")
    await of.looks(at(one("r", S.STARTING)))

    def drains(*_: object) -> None:
        of.world = at(one("r", S.DRAINING))
        of.one.look()

    of.server.before_write = drains
    assert await of.looks(at(one("r", S.READY))) == ["r"]


@call_with(bench)
async def test_asleep_replica_allows_disruption_and_waking_replica_does_not(of: Bench) -> None:
    of.made("a")
    assert not await of.looks(at(one("a", S.ASLEEP)))
    assert await of.looks(at(one("a", S.WAKING))) == ["a"]
    assert not await of.looks(at(one("a", S.READY)))


@call_with(bench)
async def test_unchanged_replica_state_causes_no_api_server_requests(of: Bench) -> None:
    of.made("a", "b")
    now = at(one("a", S.READY), one("b", S.STARTING))
    assert await of.looks(now) == ["b"]
    before = of.server.requests
    for _ in range(3):
        assert await of.looks(now) == ["b"]
        assert await of.looks(at(one("a", S.READY), one("b", S.STARTING))) == ["b"]
    assert of.server.requests == before


@call_with(bench)
async def test_draining_pods_are_annotated_before_other_annotations_are_removed(of: Bench) -> None:
    of.made("a", "b", "c")
    loads = one("b", S.STARTING, on=("gpu1",))
    slices = (device(), device("gpu1", node="n1"))
    assert await of.looks(world((ADA,), slices, (one("a", S.READY), loads))) == ["b", "c"]
    place = CordonTarget("node", "n0")
    taken = Cordon(place=place, node="n0", since_s=T0, drain=True, soon=True, why="node n0: Karpenter removes it")
    ready = one("b", S.READY, on=("gpu1",))
    now = world((ADA,), slices, (ready, one("a", S.READY)), cordons={place: taken})
    assert await of.looks(now) == ["a", "c"]
    assert [path for _, path, _ in of.server.writes] == [f"{PODS}/a", f"{PODS}/a", f"{PODS}/b"]


@call_with(bench)
async def test_new_leader_corrects_outdated_pod_annotations(of: Bench) -> None:
    of.made("a", "b", "c")
    assert await of.looks(at(one("a", S.READY), one("b", S.STARTING), one("c", S.STARTING))) == ["b", "c"]
    of.task.cancel()
    of.begin()
    later = at(one("a", S.DRAINING), one("b", S.READY), one("c", S.STARTING))
    assert await of.looks(later) == ["a", "c"]
    assert len(of.server.writes) == 3


@call_with(bench)
async def test_annotations_are_reread_after_leadership_is_regained(of: Bench) -> None:
    of.made("a")
    now = at(one("a", S.READY))
    assert not await of.looks(now)
    of.writes = False
    assert not await of.looks(now)
    of.made("a")
    assert await of.looks(now) == ["a"]
    of.writes = True
    assert not await of.looks(now)


@pytest.mark.parametrize(("leads", "writes"), [(False, True), (True, False)])
@call_with(bench)
async def test_follower_writes_no_disruption_annotation(of: Bench, leads: bool, writes: bool) -> None:
    of.made("a")
    of.writes = writes
    assert await of.looks(at(one("a", S.READY), leads=leads)) == ["a"]
    assert not of.server.writes


@call_with(bench)
async def test_annotation_write_is_retried_after_an_api_server_outage(of: Bench) -> None:
    of.made("a")
    of.server.away = True
    assert await of.looks(at(one("a", S.READY))) == ["a"]
    of.server.away = False
    await asyncio.sleep(REST_S[0])
    assert not await of.looks(of.world)


@call_with(bench)
async def test_forbidden_pod_write_does_not_block_other_pods(of: Bench, caplog: pytest.LogCaptureFixture) -> None:
    of.made("a", "b")

    def refuses(method: str, path: str) -> None:
        assert (method, path) == ("PATCH", f"{PODS}/a")
        raise AnswerError(403, "Forbidden", "a policy minds")

    of.server.before_write = refuses
    assert await of.looks(at(one("a", S.READY), one("b", S.READY))) == ["a"]
    assert "a policy minds" in caplog.text
    await asyncio.sleep(REST_S[0])
    assert not await of.looks(of.world)


@call_with(bench)
async def test_annotating_a_deleted_pod_logs_no_error(of: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert not await of.looks(at(one("a", S.READY)))
    assert len(of.server.writes) == 1
    assert not caplog.text


@call_with(bench)
async def test_annotation_set_by_model_or_settings_is_kept(of: Bench) -> None:
    of.made("a")
    own = Pod(annotations={DO_NOT_DISRUPT: "true"})
    assert await of.looks(at(one("a", S.READY), of=(model("ada", pod=own),))) == ["a"]
    assert await of.looks(at(one("a", S.READY), settings=Settings(pod=own))) == ["a"]
    assert not of.server.writes


@call_with(bench)
async def test_disruption_annotations_of_adopted_pods_are_not_modified(of: Bench) -> None:
    of.made("a")
    assert await of.looks(at(one("a", S.READY, spec_hash=ADOPTED_HASH))) == ["a"]
    assert not of.server.writes
