"""Case 23 of reliability section 5 in virtual time: a pod is force-deleted while its engine keeps running.

Loop, Kubernetes driver, watches and gateways are the real ones; two autoscalers, one of which leads.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from autoscaler.agent_contract import DeviceReport, NodeReport, PodDevices
from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects.pod_manifest import format_pod_name
from autoscaler.drivers.kubernetes.proof_of_clean import FORCED_S
from autoscaler.state.events import NodeReported
from tests.simulation.case_harness import GIB, Stage, model
from tests.simulation.installations.cluster import Cluster, Kubelet, simulated

LOOK_S = 3.0
"""Interval between two reports of an agent."""
RUNS_ON_S = 120.0
A = model("a", idle_s=3600.0)


async def watched(town: Cluster, node: str, replica: ReplicaId) -> None:
    """The node's agent reports one device, in use by that replica while its process runs."""
    for sequence in count(1):
        runs = replica in town.machine.engines
        device = DeviceReport(id="GPU-0", memory_bytes=16 * GIB, used_bytes=10 * GIB if runs else 0)
        had = (PodDevices(namespace="town", name=format_pod_name(replica), devices=("GPU-0",)),) if runs else ()
        report = NodeReport(node=node, boot="b", sequence=sequence, devices=(device,), pods=had)
        town.leader.loop.observe([NodeReported(report=report)])
        await asyncio.sleep(LOOK_S)


async def forced(stage: Stage, town: Cluster, *, agent: bool) -> float:
    """Seconds from the process end of a force-deleted pod until its only device is used again.
    The device is not used before: the watcher checks its true occupancy (I5).
    """
    await stage.answered([town.call("a")])
    (replica,) = town.machine.engines
    (slice_,) = town.leader.loop.world.replicas[replica].resources.slices
    looks = town.task(watched(town, town.leader.loop.world.nodes.slices[slice_].node, replica)) if agent else None
    await asyncio.sleep(2 * LOOK_S)
    assert isinstance(town.machine, Kubelet)
    town.machine.delete_by_force(replica, RUNS_ON_S)
    await asyncio.sleep(2.0)
    call = town.call("a", wait_s=2 * FORCED_S)
    await asyncio.sleep(RUNS_ON_S - 3.0)
    assert list(town.machine.engines) == [replica], "it runs on"
    assert stage.starts() == 1, "nothing is started beside it"
    ended_s = town.now() + 1.0
    await stage.until(lambda: stage.starts() == 2, within_s=2 * FORCED_S, step_s=0.05)
    again_s = town.now() - ended_s
    assert await stage.answered([call]) == {"completed": 1}
    if looks is not None:
        looks.cancel()
    return again_s


@pytest.mark.case("23")
@simulated(A)
async def test_force_deleted_pod_frees_its_device_once_memory_is_measured_free(stage: Stage, town: Cluster) -> None:
    assert 0.0 <= await forced(stage, town, agent=True) <= LOOK_S + 1.0


@pytest.mark.case("23")
@simulated(A)
async def test_device_without_node_agent_is_reused_after_force_delete_delay(stage: Stage, town: Cluster) -> None:
    assert await forced(stage, town, agent=False) >= FORCED_S - RUNS_ON_S
