"""A fake Cluster Autoscaler on a real API server, with one node group; it follows the documentation and the source.

Manages the group's size. A pod that fits on no existing node but fits on a node of this group triggers a scale-up, up
to the maximum; an Event on the pod reports either result. A node on which no pod prevents a scale-down is a candidate
(a soft taint). After a while it is removed: tainted (a hard taint), held while an annotation requests a delay, and
deleted. The delays are shorter than the original's (10 s, 10 min, 2 min); the order of steps is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from autoscaler.kubernetes.api import STRATEGIC, Api, ApiError, Object
from autoscaler.spec.pod import SAFE_TO_EVICT
from tests.integration.cluster.capacity.test_cluster_autoscaler import add_event
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.fabric.cluster import Rack
from tests.integration.cluster.support.kubelet.node import Node

SCAN_S, DELAY_S_MAX = 0.2, 120.0
CANDIDATE, GOES = "DeletionCandidateOfClusterAutoscaler", "ToBeDeletedByClusterAutoscaler"
DELAY = "delay-deletion.cluster-autoscaler.kubernetes.io/"
LABELS, SETS = (
    "capacity.cluster-autoscaler.kubernetes.io/labels",
    "/apis/cluster.x-k8s.io/v1beta2/namespaces/{}/machinesets",
)
FULL = "pod didn't trigger scale-up: 1 max node group size reached"


class Group:
    """Nodes with that many GPUs and that much memory, `least` at the beginning, `most` at most.
    With `shared_fabric`, GPUs can be attached to them. A node is a candidate for `unneeded_s` before it is removed.
    With `machines`, a MachineSet of that name is scaled instead (Cluster API).
    """

    def __init__(  # noqa: PLR0917  a test names them in this order
        self, rack: Rack, gpus: int, most: int, least: int = 0, memory: str = "256Gi", unneeded_s: float = 60.0,
        *, shared_fabric: bool = False, machines: bool = False,
    ) -> None:  # fmt: skip
        self.rack, self.api, self.most, self.unneeded_s = rack, rack.api, most, unneeded_s
        self.labels = {"group": rack.name, **({"fabric": rack.name} if shared_fabric else {})}
        self._least, self._gpus, self._memory, self._fabric = least, gpus, memory, shared_fabric
        self._machines = machines
        self._tasks = asyncio.TaskGroup()
        self._gone: dict[str, asyncio.Event] = {}
        self._unneeded_s: dict[str, float] = {}
        self.brought: dict[str, str] = {}
        """Pod -> the node that was added for it; empty: the group is at its maximum."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes that exist now."""
        return [name for name, removed in self._gone.items() if not removed.is_set()]

    @property
    def candidates(self) -> list[str]:
        """Unneeded nodes, as last observed."""
        return [name for name in self.nodes if name in self._unneeded_s]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Group]:
        """Runs the group; its nodes are deleted at the end."""
        if self._machines:
            await machine_set(self.api, self.rack.name, {LABELS: f"group={self.rack.name}"})
        async with self._tasks:
            for _ in range(self._least):
                await self._add()
            scanning = self._tasks.create_task(self._scan())
            try:
                yield self
            finally:
                scanning.cancel()
                for removed in self._gone.values():
                    removed.set()

    async def _scan(self) -> None:
        while True:
            pods = (await self.api.get("/api/v1/pods"))["items"]
            for pod in pods:
                if self._waits(pod) and pod["metadata"]["name"] not in self.brought:
                    await self._grow(pod)
            for name in self.nodes:
                await self._judge(name, [pod for pod in pods if pod["spec"].get("nodeName") == name])
            await asyncio.sleep(SCAN_S)

    # --- scale-up -----------------------------------------------------------------------------------------------------

    def _waits(self, pod: Object) -> bool:
        """Whether the pod is unschedulable and may run on the group's nodes, as a placeholder may."""
        conditions = {one["type"]: one for one in pod["status"].get("conditions", ())}
        requested = pod["spec"].get("nodeSelector") or {}
        here = requested.get("group", self.rack.name) == self.rack.name
        mine = here and pod["metadata"]["namespace"] == self.rack.name
        return mine and conditions.get("PodScheduled", {}).get("reason") == "Unschedulable" and not _affine(pod)

    async def _grow(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if len(self.nodes) >= self.most:
            self.brought[name] = ""
            self.rack.diary.append(f"full for {name}")
            await add_event(self.api, pod, "NotTriggerScaleUp", FULL)
            return
        await self._resize(len(self.nodes) + 1, len(self.nodes))
        self.brought[name] = await self._add()
        await self._resize(len(self.nodes), len(self.nodes))
        self.rack.diary.append(f"added {self.brought[name]}")
        size = len(self.nodes)
        sizes = f"{size - 1}->{size} (max: {self.most})"
        await add_event(self.api, pod, "TriggeredScaleUp", f"pod triggered scale-up: [{{g {sizes}}}]")

    async def _resize(self, wanted: int, ready: int) -> None:
        if self._machines:
            await resize(self.api, self.rack.name, wanted, ready)

    async def _add(self) -> str:
        node = self.rack.node(f"g{len(self._gone)}", self._gpus, self._memory, **self.labels)
        self._gone[node.name] = asyncio.Event()
        if self._fabric:
            self.rack.may_have[node.name], self.rack.has[node.name] = node, self._gpus
        there = asyncio.Event()
        self._tasks.create_task(self._run(node, there))
        await there.wait()
        return node.name

    async def _run(self, node: Node, there: asyncio.Event) -> None:
        async with node.running():
            there.set()
            await self._gone[node.name].wait()

    # --- scale-down ---------------------------------------------------------------------------------------------------

    async def _judge(self, name: str, pods: list[Object]) -> None:
        """Makes a node a candidate if no pod prevents its removal, and removes it after `unneeded_s`."""
        clock = asyncio.get_running_loop().time
        if any(map(_keeps, pods)):
            if self._unneeded_s.pop(name, None) is not None:
                await self.taint(name, CANDIDATE, "PreferNoSchedule", lift=True)
            return
        if name not in self._unneeded_s:
            self._unneeded_s[name] = clock()
            self.rack.diary.append(f"candidate {name}")
            await self.taint(name, CANDIDATE, "PreferNoSchedule")
        elif clock() >= self._unneeded_s[name] + self.unneeded_s:
            await self.remove(name)

    async def remove(self, name: str) -> None:
        """Taints the node, evicts its pods and deletes it once no annotation requests a delay."""
        self.rack.diary.append(f"closed {name}")
        await self.taint(name, GOES, "NoSchedule")
        async with asyncio.timeout(DELAY_S_MAX):
            while await self._delayed(name):
                await asyncio.sleep(SCAN_S)
        self.rack.diary.append(f"removed {name}")
        self._gone[name].set()

    async def _delayed(self, name: str) -> bool:
        """Whether pods on the node or an annotation delay the removal."""
        pods = (await self.api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}"))["items"]
        notes = (await self.api.get(f"/api/v1/nodes/{name}"))["metadata"].get("annotations") or {}
        return bool(pods) or any(key.startswith(DELAY) for key in notes)

    async def taint(self, name: str, key: str, effect: str, *, lift: bool = False) -> None:
        """Adds a taint to the node, or removes it with `lift`."""
        one = {"$patch": "delete", "key": key} if lift else {"key": key, "value": "1", "effect": effect}
        try:
            await self.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": [one]}}, STRATEGIC)
        except ApiError:
            if not lift and not self._gone[name].is_set():  # a test may have removed the node meanwhile
                raise


async def machine_set(api: Api, name: str, notes: dict[str, str]) -> None:
    """Creates a MachineSet of Cluster API in the namespace of that name."""
    await custom_resources.install_foreign(api, "capi")
    template = {
        "clusterName": "c", "bootstrap": {"dataSecretName": "b"},
        "infrastructureRef": {"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "Machine", "name": "m"},
    }  # fmt: skip
    spec = {
        "clusterName": "c", "replicas": 0, "selector": {"matchLabels": {"set": name}},
        "template": {"metadata": {"labels": {"set": name}}, "spec": template},
    }  # fmt: skip
    metadata = {"name": name, "annotations": notes}
    await api.create(SETS.format(name), {
        "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineSet", "metadata": metadata, "spec": spec,
    })  # fmt: skip
    await resize(api, name, 0, 0)


async def resize(api: Api, name: str, wanted: int, ready: int) -> None:
    """Sets the MachineSet's wanted and ready replicas."""
    path = f"{SETS.format(name)}/{name}"
    await api.patch(path, {"spec": {"replicas": wanted}})
    await api.patch(f"{path}/status", {"status": {"replicas": wanted, "readyReplicas": ready}})


def _affine(pod: Object) -> bool:
    """Whether the pod has pod affinity, so that it triggers no scale-up by itself."""
    return "podAffinity" in (pod["spec"].get("affinity") or {})


def _keeps(pod: Object) -> bool:
    """Whether the pod prevents a scale-down: it has no controller, or it is marked as not safe to evict."""
    metadata = pod["metadata"]
    safe = (metadata.get("annotations") or {}).get(SAFE_TO_EVICT)
    owned = any(one.get("controller") for one in metadata.get("ownerReferences") or ())
    return safe == "false" or (safe != "true" and not owned)
