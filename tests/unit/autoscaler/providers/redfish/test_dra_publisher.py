"""Publishing attachable fabric devices to the cluster: adopted, updated and withdrawn pools, and claim status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from autoscaler.providers.kubernetes_access import CONFLICT, AnswerError, Object
from autoscaler.providers.redfish.dra_publisher import (
    HOME,
    SWEEP_S,
    DraPublisher,
    build_resource_slice_spec,
    resource_slice_name,
)
from autoscaler.providers.release_checks import SLICES
from autoscaler.provisioning.fabric_device_claims import ClaimStatus, DevicePool, Published
from autoscaler.spec.pod import MANAGED_BY
from autoscaler.state.pending_claims import DRIVER, FAILED, device_of
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.kube_objects import PlayedServer

D0 = device_of("A100", 0)
POOL = DevicePool("rack/w1", "w1", ({"name": D0},))
MORE = DevicePool("rack/w1", "w1", ({"name": D0}, {"name": device_of("A100", 1)}))
AT = f"{SLICES}/{resource_slice_name(POOL.name)}"
CLAIM = "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/c"
NOT_ATTACHED = ClaimStatus("n", "c", "u", {D0: (FAILED, "NotAttached", "nothing is left")})


class Server(PlayedServer):
    """An API server that also selects by labels."""

    async def items(self, path: str, **query: str) -> list[Object]:
        wanted = dict(one.split("=") for one in query.pop("labelSelector").split(","))
        found = await super().items(path, **query)
        return [one for one in found if wanted.items() <= (one["metadata"].get("labels") or {}).items()]


class Stage:
    """A publisher on a simulated API server, and what it should publish."""

    def __init__(self) -> None:
        self.server = Server(lambda: 1_767_225_600.0)
        self.place = "home", "pilotlight"
        self.due: Published | None = Published((POOL,))

    def play(self, *scenes: Callable[[], None]) -> None:
        """Run one scene after the other, each until the publisher has nothing left to do."""

        async def scenario() -> None:
            one = DraPublisher(self.server, self.place, lambda: self.due, asyncio.get_running_loop().time)
            running = asyncio.create_task(one.run())
            for scene in (lambda: None, *scenes):
                scene()
                one.look()
                await asyncio.sleep(1.0)
            running.cancel()

        run(scenario())

    def written(self) -> list[str]:
        return [method for method, _, _ in self.server.writes]

    def spec(self) -> Object:
        return dict(self.server.objects[AT]["spec"])


def claim(**status: Any) -> Object:
    results = [{"request": "gpu", "driver": DRIVER, "pool": "rack/w1", "device": D0}]
    given = {"allocation": {"devices": {"results": results}}, **status}
    return {"metadata": {"namespace": "n", "name": "c", "uid": "u"}, "status": given}


def test_change_of_a_published_pool_raises_its_generation() -> None:
    stage = Stage()
    stage.play(lambda: None, lambda: setattr(stage, "due", Published((MORE,))))
    assert stage.written() == ["POST", "PATCH", "PATCH"], "nothing is given of it before it was seen to be kept"
    assert stage.server.writes[0][2]["spec"]["pool"]["resourceSliceCount"] == 2
    assert stage.spec() == build_resource_slice_spec(MORE, 3)
    assert stage.spec()["pool"] == {"name": "rack/w1", "generation": 3, "resourceSliceCount": 1}
    assert "nodeName" not in stage.spec(), "a kubelet that starts deletes those that are its node's"


def test_new_leader_adopts_published_pools_and_deletes_stale_ones() -> None:
    before = Stage()
    before.due = Published((POOL, DevicePool("rack/w2", "w2", POOL.devices)))
    before.play()
    stage = Stage()
    stage.server = before.server
    stage.server.writes.clear()
    stage.play()
    assert [(method, path) for method, path, _ in stage.server.writes] == [
        ("DELETE", f"{SLICES}/{resource_slice_name('rack/w2')}")
    ]
    assert stage.spec()["pool"]["generation"] == 2, "as it was"


def test_two_installations_keep_each_others_published_pools() -> None:
    stage, other = Stage(), Stage()
    other.server, other.place = stage.server, ("home", "second")
    other.due = Published((DevicePool("rack-b/w1", "w1", POOL.devices),))
    stage.play()
    other.play()
    stage.play()
    assert set(stage.server.objects) == {AT, f"{SLICES}/{resource_slice_name('rack-b/w1')}"}
    assert stage.written() == 2 * ["POST", "PATCH"]
    assert all(len(one["metadata"]["labels"][HOME]) <= 63 for one in stage.server.objects.values())


def test_pool_with_the_legacy_label_is_adopted_if_wanted_or_else_deleted() -> None:
    stage = Stage()
    stage.due = Published((POOL, DevicePool("rack/w2", "w2", POOL.devices)))
    stage.play()
    of_old = {"metadata": {"labels": {HOME: "home"}}}
    for path in [*stage.server.objects]:
        stage.server.change(path, of_old)
    stage.due = Published((POOL,))
    stage.play()
    assert [*stage.server.objects] == [AT]
    assert stage.server.objects[AT]["metadata"]["labels"][HOME] != "home"
    assert stage.spec() == build_resource_slice_spec(POOL, 3)


def test_pool_is_kept_if_its_state_is_unknown_or_another_owner_has_it() -> None:
    stage = Stage()
    foreign = {MANAGED_BY: "pilotlight-fabric", HOME: "elsewhere"}
    stage.server.put(f"{SLICES}/theirs", {"metadata": {"name": "theirs", "labels": foreign}, "spec": {}})
    stage.play(lambda: setattr(stage, "due", None))
    assert AT in stage.server.objects
    stage.play(lambda: setattr(stage, "due", Published()))
    assert [*stage.server.objects] == [f"{SLICES}/theirs"]


def test_deleted_pool_is_published_again() -> None:
    stage = Stage()

    async def scenario() -> None:
        one = DraPublisher(stage.server, stage.place, lambda: stage.due, asyncio.get_running_loop().time)
        running = asyncio.create_task(one.run())
        await asyncio.sleep(1.0)
        del stage.server.objects[AT]
        await asyncio.sleep(2 * SWEEP_S)
        assert AT in stage.server.objects
        running.cancel()

    run(scenario())


def test_claim_status_is_written_once_and_keeps_foreign_entries() -> None:
    stage = Stage()
    others = {"driver": "net", "pool": "p", "device": "d", "conditions": []}
    stage.server.put(CLAIM, claim(devices=[others]))
    stage.due = Published((POOL,), (NOT_ATTACHED,))
    stage.play()
    first, own = stage.server.objects[CLAIM]["status"]["devices"]
    assert first == others
    assert (own["driver"], own["pool"], own["device"]) == (DRIVER, "rack/w1", D0)
    assert own["conditions"] == [
        {
            "type": FAILED, "status": "True", "reason": "NotAttached", "message": "nothing is left",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ]  # fmt: skip
    assert [path for _, path, _ in stage.server.writes if path.startswith(CLAIM)] == [f"{CLAIM}/status"]


def test_replaced_or_freed_claim_gets_no_status() -> None:
    stage = Stage()
    stage.server.put(CLAIM, {**claim(), "metadata": {"namespace": "n", "name": "c", "uid": "another"}})
    stage.due = Published((), (NOT_ATTACHED,))
    stage.play()
    assert not stage.written()
    freed = Stage()
    freed.server.put(CLAIM, {**claim(), "status": {}})
    freed.due = Published((), (NOT_ATTACHED,))
    freed.play()
    assert not freed.written(), "the scheduler took it back meanwhile"


def test_claim_status_is_written_without_losing_a_concurrent_change() -> None:
    stage = Stage()
    stage.server.put(CLAIM, claim())
    stage.due = Published((), (NOT_ATTACHED,))
    stage.server.before_write = lambda *_: stage.server.put(CLAIM, claim(reservedFor=[{"uid": "p"}]))
    stage.play()
    status = stage.server.objects[CLAIM]["status"]
    assert (len(status["devices"]), status["reservedFor"]) == (1, [{"uid": "p"}])
    assert stage.written() == ["PATCH", "PATCH"]


def test_rejected_write_of_a_resource_slice_is_retried() -> None:
    stage = Stage()
    stage.server.refused = {"POST": AnswerError(CONFLICT, "AlreadyExists", "it is there")}
    stage.play(stage.server.refused.clear)
    assert AT in stage.server.objects


def test_no_pool_is_published_if_the_api_server_drops_binding_conditions(caplog: pytest.LogCaptureFixture) -> None:
    class Old(Server):
        async def create(self, path: str, body: Object) -> Object:
            kept = [{"name": one["name"]} for one in body["spec"]["devices"]]
            return await super().create(path, {**body, "spec": {**body["spec"], "devices": kept}})

    stage = Stage()
    stage.server = Old(lambda: 0.0)
    stage.due = Published((DevicePool("rack/w1", "w1", ({"name": D0, "bindingConditions": ["FabricDeviceReady"]},)),))
    stage.play()
    assert not stage.server.objects
    assert "DRADeviceBindingConditions" in caplog.text
