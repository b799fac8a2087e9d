"""The driver of adopted workloads with a fake API server: how changes of one object affect the others."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes, resilient_tasks
from autoscaler.drivers.kubernetes import pod_writer, volume_failures
from autoscaler.drivers.kubernetes.adoption import driver, workload, workload_runner
from autoscaler.drivers.kubernetes.adoption.annotations import Others, read_model
from autoscaler.drivers.kubernetes.adoption.driver import AdoptedDriver, WorkloadEvent
from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen, WorkloadSeen
from autoscaler.drivers.kubernetes.pod_writer import Pauses
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.unreadable_objects import UnreadableObjects
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model
from autoscaler.state.events import FaultSeen, ReplicaSeen, Seen
from pilotlight.processes.cluster import Cluster, ClusterOptions
from tests.support.builders.adoption_workload import Bench
from tests.support.fakes.kubernetes.api_server import Event, bookmark
from tests.support.harness.driver_events import Observed, running

APPS, PODS = "/apis/apps/v1/namespaces/n/deployments", "/api/v1/namespaces/n/pods"


class Plane:
    """A fake API server: collections by path, listed first and then watched."""

    def __init__(self) -> None:
        self._things: dict[tuple[str, str], Object] = {}
        self._heard: list[tuple[str, asyncio.Queue[Event]]] = []
        self._version = 1
        self.now_unix_s = 1_800_000_000.0
        self.asked: list[str] = []
        """Paths of the requested writes."""
        self.unreadable = UnreadableObjects()
        self.errors: list[Exception] = []
        """Errors that the next writes raise."""
        self.mark_errors: list[Exception] = []
        """Errors that the next writes of pod annotations raise."""
        self.events: list[Object] = []
        """Events about pods, returned for each query."""
        self.scale: Object | None = None
        """The scale of a workload, of which the watch knows an older version."""

    def put(self, path: str, found: Object) -> None:
        """Create or replace an object."""
        self._version += 1
        made = copy.deepcopy(found)
        made["metadata"] |= {"namespace": "n", "resourceVersion": str(self._version)}
        self._things[path, made["metadata"]["name"]] = made
        for at, queue in self._heard:
            if at == path:
                queue.put_nowait(("MODIFIED", made))

    async def get(self, path: str, **query: str) -> Object:
        """Return the scale; every other object, such as another autoscaler, is missing."""
        if path.endswith("/scale") and self.scale is not None:
            return self.scale
        raise ApiError(404, "NotFound", path)

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        """Return the Events."""
        assert path.endswith("/events")
        assert query["fieldSelector"].startswith("involvedObject.uid=uid-")
        yield ListPage("1", "", self.events, [])

    async def watch(
        self, path: str, version: str | None, query: Mapping[str, str], *, initial: bool = False, silent_s: float = 0
    ) -> AsyncIterator[Event]:
        """Like `Api.watch`, without filtering by selector."""
        del version, query, silent_s
        if initial:
            for (at, _), found in tuple(self._things.items()):
                if at == path:
                    yield "ADDED", found
            yield bookmark(self._version, end=True)
            return
        queue = asyncio.Queue[Event]()
        self._heard.append((path, queue))
        while True:
            yield await queue.get()

    async def apply(self, path: str, body: Object, owner: str) -> Object:
        """Like `Api.apply`: conditional if there is a scale, else of a process that is no longer the leader."""
        self.asked.append(path)
        if self.scale is not None:
            if body["metadata"]["resourceVersion"] != self.scale["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", "the object has been modified")
            return {"metadata": {"resourceVersion": str(int(body["metadata"]["resourceVersion"]) + 1)}}
        raise self.errors.pop() if self.errors else FencedError

    async def patch(self, path: str, body: Object) -> Object:
        """Like `Api.patch` of a pod's annotations."""
        self.asked.append(path)
        if self.mark_errors:
            raise self.mark_errors.pop()
        return body

    def unix_s(self) -> float:
        """Like `Api.unix_s`."""
        return self.now_unix_s


def deployment(name: str, **notes: str) -> Object:
    """An annotated Deployment with one replica."""
    written = {f"pilotlight.dev/{key.replace('_', '-')}": value for key, value in notes.items()}
    labels = {"app": name}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z",
                     "annotations": written},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels},
                 "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine"}]}}},
    }  # fmt: skip


def pod(of: str, **more: Any) -> Object:
    """A running pod of a Deployment; its exec probe means that only the kubelet knows whether it is ready."""
    container = {"name": "engine", "readinessProbe": {"exec": {"command": ["true"]}}}
    state = {"running": {"startedAt": "2026-01-01T00:00:01Z"}}
    return {
        "metadata": {"name": f"{of}-h-1", "uid": f"uid-{of}-h-1", "creationTimestamp": "2026-01-01T00:00:00Z",
                     "labels": {"app": of, "pod-template-hash": "h"},
                     "ownerReferences": [{"kind": "ReplicaSet", "name": f"{of}-h", "controller": True}]},
        "spec": {"containers": [container], "nodeName": "n1"},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}],
                   "containerStatuses": [{"name": "engine", "state": state}], **more},
    }  # fmt: skip


HOLDS = ("readiness gate", "second container", "native sidecar", "startup probe of a socket")
"""What keeps a pod from being ready although its engine answers."""


def held_pod(of: str, hold: str, *, held: bool) -> Object:
    """A pod with a running engine as its kubelet reports it, held or not."""
    found, socket = pod(of), {"tcpSocket": {"port": 8080}}
    (engine,) = found["status"]["containerStatuses"]
    ready = {"type": "Ready", "status": str(not held)}
    mesh = {"name": "mesh", "ready": not held}
    fields: dict[str, tuple[Object, Object]] = {
        "readiness gate": (
            {"readinessGates": [{"conditionType": "attached"}]},
            {"conditions": [ready, {"type": "attached", "status": str(not held)}]},
        ),
        "second container": (
            {"containers": [{"name": "engine"}, {"name": "mesh"}]}, {"containerStatuses": [engine, mesh]},
        ),
        "native sidecar": (
            {"initContainers": [{"name": "mesh", "restartPolicy": "Always"}]}, {"initContainerStatuses": [mesh]},
        ),
        "startup probe of a socket": (
            {"containers": [{"name": "engine", "startupProbe": socket, "readinessProbe": socket}]},
            {"containerStatuses": [{**engine, "started": not held}]},
        ),
    }  # fmt: skip
    spec, status = fields[hold]
    found["spec"] |= {"containers": [{"name": "engine"}], **spec}
    found["status"] |= {"conditions": [ready], **status}
    return found


class House:
    """A driver on a `Plane`, and what it reports."""

    def __init__(
        self,
        driver: AdoptedDriver,
        observed: Observed,
        plane: Plane,
        notes: list[WorkloadEvent],
        models: dict[Origin, Model],
    ) -> None:
        self.driver = driver
        self.plane = plane
        self.notes = notes
        self.models = models
        self.undecoded: dict[str, str] = {}
        """The published exception of each workload."""
        self._observed = observed

    async def until(self, *seen: tuple[str, Seen]) -> None:
        """Wait until the last report of replicas with these name prefixes has this state."""
        async with asyncio.timeout(60):
            while not all(any(id.startswith(name) and now is how for id, now in self.now().items())
                          for name, how in seen):  # fmt: skip
                await asyncio.sleep(0)

    def states(self, name: str) -> list[Seen]:
        """All reported states of the replicas with this name prefix."""
        seen = (one for one in self._observed.all if isinstance(one, ReplicaSeen))
        return [one.seen for one in seen if one.id.startswith(name)]

    def reasons(self, name: str) -> list[str]:
        """Exit reasons of the replicas with this name prefix."""
        seen = (one for one in self._observed.all if isinstance(one, ReplicaSeen))
        return [one.reason for one in seen if one.seen is Seen.EXITED and one.id.startswith(name)]

    def faults(self) -> list[FaultSeen]:
        """The exceptions that the driver reported."""
        return [one for one in self._observed.all if isinstance(one, FaultSeen)]

    def model(self, name: str) -> Model:
        """The Model built from a Deployment."""
        return self.models[Origin("Deployment", "n", name)]

    async def until_model(self, name: str, holds: Callable[[Model], bool]) -> None:
        """Wait until the Model satisfies the condition."""
        async with asyncio.timeout(60):
            while not holds(self.model(name)):
                await asyncio.sleep(0)

    def now(self) -> dict[str, Seen]:
        """The last reported state of each replica."""
        return {one.id: one.seen for one in self._observed.all if isinstance(one, ReplicaSeen)}


@asynccontextmanager
async def serving(
    *names: str,
    whose: Callable[[str, str | None], str | None] = lambda *_: "",
    made: Callable[[str], Object] = pod,
    seen: Seen = Seen.READY,
) -> AsyncIterator[House]:
    """Deployments with a pod each; waits until those of this installation are reported in this state."""
    plane, notes, models, undecoded = Plane(), list[WorkloadEvent](), dict[Origin, Model](), dict[str, str]()
    for name in names:
        plane.put(APPS, deployment(name, models=name))
        plane.put(PODS, made(name))

    def put(now: Mapping[Origin, Model], faults: Mapping[Origin, str]) -> None:
        models.clear()
        models.update(now)
        undecoded.clear()
        undecoded.update({origin.name: why for origin, why in faults.items()})

    driver = AdoptedDriver(cast("Api", plane), ["n"], put, hold_s=lambda: 600.0, whose=whose, note=notes.append)
    async with running(driver) as observed:
        house = House(driver, observed, plane, notes, models)
        house.undecoded = undecoded
        if whose("n", None) == "":
            await house.until(*((name, seen) for name in names))
        driver.lead()
        yield house


async def test_invalid_annotations_keep_the_last_valid_ones_in_force() -> None:
    """Its pods are still read with the previous port, and the pods of other workloads are read too."""
    async with serving("ada", "bert") as house:
        house.plane.put(APPS, deployment("ada", models="ada", slots="7"))
        await house.until_model("ada", lambda model: model.slots == 7)
        house.plane.put(APPS, deployment("ada", models="ada", slots="9", port="abc"))
        while not house.notes:
            await asyncio.sleep(0)
        assert "annotation pilotlight.dev/port: expected a whole number" in house.notes[0].message
        assert house.model("ada").slots == 7
        for name in ("ada", "bert"):
            house.plane.put(PODS, pod(name, conditions=[]))
            await house.until((name, Seen.UNREADY))
        house.plane.put(APPS, deployment("ada", models="ada", slots="9", port="80"))
        await house.until_model("ada", lambda model: model.slots == 9)


async def test_invalid_annotation_seen_by_follower_is_reported_when_it_leads() -> None:
    """It is reported only then; meanwhile the previous leader reported it."""
    async with serving("ada") as house:
        await house.driver.follow()
        house.plane.put(APPS, deployment("bad", models="bad", slots="x"))
        house.plane.put(APPS, deployment("ada", models="ada", slots="7"))
        await house.until_model("ada", lambda model: model.slots == 7)
        assert house.notes == []
        for _ in range(2):
            house.driver.lead()
        (note,) = house.notes
        assert (note.workload.name, note.reason, note.warning) == ("bad", "WrongAnnotation", True)


async def test_pod_template_with_a_replica_annotation_is_reported_and_not_used() -> None:
    async with serving("ada") as house:
        house.driver.lead()
        (before,) = house.now()
        marked = deployment("ada", models="ada", slots="7")
        marked["spec"]["template"]["metadata"]["annotations"] = {"pilotlight.dev/replica": "victim-abc"}
        house.plane.put(APPS, marked)
        async with asyncio.timeout(60):
            while not house.notes:
                await asyncio.sleep(0)
        assert [(note.reason, note.warning) for note in house.notes] == [("WrongAnnotation", True)]
        assert house.now() == {before: Seen.READY}
        assert house.model("ada").slots == 4, "its last valid annotations are in force"


async def test_unreadable_pod_does_not_block_changes_of_other_pods() -> None:
    """One container status lacks its start time, another has the wrong type."""
    async with serving("ada", "bert") as house:
        unsaid = {"name": "engine", "state": {"running": {"startedAt": None}}}
        house.plane.put(PODS, pod("ada", containerStatuses=[unsaid]))
        house.plane.put(PODS, pod("ada", containerStatuses=["odd"]))
        house.plane.put(PODS, pod("bert", conditions=[]))
        await house.until(("bert", Seen.UNREADY))
        assert set(house.now().values()) == {Seen.READY, Seen.UNREADY}


async def test_start_order_after_loss_of_leadership_is_dropped_not_failed() -> None:
    """The driver forgets the replica; the new leader orders what it needs."""
    async with serving("ada") as house:
        (before,) = house.now()
        more = Bench().order("more")
        house.driver.start(more, house.model("ada"))
        while not house.plane.asked or house.driver._runners()[0].core.knows(more.id):
            await asyncio.sleep(0)
        house.driver._runners()[0].settle()
        assert house.now() == {before: Seen.READY}
        assert house.driver._runners()[0].core.level() is None


@pytest.mark.parametrize(("status", "tries"), [(503, 51), (429, 51), (408, 51), (409, 20), (403, 1)])
async def test_scale_write_is_retried_after_transient_errors_but_not_a_403(
    status: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conflict is retried for a limited time, a 403 not at all; both end the start."""
    monkeypatch.setattr(workload_runner, "CHANGED_S_MAX", 0.0)
    monkeypatch.setattr(pod_writer, "RETRY_S", 0.0)
    async with serving("ada") as house:
        house.plane.errors = [ApiError(status, "Trouble", "no") for _ in range(50)]
        more = Bench().order("more")
        house.driver.start(more, house.model("ada"))
        async with asyncio.timeout(60):
            while house.driver._runners()[0].core.knows(more.id):
                await asyncio.sleep(0)
        assert len(house.plane.asked) == tries
        assert bool(house.reasons("more")) == (tries < 50)


@pytest.mark.parametrize(
    ("error", "failures", "marks"),
    [
        (UnreachableError("no response"), 50, 51),
        (ApiError(500, "InternalError", "etcd"), 3, 4),
        (ApiError(503, "ServiceUnavailable", "etcd"), 3, 4),
        (ApiError(429, "TooManyRequests", "slow down"), 3, 4),
        (ApiError(500, "InternalError", "failed calling webhook"), 50, workload_runner.MARK_FAILURES_MAX),
        (ApiError(403, "Forbidden", "no right to patch pods"), 3, 1),
    ],
    ids=["unreachable", "500", "503", "429", "webhook-stays-unavailable", "403"],
)  # fmt: skip
async def test_annotation_of_a_pod_to_stop_is_tried_before_the_scale_is_lowered(
    error: Exception, failures: int, marks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the ReplicaSet might delete another pod. No error of the API server blocks the scale forever."""
    monkeypatch.setattr(pod_writer, "RETRY_S", 0.0)
    async with serving("ada") as house:
        house.plane.scale = {"metadata": {"uid": "uid-ada", "resourceVersion": "99"}, "spec": {"replicas": 1}}
        (replica,) = house.now()
        (runner,) = house.driver._runners()
        runner.core.see_scale("uid-ada", 1, 99)
        house.plane.mark_errors = [error] * failures
        house.plane.asked.clear()
        house.driver.stop(replace(Bench().order("x"), id=ReplicaId(replica)), 1.0)
        scale = f"{APPS}/ada/scale"
        async with asyncio.timeout(60):
            while scale not in house.plane.asked:
                await asyncio.sleep(0)
        assert house.plane.asked[: marks + 1] == [*[f"{PODS}/ada-h-1"] * marks, scale]


async def test_pause_between_retries_of_a_scale_write_grows_exponentially(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class RecordedPauses(Pauses):
        async def rest(self, sooner: asyncio.Event | None = None) -> None:
            pauses.append(self._next_s)
            await super().rest(sooner)

    monkeypatch.setattr(workload_runner, "Pauses", RecordedPauses)
    async with serving("ada") as house:
        house.plane.errors = [ApiError(503, "Trouble", "no") for _ in range(3)]
        house.driver.start(Bench().order("more"), house.model("ada"))
        async with asyncio.timeout(60):
            while len(pauses) < 3:
                await asyncio.sleep(0)
    first_s, growth = pod_writer.RETRY_S, pod_writer.RETRY_GROWTH
    assert pauses == [first_s, first_s * growth, first_s * growth * growth]


@pytest.mark.parametrize(
    ("uid", "replicas", "tries"), [("uid-ada", 1, 2), ("uid-ada", 5, 20), ("uid-other", 1, 20)],
    ids=["changed-status", "scaled-by-others", "other-object"],
)  # fmt: skip
async def test_scale_write_after_409_succeeds_only_if_the_scale_is_unchanged(
    uid: str, replicas: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch does not report the change. What others wrote to the scale is not overwritten."""
    monkeypatch.setattr(workload_runner, "CHANGED_S_MAX", 0.0)
    monkeypatch.setattr(pod_writer, "RETRY_S", 0.0)
    async with serving("ada") as house:
        house.plane.scale = {"metadata": {"uid": uid, "resourceVersion": "99"}, "spec": {"replicas": replicas}}
        more = Bench().order("more")
        core = house.driver._runners()[0].core
        house.driver.start(more, house.model("ada"))
        async with asyncio.timeout(60):
            while core.version != 100 and core.knows(more.id):
                await asyncio.sleep(0)
        assert len(house.plane.asked) == tries
        assert bool(house.reasons("more")) == (tries > 2)
        assert house.driver.obstacle(house.model("ada")) == "", "a conflict is no evidence about the next start"


@pytest.mark.parametrize("status", [403, 422])
async def test_rejected_scale_is_the_reason_that_blocks_the_next_start(status: int) -> None:
    async with serving("ada") as house:
        house.plane.errors = [ApiError(status, "Refused", "a policy says no")]
        house.driver.start(Bench().order("more"), house.model("ada"))
        async with asyncio.timeout(60):
            while not house.reasons("more"):
                await asyncio.sleep(0)
        message = f"Deployment n/ada cannot be scaled: {status} Refused: a policy says no"
        assert house.reasons("more") == [message]
        assert house.driver.obstacle(house.model("ada")) == message


async def test_manual_scale_stays_in_force_after_the_server_clock_changes() -> None:
    """The managed-fields time is wrong and the server clock changes; the duration counts from the first observation."""
    async with serving("ada") as house:
        found = deployment("ada", models="ada")
        found["spec"]["replicas"] = 3
        managed = {"manager": "kubectl", "subresource": "scale", "time": "2020-01-01T00:00:00Z",
                   "fieldsV1": {"f:spec": {"f:replicas": {}}}}  # fmt: skip
        found["metadata"]["managedFields"] = [managed]
        house.plane.put(APPS, found)
        await house.until_model("ada", lambda model: model.spec.replicas.min == 3)
        house.plane.now_unix_s += 3600.0
        found["metadata"]["annotations"]["pilotlight.dev/slots"] = "7"
        house.plane.put(APPS, found)
        await house.until_model("ada", lambda model: model.slots == 7)
        assert house.model("ada").spec.replicas.min == 3


async def test_released_workload_is_neither_scaled_nor_adopted_again() -> None:
    """It holds whatever changes in names and other autoscalers while its replica terminates."""
    async with serving("ada", "bert") as house:
        house.driver.called({Origin("Deployment", "n", name): ModelName(name) for name in ("ada", "bert")}, {})
        while not house.plane.asked:
            await asyncio.sleep(0)
        (replica,) = (id for id in house.now() if id.startswith("ada"))
        order = replace(Bench().order("x"), id=ReplicaId(replica))
        house.plane.put(APPS, deployment("ada"))
        while len(house.models) > 1:
            await asyncio.sleep(0)
        house.driver.called({Origin("Deployment", "n", "bert"): ModelName("bert")}, {})
        house.driver.stop(order, 1.0)
        await house.until(("ada", Seen.CLEAN), ("bert", Seen.READY))
        house.plane.put(APPS, deployment("bert", models="bert", slots="7"))
        await house.until_model("bert", lambda model: model.slots == 7)
        assert len(house.models) == 1
        assert {path.rpartition("/")[2] for path in house.plane.asked} == {"status"}


def test_own_and_adopted_pods_share_one_probe_rate_limit() -> None:
    api = cast("Api", Plane())
    cluster = Cluster(ClusterOptions(namespace="n"), (api, api), cast("Elector", None), "a1", lambda: 0.0)
    pace = cluster._pace
    assert pace is cluster._own._prober._pace
    assert pace is cluster._resources.adopted._pace
    assert not pace.leads


async def test_exception_while_reading_a_workload_is_a_fault_of_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = read_model

    def odd(seen: WorkloadSeen, others: Others) -> Model:
        if seen.key.name == "ada" and ("pilotlight.dev/slots", "7") in seen.notes:
            raise KeyError("odd")
        return real(seen, others)

    async with serving("ada", "bert") as house:
        monkeypatch.setattr(driver, "read_model", odd)
        house.plane.put(APPS, deployment("ada", models="ada", slots="7"))
        house.plane.put(APPS, deployment("bert", models="bert", slots="9"))
        await house.until_model("bert", lambda model: model.slots == 9)
        assert [(name, "KeyError" in why) for name, why in house.undecoded.items()] == [("ada", True)]
        assert house.model("ada").slots == 4, "its last valid annotations stay in force"
        house.driver.retry({Origin("Deployment", "n", "bert")})
        assert list(house.undecoded) == ["ada"]
        monkeypatch.setattr(driver, "read_model", real)
        house.driver.retry({Origin("Deployment", "n", "ada")})
        assert (house.model("ada").slots, house.undecoded) == (7, {})


async def test_new_workload_that_cannot_be_read_is_published_as_a_paused_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its requests would be rejected as those of an unknown model, and no quarantine would begin."""
    real = read_model

    def odd(seen: WorkloadSeen, others: Others) -> Model:
        if seen.key.name == "carl":
            raise KeyError("odd")
        return real(seen, others)

    async with serving("ada") as house:
        monkeypatch.setattr(driver, "read_model", odd)
        house.plane.put(APPS, deployment("carl", models="carl, karl"))
        async with asyncio.timeout(60):
            while "carl" not in house.undecoded:
                await asyncio.sleep(0)
        model = house.model("carl")
        assert (model.name, model.spec.aliases, model.spec.paused) == ("carl", ("karl",), True)
        assert house.faults() == [], "no fault of the whole process"
        house.driver.retry({Origin("Deployment", "n", "carl")})
        assert list(house.undecoded) == ["carl"]
        monkeypatch.setattr(driver, "read_model", real)
        house.driver.retry({Origin("Deployment", "n", "carl")})
        assert (house.model("carl").spec.paused, house.undecoded) == (False, {})


async def test_exception_while_a_renamed_workload_is_read_again_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation names models while it handles their publication, and the workload is then evaluated again."""

    def odd(*_: object) -> Model:
        raise KeyError("odd")

    async with serving("ada") as house:
        monkeypatch.setattr(driver, "read_model", odd)
        house.driver.called({Origin("Deployment", "n", "ada"): ModelName("ada2")}, {})
        async with asyncio.timeout(60):
            while "ada" not in house.undecoded:
                await asyncio.sleep(0)
        monkeypatch.setattr(driver, "read_model", read_model)
        house.driver.retry({Origin("Deployment", "n", "ada")})
        assert house.undecoded == {}


@pytest.mark.parametrize("hold", HOLDS)
async def test_unmet_readiness_condition_keeps_a_pod_unready_despite_its_probe(
    hold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held at the start of this process and again after it was ready."""
    monkeypatch.setattr(probes, "READY_EVERY_S", 0.0)
    probed = 0

    async def answers(_: AdoptedPodSeen) -> bool:
        nonlocal probed
        probed += 1
        return True

    monkeypatch.setattr(workload_runner, "_probe", answers)
    made = partial(held_pod, hold=hold, held=True)
    async with serving("ada", made=made, seen=Seen.STARTING) as house:
        while probed < 4:
            await asyncio.sleep(0)
        assert set(house.states("ada")) == {Seen.STARTING}
        house.plane.put(PODS, held_pod("ada", hold, held=False))
        await house.until(("ada", Seen.READY))
        house.plane.put(PODS, made("ada"))
        await house.until(("ada", Seen.UNREADY))
        before, probed = house.states("ada"), 0
        while probed < 4:
            await asyncio.sleep(0)
        assert house.states("ada") == before


@pytest.mark.parametrize("hold", HOLDS)
async def test_failing_readiness_condition_makes_a_pod_unready_without_a_probe(
    hold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "READY_EVERY_S", 3600.0)
    probed = 0

    async def answers(_: AdoptedPodSeen) -> bool:
        nonlocal probed
        probed += 1
        return True

    monkeypatch.setattr(workload_runner, "_probe", answers)
    async with serving("ada", made=partial(held_pod, hold=hold, held=False)) as house:
        await house.until(("ada", Seen.READY))
        while probed < 2:  # the first is that of the start, which reports a running engine at once
            await asyncio.sleep(0)
        house.plane.put(PODS, held_pod("ada", hold, held=True))
        await house.until(("ada", Seen.UNREADY))
        assert probed == 2


async def test_workload_task_restarts_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilient_tasks, "PAUSE_S", 0.0)
    real, odd = workload_runner.Runner._probe_once, iter([True])

    async def once(self: workload_runner.Runner, pod: AdoptedPodSeen) -> None:
        if self.core.seen.key.name == "ada" and next(odd, False):
            raise KeyError("odd")
        await real(self, pod)

    monkeypatch.setattr(workload_runner.Runner, "_probe_once", once)
    async with serving("ada", "bert") as house:
        assert [one.model for one in house.faults() if one.reason] == ["ada"]
        assert set(house.now().values()) == {Seen.READY}


async def test_exception_in_a_workload_timer_is_a_fault_of_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("ada", "bert") as house:
        found = next(one for one in house.driver._runners() if one.core.seen.key.name == "ada")

        def odd(now_s: float) -> None:
            raise KeyError("odd")

        monkeypatch.setattr(found.core, "look", odd)
        found._on_timer()
        assert [(one.model, "KeyError" in one.reason) for one in house.faults() if one.reason] == [("ada", True)]
        assert found._timer is not None, "it is tried again"


def test_watch_change_is_delivered_again_if_its_callback_raised() -> None:
    took: list[object] = []

    def changed(changes: list[Change[str]]) -> None:
        if not took:
            took.append("raised")
            raise KeyError("odd")
        took.extend(changes)

    watched = Watched(cast("Api", None), "/x", str, changed)
    key = ObjectKey("n", "a")
    with pytest.raises(KeyError):
        watched._report([(key, "new")])
    watched._report([(key, "new")])
    assert took == ["raised", Change(key, None, "new")]


async def test_failed_mount_ends_adopted_start_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_failures, "LOOK_S", 0.01)
    monkeypatch.setattr(volume_failures, "IMAGE_S_MAX", 0.01)
    monkeypatch.setattr(workload, "UNORDERED_S", 0.0)
    why = 'MountVolume.SetUp failed for volume "a" : secret "login" not found'
    async with serving("ada", "bob") as house:
        house.plane.events = [
            {"reason": "FailedMount", "message": why, "lastTimestamp": "2026-01-01T00:00:09Z", "metadata": {}}
        ]
        state = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}
        created = pod("ada", podIP="", conditions=[], phase="Pending", containerStatuses=[state])
        created["metadata"] |= {"name": "ada-h-2", "uid": "uid-ada-h-2"}
        scaled = deployment("ada", models="ada")
        scaled["spec"]["replicas"] = 2
        house.plane.put(APPS, scaled)
        house.plane.put(PODS, created)
        await house.until(("ada-h-2", Seen.CLEAN), ("ada-h-1", Seen.READY), ("bob", Seen.READY))
        assert house.reasons("ada-h-2") == [f"FailedMount: {why}"]


async def test_workload_of_another_installation_is_adopted_when_released() -> None:
    """Until then it is not scaled, gets no condition, and one Event names the installation that serves it."""
    holder = "installation b/x serves the Models of namespace n"
    async with serving("ada", whose=lambda *_: holder) as house:
        while not house.notes:
            await asyncio.sleep(0)
        (note,) = house.notes
        assert (note.reason, note.message, note.warning) == ("NotServed", holder, False)
        assert (house.now(), house.plane.asked, house.driver._runners()) == ({}, [], [])
        assert house.driver.obstacle(house.model("ada"))
        holder = ""
        house.driver.called({Origin("Deployment", "n", "ada"): ModelName("ada")}, {})
        await house.until(("ada", Seen.READY))
        holder = "installation b/x serves the Models of namespace n"
        (one,) = house.now()
        house.driver.called({}, {})
        house.driver.stop(Bench().order(one), 0.0)
        await house.until(("ada", Seen.CLEAN))
        assert house.driver._runners() == []
        assert not [path for path in house.plane.asked if path.endswith("/scale")]


async def test_invalid_annotation_is_reported_before_workload_owner_is_known() -> None:
    """The workload has no valid annotations, so its owner is never queried."""
    async with serving(whose=lambda *_: None) as house:
        house.driver.called({}, {})
        house.plane.put(APPS, deployment("bad", models="bad", slots="x"))
        while not house.notes:
            await asyncio.sleep(0)
        (note,) = house.notes
        assert (note.workload.name, note.reason, note.warning) == ("bad", "WrongAnnotation", True)


async def test_sync_is_reported_only_after_workload_ownership_is_known() -> None:
    known: str | None = None
    plane, notified = Plane(), asyncio.Event()
    plane.put(APPS, deployment("ada", models="ada"))
    plane.put(PODS, pod("ada"))
    driver = AdoptedDriver(
        cast("Api", plane), ["n"], lambda *_: notified.set(), hold_s=lambda: 600.0, whose=lambda *_: known
    )  # fmt: skip
    observed = Observed()

    async def says() -> None:
        nonlocal known
        await notified.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert observed.all == []
        known = ""
        driver.called({Origin("Deployment", "n", "ada"): ModelName("ada")}, {})

    async with asyncio.TaskGroup() as tasks:
        runs = tasks.create_task(driver.run(observed.observe))
        await tasks.create_task(says())
        await observed.synced()
        ready = [one.seen for one in observed.all if isinstance(one, ReplicaSeen)]
        assert ready[-1] is Seen.READY
        runs.cancel()
