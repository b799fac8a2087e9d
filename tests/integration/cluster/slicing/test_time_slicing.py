"""A node whose device plugin advertises its GPU three times, on a real control plane: at most three replicas run."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.objects.node_slices import RESLICED
from autoscaler.kubernetes.api import MERGE, Api, ApiError
from autoscaler.kubernetes.device_plugin_config import CHOICE, PLACES
from autoscaler.queries.granted_memory import AS_ASKED, Given
from autoscaler.spec.model import Model
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing, Settings
from autoscaler.state.events import Seen
from autoscaler.state.world import SliceId
from tests.integration.cluster.support.driver.node_fixture import staged
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.builders.worlds import GI
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import ArgvLaunch, launch

GPU = "nvidia.com/gpu"
TAINT = {"key": GPU, "value": "true", "effect": "NoSchedule"}
CONFIG = "{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}}"
FULL = "needs 5Gi on one device; the largest has 0 bytes free of 5.3Gi"
WAIT_S_MAX = 150.0
NAMES = ("ada", "bob", "cyn", "dan")


@asynccontextmanager
async def g4dn(api: Api, logs: Path) -> AsyncIterator[Node]:
    """A node without GPU feature discovery. Pods select it by the label `test`; the ConfigMap key has its name."""
    name = f"node-{uuid.uuid4().hex[:8]}"
    labels = {"test": name, "node.kubernetes.io/instance-type": "g4dn.xlarge", CHOICE: name}
    async with Node(
        api, name, next_number(), {GPU: "3"}, labels, logs, probe_period_s=0.05, taints=(TAINT,)
    ).running() as one:
        yield one


@asynccontextmanager
async def configured(api: Api, key: str) -> AsyncIterator[None]:
    """Sets that key of the device plugin's ConfigMap."""
    place = PLACES[0]
    collection = f"/api/v1/namespaces/{place.namespace}/configmaps"
    meta = {"name": place.name, "namespace": place.namespace}
    with contextlib.suppress(ApiError):  # another test may have created it
        await api.create(collection, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    await api.patch(f"{collection}/{place.name}", {"data": {key: CONFIG}}, MERGE)
    try:
        yield
    finally:
        await api.delete(f"{collection}/{place.name}")


async def bound(api: Api, namespace: str) -> dict[str, Any]:
    """Model -> its pod, of those that have a node."""
    pods = (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
    return {pod["metadata"]["labels"]["pilotlight.dev/model"]: pod for pod in pods if pod["spec"].get("nodeName")}


async def reasons(house: House) -> str:
    """The explanations for all models."""
    lines = []
    for name in NAMES:
        async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/explain/model/{name}") as answer:
            lines.append(await answer.text())
    return "\n".join(lines)


@pytest.mark.parametrize("teller", ["settings", "config map"])
@pytest.mark.standard
async def test_gpu_shared_three_ways_serves_three_replicas_and_queues_the_fourth(
    house: House, api: Api, namespace: str, tmp_path: Path, teller: str
) -> None:
    async with g4dn(api, tmp_path) as node, asyncio.timeout(WAIT_S_MAX):
        slicing = {"slicing": {"kind": "timeslice", "replicas": 3}} if teller == "settings" else {}
        device = {"model": "T4", "memory": "16Gi", "count": 1}
        kinds = [{"selector": {"node.kubernetes.io/instance-type": "g4dn.xlarge"}, "device": device, **slicing}]
        kept = {"gpu": {"memory": "5Gi"}, "replicas": {"min": 1}, "pod": {"nodeSelector": {"test": node.name}}}
        models = {name: model(name, **kept) for name in NAMES}
        house.write(*models.values(), nodes=kinds)
        async with house.running():
            if teller == "config map":
                while "their sharing mode is not known" not in await reasons(house):
                    await asyncio.sleep(0.05)
                assert not await bound(api, namespace)
            async with configured(api, node.name) if teller == "config map" else contextlib.nullcontext():
                while len(await bound(api, namespace)) < 3 or FULL not in await reasons(house):
                    await asyncio.sleep(0.05)
                first = await bound(api, namespace)
                assert {pod["spec"]["nodeName"] for pod in first.values()} == {node.name}
                limits = [pod["spec"]["containers"][0]["resources"]["limits"] for pod in first.values()]
                assert limits == [{GPU: "1"}] * 3
                slices = sorted(pod["metadata"]["annotations"]["pilotlight.dev/slices"] for pod in first.values())
                assert slices == [f"{node.name}/gpu0/s{number}" for number in range(3)]
                answers = [await house.call(name) for name in first]
                assert [status for status, _ in answers] == [200] * 3
                (left,) = set(NAMES) - first.keys()
                removed = min(first)
                house.tell(*(one for name, one in models.items() if name != removed), nodes=kinds)
                while left not in await bound(api, namespace):
                    await asyncio.sleep(0.05)
                assert (await house.call(left))[0] == 200


# --- what the driver reports ------------------------------------------------------------------------------------------


async def test_device_with_changed_slicing_is_usable_after_its_replica_ends(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    """Its pod continues and ends as if its slice still existed; new replicas and their engines get shares."""
    limits, entries = list[float | None](), list[NodeKind]()

    def recording(model: Model, host: str, port: int, given: Given = AS_ASKED) -> ArgvLaunch:
        limits.append(given.memory_fraction)
        return launch(model, host, port, given)

    async with staged(api, namespace, tmp_path) as scene, asyncio.timeout(WAIT_S_MAX):
        name = scene.node.name
        device = NodeDevice(model="T4", memory_bytes=Bytes(16 * GI), count=2)
        entries.append(NodeKind(selector={"kubernetes.io/hostname": name}, device=device))
        driver = KubernetesDriver(
            api, namespace, recording, lambda _: "engine", assume_after_s=0.05,
            settings=lambda: Settings(nodes=tuple(entries)),
        )  # fmt: skip
        async with running(driver) as observed:

            async def until(wanted: list[tuple[str, str]]) -> None:
                while [(one.id, one.closed) for one in observed.slices().slices if one.node == name] != wanted:
                    await observed.more()

            whole, of = scene.engine("r1")
            await until([(f"{name}/gpu0", ""), (f"{name}/gpu1", "")])
            driver.start(whole, of)
            await observed.until(whole.id, Seen.READY)
            entries[0] = replace(entries[0], slicing=NodeSlicing(kind="timeslice", replicas=2))
            await scene.node.has({GPU: "4"})
            shares = [f"{name}/gpu{gpu}/s{share}" for gpu in range(2) for share in range(2)]
            await until([(id, RESLICED if "gpu0" in id else "") for id in shares])
            one, of = scene.engine("r2")
            one = replace(one, resources=replace(one.resources, slices=(SliceId(shares[2]),)))
            driver.start(one, of)
            await observed.until(one.id, Seen.READY)
            assert limits == [None, 0.5]
            driver.stop(whole, 1.0)
            await observed.until(whole.id, Seen.CLEAN)
            await until([(id, "") for id in shares])
