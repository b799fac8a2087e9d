"""A GPU that ResourceSlices offer whole and in partitions, with a real scheduler: claims partition it.

ResourceSlices are written by hand, as NVIDIA's driver writes them; pods run, but no device is prepared for them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from autoscaler.kubernetes.api import Api
from autoscaler.slicing.dra import read_allocations
from tests.integration.cluster.slicing.test_device_allocation import SLICES, WAIT_S_MAX, explained, kept, noded, own_pod
from tests.integration.cluster.slicing.test_dra_claims import RESOURCE, create_device_classes
from tests.integration.cluster.support.entry_points import held_engine
from tests.integration.cluster.support.installations.single_instance import House
from tests.support.builders.resource_slices import cut_name, partitionable, partitionables

CUT = {"selector": {}, "device": {"model": "H100", "memory": "80Gi"}, "slicing": {"kind": "dra", "cut": True}}


async def test_5_and_30_gib_models_share_one_gpu_and_leave_the_other_whole(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """Of two GPUs one stays whole, and one Model gets that; the next waits for the other."""
    await create_device_classes(api)
    claims = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"
    async with noded(api, tmp_path) as node, asyncio.timeout(2 * WAIT_S_MAX):
        published = partitionables(node.name, 2)
        for one in published:
            await api.create(f"{RESOURCE}/resourceslices", one)
        small, large = kept("small", node, "5Gi"), kept("large", node, "30Gi")
        whole = [kept(f"whole-{at}", node, "70Gi") for at in range(2)]
        try:
            house.write(small, large, nodes=[CUT])
            async with house.running():
                while len(begun := await own_pod(api, namespace)) < 2:
                    await asyncio.sleep(0.05)
                got = {
                    name: read_allocations(await api.get(f"{claims}/{pod['metadata']['name']}"))[0].entry.rpartition(
                        "/"
                    )[2]
                    for name, pod in begun.items()
                }
                assert {one.partition("-mig-")[0] for one in got.values()} == {"gpu-0"}, got
                assert "-mig-1g10gb-" in got["small"]
                assert "-mig-3g40gb-" in got["large"]

                house.tell(small, large, *whole, nodes=[CUT])
                while len(begun := await own_pod(api, namespace)) < 3:
                    await asyncio.sleep(0.05)
                (left,) = {"whole-0", "whole-1"} - begun.keys()
                while "Not placed" not in (message := await explained(house, left)):
                    await asyncio.sleep(0.05)
                assert "fits on no device" not in message

                house.tell(*whole, nodes=[CUT])
                while left not in await own_pod(api, namespace):
                    await asyncio.sleep(0.05)
                assert (await house.call(left))[0] == 200
        finally:
            for one in published:
                await api.delete(f"{RESOURCE}/resourceslices/{one['metadata']['name']}")


async def test_partitioned_gpu_is_drained_for_a_model_that_needs_all_of_it(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """An idle replica leaves one partition; the other is left when its request has ended."""
    await create_device_classes(api)
    claims = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"
    idle = {"replicas": {"min": 0}, "residencySeconds": 0.1, "idleSeconds": 600}
    async with noded(api, tmp_path) as node, asyncio.timeout(2 * WAIT_S_MAX):
        for one in partitionable(node.name):
            await api.create(f"{RESOURCE}/resourceslices", one)
        release = tmp_path / "release"
        slow = held_engine.command(release, "--host", "{host}", "--port", "{port}", "--name", "busy")
        first = kept("first", node, "5Gi", **idle)
        busy = kept("busy", node, "5Gi", **idle, command=slow)
        whole = kept("whole", node, "70Gi", **idle)
        try:
            house.write(first, busy, whole, nodes=[CUT])
            async with house.running():
                assert (await house.call("first"))[0] == 200
                calling = asyncio.create_task(house.call("busy"))
                row = f"http://127.0.0.1:{house.ops}/api/v1/models/busy"
                while '"running":1' not in await (await house.session.get(row)).text():
                    await asyncio.sleep(0.05)
                asked = asyncio.create_task(house.call("whole"))
                while "until busy has stopped" not in (message := await explained(house, "whole")):
                    await asyncio.sleep(0.05)
                assert f"{node.name}/gpu-0" in message
                late = kept("late", node, "30Gi")
                house.tell(first, busy, whole, late, nodes=[CUT])
                while "its GPU is being vacated for whole, which needs a whole GPU" not in await explained(
                    house, "late"
                ):
                    await asyncio.sleep(0.05)
                assert not calling.done()
                release.touch()
                assert (await calling)[0] == 200, "no request is interrupted"
                assert (await asked)[0] == 200
                there = await own_pod(api, namespace)
                assert "late" not in there
                (got,) = read_allocations(await api.get(f"{claims}/{there['whole']['metadata']['name']}"))
                assert got.entry.rpartition("/")[2] == "gpu-0"
        finally:
            for one in partitionable(node.name):
                await api.delete(f"{RESOURCE}/resourceslices/{one['metadata']['name']}")


async def test_models_get_the_smallest_partition_and_free_the_gpu_afterwards(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    await create_device_classes(api)
    claims = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"
    async with noded(api, tmp_path) as node, asyncio.timeout(2 * WAIT_S_MAX):
        for one in partitionable(node.name):
            await api.create(f"{RESOURCE}/resourceslices", one)
        small, large, all_of_it = kept("small", node, "5Gi"), kept("large", node, "30Gi"), kept("all", node, "70Gi")

        async def got(name: str) -> str:
            """The device that the claim of a model's pod has."""
            while name not in (there := await own_pod(api, namespace)):
                await asyncio.sleep(0.05)
            (one,) = read_allocations(await api.get(f"{claims}/{there[name]['metadata']['name']}"))
            return one.entry.rpartition("/")[2]

        try:
            house.write(small, nodes=[CUT])
            async with house.running():
                assert await got("small") == cut_name("1g.10gb", 0), "not the whole GPU, which was free"
                pod = (await own_pod(api, namespace))["small"]
                assert pod["metadata"]["annotations"][SLICES] == f"{node.name}/gpu-0", "which was chosen"
                assert (await house.call("small"))[0] == 200
                house.tell(small, large, nodes=[CUT])
                assert await got("large") == cut_name("3g.40gb", 4), "beside it"
                assert (await house.call("large"))[0] == 200

                house.tell(nodes=[CUT])
                last = f"http://127.0.0.1:{house.ops}/api/v1/explain/last"
                while (await (await house.session.get(last)).text()).count("clean: ") < 2:
                    await asyncio.sleep(0.05)
                house.tell(all_of_it, nodes=[CUT])
                assert await got("all") == "gpu-0", "when both have ended"
                assert (await house.call("all"))[0] == 200
        finally:
            for one in partitionable(node.name):
                await api.delete(f"{RESOURCE}/resourceslices/{one['metadata']['name']}")
