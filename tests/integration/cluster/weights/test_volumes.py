"""Weights of a node's store in a pod, on a real control plane: the volume binds, and the engine reads its file.
The pod is admitted and scheduled on the volume's node, and the created objects are deleted with the node.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from autoscaler import engines
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.documents import parse
from autoscaler.drivers.kubernetes import weight_volumes
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.weight_volumes import (
    VOLUMES,
    Mounted,
    NodeVolumes,
    build_node_volume,
    claims_path,
    mount_weights,
    read_node_facts,
)
from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings, Weights
from autoscaler.state.world import STORE, Replica, ReplicaResources, SliceId
from autoscaler.weights.mount_choice import ArtifactFacts, NodeMountFacts
from tests.integration.cluster.support.control_plane.service_accounts import acting_as_autoscaler, refused
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.fakes.engines.fake_engine_process import command

LOOK_S, WAIT_S_MAX = 0.05, 120.0
WORDS = "the weights themselves"
COPY = ArtifactFacts("sha256:" + 64 * "a", "copies/0123456789abcdef/sha256-aaaa/files", "llama.gguf")
READ = f"import sys; sys.exit(open(sys.argv[1]).read() != {WORDS!r})"
"""Exits with 0 if the file has its original content."""


@pytest.fixture
async def restricted(api: Api, namespace: str) -> str:
    """The namespace with the labels that the chart sets for engines."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}}, MERGE)
    return namespace


@pytest.fixture
def disk(node: Node, tmp_path: Path) -> Path:
    """The node's own disk, with cached weights in its store."""
    there = tmp_path / "disk"
    node.shown = {STORE: there / "store", "/share": there / "share"}
    file = there / "store" / COPY.folder / COPY.file
    file.parent.mkdir(parents=True)
    file.write_text(WORDS)
    return there


def reading() -> Model:
    found = parse.read_document(
        model("ada", artifact="oci://r.io/a:1", command=[sys.executable, "-c", READ, "{model_path}", "{port}"])
    )
    assert isinstance(found, Model)
    return found


async def seen(
    api: Api, node: Node, namespace: str, found: ArtifactFacts = COPY, settings: Settings | None = None
) -> Mounted:
    """Mounts the weights as a driver does."""
    of = read_node_facts(nodes.read_node(await api.get(f"/api/v1/nodes/{node.name}")))
    of = of._replace(kubelet="v1.36.0", runtime="containerd://2.1.0")  # a process kubelet mounts no images
    facts = await weight_volumes.query_cluster_facts(api, "cluster")
    return mount_weights(reading(), namespace, of, found, facts, settings or Settings())


def pod_of(node: Node, weights: Mounted) -> Object:
    replica = Replica(
        id=ReplicaId("ada-1"),
        model=ModelName("ada"),
        spec_hash="h",
        intent="i",
        slots=1,
        resources=ReplicaResources(slices=(SliceId(f"{node.name}/nvidia.com%2Fgpu"),), memory_bytes=1),
    )
    launch = engines.build_launch_command(
        weight_volumes.resolve_weight_paths(reading(), weights),
        None,
        pods.HOST,
        pods.assign_engine_port(replica.id),
        {},
    )
    return pods.build_pod_manifest(replica, reading(), launch, "engine", weights=weights.pod)


async def until(api: Api, path: str, phase: str) -> Object:
    async with asyncio.timeout(WAIT_S_MAX):
        while (found := await api.get(path)).get("status", {}).get("phase") != phase:
            await asyncio.sleep(LOOK_S)
    return found


async def until_gone(api: Api, path: str) -> None:
    collection, _, name = path.rpartition("/")
    async with asyncio.timeout(WAIT_S_MAX):
        while (await api.get(collection, fieldSelector=f"metadata.name={name}"))["items"]:
            await asyncio.sleep(LOOK_S)


async def test_volume_with_the_weights_of_a_node_is_deleted_with_the_node(
    api: Api, node: Node, disk: Path, restricted: str, kubeconfig: Path
) -> None:
    assert disk.is_dir()
    weights = await seen(api, node, restricted)
    volume, claim = (one["metadata"]["name"] for one in weights.objects)
    async with Api(await load_api_access(kubeconfig)) as counted:  # the other client is also used by the kubelet
        await NodeVolumes(counted).make(weights.objects)
        made = await counted.create(f"/api/v1/namespaces/{restricted}/pods", pod_of(node, weights))
        assert counted.requests <= 6
    path = f"/api/v1/namespaces/{restricted}/pods/{made['metadata']['name']}"
    over = await until(api, path, "Succeeded")
    assert over["spec"]["nodeName"] == node.name
    bound = await until(api, f"{claims_path(restricted)}/{claim}", "Bound")
    assert bound["spec"]["volumeName"] == volume
    await api.delete(path, grace_s=0)
    await api.delete(f"/api/v1/nodes/{node.name}")
    await until_gone(api, f"{claims_path(restricted)}/{claim}")
    await until_gone(api, f"{VOLUMES}/{volume}")


async def test_deleted_claim_is_recreated_and_bound(api: Api, node: Node, restricted: str) -> None:
    weights = await seen(api, node, restricted)
    claim = f"{claims_path(restricted)}/{weights.objects[1]['metadata']['name']}"
    volume = f"{VOLUMES}/{weights.objects[0]['metadata']['name']}"
    await NodeVolumes(api).make(weights.objects)
    first = await until(api, claim, "Bound")
    await api.delete(claim)
    await until_gone(api, claim)
    await until(api, volume, "Released")
    await NodeVolumes(api).make(weights.objects)
    assert (await until(api, claim, "Bound"))["metadata"]["uid"] != first["metadata"]["uid"]


async def test_volume_with_weights_is_not_bound_to_another_node_or_claim(api: Api, node: Node, restricted: str) -> None:
    """A pod that names the claim can only run on the volume's node."""
    elsewhere = NodeMountFacts(node.name, "another-host")
    objects = build_node_volume(restricted, elsewhere, STORE)
    await NodeVolumes(api).make(objects)
    weights = await seen(api, node, restricted)
    (source,) = weights.pod.volumes
    claim = {"claimName": objects[1]["metadata"]["name"], "readOnly": True}
    pod = pod_of(node, weights)
    pod["spec"]["volumes"] = [{"name": source["name"], "persistentVolumeClaim": claim}]
    made = await api.create(f"/api/v1/namespaces/{restricted}/pods", pod)
    path = f"/api/v1/namespaces/{restricted}/pods/{made['metadata']['name']}"
    async with asyncio.timeout(WAIT_S_MAX):
        while "match PersistentVolume's node affinity" not in str((await api.get(path))["status"]):
            await asyncio.sleep(LOOK_S)
    await api.delete(path)
    greedy: Object = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "greedy"},
        "spec": {
            "accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": objects[0]["metadata"]["name"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }  # fmt: skip
    await api.create(claims_path(restricted), greedy)
    await until(api, f"{claims_path(restricted)}/{objects[1]['metadata']['name']}", "Bound")
    assert (await api.get(f"{claims_path(restricted)}/greedy"))["status"]["phase"] == "Pending"


async def test_restricted_pod_security_allows_volumes_but_no_host_path(api: Api, node: Node, restricted: str) -> None:
    path = f"/api/v1/namespaces/{restricted}/pods?dryRun=All"
    image = Settings(weights=Weights(mount="image"))
    for found, settings in ((COPY, Settings()), (COPY._replace(image="models"), image)):
        weights = await seen(api, node, restricted, found, settings)
        await api.create(path, pod_of(node, weights))
    weights = await seen(api, node, restricted, settings=Settings(weights=Weights(mount="hostPath")))
    with pytest.raises(ApiError, match=r"restricted volume types \(volume \"pilotlight-weights\"") as refused:
        await api.create(path, pod_of(node, weights))
    assert refused.value.status == 403


async def test_weight_volumes_are_unavailable_with_namespace_scope(api: Api) -> None:
    assert (await weight_volumes.query_cluster_facts(api, "cluster")).volumes
    found = await weight_volumes.query_cluster_facts(api, "namespace")
    assert (found.volumes, found.server) == (False, (1, 36))


@pytest.mark.standard
async def test_model_stored_in_a_persistent_volume_claim_is_served_from_zero(
    api: Api, node: Node, disk: Path, namespace: str, house: House
) -> None:
    """A user's claim for shared storage, here a folder of the node."""
    share = disk / "share" / "llama"
    share.mkdir(parents=True)
    (share / "8b.gguf").write_text(WORDS)
    volume, claim = build_node_volume(namespace, NodeMountFacts(node.name, node.name), "/share")
    await NodeVolumes(api).make((volume, claim))
    words = ["sh", "-c", f'grep -q "{WORDS}" "$0" && exec "$@"', "{model_path}"]
    engine = command("--host", "{host}", "--port", "{port}", "--name", "ada")
    artifact = f"pvc://{claim['metadata']['name']}/llama/8b.gguf"
    house.write(model("ada", artifact=artifact, command=[*words, *engine]))
    async with house.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await house.call("ada"))[0] == 200


@pytest.fixture
async def autoscaler(api: Api, kubeconfig: Path, namespace: str) -> AsyncIterator[Api]:
    """An API client with the chart's permissions and policy; engines run in the namespace."""
    values = {"agent": {"enabled": True}, "engines": {"namespace": namespace, "createNamespace": False}}
    async with acting_as_autoscaler(api, kubeconfig, "default", values, "volumes.yaml") as acting:
        yield acting


async def test_admission_policy_rejects_autoscaler_volumes_not_for_weights(
    api: Api, autoscaler: Api, node: Node, namespace: str
) -> None:
    """Otherwise its service account could be used to read and write every folder of every node."""
    weights = await seen(api, node, namespace)
    volume, _ = weights.objects
    spec, path = volume["spec"], f"{VOLUMES}?dryRun=All"
    bad: list[tuple[str, Object]] = [
        ("create only volumes of", {**spec, "local": {"path": "/etc"}}),
        ("create only volumes of", {**{key: spec[key] for key in spec if key != "local"}, "hostPath": {"path": STORE}}),
        ("only for the engines' namespace", {**spec, "claimRef": {**spec["claimRef"], "namespace": "kube-system"}}),
        ("mounted read-only", {key: spec[key] for key in spec if key != "mountOptions"}),
    ]
    async with asyncio.timeout(WAIT_S_MAX):
        while bad[0][0] not in await refused(autoscaler.create(path, {**volume, "spec": bad[0][1]})):
            await asyncio.sleep(LOOK_S)  # permissions and policy are effective with a delay
    for why, other in bad:
        assert why in await refused(autoscaler.create(path, {**volume, "spec": other}))
    await NodeVolumes(autoscaler).make(weights.objects)
    await until(api, f"{claims_path(namespace)}/{weights.objects[1]['metadata']['name']}", "Bound")
    change: Object = {"spec": {"mountOptions": []}}
    with pytest.raises(ApiError, match="mounted read-only"):
        await autoscaler.patch(f"{VOLUMES}/{volume['metadata']['name']}", change)
    assert (await weight_volumes.query_cluster_facts(autoscaler, "cluster")).volumes
