"""Pods built from what is known of their node, such as a delayed stop where Karpenter may evict."""

from __future__ import annotations

import asyncio
from typing import Literal, cast

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.blocked_starts import VOLUMES
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.objects.pod_overrides import CollisionError
from autoscaler.drivers.kubernetes.start_objects import PodBuilder
from autoscaler.drivers.kubernetes.weight_volumes import MountError
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.constants import NODE_POOL, NODES
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.spec.installation_ownership import ANYBODYS, INSTALLATION, Ownership
from autoscaler.spec.pod import QUEUE, Pod
from autoscaler.spec.settings import Settings, Weights
from autoscaler.state.capacity import Marks
from tests.support.builders.worlds import model, replica
from tests.support.harness.local_rig import launch
from tests.unit.autoscaler.slicing.test_dra_partitions import Paths


def node(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "resourceVersion": "1", "labels": labels}, "spec": {}, "status": {}}


class Known(Inventory):
    """An inventory that knows the nodes; a pod requests one GPU on each."""

    def fields(self, *_: object) -> PodFields:
        return PodFields(limits={"nvidia.com/gpu": "1"})


async def known(*nodes: Object) -> Known:
    """An inventory that has listed these nodes."""
    one = Known(
        cast("Api", Paths({NODES: [*nodes]})), "n", Settings, is_ours=lambda _: False, held=list,
        changed=lambda _: None, hosts_changed=lambda: None,
    )  # fmt: skip

    async def watches() -> None:
        async with asyncio.TaskGroup() as tasks:
            await one.begin(tasks)

    watching = asyncio.create_task(watches())
    async with asyncio.timeout(60):
        while any(one.node(there["metadata"]["name"]) is None for there in nodes):
            await asyncio.sleep(0)
    watching.cancel()
    return one


def lingers(inventory: Inventory | None, *slices: str) -> bool:
    """Whether the pod of a replica on these slices has a preStop hook."""
    made = PodBuilder("n", launch, lambda _: "engine", Settings, inventory, VOLUMES)
    ada = model("ada", command=("engine", "{port}"))
    pod = made(replica(ada, "ada-1", slices), ada, None).pod
    return "preStop" in pod["spec"]["containers"][0].get("lifecycle", {})


def test_hostpath_mount_rejects_pod_with_security_context() -> None:
    """The namespace admits privileged pods."""

    def made(mount: Literal["auto", "hostPath"]) -> Object:
        ada = model("ada", command=("engine", "{port}"), pod=Pod(security_context={"runAsUser": 0}))
        settings = Settings(weights=Weights(mount=mount))
        making = PodBuilder("n", launch, lambda _: "engine", lambda: settings, None, VOLUMES)
        return making(replica(ada, "ada-1", ()), ada, None).pod

    assert made("auto")["spec"]["securityContext"] == {"runAsUser": 0}
    with pytest.raises(MountError, match="remove it"):
        made("hostPath")


def test_hostpath_mount_with_security_context_blocks_start_with_reason() -> None:
    ada = model("ada", command=("engine", "{port}"), pod=Pod(security_context={"runAsUser": 0}))

    def obstacle(mount: Literal["auto", "hostPath"]) -> str:
        settings = Settings(weights=Weights(mount=mount))
        return PodBuilder("n", launch, lambda _: "engine", lambda: settings, None, VOLUMES).obstacle(ada)

    assert obstacle("auto") == ""
    assert "remove it" in obstacle("hostPath")


@pytest.mark.parametrize(
    ("own", "marks"),
    [
        (Pod(labels={QUEUE: "mine"}), Marks(labels={QUEUE: "serving"})),
        (Pod(annotations={"example.com/order": "mine"}), Marks(annotations={"example.com/order": "serving"})),
    ],
    ids=["label", "annotation"],
)
def test_model_value_that_differs_from_a_capacity_mark_fails_the_start(own: Pod, marks: Marks) -> None:
    def made(pod: Pod) -> Object:
        ada = model("ada", command=("engine", "{port}"), pod=pod)
        one = replica(ada, "ada-1", ())
        marked = replace(one, runtime=replace(one.runtime, marks=marks))
        return PodBuilder("n", launch, lambda _: "engine", Settings, None, VOLUMES)(marked, ada, None).pod

    with pytest.raises(CollisionError, match=r"requires (label|annotation) .*: serving: remove the other value"):
        made(own)
    for equal in (Pod(), Pod(labels=marks.labels, annotations=marks.annotations)):
        metadata = made(equal)["metadata"]
        assert marks.labels.items() <= metadata["labels"].items()
        assert marks.annotations.items() <= metadata["annotations"].items()


OWN, TAKEN = node("own"), node("taken", **{NODE_POOL: "gpus"})


@pytest.mark.parametrize(
    ("nodes", "slices", "late"),
    [
        ((OWN, TAKEN), ("taken/gpu0",), True),
        ((OWN, TAKEN), ("own/gpu0",), False),
        ((OWN, TAKEN), (), True),
        ((OWN,), (), False),
        ((OWN,), ("gone/gpu0",), False),
    ],
    ids=[
        "karpenters",
        "not karpenters",
        "the scheduler chooses",
        "the scheduler chooses one of Pilotlight's nodes",
        "gone",
    ],
)
async def test_pod_has_pre_stop_sleep_only_if_it_may_run_on_a_karpenter_node(
    nodes: tuple[Object, ...], slices: tuple[str, ...], late: bool
) -> None:
    assert lingers(await known(*nodes), *slices) is late


def test_pod_has_pre_stop_sleep_when_nodes_are_unknown() -> None:
    assert lingers(None)


class Claiming(Known):
    """An inventory in which a pod requests one ResourceClaim of its own and one that other pods share."""

    def fields(self, *_: object) -> PodFields:
        claims = tuple({"metadata": {"name": name}, "spec": {}} for name in ("ada-1", "mps-gpu-0"))
        return PodFields(claims=claims, common=frozenset({"mps-gpu-0"}))


@pytest.mark.parametrize("owner", [ANYBODYS, Ownership("team-a-11111111")], ids=["alone", "several"])
def test_pod_and_all_its_claims_have_the_label_of_the_installation(owner: Ownership) -> None:
    inventory = Claiming(
        cast("Api", Paths({})), "n", Settings, is_ours=lambda _: False, held=list, changed=lambda _: None,
        hosts_changed=lambda: None,
    )  # fmt: skip
    making = PodBuilder("n", launch, lambda _: "engine", Settings, inventory, VOLUMES, owner)
    ada = model("ada", command=("engine", "{port}"))
    made = making(replica(ada, "ada-1", ("own/gpu-0",)), ada, None)
    labels = {one["metadata"]["name"]: one["metadata"]["labels"] for one in made.claims}
    intents = {name: one["pilotlight.dev/intent"] for name, one in labels.items()}
    assert intents == {"ada-1": made.pod["metadata"]["labels"]["pilotlight.dev/intent"], "mps-gpu-0": "common"}
    for one in (made.pod["metadata"]["labels"], *labels.values()):
        assert one["app.kubernetes.io/managed-by"] == "pilotlight"
        assert one.get(INSTALLATION, "") == owner.installation
