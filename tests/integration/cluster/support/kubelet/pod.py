"""One pod of the process kubelet: its address, its containers, and its status.

Annotations inject faults: `kubelet.test/pull-seconds: "3"` (duration of the image pull), `kubelet.test/image-error:
"1"` (ImagePullBackOff while the annotation exists, or the value if it is another reason), `kubelet.test/out-of-memory:
"1"` (killed containers report OOMKilled), `kubelet.test/evicted: "1"` (node-pressure eviction: the pod is killed now
and its address is no longer reported).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoscaler.kubernetes.api import STRATEGIC, ApiError, Object, UnreachableError
from tests.integration.cluster.support.kubelet.container import Container, now
from tests.integration.cluster.support.kubelet.probes import Prober
from tests.integration.cluster.support.kubelet.volumes import Volumes

if TYPE_CHECKING:
    from tests.integration.cluster.support.kubelet.node import Node

PULL_SECONDS, IMAGE_ERROR = "kubelet.test/pull-seconds", "kubelet.test/image-error"
OUT_OF_MEMORY, EVICTED = "kubelet.test/out-of-memory", "kubelet.test/evicted"
LOOK_S, RETRY_S = 0.05, 0.5
_KEYED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class Pod:
    """Runs from its creation until it is gone."""

    def __init__(self, node: Node, found: Object, ip: str) -> None:
        self._node = node
        self.object = found
        self.ip = ip
        self.uid: str = found["metadata"]["uid"]
        self.namespace: str = found["metadata"]["namespace"]
        self.name: str = found["metadata"]["name"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self._spec: dict[str, Any] = found["spec"]
        self._began = now()
        self._dirty = asyncio.Event()
        self._volumes = Volumes(node.api, found, Path(node.logs) / self.uid, self._field, node.shown)
        self._since: dict[str, tuple[str, str]] = {}
        self.containers = [self._container(spec) for spec in self._spec["containers"]]
        self._task = asyncio.create_task(self._live())
        self._end: asyncio.Task[None] | None = None

    def _container(self, spec: dict[str, Any]) -> Container:
        ports = {port["name"]: port["containerPort"] for port in spec.get("ports", []) if "name" in port}
        log = Path(self._node.logs) / f"{self.namespace}_{self.name}_{spec['name']}.log"
        prober = Prober(self.ip, ports, self._node.session, self._node.probe_period_s)
        one = Container(spec, log, prober, self._environment, self._dirty.set, here=self._volumes.of(spec))
        self._node.on_container(self.name, one)
        return one

    # --- environment of its containers -------------------------------------------------------------------------------

    async def _environment(self, spec: dict[str, Any]) -> dict[str, str]:
        env = {"PATH": os.environ["PATH"], "POD_IP": self.ip, "HOSTNAME": self.name}
        if (kubeconfig := self._volumes.kubeconfig(spec)) is not None:
            env["KUBECONFIG"] = kubeconfig
        for item in spec.get("env", []):
            source = item.get("valueFrom")
            value = item.get("value", "") if source is None else await self._value(source)
            if value is not None:
                env[item["name"]] = value
        return env

    async def _value(self, source: dict[str, Any]) -> str | None:
        """The value of a variable; None if its source is optional and does not exist."""
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        secret = "secretKeyRef" in source
        wanted = source["secretKeyRef" if secret else "configMapKeyRef"]
        path = f"/api/v1/namespaces/{self.namespace}/{'secrets' if secret else 'configmaps'}/{wanted['name']}"
        optional = wanted.get("optional", False)
        try:
            data = (await self._node.api.get(path)).get("data", {})
        except ApiError as error:
            if optional and error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        if optional and wanted["key"] not in data:
            return None
        value: str = data[wanted["key"]]
        return base64.b64decode(value).decode() if secret else value

    def _field(self, path: str) -> str:
        metadata = self.object["metadata"]
        if (keyed := _KEYED.fullmatch(path)) is not None:
            return str(metadata.get(keyed[1], {}).get(keyed[2], ""))
        return {
            "metadata.name": self.name, "metadata.namespace": self.namespace, "metadata.uid": self.uid,
            "status.podIP": self.ip, "status.hostIP": self._node.ip, "spec.nodeName": self._node.name,
        }[path]  # fmt: skip

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report())
            self._dirty.set()
            await asyncio.sleep(float(self._annotations().get(PULL_SECONDS, 0)))
            while IMAGE_ERROR in self._annotations():
                ordered = self._annotations()[IMAGE_ERROR]
                for one in self.containers:
                    reason = "ImagePullBackOff" if ordered == "1" else ordered
                    one.waits(reason, f'Back-off pulling image "{one.spec["image"]}"')
                await asyncio.sleep(LOOK_S)
            await self._mounted()
            policy = self._spec.get("restartPolicy", "Always")
            for one in self.containers:
                group.create_task(one.run(policy, self._node.back_off))

    async def _mounted(self) -> None:
        """Waits for the sources of its volumes, which may be created later."""
        while True:
            try:
                await self._volumes.make()
            except (ApiError, UnreachableError) as error:
                for one in self.containers:
                    one.waits("ContainerCreating", f"FailedMount: {error}")
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _annotations(self) -> dict[str, str]:
        return self.object["metadata"].get("annotations") or {}

    def seen(self, found: Object) -> None:
        """Handles a change of its object: a deletion, or readiness written by the controllers.
        They mark all pods of a node as unready when they consider it lost.
        """
        self.object = found
        ready = [one["status"] for one in found.get("status", {}).get("conditions", []) if one["type"] == "Ready"]
        if "Ready" in self._since and ready != [self._since["Ready"][0]]:
            self._dirty.set()
        if EVICTED in self._annotations():
            for one in self.containers:
                one.signal(signal.SIGKILL)
        if "deletionTimestamp" not in found["metadata"]:
            return
        grace_s = found["metadata"].get("deletionGracePeriodSeconds", 30)
        if self._end is None:
            self._end = asyncio.create_task(self._terminate())
        for one in self.containers:
            one.end_within(grace_s)

    def vanished(self) -> None:
        """Handles the deletion of its object. After a forced deletion its processes must be killed now."""
        if self._end is None:
            self._end = asyncio.create_task(self._abandon())
        else:
            self._node.forget(self)

    async def _terminate(self) -> None:
        """Terminates as a kubelet does: the processes, the last status, then the object."""
        await asyncio.gather(*(one.end() for one in self.containers))
        await self._stop()
        with contextlib.suppress(ApiError, UnreachableError):
            await self._node.api.patch(f"{self.path}/status", self._status(), STRATEGIC)
            await self._node.api.delete(self.path, uid=self.uid, grace_s=0)

    async def _abandon(self) -> None:
        for one in self.containers:
            one.ending = True
            one.signal(signal.SIGKILL)
        await self._stop()
        self._node.forget(self)

    async def kill(self) -> None:
        """Kills everything when the node stops, without a report."""
        if self._end is not None:
            self._end.cancel()
        for one in self.containers:
            one.end_within(0.5)
        await asyncio.gather(*(one.end() for one in self.containers))
        await self._stop()

    async def _stop(self) -> None:
        """Raises errors of its own task: otherwise a fault of this kubelet looks like a pod that never starts."""
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    # --- status ------------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Writes the latest status; a change during the write triggers another one."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._node.silent:
                return
            try:
                await self._node.api.patch(f"{self.path}/status", self._status(), STRATEGIC)
            except (ApiError, UnreachableError):  # deleted, another uid, or a conflict: `vanished` ends it
                await self._again()

    async def _again(self) -> None:
        await asyncio.sleep(RETRY_S)
        self._dirty.set()

    def _status(self) -> Object:
        """A strategic merge patch: it keeps the scheduler's condition, and the uid protects later pods of this name."""
        states = [one.state for one in self.containers]
        if OUT_OF_MEMORY in self._annotations():
            for state in states:
                if state.get("terminated", {}).get("exitCode") == 137:
                    state["terminated"]["reason"] = "OOMKilled"
        if all("terminated" in state for state in states):
            phase = "Succeeded" if all(state["terminated"]["exitCode"] == 0 for state in states) else "Failed"
        else:
            phase = "Pending" if all(one.process is None for one in self.containers) else "Running"
        ready = phase == "Running" and all(one.ready for one in self.containers)
        held = {one["type"]: one["status"] for one in self.object.get("status", {}).get("conditions", [])}
        gates = all(held.get(gate["conditionType"]) == "True" for gate in self._spec.get("readinessGates", []))
        wanted = {
            "PodReadyToStartContainers": True, "Initialized": True, "ContainersReady": ready, "Ready": ready and gates,
        }  # fmt: skip
        where: Object = {"podIP": self.ip, "podIPs": [{"ip": self.ip}]}
        if EVICTED in self._annotations():
            where = {"podIP": None, "podIPs": None, "reason": "Evicted", "message": "The node was low on memory."}
        return {
            "metadata": {"uid": self.uid},
            "status": {
                "phase": phase, "conditions": [self._condition(kind, held) for kind, held in wanted.items()], **where,
                "hostIP": self._node.ip,
                "hostIPs": [{"ip": self._node.ip}], "startTime": self._began,
                "containerStatuses": [one.status() for one in self.containers],
            },
        }  # fmt: skip

    def _condition(self, kind: str, holds: bool) -> Object:
        if self._since.get(kind, ("",))[0] != str(holds):
            self._since[kind] = (str(holds), now())
        generation = self.object["metadata"].get("generation", 1)
        return {
            "type": kind, "status": str(holds), "lastTransitionTime": self._since[kind][1],
            "observedGeneration": generation,
        }  # fmt: skip
