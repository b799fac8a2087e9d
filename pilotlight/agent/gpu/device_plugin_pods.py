"""Restarts the node's pods that detect GPUs only at startup, and taints devices of its DRA driver. I/O.

Restarts only pods of this node that match the given namespaces and labels. Taints are DeviceTaintRules named after the
GPU and the installation; only rules labelled as ours are deleted. There are no taints if the API server does not know
DeviceTaintRules or no driver publishes the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from autoscaler.providers.kubernetes_access import CONFLICT, AnswerError, ApiServer, Object
from pilotlight.agent.gpu.hotplug import DaemonPod

RESOURCE = "/apis/resource.k8s.io"
SLICES = f"{RESOURCE}/v1/resourceslices"
VERSION = f"{RESOURCE}/v1beta2"
RULES = f"{VERSION}/devicetaintrules"
TAINT = {"key": "pilotlight.dev/leaving", "effect": "NoSchedule"}
OURS = "app.kubernetes.io/managed-by", "pilotlight-agent"
DEVICE, NODE = "pilotlight.dev/device", "pilotlight.dev/node"


class Those(NamedTuple):
    """Selects pods of a namespace by labels."""

    namespace: str
    labels: str

    @property
    def path(self) -> str:
        """API path of the namespace's pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"


def parse_pod_selector(text: str) -> Those:
    """Parse NAMESPACE/LABEL=VALUE[,LABEL=VALUE]. Raises ValueError."""
    namespace, slash, labels = text.partition("/")
    if not (namespace and slash and "=" in labels):
        raise ValueError(text)
    return Those(namespace, labels)


class Daemons:
    """Daemon pods and device taints of one node. All methods raise AnswerError and connection errors."""

    def __init__(self, server: ApiServer, node: str, of: Sequence[Those]) -> None:
        self._server, self._node, self._of = server, node, of

    async def there(self) -> dict[str, DaemonPod]:
        """Return the daemon pods by UID."""
        found: dict[str, DaemonPod] = {}
        for one in self._of:
            for pod in await self._pods(one):
                conditions = pod.get("status", {}).get("conditions") or ()
                ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
                metadata = pod["metadata"]
                name = f"pod {metadata['namespace']}/{metadata['name']}"
                found[metadata["uid"]] = DaemonPod(name, ready, "deletionTimestamp" in metadata)
        return found

    async def restart(self, uids: Collection[str]) -> None:
        """Delete the pods with these UIDs that still exist; their controllers recreate them."""
        for one in self._of:
            for pod in await self._pods(one):
                metadata = pod["metadata"]
                if metadata["uid"] in uids and "deletionTimestamp" not in metadata:
                    await self._delete(f"{one.path}/{metadata['name']}", metadata)

    async def _pods(self, one: Those) -> list[Object]:
        return await self._server.items(one.path, labelSelector=one.labels, fieldSelector=f"spec.nodeName={self._node}")

    # --- taints -------------------------------------------------------------------------------------------------------

    async def tainted(self, devices: Collection[str]) -> dict[str, bool]:
        """Return True for each GPU with our rule on this node, and False for other published GPUs of `devices`."""
        known = await self._server.find(VERSION) or {}
        if all(one["name"] != "devicetaintrules" for one in known.get("resources") or ()):
            return {}
        published = await self._published() if devices else {}
        return {uuid: False for uuid in devices if uuid in published} | dict.fromkeys(await self._rules(), True)

    async def _rules(self) -> dict[str, Object]:
        """Return the installation's rules on this node, by GPU UUID."""
        found: dict[str, Object] = {}
        for rule in await self._server.items(RULES, labelSelector="=".join(OURS)):
            notes = rule["metadata"].get("annotations") or {}
            if notes.get(NODE) == self._node and self._server.owner.owns(rule):
                found[str(notes.get(DEVICE, ""))] = rule
        return found

    async def taint(self, uuid: str) -> None:
        """Taint the GPU so that no scheduler allocates it."""
        published = (await self._published()).get(uuid)
        if published is None:
            return
        body = {
            "apiVersion": "resource.k8s.io/v1beta2", "kind": "DeviceTaintRule",
            "metadata": {
                "name": self._name(uuid), "labels": dict([OURS]), "annotations": {DEVICE: uuid, NODE: self._node}
            },
            "spec": {"deviceSelector": dict(published), "taint": TAINT},
        }  # fmt: skip
        await self._server.create(RULES, body)

    async def untaint(self, uuid: str) -> None:
        """Delete our taint of the GPU."""
        rule = (await self._rules()).get(uuid)
        if rule is not None:
            await self._delete(f"{RULES}/{rule['metadata']['name']}", rule["metadata"])

    def _name(self, uuid: str) -> str:
        installation = self._server.owner.installation
        return f"pilotlight-leaving-{uuid.lower()}" + (f"-{installation}" if installation else "")

    async def _delete(self, path: str, metadata: Object) -> None:
        """Delete an object unless it has changed since it was read; the next look reads it again."""
        try:
            await self._server.delete(path, version=metadata["resourceVersion"])
        except AnswerError as error:
            if error.status != CONFLICT:
                raise

    async def _published(self) -> dict[str, Mapping[str, str]]:
        """Return, by GPU UUID, the driver, pool and device name in this node's ResourceSlices."""
        found: dict[str, Mapping[str, str]] = {}
        for one in await self._server.items(SLICES, fieldSelector=f"spec.nodeName={self._node}"):
            spec = one["spec"]
            for device in spec.get("devices") or ():
                uuid = (device.get("attributes") or {}).get("uuid", {}).get("string")
                if uuid:
                    found[uuid] = {"driver": spec["driver"], "pool": spec["pool"]["name"], "device": device["name"]}
        return found
