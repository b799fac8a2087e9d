"""A fake Kueue that behaves as observed: one ClusterQueue behind a LocalQueue, an optional admission check, preemption.

Owns quotas and Workloads, and works with any ApiServer. Pods already have the scheduling gate that Kueue's webhook
adds; the fake removes it and, if there is no other scheduler (`schedules`), binds the pods to a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoscaler.providers.kubernetes_access import ApiServer, Object
from autoscaler.providers.kueue.objects import API, GATE, VERSIONS
from autoscaler.spec.pod import GPU, GROUP, QUEUE
from tests.support.fakes.kubernetes.kube_objects import stamp

NEWEST = f"{API}/{VERSIONS[0]}"
"""The version of its API that is simulated by default."""
KIND = "WorkloadEvictedDueToPreempted"
PREEMPTED = "Preempted to accommodate a workload of another queue"


@dataclass(eq=False)
class FakeKueue:
    """Call `step` repeatedly."""

    server: ApiServer
    namespace: str
    clock: Callable[[], float]
    nodes: dict[str, int]
    """GPUs of each node; their sum is the quota."""
    most: int = 8
    """The most GPUs that a Workload can ever get."""
    checks_s: float | None = None
    """Duration of its admission check; None: there is no check."""
    check_message: str = ""
    """Message of the check while it is pending."""
    rejects: bool = False
    schedules: bool = True
    version: str = VERSIONS[0]
    """API version; NEWEST, except in one test."""
    preempted: set[str] = field(default_factory=set)
    """Workloads whose quota is given to others."""
    began: dict[str, float] = field(default_factory=dict)

    @property
    def pods(self) -> str:
        """Path of the pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def workloads(self) -> str:
        """Path of the Workloads."""
        return f"/apis/{API}/{self.version}/namespaces/{self.namespace}/workloads"

    async def step(self) -> None:
        """Does what is due now."""
        pods = [one for one in await self.server.items(self.pods) if QUEUE in (one["metadata"].get("labels") or {})]
        owned = {workload_of(one): one for one in pods}
        for one in await self.server.items(self.workloads):
            if one["metadata"]["name"] not in owned:  # as the garbage collector does
                await self.server.delete(f"{self.workloads}/{one['metadata']['name']}")
        there = {one["metadata"]["name"]: one for one in await self.server.items(self.workloads)}
        for name, pod in sorted(owned.items(), key=lambda pair: str(pair[1]["metadata"].get("creationTimestamp"))):
            if name not in there:
                await self._make(name, pod)
            elif name in self.preempted:
                await self._evict(name, pod)
            elif "deletionTimestamp" not in pod["metadata"]:  # else it keeps its quota until it is gone
                await self._admit(name, pod, pods)

    async def _make(self, name: str, pod: Object) -> None:
        template = {"spec": {"containers": pod["spec"]["containers"]}}
        spec = {"queueName": pod["metadata"]["labels"][QUEUE], "active": True,
                "podSets": [{"name": "main", "count": 1, "template": template}]}  # fmt: skip
        metadata = {"name": name, "labels": {"kueue.x-k8s.io/managed": "true"}}
        await self.server.create(
            self.workloads,
            {"apiVersion": f"{API}/{self.version}", "kind": "Workload", "metadata": metadata, "spec": spec},
        )

    async def _admit(self, name: str, pod: Object, pods: list[Object]) -> None:
        workload = await self.server.find(f"{self.workloads}/{name}")
        if workload is None or not workload["spec"].get("active", True):
            return
        asked, used = gpus(pod), sum(gpus(one) for one in pods if _ungated(one))
        if not _ungated(pod) and name not in self.began:
            if asked > self.most:
                await self._say(
                    name, "QuotaReserved", "ExceedsMaxQuota", "insufficient quota for nvidia.com/gpu", holds=False
                )
                return
            if used + asked > sum(self.nodes.values()):
                await self._say(name, "QuotaReserved", "WaitingForQuota", "insufficient unused quota", holds=False)
                return
            await self._say(name, "QuotaReserved", "QuotaReserved", "Quota reserved in ClusterQueue serving")
            self.began[name] = self.clock()
        if self.rejects:
            await self.server.patch(f"{self.workloads}/{name}", {"spec": {"active": False}})
            await self._say(name, "Evicted", "Deactivated", "DeactivatedDueToAdmissionCheck")
            return
        if self.checks_s is not None and self.clock() < self.began[name] + self.checks_s:
            check = {
                "name": "prov",
                "state": "Pending",
                "message": self.check_message,
                "lastTransitionTime": self._now(),
            }
            await self.server.patch(f"{self.workloads}/{name}/status", {"status": {"admissionChecks": [check]}})
            await self._say(name, "Admitted", "UnsatisfiedAdmissionChecks", "checks are pending", holds=False)
            return
        await self._say(name, "Admitted", "Admitted", "The workload is admitted")
        await self._let_go(pod, pods)

    async def _let_go(self, pod: Object, pods: list[Object]) -> None:
        at = f"{self.pods}/{pod['metadata']['name']}"
        if not _ungated(pod):
            left = [one for one in pod["spec"]["schedulingGates"] if not one["name"].startswith("kueue.x-k8s.io/")]
            await self.server.patch(at, {"spec": {"schedulingGates": left}})
        if self.schedules and not pod["spec"].get("nodeName"):
            for node, has in sorted(self.nodes.items()):
                there = sum(gpus(one) for one in pods if one["spec"].get("nodeName") == node)
                if there + gpus(pod) <= has:
                    await self.server.patch(at, {"spec": {"nodeName": node}, "status": {"phase": "Running"}})
                    pod["spec"]["nodeName"] = node
                    return

    async def _evict(self, name: str, pod: Object) -> None:
        """Evicts as Kueue was observed to: the Workload and its pods get the reason; the pods are deleted."""
        await self._say(name, "Evicted", "Preempted", PREEMPTED)
        await self._say(name, "Preempted", "InClusterQueue", PREEMPTED)
        if _ungated(pod):
            at = f"{self.pods}/{pod['metadata']['name']}"
            condition = {"type": "TerminationTarget", "status": "True", "reason": KIND, "message": PREEMPTED}
            conditions = [
                *(pod.get("status", {}).get("conditions") or ()),
                {**condition, "lastTransitionTime": self._now()},
            ]
            await self.server.patch(f"{at}/status", {"status": {"conditions": conditions}})
            await self.server.delete(at)
            self.preempted.discard(name)
            self.began.pop(name, None)

    async def _say(self, name: str, kind: str, reason: str, message: str, *, holds: bool = True) -> None:
        found = await self.server.find(f"{self.workloads}/{name}")
        before = [] if found is None else (found.get("status") or {}).get("conditions") or []
        condition = {"type": kind, "status": str(holds), "reason": reason, "message": message}
        if found is None or any({**one, **condition} == one for one in before):
            return
        reported = [*(one for one in before if one["type"] != kind), {**condition, "lastTransitionTime": self._now()}]
        await self.server.patch(f"{self.workloads}/{name}/status", {"status": {"conditions": reported}})

    def _now(self) -> str:
        return stamp(self.server.unix_s())


def workload_of(pod: Object) -> str:
    """Name of the pod's Workload; that of a group has the group's name."""
    name: str = pod["metadata"]["name"]
    return str(pod["metadata"]["labels"].get(GROUP, f"pod-{name}"))


def gpus(pod: Object) -> int:
    """GPUs that a pod requests."""
    limits: dict[str, Any] = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get(GPU, "0"))


def _ungated(pod: Object) -> bool:
    return GATE not in [one["name"] for one in pod["spec"].get("schedulingGates") or ()]
