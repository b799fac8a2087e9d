"""A GPU shared by several replicas through one claim: offered slices, claims, and which replicas share it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, cast

import pytest

from autoscaler.contract import TenantName
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects.node_slices import RESLICED, close_claimed_slices
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.constants import NODES
from autoscaler.planner.plan import plan
from autoscaler.slicing import slicers
from autoscaler.slicing.device_usage import FULL
from autoscaler.slicing.dra import CLIENT_BYTES, Dra, Got, common_claim_name, dra_device_name
from autoscaler.slicing.slicer_protocol import NodeFacts, Object, SliceShare
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import MANAGED_BY
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import SlicesSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Replica, Slice, SliceId
from tests.support.builders.resource_slices import DRIVER, cut_name, gpu, many, partitionable, resource_slice
from tests.support.builders.slices import GIB, NODE
from tests.support.builders.worlds import T0, gateway, level, model, replica, world
from tests.support.golden import agrees, pod
from tests.support.harness.local_rig import launch
from tests.unit.autoscaler.slicing.test_dra_partitions import Paths, meta

Sharing = Literal["timeslice", "mps"]
GPUS = resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1)])


def slices(
    *objects: Object, sharing: Sharing | None = "mps", replicas: int | None = None, kept: Sequence[str] = ()
) -> tuple[Slice, ...]:
    """The slices of a node for which the Settings declare this sharing."""
    slicing = NodeSlicing(kind="dra", sharing=sharing, replicas=replicas)
    kind = NodeKind(selector={}, device=NodeDevice(model="H100", memory_bytes=Bytes(80 * GIB)), slicing=slicing)
    return slicers.list_slices(NodeFacts(NODE, declared=kind, devices=objects or (GPUS,), kept=kept))


@pytest.mark.parametrize("sharing", ["mps", "timeslice"])
def test_pods_on_one_gpu_share_one_claim_with_its_sharing_mode(sharing: Any) -> None:
    one, other = slices(sharing=sharing)
    assert (one.id, one.device, one.shared, one.memory_bytes) == ("node-1/gpu-0", "node-1/GPU-0000", True, 81559 << 20)
    assert one.isolation == (Isolation.MEMORY if sharing == "mps" else Isolation.NONE)
    first, second = (Dra().fields(name, [SliceShare(one, 20 * GIB, 30)]) for name in ("m-1", "m-2"))
    assert first.claims == second.claims
    assert first.common == {common_claim_name(one)} == {first.claims[0]["metadata"]["name"]}
    assert common_claim_name(one) != common_claim_name(other)
    agrees(f"slicing/dra-{sharing}", [*first.claims, pod("m-1", first)])


@pytest.mark.parametrize(("sharing", "less"), [("timeslice", 0), ("mps", CLIENT_BYTES)])
def test_engine_memory_fraction_excludes_the_mps_client_overhead(sharing: Any, less: int) -> None:
    pod_fields = Dra().fields("m", [SliceShare(slices(sharing=sharing)[0], 20 * GIB)])
    assert pod_fields.memory_fraction == (20 * GIB - less) * 1000 // (81559 << 20) / 1000


def test_whole_or_multiple_gpus_use_shared_claims_without_limits() -> None:
    found = slices()
    alone = Dra().fields("m", [SliceShare(found[0], 0)])
    both = Dra().fields("m", [SliceShare(one, 20 * GIB, 30) for one in found])
    for requested, of in ((alone, found[:1]), (both, found)):
        assert [claim["metadata"]["name"] for claim in requested.claims] == [common_claim_name(one) for one in of]
        assert (requested.env, requested.memory_fraction) == ({}, None)


@pytest.mark.parametrize(
    ("sharing", "replicas", "most"), [("mps", None, 48), ("mps", 4, 4), ("timeslice", None, 256), ("timeslice", 9, 9)]
)
def test_replicas_per_gpu_are_limited_by_sharing_mode_or_settings(
    sharing: Any, replicas: int | None, most: int
) -> None:
    assert {one.holders_max for one in slices(sharing=sharing, replicas=replicas)} == {most}


def test_partition_or_consumable_capacity_has_a_separate_claim_per_pod() -> None:
    kept = (f"{DRIVER}/{NODE}/{cut_name('1g.10gb', 3)}",)
    parts = slices(*partitionable(NODE), kept=kept)
    (consumed,) = slices(resource_slice(NODE, "many", devices=[many(0)]))
    assert parts
    assert not any(one.shared for one in parts)
    assert consumed.isolation is Isolation.NONE, "the driver refuses MPS there"
    for one in (*parts, consumed):
        pod_fields = Dra().fields("m-1", [SliceShare(one, one.memory_bytes)])
        assert [claim["metadata"]["name"] for claim in pod_fields.claims] == ["m-1"]
        assert (pod_fields.common, pod_fields.env, pod_fields.memory_fraction) == (frozenset(), {}, None)
        assert common_claim_name(one) == ""
    (whole,) = slices(*partitionable(NODE))
    assert (whole.shared, common_claim_name(whole)) == (True, "mps-gpu-0-" + common_claim_name(whole)[-16:])


@pytest.mark.parametrize("then", ["mps", "timeslice"])
def test_gpu_held_by_an_outdated_claim_is_unavailable(then: Any) -> None:
    """It is a replica's own claim, or one for another kind of sharing, from before the Settings changed."""
    (before, *_), found = slices(sharing="mps" if then == "timeslice" else "timeslice"), slices(sharing=then)
    for name in ("m-1", common_claim_name(before)):
        closed, free = close_claimed_slices(found, [(name, Got("gpu", dra_device_name(found[0]), None))])
        assert (closed.closed, free.closed) == (RESLICED, "")
    assert (
        close_claimed_slices(found, [(common_claim_name(found[0]), Got("gpu", dra_device_name(found[0]), None))])
        == found
    )
    alone = slices(sharing=None)
    assert close_claimed_slices(alone, [("m-1", Got("gpu", dra_device_name(alone[0]), None))]) == alone


# --- as in a cluster --------------------------------------------------------------------------------------------------

SAID = """apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
- {selector: {}, device: {model: H100, memory: 80Gi}, slicing: {kind: dra, sharing: mps}}"""


def claimed(name: str, namespace: str = "n", **labels: str) -> Object:
    """A claim that was allocated the first GPU."""
    result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0"}
    metadata = {"name": name, "namespace": namespace, "resourceVersion": "1", "labels": labels}
    return {"metadata": metadata, "status": {"allocation": {"devices": {"results": [result]}}}}


async def observed(*there: Object, held: Sequence[str] = (), owner: Ownership = ANYBODYS) -> Inventory:
    """An inventory that has listed a node with two GPUs and these claims; `held`: those held by replicas of ours."""
    conditions = [{"type": "Ready", "status": "True"}]
    node: Object = {
        "metadata": {"name": NODE, "resourceVersion": "1"}, "spec": {}, "status": {"conditions": conditions},
    }  # fmt: skip
    served, settings = (
        {NODES: [node], resource_claims.PUBLISHED: [meta(GPUS)], resource_claims.CLAIMS: [*there]},
        parse_documents([("a", SAID)]),
    )
    inventory = Inventory(
        cast("Api", Paths(served)), "n", lambda: settings.settings, is_ours=lambda _: False,
        held=lambda: [SliceId(f"{NODE}/{one}") for one in held], changed=lambda _: None, hosts_changed=lambda: None,
        owner=owner,
    )  # fmt: skip
    begun = asyncio.Event()

    async def watched() -> None:
        async with asyncio.TaskGroup() as watches:
            await inventory.begin(watches)
            begun.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watched())
        await begun.wait()
        watching.cancel()
    return inventory


def reported(inventory: Inventory) -> tuple[Slice, ...]:
    seen, *_ = inventory.look()
    assert isinstance(seen, SlicesSeen)
    return seen.slices


async def looked(*there: Object, held: Sequence[str] = ()) -> tuple[Slice, ...]:
    """The slices that this inventory reports."""
    return reported(await observed(*there, held=held))


def claim_names(inventory: Inventory) -> list[str]:
    """The names of the claims of a new replica on the first GPU; its pod and the claims agree on them."""
    ada = model("ada", command=("engine", "{port}"))
    one = replica(ada, "ada-1", (f"{NODE}/gpu-0",), memory_bytes=20 * GIB)
    asks = inventory.fields(one, None)
    assert asks is not None
    made = pods.build_pod_manifest(one, ada, launch(ada, "", 1), "image", asks=asks)
    names = [claim["metadata"]["name"] for claim in resource_claims.build_claims(one, asks)]
    assert [claim["resourceClaimName"] for claim in made["spec"]["resourceClaims"]] == names
    assert asks.common == {*names}
    return names


OURS_TOO = {MANAGED_BY: "pilotlight", "pilotlight.dev/intent": "common"}


async def test_gpu_with_a_shared_claim_of_this_installation_stays_available() -> None:
    """It includes the moment after the last of its replicas has ended."""
    free = await looked()
    name = common_claim_name(free[0])
    assert await looked(claimed(name, **OURS_TOO), held=["gpu-0"]) == await looked(claimed(name, **OURS_TOO)) == free


ONE, OTHER = Ownership("team-a-11111111"), Ownership("team-b-22222222")


async def test_shared_claim_of_each_installation_has_its_own_name() -> None:
    """Two installations may share the namespace of engines."""
    made = await observed()
    base = common_claim_name(reported(made)[0])
    assert claim_names(made) == [base], "without an installation"
    for owner, name in ((ONE, f"{base}-11111111"), (OTHER, f"{base}-22222222")):
        inventory = await observed(owner=owner)
        reported(inventory)
        assert claim_names(inventory) == [name]


async def test_gpu_with_a_shared_claim_is_available_only_to_its_installation() -> None:
    base = common_claim_name((await looked())[0])
    claim = claimed(base + ONE.suffix, **OURS_TOO, **ONE.labels)
    for owner, closed in ((ONE, ""), (OTHER, FULL)):
        inventory = await observed(claim, owner=owner)
        assert [one.closed for one in reported(inventory)] == [closed, ""]
        assert claim_names(inventory) == [base + owner.suffix]


@pytest.mark.parametrize("labels", [{}, ONE.labels], ids=["unlabelled", "labelled"])
async def test_shared_claim_of_an_earlier_version_is_used_until_its_pods_end(labels: dict[str, str]) -> None:
    """Its name lacks the installation. Another claim could not be allocated while it holds the GPU."""
    base = common_claim_name((await looked())[0])
    before = claimed(base, **OURS_TOO, **labels)
    inventory = await observed(before, held=["gpu-0"], owner=ONE)
    assert [one.closed for one in reported(inventory)] == ["", ""]
    assert claim_names(inventory) == [base]
    if labels:
        foreign = await observed(before, owner=OTHER)
        assert [one.closed for one in reported(foreign)] == [FULL, ""]
        assert claim_names(foreign) == [base + OTHER.suffix]
    pending = await observed({**before, "status": {}}, held=["gpu-0"], owner=ONE)
    reported(pending)
    assert claim_names(pending) == [base], "also before it is allocated"
    gone = await observed(owner=ONE)
    reported(gone)
    assert claim_names(gone) == [base + ONE.suffix]


async def test_gpu_with_a_foreign_claim_is_unavailable() -> None:
    name = common_claim_name((await looked())[0])
    for foreign in (claimed(name), claimed(name, "other", **OURS_TOO), claimed("theirs")):
        assert [one.closed for one in await looked(foreign)] == [FULL, ""]


async def test_gpu_held_by_an_earlier_exclusive_claim_accepts_no_replica() -> None:
    before = claimed("m-1", **OURS_TOO | {"pilotlight.dev/intent": "i"})
    assert [one.closed for one in await looked(before, held=["gpu-0"])] == [RESLICED, ""]
    assert all(one.closed for one in (await looked(before))[:1]), "and until its claim is deleted"


# --- the resulting plan -----------------------------------------------------------------------------------------------


def started(*models: Model, there: Sequence[Replica] = (), **reported: Any) -> list[str]:
    """The Models that start on a node with one such GPU."""
    found = slices(resource_slice(NODE, "gpus", devices=[gpu(0)]), **reported)
    known = world(models, found, there, gateways=[gateway(levels=[level(one.name, 1) for one in models])])
    return [str(one.replica.model) for one in plan(known, T0).actions if isinstance(one, StartReplica)]


def runs(of: Model, state: S = S.READY) -> Replica:
    """A replica on that GPU that has been in this state since T0."""
    return replica(of, f"{of.name}-1", ["node-1/gpu-0"], state, since_s=T0, ready_s=T0)


A, B, C = (model(name, 30) for name in "abc")


def test_two_30gib_models_share_an_80gib_gpu_and_a_third_waits() -> None:
    assert started(A, B, there=[runs(A)]) == ["b"]
    assert started(A, B, C, there=[runs(A), runs(B)]) == []


def test_replicas_on_a_shared_gpu_start_one_at_a_time() -> None:
    assert started(A, B) in (["a"], ["b"])
    assert started(A, B, there=[runs(A, S.STARTING)]) == []


def test_settings_limit_the_replicas_per_gpu() -> None:
    few = [model(name, 1) for name in "abc"]
    assert started(*few, there=[runs(one) for one in few[:2]]) == ["c"]
    assert started(*few, there=[runs(one) for one in few[:2]], replicas=2) == []


def test_models_of_different_tenants_do_not_share_a_gpu() -> None:
    acme, bolt = (model(name, 20, tenants=(TenantName(name),)) for name in ("acme", "bolt"))
    assert started(acme, bolt, there=[runs(acme)]) == []
    assert started(acme, model("any", 20), there=[runs(acme)]) == ["any"]


def test_memory_isolated_model_shares_a_gpu_only_under_mps() -> None:
    apart = model("apart", 20, gpu=Gpu(isolation="memory"))
    assert started(A, apart, there=[runs(A)]) == ["apart"]
    assert started(A, apart, there=[runs(A)], sharing="timeslice") == []
