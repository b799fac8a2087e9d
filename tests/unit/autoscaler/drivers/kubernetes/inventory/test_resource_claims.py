"""Lifecycle of our ResourceClaims: created before their pod, owned by it, deleted without it. Others are untouched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes.inventory import resource_claims as claims_
from autoscaler.drivers.kubernetes.inventory.resource_claims import Claims, ClaimSeen
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.drivers.kubernetes.pod_writer import Orders, StartListener
from autoscaler.kubernetes.api import STRATEGIC, Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.watch import Watched
from autoscaler.slicing.dra import Dra, Got, common_claim_name
from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, SliceShare
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing
from autoscaler.state.world import NodeId, Replica, SliceId
from tests.support.builders.resource_slices import DRIVER, gpu, partitionable, resource_slice
from tests.support.golden import VERSIONS, validate
from tests.support.harness.local_rig import launch, replica

PODS, CLAIMS = "/api/v1/namespaces/n/pods", "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims"
DECLARED = NodeKind(
    selector={}, device=NodeDevice(model="H100", memory_bytes=Bytes(80 << 30)),
    slicing=NodeSlicing(kind="dra", sharing="mps"),
)  # fmt: skip
(GPU,) = Dra().inventory(NodeFacts(NodeId("m"), devices=[resource_slice("m", "gpus", devices=[gpu(0)])])) or ()

(SHARED,) = Dra().inventory(
    NodeFacts(NodeId("m"), declared=DECLARED, devices=[resource_slice("m", "gpus", devices=[gpu(0)])])
) or ()  # fmt: skip
SEEN = PodSeen(
    namespace="n", name="r1", uid="u9", replica=ReplicaId("r1"), model=ModelName("a"), spec_hash="h", intent="i",
    slices=(SliceId("m/gpu-0"),), memory_bytes=1, compute_percent=0, slots=1, readiness_path="/", tls_name=None,
    node="m", ip="", port=8000, prepared=True, started_unix_s=None, ended="", waits="", patience_s=None, leaving=False,
    drain="", disrupted="",
)  # fmt: skip


class Server:
    """Objects by path. `refuses`: the errors that creates under a path raise, once each."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.refuses: list[tuple[str, Exception]] = []
        self.number = 0

    async def create(self, path: str, body: Object) -> Object:
        for at, (of, error) in enumerate(self.refuses):
            if of == path:
                del self.refuses[at]
                raise error
        name = f"{path}/{body['metadata']['name']}"
        if name in self.objects:
            raise ApiError(409, "AlreadyExists", "")
        self.number += 1
        metadata = {"uid": f"u{self.number}", "namespace": "n", "resourceVersion": str(self.number)}
        self.objects[name] = {**body, "metadata": {**body["metadata"], **metadata}}
        return self.objects[name]

    async def get(self, path: str, **query: str) -> Object:
        if path == PODS:
            assert query == {"labelSelector": ANYBODYS.engines}
            return {"items": self._under(path)}
        if path not in self.objects:
            raise ApiError(404, "NotFound", "")
        return self.objects[path]

    def _under(self, path: str) -> list[Object]:
        return [one for name, one in self.objects.items() if name.startswith(f"{path}/")]

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        assert query == {"labelSelector": ANYBODYS.engines}
        yield ListPage("1", "", self._under(path), [])

    async def patch(self, path: str, body: Object, kind: str) -> Object:
        """Merge ownerReferences by key: existing entries stay."""
        assert kind == STRATEGIC
        self.number += 1
        found = await self.get(path)
        owners = {one["uid"]: one for of in (found, body) for one in of["metadata"].get("ownerReferences", ())}
        metadata = {**found["metadata"], "ownerReferences": [*owners.values()], "resourceVersion": str(self.number)}
        self.objects[path] = {**found, "metadata": metadata}
        return self.objects[path]

    async def delete(self, path: str, *, uid: str, version: str | None) -> Object:
        metadata = (await self.get(path))["metadata"]
        if metadata["uid"] != uid or version not in (None, metadata["resourceVersion"]):
            raise ApiError(409, "Conflict", "")
        return self.objects.pop(path)

    def names(self, path: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self.objects if name.startswith(f"{path}/")]

    def owners(self, claim: str) -> list[str]:
        return [one["uid"] for one in self.objects[f"{CLAIMS}/{claim}"]["metadata"].get("ownerReferences", ())]


class Heard:
    """Records the reports about a start."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start_made(self, replica: Replica) -> None:
        self.events.append(f"made {replica.id}")

    def start_waits(self, replica: Replica, reason: str) -> None:
        self.events.append(f"waits {replica.id}: {reason}")

    def start_refused(self, replica: Replica, reason: str) -> None:
        self.events.append(f"refused {replica.id}: {reason}")

    def is_gone(self, replica: Replica) -> None:
        raise AssertionError(replica.id)


class Watching:
    """A watch with these pods."""

    def __init__(self) -> None:
        self.items: dict[str, PodSeen] = {}

    def expect(self, version: str) -> None:
        assert version


def begun(name: str = "r1") -> tuple[Replica, Object, tuple[Object, ...]]:
    """A replica, its pod, and the claims of the pod."""
    one, of = replica(name, ("engine", "{port}"), ("m/gpu-0",))
    pod_fields = Dra().fields(one.id, [SliceShare(GPU, GPU.memory_bytes)])
    return (
        one,
        pods.build_pod_manifest(one, of, launch(of, "", 1), "image", asks=pod_fields),
        claims_.build_claims(one, pod_fields),
    )


def orders(server: Server) -> tuple[Orders, Heard, Watching]:
    heard, watching = Heard(), Watching()
    made = Orders(cast("Api", server), PODS, cast("Watched[PodSeen]", watching), cast("StartListener", heard))
    return made, heard, watching


async def test_claim_is_created_before_its_pod_and_owned_by_pod() -> None:
    server = Server()
    made, heard, _ = orders(server)
    one, pod, claims = begun()
    await made.create(one, pod, claims)
    assert heard.events == ["made r1"]
    assert list(server.objects) == [f"{CLAIMS}/r1", f"{PODS}/r1"]
    assert server.owners("r1") == [server.objects[f"{PODS}/r1"]["metadata"]["uid"]]


@pytest.mark.parametrize("path", [PODS, CLAIMS])
@pytest.mark.parametrize(
    "error", [UnreachableError("silent"), ApiError(500, "InternalError", "etcdserver: leader changed")],
    ids=["unreachable", "500"],
)  # fmt: skip
async def test_claim_is_not_duplicated_when_api_server_fails_once(path: str, error: Exception) -> None:
    server = Server()
    server.refuses = [(path, error)]
    made, heard, _ = orders(server)
    one, pod, claims = begun()
    await made.create(one, pod, claims)
    assert [word.split()[0].rstrip(":") for word in heard.events] == ["waits", "made"]
    assert (server.names(CLAIMS), len(server.owners("r1"))) == (["r1"], 1)


async def test_claim_is_deleted_when_its_pod_is_rejected() -> None:
    server = Server()
    server.refuses = [(PODS, ApiError(403, "Forbidden", "pod security"))]
    made, heard, _ = orders(server)
    await made.create(*begun())
    assert heard.events == ["refused r1: the API server rejected its pod: pod security"]
    assert server.objects == {}


async def test_start_fails_if_a_claim_of_another_owner_has_its_name() -> None:
    server = Server()
    one, pod, claims = begun()
    await server.create(CLAIMS, {"metadata": {"name": "r1", "labels": {"their": "own"}}})
    made, heard, _ = orders(server)
    await made.create(one, pod, claims)
    assert heard.events == [
        "refused r1: the API server rejected its pod: a ResourceClaim of its name exists and is not ours"
    ]
    assert (server.names(CLAIMS), server.names(PODS)) == (["r1"], [])


async def test_orphaned_claims_are_assigned_to_their_pods_or_deleted() -> None:
    server = Server()
    for name in ("r1", "r2", "r3", "r4"):
        (claim,) = begun(name)[2]
        await server.create(CLAIMS, claim)
    server.objects[f"{CLAIMS}/r4"]["metadata"]["ownerReferences"] = [{"uid": "other"}]
    await Claims(cast("Api", server), "n").tidy(lambda name: [SEEN] if name == "r1" else [], {"r3"}.__contains__)
    assert server.names(CLAIMS) == ["r1", "r3", "r4"]
    assert [server.owners(name) for name in ("r1", "r3", "r4")] == [[SEEN.uid], [], ["other"]]


class Filtering(Server):
    """Filters lists by labels."""

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        wanted = [one.partition("=") for one in query["labelSelector"].split(",")]
        labelled = [(one, one["metadata"]["labels"]) for one in self._under(path)]
        items = [one for one, has in labelled if all(key in has and of in ("", has[key]) for key, _, of in wanted)]
        yield ListPage("1", "", items, [])


async def test_claim_of_another_installation_is_neither_used_nor_deleted() -> None:
    server, (claim,) = Filtering(), begun("r1")[2]
    blue, green = Ownership("blue-1"), Ownership("green-1")
    own, foreign = (Claims(cast("Api", server), "n", owner) for owner in (blue, green))
    await foreign.make([green.label(claim)])
    with pytest.raises(ApiError, match="a ResourceClaim of its name exists and is not ours"):
        await own.make([blue.label(claim)])
    await own.drop([blue.label(claim)])
    await own.tidy(lambda _: [], lambda _: False)
    assert server.names(CLAIMS) == ["r1"]
    result = {"request": "gpu", "driver": DRIVER, "pool": "m", "device": "gpu-0"}
    found = {**server.objects[f"{CLAIMS}/r1"], "status": {"allocation": {"devices": {"results": [result]}}}}
    seen = [claims_.read_claim(found, "n", owner) for owner in (blue, green)]
    assert [one is not None and one.ours for one in seen] == [False, True]
    await foreign.tidy(lambda _: [], lambda _: False)
    assert server.names(CLAIMS) == []


async def test_claim_cleanup_keeps_claims_of_starts_in_progress() -> None:
    """The claim was listed before it got its owner, and the watch has not reported the pod yet."""

    class Late(Server):
        async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
            async for page in super().pages(path, query):
                await made.create(*begun("r2"))
                await self.patch(f"{CLAIMS}/r1", {"metadata": {"ownerReferences": [{"uid": "u9"}]}}, STRATEGIC)
                yield page

    server = Late()
    made, _, _ = orders(server)
    await server.create(CLAIMS, begun("r1")[2][0])
    await made.tidy()
    assert server.names(CLAIMS) == ["r1", "r2"]


async def test_claim_cleanup_raises_no_error_without_the_resource_claim_api() -> None:
    class Without(Server):
        async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
            if path == CLAIMS:
                raise ApiError(404, "NotFound", "")
            async for page in super().pages(path, query):
                yield page

    await Claims(cast("Api", Without()), "n").tidy(lambda _: [], lambda _: False)


# --- claims shared by the pods on a GPU -------------------------------------------------------------------------------

COMMON = common_claim_name(SHARED)
"""The name of the shared claim."""


def joins(name: str) -> tuple[Replica, Object, tuple[Object, ...]]:
    """Like `begun`, on the shared GPU."""
    one, of = replica(name, ("engine", "{port}"), ("m/gpu-0",))
    pod_fields = Dra().fields(one.id, [SliceShare(SHARED, 1 << 30)])
    return (
        one,
        pods.build_pod_manifest(one, of, launch(of, "", 1), "image", asks=pod_fields),
        claims_.build_claims(one, pod_fields),
    )


def uid(server: Server, pod: str) -> str:
    return str(server.objects[f"{PODS}/{pod}"]["metadata"]["uid"])


async def test_pods_on_shared_gpu_own_one_common_claim() -> None:
    server = Server()
    made, heard, _ = orders(server)
    for name in ("r1", "r2"):
        await made.create(*joins(name))
    assert heard.events == ["made r1", "made r2"]
    assert server.names(CLAIMS) == [COMMON]
    assert server.owners(COMMON) == [uid(server, "r1"), uid(server, "r2")]
    (named,) = server.objects[f"{PODS}/r2"]["spec"]["resourceClaims"]
    assert named["resourceClaimName"] == COMMON


async def test_shared_claim_of_a_rejected_pod_is_deleted_unless_still_owned() -> None:
    server = Server()
    made, _, _ = orders(server)
    await made.create(*joins("r1"))
    for name in ("r2", "r3"):
        server.refuses = [(PODS, ApiError(403, "Forbidden", "pod security"))]
        await made.create(*joins(name))
    assert server.owners(COMMON) == [uid(server, "r1")]
    server.objects.clear()
    server.refuses = [(PODS, ApiError(403, "Forbidden", "pod security"))]
    await made.create(*joins("r4"))
    assert server.objects == {}


async def test_start_on_shared_gpu_fails_if_its_claim_has_another_owner() -> None:
    server = Server()
    await server.create(CLAIMS, {"metadata": {"name": COMMON, "labels": {"their": "own"}}})
    made, heard, _ = orders(server)
    await made.create(*joins("r1"))
    assert heard.events == [
        "refused r1: the API server rejected its pod: a ResourceClaim of its name exists and is not ours"
    ]


class Going(Server):
    """Deletes the previous shared claim as Kubernetes does: after its last pod is gone. `at`: during which request."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.asked = at, 0

    def goes(self) -> Object:
        one = self.objects[f"{CLAIMS}/{COMMON}"]
        one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return one

    async def create(self, path: str, body: Object) -> Object:
        self.asked += path == CLAIMS
        if path == CLAIMS and self.at == "make" and self.asked == 1:
            await super().create(path, body)
            self.goes()
        elif path == CLAIMS and self.asked == 2:
            self.objects.pop(f"{CLAIMS}/{COMMON}", None)
        return await super().create(path, body)

    async def patch(self, path: str, body: Object, kind: str) -> Object:
        if self.asked == 1:
            if self.at == "gone":
                self.objects.pop(path)
            elif self.at in {"give", "used"}:
                self.goes()["status"] = {"reservedFor": [{"uid": uid(self, "r1")}] if self.at == "used" else []}
        return await super().patch(path, body, kind)


@pytest.mark.parametrize("at", ["make", "gone", "give"])
async def test_start_recreates_shared_claim_that_is_being_deleted(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscaler.drivers.kubernetes.pod_writer.RETRY_S", 0.001)
    server = Going(at)
    made, heard, _ = orders(server)
    await made.create(*joins("r1"))
    assert heard.events == [f"waits r1: {claims_.CLAIM_DELETING}", "made r1"]
    assert at != "make" or list(server.objects) == [f"{CLAIMS}/{COMMON}", f"{PODS}/r1"], "the pod waits for it"
    claim = server.objects[f"{CLAIMS}/{COMMON}"]
    assert "deletionTimestamp" not in claim["metadata"]
    assert server.owners(COMMON) == [uid(server, "r1")]


async def test_terminating_claim_reserved_for_new_pod_is_used() -> None:
    server = Going("used")
    made, heard, _ = orders(server)
    await made.create(*joins("r1"))
    assert heard.events == ["made r1"]


async def test_claim_cleanup_adds_missing_owners_and_deletes_unused_claims() -> None:
    """The previous leader created the pod of r2 and nothing else."""
    server = Server()
    made, _, watching = orders(server)
    await made.create(*joins("r1"))
    await server.create(PODS, joins("r2")[1])
    for name in ("r1", "r2"):
        seen = pod_state.read_replica_pod(server.objects[f"{PODS}/{name}"])
        assert seen is not None
        watching.items[name] = seen
    await made.tidy()
    assert server.owners(COMMON) == [uid(server, "r1"), uid(server, "r2")]
    del server.objects[f"{CLAIMS}/{COMMON}"]["metadata"]["ownerReferences"]
    watching.items.clear()
    await made.tidy()
    assert server.names(CLAIMS) == []


def test_two_replicas_on_a_shared_gpu_generate_the_same_resource_claim() -> None:
    _, _, (claim,) = joins("r1")
    assert claim == joins("r2")[2][0]
    result = {"request": "gpu", "driver": DRIVER, "pool": "m", "device": "gpu-0"}
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": [{"uid": "u1"}, {"uid": "u2"}]}
    seen = claims_.read_claim({"metadata": {**claim["metadata"], "namespace": "n"}, "status": status}, "n")
    assert seen == ClaimSeen((Got("gpu", f"{DRIVER}/m/gpu-0", None),), ours=True, users=frozenset({"u1", "u2"}))
    for version in VERSIONS:
        validate(claim, version, strict=True)


# --- publishing and reading -------------------------------------------------------------------------------------------


def test_pod_keeps_its_claim_when_the_model_adds_resources() -> None:
    one, of = replica("r1", ("engine", "{port}"), ("m/gpu-0",))
    pod_fields = Dra().fields(one.id, [SliceShare(GPU, GPU.memory_bytes)])
    more = Pod(resources=Resources(limits={"memory": cast("Any", "4Gi")}))
    pod = pods.build_pod_manifest(one, of, launch(of, "", 1), "image", more, asks=pod_fields)
    for version in VERSIONS:
        for made in (pod, *claims_.build_claims(one, pod_fields)):
            validate(made, version, strict=True)
    (named,), (engine,) = pod["spec"]["resourceClaims"], pod["spec"]["containers"]
    assert named == {"name": "claim-0", "resourceClaimName": "r1"}
    assert engine["resources"]["claims"] == [{"name": "claim-0"}]
    assert claims_.build_claims(one, PodFields()) == claims_.build_claims(one, None) == ()


def test_claim_counts_as_ours_only_with_our_metadata_and_namespace() -> None:
    _, _, (claim,) = begun()
    result = {"request": "gpu-0", "driver": DRIVER, "pool": "m", "device": "gpu-0"}
    status = {"allocation": {"devices": {"results": [result]}}}
    got = (Got("gpu-0", f"{DRIVER}/m/gpu-0", None),)
    metadata = {**claim["metadata"], "namespace": "n"}
    assert claims_.read_claim({"metadata": metadata, "status": status}, "n") == ClaimSeen(got, ours=True)
    assert claims_.read_claim({"metadata": metadata, "status": status}, "m") == ClaimSeen(got, ours=False)
    assert claims_.read_claim({"metadata": {"name": "x"}, "status": status}, "n") == ClaimSeen(got, ours=False)
    assert claims_.read_claim({"metadata": metadata}, "n") is None


def test_resource_slice_of_counters_is_grouped_with_its_node() -> None:
    """Counters are in a ResourceSlice of their own."""
    counters, devices = partitionable("m")
    del counters["spec"]["nodeName"], devices["spec"]["nodeName"]
    for one in devices["spec"]["devices"]:
        one["nodeName"] = "m"
    other = resource_slice("o", "gpus", devices=[gpu(0)])
    kept = [claims_.read_resource_slice(one) for one in (counters, devices, other)]
    assert claims_.group_slices_by_node(one for one in kept if one) == {"m": kept[:2], "o": kept[2:]}
    other["spec"]["driver"] = "compute-domain.nvidia.com"
    assert claims_.read_resource_slice(other) is None
