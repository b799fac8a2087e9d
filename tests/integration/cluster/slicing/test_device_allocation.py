"""Slices of nodes that others partition or allocate, through the plan and on a real control plane.

A pod requests and gets the chosen device; devices of other owners' pods are not used. ResourceSlices are written by
hand; pods run, but no device is prepared for them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.slicing.dra import read_allocations
from autoscaler.slicing.hami import SCHEDULER
from tests.integration.cluster.slicing.test_dra_claims import RESOURCE, create_device_classes
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.builders.resource_slices import DRIVER, gpu, resource_slice
from tests.support.builders.slices import card
from tests.support.fakes.engines.fake_engine_process import command

SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
WAIT_S_MAX = 150.0
SLICES = "pilotlight.dev/slices"


@asynccontextmanager
async def noded(api: Api, logs: Path, **amounts: str) -> AsyncIterator[Node]:
    """A node with H100s; pods select it by the label `test`."""
    name = f"node-{uuid.uuid4().hex[:8]}"
    labels = {"test": name, "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    async with Node(api, name, next_number(), amounts, labels, logs, probe_period_s=0.05).running() as one:
        yield one


async def occupied(api: Api, namespace: str, node: Node, resources: dict[str, Any], **spec: Any) -> str:
    """Creates another owner's pod on that node and returns its path."""
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    container = {"name": "theirs", "image": "theirs", "command": sleeps, "resources": resources}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"},
        "spec": {
            "nodeSelector": {"test": node.name}, "containers": [container], "terminationGracePeriodSeconds": 1, **spec,
        },
    }  # fmt: skip
    pods = f"/api/v1/namespaces/{namespace}/pods"
    await api.create(pods, pod)
    while not (await api.get(f"{pods}/theirs"))["spec"].get("nodeName"):
        await asyncio.sleep(0.02)
    return f"{pods}/theirs"


async def own_pod(api: Api, namespace: str) -> dict[str, Any]:
    """Model -> its pod, of those that have a node."""
    found = (await api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="pilotlight.dev/model"))["items"]
    return {pod["metadata"]["labels"]["pilotlight.dev/model"]: pod for pod in found if pod["spec"].get("nodeName")}


async def explained(house: House, name: str) -> str:
    """The explanation for a model."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/explain/model/{name}") as answer:
        return await answer.text()


def kept(name: str, node: Node, memory: str, **spec: object) -> dict[str, object]:
    """A Model with one replica on that node; `spec` overrides fields."""
    there = {"gpu": {"memory": memory}, "replicas": {"min": 1}, "pod": {"nodeSelector": {"test": node.name}}}
    return model(name, **{**there, **spec})


@pytest.mark.standard
async def test_model_gets_a_fitting_mig_slice_that_no_foreign_pod_uses(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    async with noded(api, tmp_path, **{SMALL: "1", LARGE: "2"}) as node, asyncio.timeout(WAIT_S_MAX):
        foreign = await occupied(api, namespace, node, {"limits": {LARGE: "1"}})
        house.write(kept("small", node, "5Gi"), kept("large", node, "30Gi"), kept("larger", node, "31Gi"))
        async with house.running():
            while len(begun := await own_pod(api, namespace)) < 2:
                await asyncio.sleep(0.05)
            (left,) = {"large", "larger"} - begun.keys()
            asked = {name: pod["spec"]["containers"][0]["resources"]["limits"] for name, pod in begun.items()}
            assert asked == {"small": {SMALL: "1"}, next(name for name in begun if name != "small"): {LARGE: "1"}}
            assert (await house.call("small"))[0] == 200
            while "pods that this installation does not manage" not in await explained(house, left):
                await asyncio.sleep(0.05)
            await api.delete(foreign)
            while left not in await own_pod(api, namespace):
                await asyncio.sleep(0.05)
            assert (await house.call(left))[0] == 200


@pytest.mark.standard
async def test_model_gets_its_chosen_device_through_a_claim_owned_by_the_pod(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """Of two GPUs another owner has one through a claim, which the plan observes."""
    await create_device_classes(api)
    claims = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"
    async with noded(api, tmp_path) as node, asyncio.timeout(WAIT_S_MAX):
        published = resource_slice(node.name, "gpus", devices=[gpu(0), gpu(1)])
        await api.create(f"{RESOURCE}/resourceslices", published)
        request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
        await api.create(claims, {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "theirs"},
            "spec": {"devices": {"requests": [request]}},
        })  # fmt: skip
        foreign = await occupied(
            api, namespace, node, {"claims": [{"name": "gpu"}]},
            resourceClaims=[{"name": "gpu", "resourceClaimName": "theirs"}],
        )  # fmt: skip
        (got,) = read_allocations(await api.get(f"{claims}/theirs"))
        assert got.entry == f"{DRIVER}/{node.name}/gpu-0", "the scheduler takes the first"
        models = {name: kept(name, node, "20Gi") for name in ("ada", "bob")}
        house.write(*models.values())
        try:
            async with house.running():
                while not (begun := await own_pod(api, namespace)):
                    await asyncio.sleep(0.05)
                ((first, pod),) = begun.items()
                (left,) = models.keys() - begun.keys()
                name = pod["metadata"]["name"]
                assert pod["metadata"]["annotations"][SLICES] == f"{node.name}/gpu-1"
                claim = await api.get(f"{claims}/{name}")
                assert [one.entry for one in read_allocations(claim)] == [f"{DRIVER}/{node.name}/gpu-1"]
                while "ownerReferences" not in claim["metadata"]:  # the claim is owned by the pod once that exists
                    claim = await api.get(f"{claims}/{name}")
                assert [one["uid"] for one in claim["metadata"]["ownerReferences"]] == [pod["metadata"]["uid"]]
                assert (await house.call(first))[0] == 200
                while "pods that this installation does not manage" not in await explained(house, left):
                    await asyncio.sleep(0.05)

                house.tell(models[left])
                while left not in (begun := await own_pod(api, namespace)):
                    await asyncio.sleep(0.05)
                assert begun[left]["metadata"]["annotations"][SLICES] == f"{node.name}/gpu-1", "it is free again"
                while name in [one["metadata"]["name"] for one in (await api.get(claims))["items"]]:
                    await asyncio.sleep(0.05)  # the garbage collector deletes it

                await api.delete(foreign)
                await api.delete(f"{claims}/theirs")
                house.tell(*models.values())
                while len(begun := await own_pod(api, namespace)) < 2 or first not in begun:
                    await asyncio.sleep(0.05)
                assert begun[first]["metadata"]["annotations"][SLICES] == f"{node.name}/gpu-0", "others have left"
                assert (await house.call(first))[0] == 200
        finally:
            await api.delete(f"{RESOURCE}/resourceslices/{published['metadata']['name']}")


@pytest.mark.standard
async def test_hami_model_is_placed_on_the_card_with_enough_free_memory(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """The test replaces HAMi's scheduler: it binds a pod to its node."""
    first, second = card("GPU-aaaa"), card("GPU-bbbb")
    async with noded(api, tmp_path, **{"nvidia.com/gpu": "20"}) as node, asyncio.timeout(WAIT_S_MAX):
        notes = {"hami.io/node-nvidia-register": json.dumps([first, second])}
        await api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"annotations": notes}})
        foreign = await occupied(api, namespace, node, {})
        taken = {"hami.io/vgpu-devices-allocated": "GPU-aaaa,NVIDIA,61440,0:;"}
        await api.patch(foreign, {"metadata": {"annotations": taken}})
        house.write(kept("ada", node, "30Gi"))
        pods = f"/api/v1/namespaces/{namespace}/pods"
        async with house.running():
            while not (there := (await api.get(pods, labelSelector="pilotlight.dev/model"))["items"]):
                await asyncio.sleep(0.05)
            (pod,) = there
            assert pod["metadata"]["annotations"]["nvidia.com/use-gpuuuid"] == "GPU-bbbb"
            assert pod["spec"]["containers"][0]["resources"]["limits"] == {
                "nvidia.com/gpu": "1", "nvidia.com/gpumem": "30720",
            }  # fmt: skip
            assert (pod["spec"]["schedulerName"], pod["spec"].get("nodeName")) == (SCHEDULER, None)
            name = pod["metadata"]["name"]
            target = {"apiVersion": "v1", "kind": "Node", "name": node.name}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            await api.create(f"{pods}/{name}/binding", binding)
            assert (await house.call("ada"))[0] == 200


class Shared(NamedTuple):
    """How one way of sharing a GPU appears on a node and in a pod."""

    settings: dict[str, object]
    """`slicing` of the Settings."""
    amounts: dict[str, str]
    """Extended resources of the node."""
    registers: dict[str, str]
    """Annotations of the node."""
    limits: dict[str, str]
    annotations: dict[str, str]
    scheduler: str


_REGISTERED = "GPU-a,10,81920,NVIDIA-H100,true,hami-core:"
SHARED = {
    "mps": Shared(
        {"kind": "mps", "replicas": 2}, {"nvidia.com/gpu": "2"}, {}, {"nvidia.com/gpu": "1"}, {}, "default-scheduler",
    ),
    "kai": Shared(
        {"kind": "kai"}, {"nvidia.com/gpu": "1"}, {}, {}, {"gpu-memory": "30720"}, "kai-scheduler",
    ),
    "volcano": Shared(
        {"kind": "volcano"}, {}, {"volcano.sh/node-vgpu-register": _REGISTERED},
        {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "30720"},
        {"volcano.sh/vgpu-use-gpuuuid": "GPU-a"}, "volcano",
    ),
}  # fmt: skip


@pytest.mark.standard
@pytest.mark.parametrize("kind", SHARED)
async def test_pod_gpu_share_request_matches_the_sharing_mechanism_of_the_node(
    house: House, api: Api, namespace: str, tmp_path: Path, kind: str
) -> None:
    """The schedulers of KAI and Volcano do not run here: the test binds in their place."""
    shared = SHARED[kind]
    async with noded(api, tmp_path, **shared.amounts) as node, asyncio.timeout(WAIT_S_MAX):
        await api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"annotations": shared.registers}})
        device = {"model": "H100", "memory": "80Gi", "count": 1}
        kinds = [{"selector": {"test": node.name}, "device": device, "slicing": shared.settings}]
        house.write(kept("ada", node, "30Gi"), nodes=kinds)
        pods = f"/api/v1/namespaces/{namespace}/pods"
        async with house.running():
            while not (there := (await api.get(pods, labelSelector="pilotlight.dev/model"))["items"]):
                await asyncio.sleep(0.05)
            (pod,) = there
            assert pod["spec"]["schedulerName"] == shared.scheduler
            assert pod["spec"]["containers"][0]["resources"].get("limits", {}) == shared.limits
            assert pod["metadata"]["annotations"].items() >= shared.annotations.items()
            if shared.scheduler != "default-scheduler":
                name = pod["metadata"]["name"]
                target = {"apiVersion": "v1", "kind": "Node", "name": node.name}
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
                await api.create(f"{pods}/{name}/binding", binding)
            assert (await house.call("ada"))[0] == 200


async def bound(api: Api, pods: str, pod: dict[str, Any], node: Node, uuid: str) -> None:
    """Records the allocated device and binds the pod, as HAMi's scheduler does."""
    name = pod["metadata"]["name"]
    memory_mib = pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"]
    given = {"hami.io/vgpu-devices-allocated": f"{uuid},NVIDIA,{memory_mib},0:;"}
    await api.patch(f"{pods}/{name}", {"metadata": {"annotations": given}})
    target = {"apiVersion": "v1", "kind": "Node", "name": node.name}
    await api.create(
        f"{pods}/{name}/binding", {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    )


async def test_model_with_gpu_growth_requests_only_memory_unused_by_others(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """The test replaces HAMi's scheduler. The engine gets the granted memory: it names its transcript after it."""
    async with noded(api, tmp_path, **{"nvidia.com/gpu": "20"}) as node, asyncio.timeout(2 * WAIT_S_MAX):
        notes = {"hami.io/node-nvidia-register": json.dumps([card("GPU-aaaa")])}
        await api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"annotations": notes}})
        pods, known = f"/api/v1/namespaces/{namespace}/pods", set[str]()
        words = command("--host", "{host}", "--port", "{port}", "--name", "ada")
        words += ["--transcript", str(tmp_path / "{memory_bytes}.jsonl")]
        ada = kept("ada", node, "50Gi", command=words, gpu={"memory": "50Gi", "growth": 40})
        house.write(ada, kept("bob", node, "15Gi", replicas={"min": 0}))
        async with house.running():
            first = await waiting(api, pods, known)
            container = first["spec"]["containers"][0]
            assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(65 << 10)}
            assert container["command"][-1] == str(tmp_path / f"{65 << 30}.jsonl")
            await bound(api, pods, first, node, "GPU-aaaa")
            assert (await house.call("ada"))[0] == 200
            assert (tmp_path / f"{65 << 30}.jsonl").exists()
            assert "granted 65Gi instead of 50Gi" in await explained(house, "ada")

            calling = asyncio.create_task(house.call("bob"))
            second = await waiting(api, pods, known)
            assert second["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] == str(15 << 10)
            await bound(api, pods, second, node, "GPU-aaaa")
            assert (await calling)[0] == 200
            assert (await own_pod(api, namespace)).keys() == {"ada", "bob"}, "no replica was evicted for it"


async def waiting(api: Api, pods: str, known: set[str]) -> dict[str, Any]:
    """Waits for a replica's pod that is not in `known`."""
    while True:
        for pod in (await api.get(pods, labelSelector="pilotlight.dev/model"))["items"]:
            if pod["metadata"]["name"] not in known:
                known.add(pod["metadata"]["name"])
                return dict(pod)
        await asyncio.sleep(0.05)


@pytest.mark.case("23")
@pytest.mark.standard
async def test_pod_bound_to_the_wrong_gpu_is_restarted_on_the_chosen_gpu(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """The test replaces HAMi's scheduler, and allocates the first pod's card to the second pod."""
    async with noded(api, tmp_path, **{"nvidia.com/gpu": "20"}) as node, asyncio.timeout(2 * WAIT_S_MAX):
        notes = {"hami.io/node-nvidia-register": json.dumps([card("GPU-aaaa"), card("GPU-bbbb")])}
        await api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"annotations": notes}})
        pods, known = f"/api/v1/namespaces/{namespace}/pods", set[str]()
        house.write(kept("ada", node, "50Gi"), kept("bob", node, "50Gi"))
        async with house.running():
            first = await waiting(api, pods, known)
            older = first["metadata"]["labels"]["pilotlight.dev/model"]
            (younger,) = {"ada", "bob"} - {older}
            uuid = first["metadata"]["annotations"]["nvidia.com/use-gpuuuid"]
            await bound(api, pods, first, node, uuid)
            second = await waiting(api, pods, known)
            chosen = second["metadata"]["annotations"]["nvidia.com/use-gpuuuid"]
            assert {uuid, chosen} == {"GPU-aaaa", "GPU-bbbb"}
            await bound(api, pods, second, node, uuid)
            third = await waiting(api, pods, known)
            assert third["metadata"]["annotations"]["nvidia.com/use-gpuuuid"] == chosen
            await bound(api, pods, third, node, chosen)
            assert (await house.call(younger))[0] == 200
            assert (await house.call(older))[0] == 200
            moves = await explained(house, younger)
            assert f"it was allocated {node.name}/{uuid} instead of {node.name}/{chosen}" in moves
            names = {pod["metadata"]["name"] for pod in (await api.get(pods))["items"]}
            assert first["metadata"]["name"] in names, "the older stays"
            assert len(known) == 3


@pytest.mark.case("23")
async def test_device_of_a_force_deleted_pod_stays_held_if_no_agent_measures_it(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """Freeing the claim does not suffice: the end of its processes was not reported, and no agent measures."""
    await create_device_classes(api)
    claims, pods = f"{RESOURCE}/namespaces/{namespace}/resourceclaims", f"/api/v1/namespaces/{namespace}/pods"
    async with noded(api, tmp_path) as node, asyncio.timeout(2 * WAIT_S_MAX):
        published = resource_slice(node.name, "gpus", devices=[gpu(0)])
        await api.create(f"{RESOURCE}/resourceslices", published)
        house.write(kept("ada", node, "20Gi"))
        try:
            async with house.running():
                assert (await house.call("ada"))[0] == 200
                (pod,) = (await api.get(pods, labelSelector="pilotlight.dev/model"))["items"]
                name = pod["metadata"]["name"]
                (user,) = (await api.get(f"{claims}/{name}"))["status"]["reservedFor"]
                assert user["uid"] == pod["metadata"]["uid"]
                await api.delete(f"{pods}/{name}", uid=pod["metadata"]["uid"], grace_s=0)
                while (
                    "deleted by force" not in (message := await explained(house, "ada"))
                    or "held by ada (" not in message
                ):
                    await asyncio.sleep(0.05)
                while name in [one["metadata"]["name"] for one in (await api.get(claims))["items"]]:
                    await asyncio.sleep(0.05)  # deleted by the cluster, which does not see the node's processes
                await asyncio.sleep(2.0)
                assert not (await api.get(pods, labelSelector="pilotlight.dev/model"))["items"], "nothing starts there"
        finally:
            await api.delete(f"{RESOURCE}/resourceslices/{published['metadata']['name']}")
