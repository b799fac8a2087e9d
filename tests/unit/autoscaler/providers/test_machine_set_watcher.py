"""MachineSets and MachineDeployments as node groups, and how they are watched."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import GPU_COUNT
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.machine_set_watcher import (
    LABELS,
    LOOK_S,
    NONE_S,
    MachineGroupObject,
    MachineGroupWatcher,
    read_machine_groups,
)
from autoscaler.spec.capacity import Cro, ProviderSettings
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Settings
from autoscaler.state.capacity import Capacity, Group, GroupsSeen
from autoscaler.state.world import World
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.worlds import GI
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.async_tests import run_with

CAPI, OPENSHIFT = "cluster.x-k8s.io/v1beta2", "machine.openshift.io/v1beta1"
T4 = NodeKind(selector={"pool": "t4"}, device=NodeDevice(model="T4", memory_bytes=Bytes(16 * GI), count=2))
SETTINGS = Settings(nodes=(T4,))
ON_NODES = "node.cluster.x-k8s.io/pool"


def machines(kind: str = "MachineSet", name: str = "g", version: str = CAPI, **fields: Any) -> MachineGroupObject:
    """A group with three desired machines, one of them ready."""
    notes = {LABELS: "pool=t4,zone=a", **fields.pop("notes", {})}
    metadata = {"namespace": "default", "name": name, "annotations": notes, **fields.pop("metadata", {})}
    body = {"metadata": metadata, "spec": {"replicas": 3}, "status": {"replicas": 3, "readyReplicas": 1}, **fields}
    return MachineGroupObject(kind, {**body, "apiVersion": version})


def read(found: MachineGroupObject, *pods: dict[str, Any], settings: Settings = SETTINGS) -> Group:
    (one,) = read_machine_groups([found], pods, settings)
    return one


def pod(gpus: int, selector: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    """A pending pod."""
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    spec: dict[str, Any] = {"containers": [limits, {}], **({"nodeSelector": selector} if selector else {})}
    return {"metadata": {"name": "p", **metadata}, "spec": spec, "status": {"phase": "Pending"}}


def test_machine_group_offer_is_built_from_labels_and_settings() -> None:
    one = read(machines())
    assert (one.name, one.wanted, one.ready, one.most) == ("MachineSet default/g", 3, 1, 0)
    assert one.offer is not None
    assert (one.offer.product, one.offer.devices_min, one.offer.devices_max) == ("T4", 2, 2)
    assert one.offer.provider == one.name
    assert one.labels == one.offer.labels == {"pool": "t4", "zone": "a"}
    assert read(machines(notes={LABELS: "pool=other"})).offer is None, "nobody says"
    assert read(machines(spec={}, status=None)).wanted == 1, "as both APIs have it"


def test_offered_node_has_only_machine_labels_that_propagate_to_nodes() -> None:
    arrives = {ON_NODES: "t4", "x.node-restriction.kubernetes.io/y": "z"}
    template: dict[str, Any] = {"metadata": {"labels": {**arrives, "pool": "h100"}}}
    one = read(machines(notes={LABELS: ""}, spec={"replicas": 1, "template": template}))
    assert one.labels == arrives
    template = {"spec": {"metadata": {"labels": {"pool": "t4"}}}}
    one = read(machines(version=OPENSHIFT, notes={LABELS: ""}, spec={"replicas": 1, "template": template}))
    assert one.labels == {"pool": "t4"}


def test_gpu_count_annotation_sets_devices_per_node() -> None:
    one = read(machines(notes={GPU_COUNT: "4"}))
    assert one.most == 4
    assert one.offer is not None
    assert one.offer.devices_max == 4


@pytest.mark.parametrize("expected", [True, False])
def test_gpu_count_annotation_creates_no_offer_if_devices_are_attachable(expected: bool) -> None:
    rack = ProviderSettings(name="rack", cro=Cro(model="T4"))
    kind = NodeKind(selector=T4.selector, device=T4.device, devices_max=8 if expected else None)
    one = read(machines(notes={GPU_COUNT: "4"}), settings=Settings(nodes=(kind,), capacity=(rack,)))
    assert (one.most, one.offer) == (4, None)
    counted = machines(notes={GPU_COUNT: "4", LABELS: "pool=t4,nvidia.com/gpu.count=1"})
    one = read(counted, settings=Settings(nodes=(kind,), capacity=(rack,)))
    assert one.offer is not None
    assert one.offer.devices_max == 1, "its own, of which labels tell"


def test_machine_set_of_a_deployment_has_no_offer_of_its_own() -> None:
    owner = {"ownerReferences": [{"kind": "MachineDeployment", "name": "g", "controller": True}]}
    one = read(machines(name="g-x7", notes={GPU_COUNT: "4"}, metadata={**owner, "annotations": {GPU_COUNT: "4"}}))
    assert (one.most, one.wanted, one.offer) == (4, 0, None), "what its nodes can have they look up at the set"
    assert read(machines("MachineDeployment")).wanted == 3


def test_devices_for_foreign_pending_pods_of_the_group_count_as_claimed() -> None:
    own = pod(4, labels={"pilotlight.dev/provider": "group"})
    elsewhere = pod(8, {"pool": "h100"})
    assert read(machines(), pod(1), pod(2, {"pool": "t4"}), elsewhere, own).claimed == 3


# --- watching ---------------------------------------------------------------------------------------------------------


class Looked:
    """An API server with machine groups, and the lists that the watcher reports."""

    def __init__(self) -> None:
        self.server = PlayedServer(lambda: 0.0)
        self.world = World(epoch=1, settings=SETTINGS)
        self.received: list[GroupsSeen] = []
        one = MachineGroupWatcher(self.server, lambda: self.world, self.received.extend)
        self.task = asyncio.create_task(one.run())

    def serve(self, group: str, version: str) -> None:
        self.server.put(f"/apis/{group}", {"preferredVersion": {"groupVersion": version}})

    def put(self, version: str, plural: str, found: MachineGroupObject) -> None:
        body = {key: value for key, value in found.body.items() if key != "apiVersion"}
        self.server.put(f"/apis/{version}/namespaces/default/{plural}/{found.body['metadata']['name']}", body)


@run_with(run)
async def test_poll_of_machine_groups_reports_all_groups_and_claimed_devices() -> None:
    one = Looked()
    one.serve("cluster.x-k8s.io", CAPI)
    one.serve("machine.openshift.io", OPENSHIFT)
    one.put(CAPI, "machinedeployments", machines("MachineDeployment", "d"))
    one.put(CAPI, "machinesets", machines(name="s"))
    one.put(OPENSHIFT, "machinesets", machines(name="o"))
    one.server.put("/api/v1/namespaces/team/pods/p", pod(2, {"pool": "t4"}))
    one.server.put("/api/v1/namespaces/team/pods/q", {**pod(2), "spec": {**pod(2)["spec"], "nodeName": "n"}})
    await asyncio.sleep(LOOK_S * 1.5)
    first, second = one.received
    assert [(group.name, group.claimed) for group in first.groups] == [
        ("MachineDeployment default/d", 2), ("MachineSet default/o", 2), ("MachineSet default/s", 2),
    ]  # fmt: skip
    assert first == second
    one.task.cancel()


@run_with(run)
async def test_empty_list_of_machine_groups_is_reported_only_once() -> None:
    """So a group created later is known to be new."""
    one = Looked()
    await asyncio.sleep(NONE_S / 2)
    assert one.received == [GroupsSeen(groups=())]
    one.world = replace(one.world, capacity=Capacity(grouped=True))
    await asyncio.sleep(NONE_S)
    assert len(one.received) == 1
    one.serve("cluster.x-k8s.io", CAPI)
    one.put(CAPI, "machinesets", machines())
    await asyncio.sleep(NONE_S)
    assert one.received[1].groups[0].name == "MachineSet default/g"
    one.task.cancel()


@run_with(run)
async def test_forbidden_machine_groups_are_logged_only_once(caplog: pytest.LogCaptureFixture) -> None:
    one = Looked()
    one.server.refused["GET"] = AnswerError(403, "Forbidden", "machinesets is forbidden")
    await asyncio.sleep(NONE_S * 3.5)
    assert not one.received
    (record,) = caplog.records
    assert "machine groups are not read" in record.message
    assert "403 Forbidden: machinesets is forbidden" in record.message
    one.task.cancel()
