"""The driver and faults of its API server (cases 18, 19, 25 and 28 of the fault list).
Two leaders, a server that hangs or restarts, interrupted or silent watches, and reused addresses.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.kubernetes import watch as watching
from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.kubeconfig import ApiAccess, load_api_access
from autoscaler.spec.pod import Pod
from autoscaler.state.events import ReplicaSeen, Seen, Synced
from autoscaler.state.lifecycle import STOP_GRACE_S
from tests.contracts.driver import Manner
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.control_plane.connection_loss_proxy import Cutter, port_of
from tests.integration.cluster.support.driver.node_fixture import Scene, drained, until_reported
from tests.integration.cluster.support.kubelet.node import next_number
from tests.support.harness.driver_events import WAIT_S_MAX, running
from tests.support.harness.local_rig import launch, replica
from tests.support.waiting import until

# --- two leaders ------------------------------------------------------------------------------------------------------


class Paused(Api):
    """A process that is paused before its delete, and loses its leadership before it gets the response."""

    def __init__(self, way: ApiAccess) -> None:
        super().__init__(way, lambda: self.may_s)
        self.may_s = math.inf
        self.at_delete, self.goes_on = asyncio.Event(), asyncio.Event()

    async def delete(
        self, path: str, *, uid: str | None = None, version: str | None = None, grace_s: int | None = None
    ) -> Object:
        self.at_delete.set()
        await self.goes_on.wait()
        try:
            return await super().delete(path, uid=uid, version=version, grace_s=grace_s)
        finally:
            self.may_s = 0.0


@pytest.mark.case("25")
async def test_paused_leader_does_not_delete_a_pod_adopted_by_the_next_leader(scene: Scene, kubeconfig: Path) -> None:
    one, model = scene.engine("r1")
    async with Paused(await load_api_access(kubeconfig)) as api:
        old = scene.driver(api)
        async with running(old) as seen_by_old:
            old.start(one, model)
            await seen_by_old.until(one.id, Seen.READY)
            old.stop(drained(one, 4), 5.0)
            await api.at_delete.wait()
            marked = await scene.api.get(f"{scene.pods}/r1")
            assert marked["metadata"]["annotations"]["pilotlight.dev/drain"] == "4"
            async with running(scene.driver()) as seen_by_new:
                await seen_by_new.until(one.id, Seen.READY)
                await until_unmarked(scene)
                api.goes_on.set()
                while old._ordered:
                    await asyncio.sleep(0.01)
                left = await scene.api.get(f"{scene.pods}/r1")
                assert "deletionTimestamp" not in left["metadata"]
                assert seen_by_new.words(one.id) == ["ready"]


@pytest.mark.case("26")
@pytest.mark.parametrize("heard", [True, False], ids=["its end is heard of", "its end is not heard of"])
async def test_pod_stopped_by_a_former_leader_is_not_reported_as_failed(
    scene: Scene, plane: Plane, kubeconfig: Path, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a condition of its Model would report a failure.
    It ends within Pilotlight's grace period and is not deleted by force, regardless of who deleted it.
    """
    monkeypatch.setattr("autoscaler.drivers.kubernetes.driver.ADOPT_SECONDS_MAX", 0.05)  # do not wait
    one, model = scene.engine("r1", manner=Manner.IGNORES_SIGTERM)
    old, cutter, way = scene.driver(), Cutter(port_of(plane)), await load_api_access(kubeconfig)
    async with running(old) as seen_by_old:
        old.start(one, model)
        await seen_by_old.until(one.id, Seen.READY)
        old.stop(drained(one, 4), 300.0)
        while old._ordered:
            await asyncio.sleep(0.01)
    async with cutter.running() as port:
        way.server = f"https://127.0.0.1:{port}"
        async with Api(way) as api, running(scene.driver(api)) as seen_by_new, asyncio.timeout(2 * WAIT_S_MAX):
            await seen_by_new.until(one.id, Seen.LEAVING)
            while (await scene.api.get(f"{scene.pods}/r1"))["metadata"]["deletionGracePeriodSeconds"] > STOP_GRACE_S:
                await asyncio.sleep(0.02)
            cutter.closed = not heard
            if not heard:
                cutter.cut()
            scene.kill("r1")
            while (await scene.api.get(scene.pods))["items"]:
                await asyncio.sleep(0.02)
            if not heard:
                await forget(plane)
            cutter.closed = False
            await seen_by_new.until(one.id, Seen.CLEAN)
            assert seen_by_new.words(one.id) == ["leaving", "exited", "clean"]


async def until_unmarked(scene: Scene) -> None:
    """Waits until the new leader has removed the old one's mark."""
    async with asyncio.timeout(WAIT_S_MAX):
        while pod_manifest.DRAIN in (await scene.api.get(f"{scene.pods}/r1"))["metadata"]["annotations"]:
            await asyncio.sleep(0.02)


async def test_driver_without_a_valid_leader_lease_starts_and_stops_no_pod(scene: Scene, kubeconfig: Path) -> None:
    may_s = [math.inf]
    async with Api(await load_api_access(kubeconfig), lambda: may_s[0]) as api:
        driver = scene.driver(api)
        async with running(driver) as observed:
            one, model = scene.engine("r1")
            driver.start(one, model)
            await observed.until(one.id, Seen.READY)
            may_s[0] = 0.0
            two, of_two = scene.engine("r2", gpu=1)
            driver.start(two, of_two)
            driver.stop(one, 1.0)
            while driver._ordered:
                await asyncio.sleep(0.01)
            assert observed.of(two.id) == []
            assert observed.words(one.id) == ["starting", "ready"]
            assert len((await scene.api.get(scene.pods))["items"]) == 1
            may_s[0] = math.inf
            await driver.follow()
            count = len(observed.all)
            driver.lead()
            while Synced() not in observed.all[count:]:
                await asyncio.sleep(0.01)
            again = observed.all[count : observed.all.index(Synced(), count)]
            assert [seen.seen for seen in again if isinstance(seen, ReplicaSeen)] == [Seen.READY]
            driver.stop(one, 1.0)
            await observed.until(one.id, Seen.CLEAN)


# --- faults of the API server -----------------------------------------------------------------------------------------


async def test_replica_start_and_stop_take_on_average_at_most_six_api_requests(
    scene: Scene, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "SUSPECT_S", WAIT_S_MAX)  # a late watch is not tested here
    async with Api(await load_api_access(kubeconfig)) as api, running(driver := scene.driver(api)) as observed:
        asked = api.requests
        for number in range(4):
            one, model = scene.engine(f"r{number}", gpu=number % 2)
            driver.start(one, model)
            await observed.until(one.id, Seen.READY)
            driver.stop(drained(one, 1), 1.0)
            await observed.until(one.id, Seen.CLEAN)
        assert (api.requests - asked) / 4 <= 6


class Deaf(Api):
    """An API whose watches report nothing for a while, although they are open. Lists work."""

    deaf = False

    def __init__(self, way: ApiAccess) -> None:
        super().__init__(way)
        self.unheard: list[str] = []
        """Kinds of the events that were dropped."""

    async def watch(
        self, path: str, version: str | None, query: Mapping[str, str], **how: Any
    ) -> AsyncGenerator[Any, None]:
        async for event in super().watch(path, version, query, **how):
            if not self.deaf or how.get("initial"):
                yield event
            else:
                self.unheard.append(event[0])


@pytest.mark.case("28")
@pytest.mark.standard
async def test_events_missed_by_a_silent_watch_are_found_by_a_list_request(
    scene: Scene, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start, then an end whose DELETED is lost: a list after our own write detects both."""
    monkeypatch.setattr(watching, "SUSPECT_S", 0.5)
    async with Deaf(await load_api_access(kubeconfig)) as api, running(driver := scene.driver(api)) as observed:
        api.deaf = True
        one, model = scene.engine("r1")
        driver.start(one, model)
        await until_reported(observed, one.id, lambda seen: seen.waits or seen.address)
        api.deaf = False
        await observed.until(one.id, Seen.READY)
        api.deaf = True
        driver.stop(one, 1.0)
        async with asyncio.timeout(WAIT_S_MAX):
            while (await scene.api.get(scene.pods))["items"]:
                await asyncio.sleep(0.02)
        driver.stop(one, 1.0)  # 404: the watch must be wrong
        await observed.until(one.id, Seen.CLEAN)


@pytest.mark.case("27")
@pytest.mark.standard
async def test_starts_and_stops_complete_after_an_api_server_restart_or_hang(scene: Scene, plane: Plane) -> None:
    async with running(driver := scene.driver()) as observed:
        one, model = scene.engine("r1")
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
        plane.kill_part("kube-apiserver")
        two, of_two = scene.engine("r2", gpu=1)
        driver.start(two, of_two)
        waits = await until_reported(observed, two.id, lambda seen: seen.waits)
        assert waits.waits == "the API server does not answer"
        driver.stop(one, 1.0)
        plane.start_part("kube-apiserver")
        await asyncio.to_thread(plane.until_ready)
        await observed.until(one.id, Seen.CLEAN)
        await observed.until(two.id, Seen.READY)
        assert observed.words(two.id) == ["starting", "ready"]
        plane.signal_part("kube-apiserver", signal.SIGSTOP)
        driver.stop(two, 1.0)
        await asyncio.sleep(0.5)
        plane.signal_part("kube-apiserver", signal.SIGCONT)
        await observed.until(two.id, Seen.CLEAN)


@pytest.mark.case("18")
async def test_repeatedly_interrupted_watches_lose_no_change(scene: Scene, plane: Plane, kubeconfig: Path) -> None:
    cutter = Cutter(port_of(plane), 0.8)
    async with cutter.running() as port:
        way: ApiAccess = await load_api_access(kubeconfig)
        way.server = f"https://127.0.0.1:{port}"
        async with Api(way) as api, running(driver := scene.driver(api)) as observed:
            number = 0
            while cutter.cuts < 4:
                one, model = scene.engine(f"r{(number := number + 1)}")
                driver.start(one, model)
                await observed.until(one.id, Seen.READY)
                driver.stop(drained(one, 1), 1.0)
                await observed.until(one.id, Seen.CLEAN)
                assert observed.words(one.id) == ["starting", "ready", "exited", "clean"]
    assert not (await scene.api.get(scene.pods))["items"]


async def forget(plane: Plane) -> None:
    """Makes older changes unavailable to watches."""
    plane.compact()
    plane.kill_part("kube-apiserver")  # its cache holds some of what etcd has compacted
    plane.start_part("kube-apiserver")
    await asyncio.to_thread(plane.until_ready)


class Noting(Api):
    """An API that records the statuses with which its watches were rejected."""

    def __init__(self, way: ApiAccess) -> None:
        super().__init__(way)
        self.refused: list[int] = []

    async def watch(
        self, path: str, version: str | None, query: Mapping[str, str], **how: Any
    ) -> AsyncGenerator[Any, None]:
        try:
            async for event in super().watch(path, version, query, **how):
                yield event
        except ApiError as error:
            self.refused.append(error.status)
            raise


@pytest.mark.case("28")
async def test_driver_relists_after_etcd_compaction_during_a_disconnect(
    scene: Scene, plane: Plane, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod is deleted meanwhile. The driver's resource version is then too old (410), so it lists everything again."""
    monkeypatch.setattr(watching, "SUSPECT_S", WAIT_S_MAX)  # otherwise a suspicion may restart the watch first
    cutter = Cutter(port_of(plane))
    async with cutter.running() as port:
        way: ApiAccess = await load_api_access(kubeconfig)
        way.server = f"https://127.0.0.1:{port}"
        async with Noting(way) as api, running(driver := scene.driver(api)) as observed:
            for number in range(2):
                one, model = scene.engine(f"r{number}", gpu=number)
                driver.start(one, model)
                await observed.until(one.id, Seen.READY)
            cutter.closed = True
            cutter.cut()
            await scene.api.delete(f"{scene.pods}/r0", grace_s=0)
            await forget(plane)
            cutter.closed = False
            await observed.until(ReplicaId("r0"), Seen.EXITED)
            async with asyncio.timeout(WAIT_S_MAX):  # a list may report the end before the watch is restored
                while 410 not in api.refused:
                    await asyncio.sleep(0.01)
            assert observed.words(ReplicaId("r1")) == ["starting", "ready"]


# --- reused addresses -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ready_at(ip: str, *replicas: str) -> AsyncIterator[None]:
    """Servers at an address that respond with 200 on the ports of these replicas."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with AsyncExitStack() as stack:
        for one in replicas:
            server = await asyncio.start_server(answer, ip, pod_manifest.assign_engine_port(ReplicaId(one)))
            await stack.enter_async_context(server)
        yield


async def runs_at(api: Api, path: str, ip: str, since: str) -> None:
    """Writes the status of a running pod as a kubelet would."""
    statuses = [{
        "name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0,
        "state": {"running": {"startedAt": since}},
    }]  # fmt: skip
    await api.patch(
        f"{path}/status", {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
                                      "containerStatuses": statuses}},
    )  # fmt: skip


@pytest.mark.case("19")
async def test_pod_whose_address_was_reused_becomes_unready(
    api: Api, namespace: str, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kubelet here: unscheduled pods with statuses written by hand. The end of the first one is missed."""
    monkeypatch.setattr(watching, "SUSPECT_S", 0.5)
    path, ip = f"/api/v1/namespaces/{namespace}/pods", f"10.244.{next_number()}.9"
    async with ready_at(ip, "r1", "r2"), Deaf(await load_api_access(kubeconfig)) as own:
        driver = KubernetesDriver(own, namespace, launch, lambda _: "engine", assume_after_s=0.05, inventory=False)
        async with running(driver) as observed:
            unscheduled = Pod(scheduler_name="not-installed")
            made = []
            for name in ("r1", "r2"):
                one, model = replica(name, ("engine", "{port}"), ())
                model = replace(model, spec=replace(model.spec, pod=unscheduled))
                driver.start(one, model)
                await until_reported(observed, one.id, lambda seen: seen.waits)
                made.append(one)
            first, second = made
            await runs_at(api, f"{path}/r1", ip, "2026-01-01T00:00:00Z")
            await observed.until(first.id, Seen.READY)
            own.deaf = True
            await api.delete(f"{path}/r1", grace_s=0)
            await until("the deletion is missed", lambda: "DELETED" in own.unheard)
            own.deaf = False
            await runs_at(api, f"{path}/r2", ip, "2026-01-01T00:00:01Z")
            unready = await observed.until(first.id, Seen.UNREADY)
            assert unready.reason == "the IP address of its pod now belongs to pod r2"
            await observed.until(second.id, Seen.READY)
            await observed.until(first.id, Seen.CLEAN)
            assert observed.words(second.id) == ["starting", "ready"]


@pytest.mark.case("18")
@pytest.mark.standard
async def test_evicted_pod_without_an_address_is_reported_as_exited(api: Api, namespace: str) -> None:
    path, ip = f"/api/v1/namespaces/{namespace}/pods", f"10.244.{next_number()}.9"
    driver = KubernetesDriver(api, namespace, launch, lambda _: "engine", assume_after_s=0.05, inventory=False)
    async with ready_at(ip, "r1"), running(driver) as observed:
        one, model = replica("r1", ("engine", "{port}"), ())
        driver.start(one, replace(model, spec=replace(model.spec, pod=Pod(scheduler_name="not-installed"))))
        await until_reported(observed, one.id, lambda seen: seen.waits)
        await runs_at(api, f"{path}/r1", ip, "2026-01-01T00:00:00Z")
        await observed.until(one.id, Seen.READY)
        evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        await api.patch(f"{path}/r1/status", {"status": {**evicted, "podIP": None, "podIPs": None}})
        assert (await observed.until(one.id, Seen.EXITED)).reason == f"Evicted: {evicted['message']}"
        await observed.until(one.id, Seen.CLEAN)
