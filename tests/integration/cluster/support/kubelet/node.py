"""A kubelet for tests: registers one Node and runs the pods that are bound to it as local processes.

Manages the node's Lease, addresses and pods. Scheduler, ReplicaSets, EndpointSlices and garbage collection are real.
There are no containers: the command must exist on this machine, and a GPU is only a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from autoscaler.kubernetes.api import MERGE, STRATEGIC, Api, ApiError, Object, UnreachableError
from autoscaler.kubernetes.watch import Change, Watched
from tests.integration.cluster.support.kubelet.container import BackOff, Container, now
from tests.integration.cluster.support.kubelet.pod import Pod

HEARTBEAT_S, LEASE_S = 1.0, 40
QUICK = BackOff(0.2, 5.0)
CONTROLLERS_S_MAX = 90.0
"""After an API server outage, controllers recover one by one, each after up to half a minute or more."""
LATE_S = 5.0
"""Delay before an address is reused, as in network plugins: a router with a stale list must not reach the next pod."""
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_numbers = itertools.cycle(range(1, 120))


def next_number() -> int:
    """Returns the number of the next node, from which the addresses of its pods are derived."""
    return next(_numbers)


class Node:
    """One node. `number` determines its addresses: 10.244.NUMBER.x. `amounts`: resources besides CPU and memory."""

    def __init__(  # noqa: PLR0917  a test names them in this order
        self,
        api: Api,
        name: str,
        number: int,
        amounts: Mapping[str, str],
        labels: Mapping[str, str],
        logs: Path,
        *,
        probe_period_s: float | None = None,
        back_off: BackOff = QUICK,
        taints: tuple[Object, ...] = (),
        late_s: float = LATE_S,
    ) -> None:
        self.api = api
        self.name = name
        self.ip = f"10.244.{number}.1"
        self.logs = logs
        self.probe_period_s = probe_period_s
        self.back_off = back_off
        self._late_s = late_s
        self._number = number
        self._amounts = dict(amounts)
        self._labels = dict(labels)
        self._taints = list(taints)
        self._pods: dict[str, Pod] = {}
        self._taken: set[str] = set()
        self._works: list[asyncio.Task[None]] = []
        self.session: aiohttp.ClientSession
        self.on_container: Callable[[str, Container], None] = lambda _pod, _container: None
        """Called for each new container with its pod's name."""
        self.shown: dict[str, Path] = {}
        """Node paths (hostPath) -> the folders of this machine that stand for them."""
        self.silent = False
        """Simulates a partition: processes continue, but the node neither reports nor watches."""
        self._ready, self._boots, self._runtime = True, 1, "process"
        self._telling = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        """Registers the node and yields when it accepts pods; at the end kills its processes and deletes its object."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as self.session:
            await self._register()
            pods = Watched(
                self.api, "/api/v1/pods", lambda found: found, self._changed, fieldSelector=f"spec.nodeName={self.name}"
            )
            self._works = [asyncio.create_task(pods.run()), asyncio.create_task(self._beat())]
            try:
                await self._untainted()
                yield self
            finally:
                self.fall_silent()
                await asyncio.gather(*self._works, return_exceptions=True)
                await asyncio.gather(*(pod.kill() for pod in self._pods.values()))
                with contextlib.suppress(ApiError, UnreachableError):
                    await self.api.delete(f"/api/v1/nodes/{self.name}")

    def fall_silent(self) -> None:
        """Simulates a node whose network is down."""
        self.silent = True
        for work in self._works:
            work.cancel()

    async def has(self, amounts: Mapping[str, str]) -> None:
        """Updates the node's resources, as a device plugin does when a GPU is attached or detached."""
        self._amounts = dict(amounts)
        await self._tell()

    async def runs(self, runtime: str) -> None:
        """Sets the reported container runtime."""
        self._runtime = runtime
        await self._tell()

    async def restarts(self, *, over: bool) -> None:
        """Simulates a restart of its machine, which runs no pod: down, or with `over` up again."""
        self._ready = over
        self._boots += over
        await self._tell()

    # --- Node object -------------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self._labels}
        node = {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels},
            "spec": {"taints": self._taints},
        }  # fmt: skip
        await self.api.create("/api/v1/nodes", node)
        await self._tell()
        await self.api.create(LEASES, {**self._lease(), "metadata": {"name": self.name}})

    async def _untainted(self) -> None:
        """Waits until the controllers have observed the node as ready and removed its taints."""
        async with asyncio.timeout(CONTROLLERS_S_MAX):
            while True:
                taints = (await self.api.get(f"/api/v1/nodes/{self.name}"))["spec"].get("taints", [])
                if not any(taint["key"].startswith("node.kubernetes.io/") for taint in taints):
                    return
                await asyncio.sleep(0.02)

    async def _tell(self) -> None:
        """Serializes status writes, so that an older write never overwrites a newer one."""
        async with self._telling:
            await self.api.patch(f"/api/v1/nodes/{self.name}/status", self._status(), STRATEGIC)

    def _status(self) -> Object:
        amounts = {"cpu": "32", "memory": "256Gi", "pods": "110", "ephemeral-storage": "1Ti", **self._amounts}
        fields = (
            "machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion",
            "kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture",
        )  # fmt: skip
        ready = {"type": "Ready", "status": str(self._ready), "reason": "KubeletReady"}
        info = dict.fromkeys(fields, "process") | {"bootID": f"boot-{self._boots}"}
        info["containerRuntimeVersion"] = self._runtime
        return {"status": {
            "capacity": amounts, "allocatable": amounts, "nodeInfo": info,
            "addresses": [{"type": "InternalIP", "address": self.ip}],
            "conditions": [{**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}],
        }}  # fmt: skip

    def _lease(self) -> Object:
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": LEASE_S, "renewTime": now(micro=True)}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(ApiError, UnreachableError):
                await self.api.patch(f"{LEASES}/{self.name}", {"spec": self._lease()["spec"]}, MERGE)
                await self._say_ready()

    async def _say_ready(self) -> None:
        """Reports ready again if the controllers marked the node as lost (API server outage, or a busy machine)."""
        found = await self.api.get(f"/api/v1/nodes/{self.name}", resourceVersion="0")
        statuses = [one["status"] for one in found["status"].get("conditions", ()) if one["type"] == "Ready"]
        if statuses != [str(self._ready)]:
            await self._tell()

    # --- pods --------------------------------------------------------------------------------------------------------

    def _changed(self, changes: list[Change[Object]]) -> None:
        for _, old, new in changes:
            if new is None:
                removed = self._pods.get((old or {})["metadata"]["uid"])
                if removed is not None:
                    removed.vanished()
                continue
            pod = self._pods.get(new["metadata"]["uid"])
            if pod is None:
                pod = Pod(self, new, self._address())
                self._pods[pod.uid] = pod
            pod.seen(new)

    def _address(self) -> str:
        ip = next(ip for n in range(2, 255) if (ip := f"10.244.{self._number}.{n}") not in self._taken)
        self._taken.add(ip)
        return ip

    def forget(self, pod: Pod) -> None:
        """Removes a pod that is gone."""
        self._pods.pop(pod.uid, None)
        asyncio.get_running_loop().call_later(self._late_s, self._taken.discard, pod.ip)
