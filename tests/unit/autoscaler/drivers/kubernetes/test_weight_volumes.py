"""Weights in pods: the volumes of each mount method, of node stores, and the number of API requests."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes import pod_writer, weight_volumes
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects.pod_overrides import CollisionError, refuse_collisions
from autoscaler.drivers.kubernetes.weight_volumes import (
    Mounted,
    MountError,
    NodeVolumes,
    build_node_volume,
    mount_weights,
)
from autoscaler.kubernetes.api import Api, ApiError, Object, UnreachableError
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from autoscaler.spec.model import Adapter, Model
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.settings import Settings, Weights
from autoscaler.state.world import ClusterFacts, Replica
from autoscaler.weights.mount_choice import ArtifactFacts, NodeMountFacts
from pilotlight.processes.cluster import build_pod_launch
from tests.support.golden import agrees
from tests.unit.autoscaler.drivers.kubernetes.objects.test_pod_manifest import model, replica
from tests.unit.autoscaler.drivers.kubernetes.test_pod_writer import Deaf

DIGEST = "sha256:" + 64 * "a"
COPY = ArtifactFacts(DIGEST, "copies/0123456789abcdef/sha256-aaaa/files", "llama.gguf")
NODE = NodeMountFacts("gpu-1.example", "gpu-1", "v1.36.3", "containerd://2.1.4")
FACTS = ClusterFacts(volumes=True, server=(1, 36))
ADDRESSED = """
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: ada}
spec: {engine: command, image: "engine:1", command: [serve, "{host}:{port}"]}
"""
OCI, CLAIM = "artifact: oci://ghcr.io/acme/llama:8b", "artifact: pvc://shared/llama/8b.gguf"


def seen(
    text: str = OCI, found: ArtifactFacts | None = COPY, mount: str = "auto", facts: ClusterFacts = FACTS
) -> Mounted:
    settings = Settings(weights=Weights(mount=cast("Any", mount)))
    return mount_weights(model(text), "engines", NODE, found, facts, settings)


def pod(of: Model, weights: Mounted) -> Object:
    one = replica(of, "gpu-1.example/gpu0", id="ada-1")
    there = weight_volumes.resolve_weight_paths(of, weights)
    return pods.build_pod_manifest(
        one, of, build_pod_launch(there, pods.HOST, pods.assign_engine_port(one.id)), "engine:1", weights=weights.pod
    )


WAYS = {
    "volume": seen(),
    "image": seen(found=ArtifactFacts(DIGEST, image="models", file="llama.gguf"), mount="image"),
    "host-path": seen(mount="hostPath"),
    "claim": seen(CLAIM, None),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_volume_type_mounts_weights_read_only_at_the_same_path(way: str) -> None:
    of = model(f"{CLAIM if way == 'claim' else OCI}\nargs: ['-m']")
    made = pod(of, WAYS[way])
    agrees(f"volumes/{way}", [*WAYS[way].objects, made])
    (mount,) = made["spec"]["containers"][0]["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/weights", True)


def test_mounted_weights_become_the_artifact_path_for_each_volume_type() -> None:
    assert {way: one.path for way, one in WAYS.items()} == {
        "volume": "/weights/llama.gguf", "image": "/weights/models/llama.gguf", "host-path": "/weights/llama.gguf",
        "claim": "/weights/llama/8b.gguf",
    }  # fmt: skip
    assert seen(found=COPY._replace(file="")).path == "/weights", "a folder of safetensors"
    assert weight_volumes.resolve_weight_paths(model(OCI), WAYS["volume"]).spec.artifact == "file:///weights/llama.gguf"


def test_pvc_artifact_is_mounted_without_a_download() -> None:
    of = model(CLAIM)
    one = replica(of)
    made = pods.build_pod_manifest(
        one, of, build_pod_launch(of, pods.HOST, pods.assign_engine_port(one.id)), "engine:1"
    )
    assert made["spec"]["volumes"] == pod(of, WAYS["claim"])["spec"]["volumes"]
    assert (
        "volumes"
        not in pods.build_pod_manifest(one, model(), build_pod_launch(model(), pods.HOST, 1), "engine:1")["spec"]
    )


@pytest.mark.parametrize(
    ("ip", "word"), [("fd00::1", "[$(POD_IP)]:9000"), ("10.0.0.1", "$(POD_IP):9000"), ("", "$(POD_IP):9000")]
)
def test_engine_listens_on_ipv6_if_the_autoscaler_pod_has_an_ipv6_address(
    ip: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", ip)
    of = parse_documents([("a.yaml", ADDRESSED)]).models[0]
    assert build_pod_launch(of, pods.HOST, 9000).argv == ("serve", word)


@pytest.mark.parametrize("path", ["/weights", "/weights/", "/./weights"])
def test_volume_mount_at_weights_path_is_rejected(path: str) -> None:
    of = model(
        f"{CLAIM}\npod:\n  volumes: [{{name: x, emptyDir: {{}}}}]\n  volumeMounts: [{{name: x, mountPath: {path}}}]"
    )
    with pytest.raises(CollisionError, match="Pilotlight uses mount path /weights in this pod"):
        pod(of, WAYS["claim"])


def test_user_volume_named_like_the_weights_volume_is_rejected() -> None:
    """A new document with that name is rejected, but an older Model that is not read again may have it."""
    foreign = Pod(volumes=({"name": weight_volumes.NAME, "emptyDir": {}},))
    with pytest.raises(CollisionError, match=f"Pilotlight uses volume {weight_volumes.NAME} in this pod"):
        refuse_collisions(foreign, (), PodFields(), seen(CLAIM).pod)


@pytest.mark.parametrize(
    ("foreign", "env", "requested", "what"),
    [
        (Pod(labels={"a": "x"}), (), PodFields(labels={"a": "y"}), "label a"),
        (Pod(annotations={"a": "x"}), (), PodFields(annotations={"a": "y"}), "annotation a"),
        (Pod(resources=Resources(limits={"v/mem": 1})), (), PodFields(limits={"v/mem": "2"}), "resource v/mem"),
        (Pod(resources=Resources(requests={"v/mem": 1})), (), PodFields(limits={"v/mem": "2"}), "resource v/mem"),
        (Pod(), ("A",), PodFields(env={"A": "1"}), "environment variable A"),
    ],
)
def test_model_pod_field_that_its_device_also_sets_is_rejected(
    foreign: Pod, env: tuple[str, ...], requested: PodFields, what: str
) -> None:
    with pytest.raises(CollisionError, match=f"Pilotlight uses {what} in this pod"):
        refuse_collisions(foreign, env, requested, seen(CLAIM).pod)
    refuse_collisions(foreign, env, PodFields(), seen(CLAIM).pod)


def test_scheduler_other_than_that_of_the_devices_is_rejected() -> None:
    other, requested = Pod(scheduler_name="default-scheduler"), PodFields(scheduler="kai-scheduler")
    with pytest.raises(CollisionError, match="require schedulerName kai-scheduler: remove schedulerName default-sche"):
        refuse_collisions(other, (), requested, Pod())
    refuse_collisions(Pod(scheduler_name="kai-scheduler"), (), requested, Pod())
    refuse_collisions(Pod(), (), requested, Pod())
    refuse_collisions(other, (), PodFields(), Pod())


def test_security_context_of_model_is_rejected_with_hostpath_weights() -> None:
    privileged = Settings(weights=Weights(mount="hostPath"))
    for artifact in (OCI, CLAIM, ""):
        of = model(f"{artifact}\npod: {{securityContext: {{runAsUser: 0}}}}")
        with pytest.raises(MountError, match=r"spec.pod.securityContext is not allowed with weights.mount hostPath"):
            weight_volumes.check_security_context(of, privileged)
        weight_volumes.check_security_context(of, Settings())
        weight_volumes.check_security_context(model(artifact), privileged)
    assert seen(OCI, mount="hostPath").pod.volume_mounts[0]["readOnly"] is True


LORAS = tuple(
    Adapter(name=name, artifact=artifact)
    for name, artifact in {"near": "oci://r.io/a:1", "far": "oci://r.io/b:1", "here": "file:///l"}.items()
)
CAME = {
    "near": COPY._replace(folder="copies/x/files", file="lora.gguf"),
    "far": COPY._replace(folder="copies/y/files", file=""),
}


def with_loras(text: str) -> Model:
    of = model(f"{text}\nargs: ['-m']")
    return replace(of, spec=replace(of.spec, adapters=LORAS))


@pytest.mark.parametrize(("own", "mount"), [(OCI, "auto"), (OCI, "hostPath"), (CLAIM, "auto"), ("", "auto")])
def test_adapters_are_mounted_under_their_names_next_to_weights(own: str, mount: Any) -> None:
    of = with_loras(own or "artifact: file:///m")
    settings = Settings(weights=Weights(mount=mount))
    weights = mount_weights(of, "engines", NODE, COPY if own == OCI else None, FACTS, settings, CAME)
    made = pod(of, weights)["spec"]
    sources = {one["name"]: one for one in made["volumes"]}
    seen = {one["mountPath"]: one for one in made["containers"][0]["volumeMounts"]}
    assert set(seen) == {"/adapters/near", "/adapters/far"} | ({"/weights"} if own else set())
    assert all(one["readOnly"] is True and one["name"] in sources for one in seen.values())
    near = seen["/adapters/near"]
    if mount == "auto":
        assert near["subPath"] == "copies/x/files"
        assert sources[near["name"]]["persistentVolumeClaim"]["claimName"] == weights.objects[1]["metadata"]["name"]
        assert len(sources) == (2 if own == CLAIM else 1), "one claim of a store is one volume"
    else:
        assert sources[near["name"]]["hostPath"]["path"].endswith("/copies/x/files")
    there = weight_volumes.resolve_weight_paths(of, weights).spec
    assert [one.artifact for one in there.adapters] == [
        "file:///adapters/near/lora.gguf", "file:///adapters/far", "file:///l",
    ]  # fmt: skip
    assert there.artifact == {OCI: "file:///weights/llama.gguf", CLAIM: "file:///weights/llama/8b.gguf"}.get(
        own, "file:///m"
    )


def test_engine_that_downloads_its_weights_gets_only_adapter_volumes() -> None:
    of = with_loras(OCI)
    of = replace(of, spec=replace(of.spec, engine="vllm", artifact="hf://a/b"))
    weights = mount_weights(of, "engines", NODE, None, FACTS, Settings(), CAME)
    assert {one["mountPath"] for one in weights.pod.volume_mounts} == {"/adapters/near", "/adapters/far"}
    assert weight_volumes.resolve_weight_paths(of, weights).spec.artifact == "hf://a/b"


def test_error_names_adapter_missing_from_node() -> None:
    with pytest.raises(MountError, match="the weights of adapter near of Model ada are not on its node yet"):
        mount_weights(with_loras(OCI), "engines", NODE, COPY, FACTS, Settings(), {"near": ArtifactFacts()})


def test_volume_with_the_weights_of_a_node_store_is_mounted_read_only() -> None:
    """Kubernetes gives all files of a writable volume to the pod's fsGroup."""
    volume, claim = WAYS["volume"].objects
    assert volume["spec"]["mountOptions"] == ["ro"]
    for way in ("volume", "claim"):
        (source,) = WAYS[way].pod.volumes
        assert cast("Object", source["persistentVolumeClaim"])["readOnly"] is True
    assert (volume["spec"]["accessModes"], claim["spec"]["accessModes"]) == (["ReadOnlyMany"], ["ReadOnlyMany"])


def test_weights_missing_on_the_node_or_unmountable_are_an_error() -> None:
    with pytest.raises(MountError, match="the weights of Model ada are not on its node yet"):
        seen(found=None)
    with pytest.raises(MountError, match="the digest of the weights of Model ada is not known yet"):
        seen(found=None, mount="image")
    with pytest.raises(
        MountError, match="the weights of Model ada cannot be mounted in its pods: Pilotlight may not create"
    ):
        seen(facts=ClusterFacts())
    with pytest.raises(MountError, match="are stored on a node, and no node is chosen yet"):
        mount_weights(model(OCI), "engines", None, COPY, FACTS, Settings())


def names(
    namespace: str = "engines", node: NodeMountFacts = NODE, store: str = "/store", installation: str = ""
) -> tuple[str, str]:
    volume, claim = build_node_volume(namespace, node, store, Ownership(installation))
    for made in (volume, claim):
        assert made["metadata"]["labels"].get(INSTALLATION, "") == installation
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    return volume["metadata"]["name"], claim["metadata"]["name"]


def test_volumes_of_other_nodes_namespaces_or_installations_differ_in_name() -> None:
    others = [
        names(), names("others"), names(node=NODE._replace(name="gpu-2")), names(store="/other"),
        names(node=NODE._replace(hostname="moved")), names(installation="blue-1"), names(installation="green-2"),
    ]  # fmt: skip
    assert len({volume for volume, _ in others}) == len(others)
    long = names(node=NODE._replace(name="n." * 100 + "a"))
    assert all(len(one) <= 80 for one in long)
    assert names() == names()


def test_node_is_read_with_its_kubelet_and_container_runtime_version() -> None:
    info = {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.1.4", "bootID": "b"}
    metadata = {"name": "n1", "labels": {"kubernetes.io/hostname": "host-1"}}
    found = nodes.read_node({"metadata": metadata, "spec": {}, "status": {"nodeInfo": info}})
    assert weight_volumes.read_node_facts(found) == NodeMountFacts("n1", "host-1", "v1.36.3", "containerd://2.1.4")
    assert weight_volumes.read_node_facts(nodes.read_node({"metadata": {"name": "n1"}, "spec": {}})) == NodeMountFacts(
        "n1"
    )


class Server:
    """Keeps applied objects and records requests. `leaves`: objects that are being deleted."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.objects: dict[str, Object] = {}
        self.leaves: set[str] = set()
        self.forbids = False
        self.fails: list[Exception] = []
        """Errors that the next applies raise."""

    async def get(self, path: str) -> Object:
        self.asked.append(f"GET {path}")
        return {"metadata": {"name": path.rpartition("/")[2], "uid": "node-uid"}}

    async def apply(self, path: str, body: Object, owner: str) -> Object:
        assert owner == "pilotlight"
        self.asked.append(f"APPLY {body['kind']}")
        if self.fails:
            raise self.fails.pop()
        if self.forbids:
            raise ApiError(403, "Forbidden", "persistentvolumes is forbidden")
        made: Object = copy.deepcopy(body)
        made["metadata"] |= {"uid": f"uid of {path}", "resourceVersion": "7"}
        if body["kind"] in self.leaves:
            made["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
        before = self.objects.get(path, {}).get("spec", {})
        made["spec"] = {**made["spec"], **({"claimRef": before["claimRef"]} if "claimRef" in before else {})}
        self.objects[path] = made
        return made

    async def patch(self, path: str, body: Object) -> Object:
        self.asked.append(f"PATCH {path.rpartition('/')[2]}")
        assert body["metadata"]["resourceVersion"] == "7"
        self.objects[path]["spec"]["claimRef"].update(body["spec"]["claimRef"])
        return self.objects[path]


def making(server: Server, at: list[float]) -> NodeVolumes:
    return NodeVolumes(cast("Api", server), lambda: at[0])


OBJECTS = build_node_volume("engines", NODE, "/store")
AT_FIRST = [f"GET /api/v1/nodes/{NODE.name}", "APPLY PersistentVolume", "APPLY PersistentVolumeClaim"]


async def test_node_volume_is_applied_again_only_after_a_minute() -> None:
    server, at = Server(), [0.0]
    made = making(server, at)
    await made.make(OBJECTS)
    assert server.asked == AT_FIRST, "with the pod's own that is at most 6 for a start"
    for one in server.objects.values():
        (owner,) = one["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "v1", "kind": "Node", "name": NODE.name, "uid": "node-uid"}
    at[0] = 59.0
    await made.make(OBJECTS)
    await made.make(())
    assert server.asked == AT_FIRST
    at[0] = 60.0
    await made.make(OBJECTS)
    assert server.asked == AT_FIRST * 2, "another client may have deleted it"


async def test_volume_bound_to_a_deleted_pvc_is_released_for_the_next_pvc() -> None:
    server = Server()
    await making(server, [0.0]).make(OBJECTS)
    path = f"{weight_volumes.VOLUMES}/{OBJECTS[0]['metadata']['name']}"
    server.objects[path]["spec"]["claimRef"] |= {"uid": "another", "resourceVersion": "3"}
    await making(server, [0.0]).make(OBJECTS)
    assert server.objects[path]["spec"]["claimRef"]["uid"] is None
    assert len(server.asked) == 3 + 4


@pytest.mark.parametrize("kind", ["PersistentVolume", "PersistentVolumeClaim"])
async def test_terminating_volume_or_pvc_raises_conflict_until_it_is_gone(kind: str) -> None:
    server = Server()
    made = making(server, [0.0])
    server.leaves = {kind}
    with pytest.raises(ApiError, match=f"{kind} .* is being deleted") as error:
        await made.make(OBJECTS)
    assert (error.value.status, error.value.reason) == (409, "Conflict")
    server.leaves = set()
    await made.make(OBJECTS)


async def test_error_for_forbidden_volume_names_the_helm_value_to_set() -> None:
    server = Server()
    server.forbids = True
    with pytest.raises(ApiError, match=r"forbidden: grant the permissions of chart value `agent\.enabled`"):
        await making(server, [0.0]).make(OBJECTS)


class Starts(Server):
    """A Server that also creates pods."""

    async def create(self, path: str, body: Object) -> Object:
        self.asked.append(f"POST {body['kind']}")
        return {**body, "metadata": {**body["metadata"], "resourceVersion": "9"}}


class Hears(Deaf):
    """Records the outcome of a start."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def start_made(self, one: Replica) -> None:
        self.events.append(f"{one.id} made")

    def start_waits(self, one: Replica, reason: str) -> None:
        self.events.append(f"{one.id} waits: {reason}")

    def order_failed(self, replica: ReplicaId, reason: str) -> None:
        raise AssertionError(reason)

    def start_refused(self, one: Replica, reason: str) -> None:
        self.events.append(f"{one.id} refused: {reason}")


async def test_pod_is_created_after_its_volume_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_writer, "RETRY_S", 0.0)
    server, hears, of = Starts(), Hears(), model(OCI)
    made = pod_writer.Orders(cast("Api", server), "/api/v1/namespaces/engines/pods", cast("Any", hears), hears)
    one, server.leaves = replica(of, "n/gpu0", id="ada-1"), {"PersistentVolume"}
    start = asyncio.create_task(made.create(one, pod(of, WAYS["volume"]), (), OBJECTS))
    while not hears.events:
        await asyncio.sleep(0)
    assert hears.events[0].startswith("ada-1 waits: PersistentVolume")
    assert "POST Pod" not in server.asked
    server.leaves = set()
    await start
    assert hears.events[-1] == "ada-1 made"
    assert server.asked[-4:] == [*AT_FIRST, "POST Pod"]
    server.asked.clear()
    await made.create(replica(of, "n/gpu0", id="ada-2"), pod(of, WAYS["volume"]), (), OBJECTS)
    assert server.asked == ["POST Pod"]
    server.forbids, others = True, build_node_volume("engines", NODE._replace(name="other"), "/store")
    await made.create(replica(of, "n/gpu0", id="ada-3"), pod(of, WAYS["volume"]), (), others)
    assert hears.events[-1].startswith(
        "ada-3 refused: the API server rejected its pod: persistentvolumes is forbidden: grant"
    )


async def test_start_is_retried_if_creating_its_volume_fails_with_500(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_writer, "RETRY_S", 0.0)
    server, hears, of = Starts(), Hears(), model(OCI)
    server.fails = [ApiError(500, "InternalError", "etcdserver: leader changed")]
    made = pod_writer.Orders(cast("Api", server), "/api/v1/namespaces/engines/pods", cast("Any", hears), hears)
    await made.create(replica(of, "n/gpu0", id="ada-1"), pod(of, WAYS["volume"]), (), OBJECTS)
    assert hears.events == ["ada-1 waits: etcdserver: leader changed", "ada-1 made"]
    assert server.asked == [*AT_FIRST[:2], *AT_FIRST, "POST Pod"]


class Says(Server):
    """A Server that also reports its version."""

    async def get(self, path: str) -> Object:
        self.asked.append(path)
        if self.forbids:
            raise UnreachableError("GET /version")
        return {"major": "1", "minor": "35+"}

    async def create(self, path: str, body: Object) -> Object:
        self.asked.append(path)
        assert body["spec"]["resourceAttributes"] == {"resource": "persistentvolumes", "verb": "create"}
        return {"status": {"allowed": True}}


async def test_cluster_version_is_reported_when_the_api_server_answers() -> None:
    server, heard = Says(), list[ClusterFacts]()
    assert await weight_volumes.query_cluster_facts(cast("Api", server), "namespace") == ClusterFacts(False, (1, 35))
    assert server.asked == ["/version"], "with that scope nothing of the cluster may be made"
    looking = asyncio.create_task(
        weight_volumes.poll_cluster_facts(
            cast("Api", server), "cluster", "/store", lambda seen: heard.extend(one.facts for one in seen)
        )
    )
    server.forbids = True
    for _ in range(3):
        await asyncio.sleep(0)
    assert not heard
    assert not looking.done()
    looking.cancel()
    server.forbids = False
    looking = asyncio.create_task(
        weight_volumes.poll_cluster_facts(
            cast("Api", server), "cluster", "/store", lambda seen: heard.extend(one.facts for one in seen)
        )
    )
    for _ in range(3):
        await asyncio.sleep(0)
    looking.cancel()
    assert heard == [ClusterFacts(True, (1, 35), "/store")]
