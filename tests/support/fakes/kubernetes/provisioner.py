"""A fake controller of ProvisioningRequests: the classes of Cluster Autoscaler, or a cloud provider's queue.

Owns the outcome of each request: its conditions with the reasons from Cluster Autoscaler's source, its node, whose GPUs
appear later than the node, and named faults. It works with any ApiServer: the fake one in virtual time, or a real API
server with the real CustomResourceDefinition. Pods of the test are bound by the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from autoscaler.providers.kubernetes_access import ApiServer, Object
from autoscaler.providers.provisioning_request.objects import API, CHECK, CONSUMED
from autoscaler.spec.pod import CONSUMES, GPU
from tests.support.fakes.kubernetes.kube_objects import stamp

Fault = Literal["", "never", "rejects", "half", "late", "expires", "quota", "revokes", "unseen", "fails"]
"""never: accepted, but not delivered. half: the node has half of the devices. late: the node is added although the
request was deleted. expires: the booking ends before the node is added. quota: the cloud's quota is used up. unseen: no
controller accepts it. revokes: delivered capacity is withdrawn."""


@dataclass(eq=False)
class FakeProvisioner:
    """Call `step` repeatedly. `labels`: labels of added nodes, in addition to those requested."""

    server: ApiServer
    namespace: str
    clock: Callable[[], float]
    after_s: float = 60.0
    """From the request until it is granted."""
    boot_s: float = 60.0
    """From the grant until its node is added, and again from there until its GPUs appear."""
    fault: Callable[[str], Fault] = lambda name: ""
    prefix: str = "node-"
    """Prefix of its nodes' names."""
    gke: bool = False
    """It reports which nodes belong to a request (provisioningClassDetails, and a label)."""
    seen: dict[str, Object] = field(default_factory=dict)
    """Requests by name, as first seen."""
    granted: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    """The node that was added for each request."""

    @property
    def path(self) -> str:
        """Path of the requests."""
        return f"/apis/{API}/namespaces/{self.namespace}/provisioningrequests"

    async def step(self) -> None:
        """Does what is due now."""
        there = {one["metadata"]["name"]: one for one in await self.server.items(self.path)}
        for name, one in there.items():
            if self.seen.get(name, {}).get("metadata", {}).get("uid") != one["metadata"].get("uid"):
                self.granted.pop(name, None)  # a new request with the same name
            self.seen[name] = one
            await self._serve(name, one)
        for name, one in [*self.seen.items()]:
            if name in there:
                continue
            if self.fault(name) == "late" and name not in self.nodes and name in self.granted:
                await self._boot(name, one)
            elif self.fault(name) != "late":
                await self._end(name)

    async def _serve(self, name: str, one: Object) -> None:
        fault, kind = self.fault(name), one["spec"]["provisioningClassName"]
        if fault == "unseen":
            return
        if not _holds(one, "Accepted"):
            if fault == "rejects":
                await self._say(name, "Failed", "FailedToCreatePods", "its template is wrong")
                return
            await self._say(name, "Accepted", "Accepted", "ProvisioningRequest is accepted by ClusterAutoscaler")
            self.granted[name] = self.clock() + self.after_s
        if self.clock() < self.granted.get(name, 0.0) or _holds(one, "Failed"):
            return
        if fault == "quota":
            message = "Quota 'NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region europe-west4."
            await self._say(name, "Provisioned", "QUOTA_EXCEEDED", message, holds=False)
        elif fault == "fails":
            await self._say(name, "Failed", "Expired", "ProvisioningRequest is expired")
        elif fault == "never":
            await self._say(name, "Provisioned", "CapacityIsNotFound", "CA will try to find it later.", holds=False)
        elif not _holds(one, "Provisioned"):
            reason = "CapacityIsFound" if kind == CHECK else "CapacityIsProvisioned"
            details = {"ResizeRequestName": f"rr-{name}"} if self.gke else {}
            await self._say(name, "Provisioned", reason, "Capacity is found in the cluster", details=details)
        elif fault == "expires":
            await self._say(name, "BookingExpired", "CapacityReservationTimeExpired", "reservation time is expired")
        elif kind != CHECK:
            await self._boot(name, one)
            if fault == "revokes":
                await self._say(name, "CapacityRevoked", "Preempted", "the machine was taken back")
        else:
            await self._consume(name)

    async def _boot(self, name: str, one: Object) -> None:
        """Adds the node once; its GPUs appear later."""
        due_s = self.granted[name] + self.boot_s
        if self.clock() < due_s:
            return
        template = await self.server.find(f"/api/v1/namespaces/{self.namespace}/podtemplates/{name}")
        node = f"{self.prefix}{name}"
        if name not in self.nodes and template is not None:
            self.nodes[name] = node
            spec: dict[str, Any] = template["template"]["spec"]
            labels = {**spec.get("nodeSelector", {}), "kubernetes.io/hostname": node}
            if self.gke:
                labels |= {"autoscaling.gke.io/provisioning-request": f"rr-{name}"}
            made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}}
            await self.server.create("/api/v1/nodes", made)
            asked = int(spec["containers"][0]["resources"]["limits"][GPU])
            self.gpus[node] = asked // 2 if self.fault(name) == "half" else asked
        if node in self.gpus and self.clock() >= due_s + self.boot_s:
            await self._allocate(node, self.gpus.pop(node))

    gpus: dict[str, int] = field(default_factory=dict)
    """GPUs of nodes that do not report them yet."""

    async def _allocate(self, node: str, gpus: int) -> None:
        has = {"cpu": "8", "memory": "32Gi", "pods": "110", GPU: str(gpus)}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "it is",
            "lastTransitionTime": stamp(self.server.unix_s()),
            "lastHeartbeatTime": stamp(self.server.unix_s()),
        }
        status = {"capacity": has, "allocatable": has, "conditions": [ready]}
        await self.server.patch(f"/api/v1/nodes/{node}/status", {"status": status})

    async def _consume(self, name: str) -> None:
        """A booking is used up once its pod exists."""
        pods = await self.server.items(f"/api/v1/namespaces/{self.namespace}/pods")
        reported = ((one["metadata"].get("annotations") or {}, one["spec"].get("nodeName")) for one in pods)
        if any(notes.get(CONSUMES[0]) == name and node for notes, node in reported):
            await self._say(name, "BookingExpired", CONSUMED, "all pods of the booking are scheduled")

    async def _end(self, name: str) -> None:
        """Removes the node, which is no longer needed, unless a pod uses its devices."""
        self.seen.pop(name)
        self.granted.pop(name, None)
        node = self.nodes.pop(name, None)
        if node is not None:
            self.gpus.pop(node, None)
            await self.server.delete(f"/api/v1/nodes/{node}")

    async def _say(
        self, name: str, kind: str, reason: str, message: str, *, holds: bool = True,
        details: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        found = await self.server.find(f"{self.path}/{name}")
        if found is None:
            return
        conditions = [one for one in (found.get("status") or {}).get("conditions") or () if one["type"] != kind]
        before = next((one for one in (found.get("status") or {}).get("conditions") or () if one["type"] == kind), None)
        condition = {"type": kind, "status": str(holds), "reason": reason, "message": message}
        if before is not None and {**before, **condition} == before:
            return
        condition["lastTransitionTime"] = stamp(self.server.unix_s())
        status: Object = {"conditions": [*conditions, condition]}
        if details:
            status["provisioningClassDetails"] = details
        await self.server.patch(f"{self.path}/{name}/status", {"status": status})


def _holds(one: Object, kind: str) -> bool:
    conditions = (one.get("status") or {}).get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)
