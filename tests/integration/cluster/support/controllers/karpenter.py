"""Runs the real Karpenter with its provider of simulated nodes (KWOK), and a kubelet for each node that it adds.

Starts one process on the control plane of the run, with its instance types, and a kubelet (`kubelet.node`) for each
Node that it creates, so that pods run there. Each test requests nodes through a NodePool of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from autoscaler.kubernetes.api import STRATEGIC, Api, ApiError, Object
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.kubernetes.watch import Change, Watched
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.components import die_with_parent
from tests.integration.cluster.support.kubelet.node import LEASES, Node, next_number
from tests.integration.cluster.support.programs.build import KARPENTER
from tests.support.go_programs import build

TYPE = "g4dn.xlarge"
GROUP = "/apis/karpenter.sh/v1"
CLAIMS, POOLS = f"{GROUP}/nodeclaims", f"{GROUP}/nodepools"
CLASSES = "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses"
SETTLE_S_MAX, READY_S_MAX = 60.0, 90.0


def _offering(bought: str, price: float) -> Object:
    fields = {"karpenter.sh/capacity-type": bought, "topology.kubernetes.io/zone": "test-zone-a"}
    asked = [{"key": key, "operator": "In", "values": [value]} for key, value in fields.items()]
    return {"Price": price, "Available": True, "Requirements": asked}


MACHINES = [
    {
        "name": TYPE, "architecture": "amd64", "operatingSystems": ["linux"],
        "resources": {
            "cpu": "4", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "29", "nvidia.com/gpu": "3",
        },
        "offerings": [_offering("on-demand", 0.53), _offering("spot", 0.16)],
    }
]  # fmt: skip
"""A T4 that its device plugin advertises three times."""


@contextmanager
def karpenter(kubeconfig: Path, folder: Path) -> Iterator[int]:
    """Runs the Karpenter process for the duration of the context. Raises BuildError."""
    named = Path(os.environ.get("PILOTLIGHT_TESTPLANE", "."))
    programs = named if (named / "karpenter").exists() else build(KARPENTER)
    asyncio.run(_define(kubeconfig, programs / "crds"))
    (folder / "machines.json").write_text(json.dumps(MACHINES))
    fields = {
        "KUBECONFIG": str(kubeconfig), "DISABLE_LEADER_ELECTION": "true", "METRICS_PORT": "0",
        "HEALTH_PROBE_PORT": "0", "INSTANCE_TYPES_FILE_PATH": str(folder / "machines.json"),
        "BATCH_IDLE_DURATION": "200ms", "BATCH_MAX_DURATION": "1s",
    }  # fmt: skip
    with (folder / "karpenter.log").open("wb") as output:
        process = subprocess.Popen(
            [programs / "karpenter"], env={**os.environ, **fields}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509  no threads before it
        )  # fmt: skip
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        asyncio.run(_remove_nodes(kubeconfig))


async def _remove_nodes(kubeconfig: Path) -> None:
    """Removes nodes that were added after the test that caused them, on which later tests would wait for a GPU."""
    async with Api(await load_api_access(kubeconfig)) as api:
        for node in (await api.get("/api/v1/nodes", labelSelector="karpenter.sh/nodepool"))["items"]:
            path = f"/api/v1/nodes/{node['metadata']['name']}"
            await api.patch(path, {"metadata": {"finalizers": None}})
            await api.delete(path)


async def _define(kubeconfig: Path, folder: Path) -> None:
    async with Api(await load_api_access(kubeconfig)) as api:
        await custom_resources.install_folder(api, folder)


def pool(name: str, **spec: object) -> Object:
    """A NodePool of such nodes, which have the label `test` with its name. Karpenter never considers them idle."""
    template = {
        "metadata": {"labels": {"test": name}},
        "spec": {
            "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": name},
            "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
            "expireAfter": "720h",
            "requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": [TYPE]},
            ],
        },
    }
    return {
        "apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": name},
        "spec": {
            "template": template, "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "1h"}, **spec,
        },
    }  # fmt: skip


class Joined(Node):
    """The kubelet of an existing Node object."""

    async def _register(self) -> None:
        await self.api.patch(f"/api/v1/nodes/{self.name}/status", self._status(), STRATEGIC)
        await self.api.create(LEASES, {**self._lease(), "metadata": {"name": self.name}})


class Machines:
    """The nodes of a pool, each with its kubelet."""

    def __init__(self, api: Api, name: str, folder: Path) -> None:
        self._api, self.name, self._folder = api, name, folder
        self._tasks = asyncio.TaskGroup()
        self._gone: dict[str, asyncio.Event] = {}
        self.ever: list[str] = []
        """Names of all nodes that were ever added."""
        self._launched: set[str] = set()
        """Names of the nodes of all claims that were launched."""

    @asynccontextmanager
    async def pooled(self, **spec: object) -> AsyncIterator[Machines]:
        """Creates the NodePool; at the end deletes everything that belongs to it."""
        delay = {"spec": {"nodeRegistrationDelay": "1s"}}
        kind = {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass", "metadata": {"name": self.name}}
        await self._api.create(CLASSES, {**kind, **delay})
        await self._api.create(POOLS, pool(self.name, **spec))
        selector = f"karpenter.sh/nodepool={self.name}"
        nodes = Watched(self._api, "/api/v1/nodes", lambda found: found, self._changed, labelSelector=selector)
        claims = Watched(self._api, CLAIMS, lambda found: found, self._claims_changed, labelSelector=selector)
        async with self._tasks:
            watching = [self._tasks.create_task(watched.run()) for watched in (nodes, claims)]
            try:
                yield self
            finally:
                await self._clean()
                for task in watching:  # before: a node that is added afterwards would get a kubelet that nothing ends
                    task.cancel()
                for event in self._gone.values():
                    event.set()

    async def until_accepted(self) -> None:
        """Waits until Karpenter reports the pool as ready. Before, it may report that the pool's class is missing."""
        async with asyncio.timeout(READY_S_MAX):
            while not _is_ready(await self._api.get(f"{POOLS}/{self.name}")):
                await asyncio.sleep(0.05)

    async def claims(self) -> list[Object]:
        """All NodeClaims of the pool, regardless of their creator."""
        found: list[Object] = (await self._api.get(CLAIMS, labelSelector=f"karpenter.sh/nodepool={self.name}"))["items"]
        return found

    async def only(self) -> Object:
        """The only claim, with its node's name. Karpenter writes the name later than a pod can be ready there."""
        while True:
            (claim,) = await self.claims()
            if claim.get("status", {}).get("nodeName"):
                return claim
            await asyncio.sleep(0.05)

    def _changed(self, changes: list[Change[Object]]) -> None:
        for change in changes:
            name = change.key.name
            if change.new is None:
                self._gone[name].set()
            elif name not in self._gone:
                self.ever.append(name)
                self._gone[name] = asyncio.Event()
                self._tasks.create_task(self._run(change.new))

    def _claims_changed(self, changes: list[Change[Object]]) -> None:
        ids = [change.new.get("status", {}).get("providerID", "") for change in changes if change.new is not None]
        self._launched |= {id.removeprefix("kwok://") for id in ids if id}

    async def _run(self, found: Object) -> None:
        amounts, name = found["status"]["allocatable"], found["metadata"]["name"]
        kubelet = Joined(self._api, name, next_number(), amounts, {}, self._folder, probe_period_s=0.05)
        try:
            async with kubelet.running():
                await self._gone[name].wait()
        except TimeoutError:
            pass
        except ApiError as error:
            if error.status != 404:  # the node was deleted before it was ready
                raise

    async def _clean(self) -> None:
        """Deleting the pool deletes its claims."""
        await self._api.delete(f"{POOLS}/{self.name}")
        for claim in await self.claims():
            with contextlib.suppress(ApiError):
                await self._api.delete(f"{CLAIMS}/{claim['metadata']['name']}")
        for name in self.ever:
            for pod in (await self._api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}"))["items"]:
                at = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                with contextlib.suppress(ApiError):
                    await self._api.delete(at, grace_s=0)
        async with asyncio.timeout(SETTLE_S_MAX):
            # KWOK adds a node one second after its launch, even if its claim has been deleted meanwhile.
            while await self.claims() or not self._launched <= {*self.ever}:
                await asyncio.sleep(0.1)
        for name in self.ever:
            with contextlib.suppress(ApiError):
                await self._api.delete(f"/api/v1/nodes/{name}")
        await self._api.delete(f"{CLASSES}/{self.name}")


def _is_ready(pool: Object) -> bool:
    conditions = pool.get("status", {}).get("conditions") or ()
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)
