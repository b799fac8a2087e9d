"""Cluster Autoscaler and a scheduler, simulated on a fake API server: a node is added for a Pending pod.

Owns the group's size, the events that it emits, and the delays, which follow its manual, in virtual time. A keeper pod
is bound to the node of its placeholder pod.
"""

from __future__ import annotations

import asyncio

from autoscaler.providers.cluster_autoscaler.placeholder_pods import KEEPS, REFUSED, TRIGGERED
from autoscaler.providers.kubernetes_access import Object
from autoscaler.spec.pod import PLACE
from tests.support.fakes.kubernetes.kube_objects import PlayedServer, stamp

PODS, EVENTS = "/api/v1/namespaces/engines/pods", "/api/v1/namespaces/engines/events"
LOOK_S, NODE_S = 10.0, 200.0
BEGIN_UNIX_S = 1_800_000_000.0
FULL = "pod didn't trigger scale-up: 1 max node group size reached"


class PlayedAutoscaler(PlayedServer):
    """`size_max`: the maximum size of the group."""

    def __init__(self, size_max: int = 4) -> None:
        super().__init__(lambda: BEGIN_UNIX_S + asyncio.get_running_loop().time())
        self.size_max = size_max
        self.silent = False
        """Whether it has stopped processing objects."""
        self.nodes: list[str] = []
        self._told = 0

    async def create(self, path: str, body: Object) -> Object:
        """See ApiServer."""
        made = await super().create(path, body)
        if path == PODS and PLACE in body["metadata"]["labels"]:
            asyncio.get_running_loop().call_later(LOOK_S, self._looks, body["metadata"]["name"])
        return made

    def _looks(self, name: str) -> None:
        if self.silent or f"{PODS}/{name}" not in self.objects:
            return
        if len(self.nodes) >= self.size_max:
            self.tell(name, REFUSED, FULL)
            asyncio.get_running_loop().call_later(LOOK_S, self._looks, name)
            return
        self.nodes.append(f"node-of-{name}")
        self.tell(name, TRIGGERED, "pod triggered scale-up: [{t4 0->1 (max: 4)}]")
        asyncio.get_running_loop().call_later(NODE_S, self._binds, name)

    def tell(self, name: str, reason: str, message: str) -> None:
        """Creates an event about a pod, if the pod exists."""
        self._told += 1
        uid = self.objects[f"{PODS}/{name}"]["metadata"]["uid"]
        self.put(f"{EVENTS}/e{self._told}", {
            "reason": reason, "message": message, "involvedObject": {"name": name, "uid": uid},
            "lastTimestamp": stamp(self.unix_s()),
        })  # fmt: skip

    def _binds(self, name: str) -> None:
        """Binds the placeholder first, then its keeper."""
        for path, pod in sorted(self.objects.items()):
            labels = pod["metadata"].get("labels") or {}
            if name in (labels.get(PLACE), labels.get(KEEPS)):
                self.change(path, {"spec": {"nodeName": f"node-of-{name}"}})
