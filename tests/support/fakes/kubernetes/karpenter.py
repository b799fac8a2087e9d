"""Karpenter, simulated on a fake API server: a NodeClaim is launched, joins as a Node, is initialized, and is drained.

Owns the delays, which are those observed with the real one, in virtual time. It launches every request and updates the
resource usage of NodePools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from autoscaler.providers.kubernetes_access import Object
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.kube_objects import PlayedServer, stamp

CLAIMS, POOLS = "/apis/karpenter.sh/v1/nodeclaims", "/apis/karpenter.sh/v1/nodepools"
NODES = "/api/v1/nodes"
FINALIZER = "karpenter.sh/termination"
LAUNCHED_S, REGISTERED_S, INITIALIZED_S, TERMINATED_S = 0.4, 5.5, 6.5, 2.0
BEGIN_UNIX_S = 1_800_000_000.0


def node_pool(name: str = "g4-nodepool", **spec: Any) -> Object:
    """A NodePool of on-demand g4dn.xlarge with at most 4 GPUs."""
    template = {
        "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
        "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
        "expireAfter": "720h",
        "requirements": [
            {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
            {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["g4dn.xlarge", "g4dn.2xlarge"]},
        ],
    }
    template |= spec.pop("template", {})
    whole = {"metadata": {"labels": spec.pop("labels", {})}, "spec": template}
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name, "uid": f"uid-of-{name}"},
        "spec": {"template": whole, "limits": {"nvidia.com/gpu": "4"}, **spec},
    }


class PlayedKarpenter(PlayedServer):
    """A server with the objects. `silent`: NodeClaims make no progress after they are created."""

    def __init__(self) -> None:
        super().__init__(self._now)
        self.silent = False
        self.put("/apis/karpenter.sh", {"versions": [{"version": "v1"}]})

    @staticmethod
    def _now() -> float:
        return BEGIN_UNIX_S + asyncio.get_running_loop().time()

    async def create(self, path: str, body: Object) -> Object:
        """See ApiServer."""
        made = await super().create(path, body)
        if path == CLAIMS and not self.silent:
            name, later = body["metadata"]["name"], asyncio.get_running_loop().call_later
            later(0.1, self.change_if, f"{CLAIMS}/{name}", {"metadata": {"finalizers": [FINALIZER]}})
            later(LAUNCHED_S, self.conditions, name, "Launched")
            later(REGISTERED_S, self._joins, name)
            later(INITIALIZED_S, self.conditions, name, "Launched", "Registered", "Initialized")
        return made

    async def delete(self, path: str, *, version: str | None = None) -> None:
        """See ApiServer."""
        await super().delete(path, version=version)
        if path.startswith(CLAIMS) and path in self.objects:
            asyncio.get_running_loop().call_later(TERMINATED_S, self._terminates, path)

    def conditions(self, name: str, *true: str, **more: Object) -> None:
        """Sets these conditions to true, if the object exists. `more`: other conditions, complete."""
        found = [{"type": one, "status": "True", "lastTransitionTime": stamp(self._now())} for one in true]
        found += [{"type": kind, **reported} for kind, reported in more.items()]
        self.change_if(f"{CLAIMS}/{name}", {"status": {"conditions": found}})

    def change_if(self, path: str, body: Object) -> None:
        """Changes the object if it exists and is not being deleted."""
        if path in self.objects and "deletionTimestamp" not in self.objects[path]["metadata"]:
            self.change(path, body)

    def _joins(self, name: str) -> None:
        claim = self.objects.get(f"{CLAIMS}/{name}")
        if claim is None or "deletionTimestamp" in claim["metadata"]:
            return
        node, kept = f"node-of-{name}", ("labels", "annotations")
        self.put(f"{NODES}/{node}", {"metadata": {key: claim["metadata"][key] for key in kept}, "spec": {}})
        self.change(f"{CLAIMS}/{name}", {"status": {"nodeName": node}})
        self.conditions(name, "Launched", "Registered")

    def _terminates(self, path: str) -> None:
        """Finishes the termination once no pod is on the node."""
        node = (self.objects[path].get("status") or {}).get("nodeName")
        pods = [one for one in self.objects.values() if node and one.get("spec", {}).get("nodeName") == node]
        if pods:
            asyncio.get_running_loop().call_later(TERMINATED_S, self._terminates, path)
            return
        self.objects.pop(f"{NODES}/{node}", None)
        self.change(path, {"metadata": {"finalizers": None}})


def played(scenario: Coroutine[object, object, None]) -> None:
    """Runs a scenario in virtual time."""
    run(scenario)


def pod(name: str, node: str, **spec: Any) -> Object:
    """A pod of a ReplicaSet that runs on the node with a GPU; `labels` and `metadata` are merged into its own."""
    limits = {"nvidia.com/gpu": "1"}
    owner = {"kind": "ReplicaSet", "name": "of", "controller": True}
    labels = spec.pop("labels", {})
    return {
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner], **spec.pop("metadata", {})},
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": limits}}], **spec},
        "status": {"phase": "Running"},
    }  # fmt: skip
