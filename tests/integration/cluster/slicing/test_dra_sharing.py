"""A GPU of a DRA driver that Settings let replicas share, through the plan and a real scheduler: one claim.

ResourceSlices are written by hand, as NVIDIA's driver writes them; pods run, but no device is prepared for them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.slicing.dra import read_allocations
from tests.integration.cluster.slicing.test_device_allocation import SLICES, WAIT_S_MAX, explained, kept, noded, own_pod
from tests.integration.cluster.slicing.test_dra_claims import RESOURCE, create_device_classes
from tests.integration.cluster.support.installations.single_instance import House
from tests.support.builders.resource_slices import DRIVER, gpu, resource_slice

pytestmark = pytest.mark.standard

SHARED = {
    "selector": {}, "device": {"model": "H100", "memory": "80Gi"}, "slicing": {"kind": "dra", "sharing": "mps"},
}  # fmt: skip


def reserved(claim: dict[str, Any]) -> set[str]:
    """Uids of the pods for which the claim is reserved."""
    return {one["uid"] for one in claim.get("status", {}).get("reservedFor", ())}


async def test_shared_claim_serves_two_replicas_and_is_deleted_with_the_last(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    await create_device_classes(api)
    path = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"

    async def claims() -> list[dict[str, Any]]:
        return list((await api.get(path))["items"])

    async with noded(api, tmp_path) as node, asyncio.timeout(2 * WAIT_S_MAX):
        published = resource_slice(node.name, "gpus", devices=[gpu(0)])
        await api.create(f"{RESOURCE}/resourceslices", published)
        models = {name: kept(name, node, "30Gi") for name in ("ada", "bob", "cid")}
        try:
            house.write(*models.values(), nodes=[SHARED])
            async with house.running():
                while len(begun := await own_pod(api, namespace)) < 2:
                    await asyncio.sleep(0.05)
                (left,) = models.keys() - begun.keys()
                for name, pod in begun.items():
                    assert (await house.call(name))[0] == 200
                    assert pod["metadata"]["annotations"][SLICES] == f"{node.name}/gpu-0"
                    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
                    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=30720M"
                (claim,) = await claims()
                assert [one.entry for one in read_allocations(claim)] == [f"{DRIVER}/{node.name}/gpu-0"]
                uids = {pod["metadata"]["uid"] for pod in begun.values()}
                assert reserved(claim) == {one["uid"] for one in claim["metadata"]["ownerReferences"]} == uids
                while "Not placed" not in (message := await explained(house, left)):
                    await asyncio.sleep(0.05)
                assert "fits on no device" not in message
                assert left not in await own_pod(api, namespace)

                first, second = begun
                house.tell(models[second], models[left], nodes=[SHARED])
                while left not in await own_pod(api, namespace):
                    await asyncio.sleep(0.05)
                assert (await house.call(left))[0] == 200
                assert (await house.call(second))[0] == 200
                assert [one["metadata"]["uid"] for one in await claims()] == [claim["metadata"]["uid"]]

                house.tell(nodes=[SHARED])
                while await claims():
                    await asyncio.sleep(0.05)
                house.tell(models[first], nodes=[SHARED])
                while first not in await own_pod(api, namespace):
                    await asyncio.sleep(0.05)
                assert (await house.call(first))[0] == 200
                (anew,) = await claims()
                assert anew["metadata"]["name"] == claim["metadata"]["name"]
                assert anew["metadata"]["uid"] != claim["metadata"]["uid"]
        finally:
            await api.delete(f"{RESOURCE}/resourceslices/{published['metadata']['name']}")
