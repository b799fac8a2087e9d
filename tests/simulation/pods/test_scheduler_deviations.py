"""Case 23 of reliability section 5 in virtual time: schedulers and kubelets deviate from the placement, or are late.

Loop, driver, watches and gateways are the real ones; HAMi's scheduler and the allocator of claims are simulated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.controller.loop import LoopStep
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.resources.events import ModelEvent, derive_step_events
from autoscaler.slicing.hami import NVIDIA
from autoscaler.state.world import SliceId
from tests.simulation.case_harness import GIB, Stage, model
from tests.simulation.environment.api_server import NODES, PODS
from tests.simulation.environment.machine import one_device
from tests.simulation.installations.cluster import NODE, Cluster, Kubelet, simulated
from tests.simulation.pods.test_force_deletion import LOOK_S, watched
from tests.support.builders.resource_slices import DRIVER, gpu, resource_slice
from tests.support.builders.slices import card

OURS = f"{resource_claims.CLAIMS.rpartition('/')[0]}/namespaces/town/resourceclaims"
FIRST, SECOND = "GPU-aaaa", "GPU-bbbb"
LONG_S = 300.0
A, B = model("a", idle_s=3600.0), model("b", idle_s=3600.0)


def model_events(town: Cluster) -> list[ModelEvent]:
    """All Events from now on."""
    found: list[ModelEvent] = []

    def hear(step: LoopStep) -> None:
        found.extend(derive_step_events(step.transitions, step.actions, step.before, step.after))

    town.leader.loop.listeners.append(hear)
    return found


def scheduled(town: Cluster, decide: Callable[[Object], bool]) -> Callable[[Object, str], None]:
    """Returns a function that binds a pod. `decide` writes the decision onto a new pod; False: do not bind it now."""
    binds = town.server.on_pod

    def hears(pod: Object, event: str) -> None:
        if event != "ADDED" or decide(pod):
            binds(pod, event)

    town.server.on_pod = hears
    return binds


async def known(stage: Stage, town: Cluster) -> None:
    """Wait until the leader has seen the inventory and has published it."""
    await stage.until(lambda: bool(town.leader.loop.world.nodes.slices))
    await asyncio.sleep(2.0)


async def cards(stage: Stage, town: Cluster, *uuids: str) -> None:
    """HAMi registers these devices on the node."""
    node = town.server.objects[NODES][NODE]
    node["metadata"]["annotations"] = {NVIDIA.register: json.dumps([card(one, devmem=16384) for one in uuids])}
    town.server.put(NODES, node, "MODIFIED")
    await known(stage, town)


def gives(pod: Object, uuid: str) -> None:
    memory_mib = pod["spec"]["containers"][0]["resources"]["limits"][NVIDIA.memory]
    pod["metadata"]["annotations"][NVIDIA.allocated] = f"{uuid},NVIDIA,{memory_mib},0:;"


def asked(pod: Object) -> str:
    return str(pod["metadata"]["annotations"][NVIDIA.use])


async def served(stage: Stage, town: Cluster, name: str) -> None:
    assert await stage.answered([town.call(name)]) == {"completed": 1}


def places(town: Cluster) -> dict[str, tuple[str, ...]]:
    """Model -> the actual location of its replica, as the leader knows it."""
    return {str(one.model): one.resources.slices for one in town.leader.loop.world.replicas.values()}


@pytest.mark.case("23")
@simulated(A, B, gpus=0)
async def test_replica_bound_to_the_wrong_card_is_evicted_and_started_again(stage: Stage, town: Cluster) -> None:
    await cards(stage, town, FIRST, SECOND)
    given: list[str] = []

    def decide(pod: Object) -> bool:
        given.append(given[0] if len(given) == 1 else asked(pod))
        gives(pod, given[-1])
        return True

    scheduled(town, decide)
    await served(stage, town, "a")
    events = model_events(town)
    await served(stage, town, "b")
    await stage.until(lambda: stage.starts("b") == 2 and stage.replicas("b") == 1, within_s=120.0)
    await served(stage, town, "b")
    assert given == [given[0], given[0], given[2]]
    assert {given[0], given[2]} == {FIRST, SECOND}
    assert places(town) == {"a": (f"{NODE}/{given[0]}",), "b": (f"{NODE}/{given[2]}",)}
    assert stage.starts("a") == 1, "the older stays"
    reasons = [(one.model, one.reason) for one in events if one.reason in ("Misplaced", "Evicted")]
    assert reasons == [("b", "Misplaced"), ("b", "Evicted")], "one of each"


@pytest.mark.case("23")
@simulated(A, gpus=0)
async def test_replica_moves_when_hami_gives_its_card_to_another_pod(stage: Stage, town: Cluster) -> None:
    await cards(stage, town, FIRST, SECOND)

    def decide(pod: Object) -> bool:
        gives(pod, asked(pod))
        return True

    scheduled(town, decide)
    await served(stage, town, "a")
    (at,) = places(town)["a"]
    foreign: Object = {
        "metadata": {
            "name": "theirs", "namespace": "others",
            "annotations": {NVIDIA.allocated: f"{at.rpartition('/')[2]},NVIDIA,12288,0:;"},
        },
        "spec": {"nodeName": NODE, "containers": [{"name": "x"}]},
    }  # fmt: skip
    town.server.put("/api/v1/pods", foreign, "ADDED")
    await stage.until(lambda: stage.replicas("a") == 0, within_s=120.0)
    await served(stage, town, "a")
    (now,) = places(town)["a"]
    assert {at, now} == {f"{NODE}/{FIRST}", f"{NODE}/{SECOND}"}


@pytest.mark.case("23")
@simulated(A, gpus=0)
async def test_start_waits_with_a_reason_while_a_node_lock_blocks_hami(stage: Stage, town: Cluster) -> None:
    why = "binding rejected: node node has been locked within 5 minutes"
    await cards(stage, town, FIRST)
    waits: list[Object] = []

    def decide(pod: Object) -> bool:
        condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": why}
        waits.append(town.server.put(PODS, {**pod, "status": {"conditions": [condition]}}, "MODIFIED"))
        return False

    binds = scheduled(town, decide)
    events = model_events(town)
    call = town.call("a", wait_s=2 * LONG_S)
    await asyncio.sleep(LONG_S)
    (one,) = town.leader.loop.world.replicas.values()
    assert one.runtime.waits == f"SchedulerError: {why}"
    assert len(waits) == 1, "no second start"
    pod = town.server.objects[PODS][waits[0]["metadata"]["name"]]
    gives(pod, asked(pod))
    binds(pod, "ADDED")
    assert await stage.answered([call]) == {"completed": 1}
    assert "StartFailed" not in [one.reason for one in events]


@pytest.mark.case("23")
@simulated(A, gpus=0)
async def test_start_that_the_kubelet_rejects_after_lock_expiry_is_retried(stage: Stage, town: Cluster) -> None:
    await cards(stage, town, FIRST)
    seen: list[str] = []

    def decide(pod: Object) -> bool:
        gives(pod, asked(pod))
        seen.append(pod["metadata"]["name"])
        if len(seen) > 1:
            return True
        refused = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "node lock expired"}
        town.server.put(PODS, {**pod, "spec": {**pod["spec"], "nodeName": NODE}, "status": refused}, "MODIFIED")
        return False

    scheduled(town, decide)
    events = model_events(town)
    await served(stage, town, "a")
    assert len(seen) == 2
    (failed,) = [one for one in events if one.reason == "StartFailed"]
    assert "UnexpectedAdmissionError: node lock expired" in failed.note


@pytest.mark.case("23")
@simulated(A, gpus=0)
async def test_device_of_force_deleted_pod_is_reused_only_after_its_claim_ends(stage: Stage, town: Cluster) -> None:
    town.machine.slices = (one_device(16 * GIB, f"{NODE}/gpu-0"),)
    town.server.put(resource_claims.PUBLISHED, resource_slice(NODE, "gpus", devices=[gpu(0)]), "ADDED")
    await known(stage, town)

    def decide(pod: Object) -> bool:
        (named,) = pod["spec"]["resourceClaims"]
        claim = town.server.objects[OURS][named["resourceClaimName"]]
        result = {"request": "gpu-0", "driver": DRIVER, "pool": NODE, "device": "gpu-0"}
        user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        claim["status"] = {"allocation": {"devices": {"results": [result]}}, "reservedFor": [user]}
        town.server.put(resource_claims.CLAIMS, claim, "ADDED")
        return True

    scheduled(town, decide)
    await served(stage, town, "a")
    (replica,) = town.machine.engines
    looks = town.task(watched(town, town.leader.loop.world.nodes.slices[_slice(town, replica)].node, replica))
    await asyncio.sleep(2 * LOOK_S)
    assert isinstance(town.machine, Kubelet)
    (claim,) = town.server.objects[resource_claims.CLAIMS].values()
    town.machine.delete_by_force(replica)
    call = town.call("a", wait_s=4 * LONG_S)
    await asyncio.sleep(2 * LONG_S)
    assert stage.starts() == 1, "its memory was measured to be free long ago, and its claim has the device"
    town.server.put(resource_claims.CLAIMS, claim, "DELETED")
    assert await stage.until(lambda: stage.starts() == 2, within_s=60.0) <= LOOK_S + 1.0
    assert await stage.answered([call]) == {"completed": 1}
    looks.cancel()


def _slice(town: Cluster, replica: ReplicaId) -> SliceId:
    (one,) = town.leader.loop.world.replicas[replica].resources.slices
    return one
