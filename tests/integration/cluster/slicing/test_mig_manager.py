"""MIG repartitioning of nodes with a fake of NVIDIA's mig-manager: what is written, rejected and read."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.drivers.kubernetes.inventory.mig_manager import ANNOTATION, FILE, NodeCutter
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.constants import NODES
from autoscaler.queries.mig_status import configs_of
from autoscaler.slicing.mig import CONFIG, PRODUCT, STATE
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import Cutting, NodeDevice, NodeKind, NodeSlicing, Settings
from autoscaler.state.mig import CutOrder, CutRefused, CuttableSeen, MigNode
from tests.integration.cluster.support.kubelet.node import Node, next_number

H100 = "NVIDIA-H100-80GB-HBM3"
CUTS = (("1g.10gb", "1g.10gb", "3g.40gb"), ("7g.80gb",))
ORDERED = configs_of(CUTS)[0]
SETTLE_S = 0.3
WAIT_S_MAX = 90.0


class Seen:
    """The observed state of one node."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._changed = asyncio.Event()
        self.node: MigNode | None = None
        self.refused: list[str] = []

    def observe(self, batch: tuple[CuttableSeen | CutRefused, ...]) -> None:
        for one in batch:
            if isinstance(one, CutRefused):
                self.refused.append(one.reason)
            else:
                self.node = next((node for node in one.nodes if node.name == self._node), None)
        self._changed.set()

    async def until(self, right: Callable[[Seen], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not right(self):
                self._changed.clear()
                await self._changed.wait()

    def is_in(self, state: str) -> bool:
        return self.node is not None and self.node.state == state


class Scene:
    """A node with two GPUs, and a namespace for the GPU operator's ConfigMap."""

    def __init__(self, api: Api, node: str, namespace: str) -> None:
        self.api, self.node, self.namespace = api, node, namespace
        self.config_maps = f"/api/v1/namespaces/{namespace}/configmaps"
        device = NodeDevice(model=H100, memory_bytes=Bytes(80 << 30), count=2)
        kind = NodeKind(selector={"test": node}, device=device, slicing=NodeSlicing(kind="mig", cut=True))
        self.settings = Settings(nodes=(kind,), cutting=Cutting(namespace=namespace, config_map="mig"))
        self.order = CutOrder(node=node, config=ORDERED, cuts=CUTS, before="as-it-was")

    async def say(self, **labels: str) -> None:
        """Writes labels, as mig-manager or a user does."""
        node_labels = {CONFIG if name == "config" else STATE: value for name, value in labels.items()}
        await self.api.patch(f"{NODES}/{self.node}", {"metadata": {"labels": node_labels}})

    async def labels(self) -> dict[str, str]:
        found: dict[str, str] = (await self.api.get(f"{NODES}/{self.node}"))["metadata"]["labels"]
        return found

    async def configurations(self) -> dict[str, Any]:
        text = (await self.api.get(f"{self.config_maps}/mig"))["data"][FILE]
        found: dict[str, Any] = yaml.safe_load(text)["mig-configs"]
        return found

    @contextlib.asynccontextmanager
    async def cutter(self) -> AsyncIterator[tuple[NodeCutter, Seen]]:
        """Yields the NodeCutter of one autoscaler, once it has observed the node."""
        seen = Seen(self.node)
        one = NodeCutter(self.api, self.api, seen.observe, lambda: self.settings, settle_s=SETTLE_S)
        task = asyncio.create_task(one.run())
        try:
            await seen.until(lambda seen: seen.node is not None)
            yield one, seen
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task  # raises its error if it has failed: otherwise a test only times out


@pytest.fixture
async def place(api: Api, namespace: str, tmp_path: Path) -> AsyncIterator[Scene]:
    made = f"mig-{uuid.uuid4().hex[:8]}"
    labels = {"test": made, PRODUCT: H100, CONFIG: "as-it-was", STATE: "success"}
    async with Node(api, made, next_number(), {}, labels, tmp_path).running():  # without a kubelet it is soon lost
        yield Scene(api, made, namespace)


def holder(scene: Scene) -> dict[str, Any]:
    """Another owner's pod with a MIG device, bound to the node."""
    requested = {"limits": {"nvidia.com/mig-1g.10gb": "1"}}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"},
        "spec": {"nodeName": scene.node, "containers": [
            {"name": "c", "image": "i", "command": ["/bin/sleep", "600"], "resources": requested},
        ]},
    }  # fmt: skip


async def test_repartition_order_is_written_and_read_by_the_next_leader(place: Scene) -> None:
    async with place.cutter() as (one, seen):
        began_s = asyncio.get_running_loop().time()
        one.cut(place.order)
        await seen.until(lambda seen: seen.is_in("pending"))
        assert asyncio.get_running_loop().time() - began_s >= SETTLE_S, "mig-manager may still read what was before"
        configurations = await place.configurations()
        assert configurations.keys() == {"all-disabled", *configs_of(CUTS)}
        assert [gpu["mig-devices"] for gpu in configurations[ORDERED]] == [{"1g.10gb": 2, "3g.40gb": 1}, {"7g.80gb": 1}]
        assert (await place.labels())[CONFIG] == ORDERED
    async with place.cutter() as (_, other):
        assert other.node is not None
        assert other.node.order is not None
        assert (other.node.order.cuts, other.node.order.tries, other.node.gpus) == (CUTS, 1, 2)
        await place.say(state="success")
        await other.until(lambda seen: seen.is_in("success"))
        assert other.node.order is not None
        await place.say(config="all-disabled")
        await other.until(lambda seen: seen.node is not None and seen.node.order is None)
        assert other.refused == []


@pytest.mark.case("24")
@pytest.mark.standard
async def test_node_with_a_device_in_use_is_not_repartitioned(place: Scene) -> None:
    pods = f"/api/v1/namespaces/{place.namespace}/pods"
    async with place.cutter() as (one, seen):
        await place.api.create(pods, holder(place))
        one.cut(place.order)
        await seen.until(lambda seen: bool(seen.refused))
        assert seen.refused == [f"pod {place.namespace}/theirs uses its devices"]
        assert (await place.labels())[CONFIG] == "as-it-was"
        await place.api.delete(f"{pods}/theirs", grace_s=0)
        one.cut(place.order)
        await seen.until(lambda seen: seen.is_in("pending"))


@pytest.mark.parametrize("what", [{"config": "by-a-person"}, {"state": "pending"}, {"state": "rebooting"}])
async def test_node_whose_mig_state_another_client_changed_is_not_repartitioned(
    place: Scene, what: dict[str, str]
) -> None:
    async with place.cutter() as (one, seen):
        await place.say(**what)
        labels = await place.labels()
        before = {name: labels[name] for name in labels if not name.startswith("beta.kubernetes.io/")}
        one.cut(place.order)
        await seen.until(lambda seen: bool(seen.refused))
        assert seen.refused[0] in {
            "another client changed its MIG configuration",
            "it is not ready to be repartitioned",
        }
        after = await place.labels()
        assert {name: after[name] for name in after if not name.startswith("beta.kubernetes.io/")} == before, (
            "but for what the node's controller adds in its own time"
        )


async def test_repartition_order_keeps_foreign_entries_of_the_configmap(place: Scene) -> None:
    foreign = [{"devices": "all", "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}]
    text = yaml.safe_dump({"version": "v1", "mig-configs": {"all-7g.80gb": foreign}})
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mig"}, "data": {FILE: text, "more": "x"}}
    await place.api.create(place.config_maps, made)
    async with place.cutter() as (one, seen):
        one.cut(place.order)
        await seen.until(lambda seen: seen.is_in("pending"))
        entries = await place.configurations()
        assert entries.keys() == {"all-7g.80gb", *configs_of(CUTS)}
        assert entries["all-7g.80gb"] == foreign
        assert (await place.api.get(f"{place.config_maps}/mig"))["data"]["more"] == "x"


async def test_configmap_without_a_valid_mig_configuration_is_not_changed(place: Scene) -> None:
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mig"}, "data": {FILE: "- a\n- b\n"}}
    await place.api.create(place.config_maps, made)
    await place.api.patch(f"{NODES}/{place.node}", {"metadata": {"annotations": {ANNOTATION: "{"}}})
    async with place.cutter() as (one, seen):
        assert seen.node is not None
        assert seen.node.order is None
        one.cut(place.order)
        await seen.until(lambda seen: bool(seen.refused))
        assert seen.refused == [f"its ConfigMap's {FILE} is not a mig-parted configuration"]
        assert (await place.api.get(f"{place.config_maps}/mig"))["data"] == {FILE: "- a\n- b\n"}


async def test_former_leader_writes_no_repartition_order(place: Scene) -> None:
    async with place.cutter() as (one, seen):
        one.cut(place.order)
        await one.follow()
        await asyncio.sleep(2 * SETTLE_S)
        assert (await place.labels())[CONFIG] == "as-it-was"
        assert seen.refused == []
        found = await place.api.get(f"{NODES}/{place.node}")
        assert ANNOTATION not in found["metadata"].get("annotations", {})
