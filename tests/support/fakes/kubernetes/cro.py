"""A fake composable resource operator (CRO). It handles requests and resources as the real one was observed to.

Owns the states, finalizers, its choice of victims and its polling (every `look_s`, as the real one's 30 s). Works with
any ApiServer, so also with the real API server. The fabric behind it is a pool of devices of each model.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from autoscaler.providers.cro.objects import API, LAST_USED, MANAGED_BY, ONLINE, REQUESTS, RESOURCES, VICTIM
from autoscaler.providers.kubernetes_access import AnswerError, ApiServer, Object

FINALIZER = "com.ie.ibm.hpsys/finalizer"
NONE_FREE = "there is no free device in the fabric"


@dataclass(eq=False)
class FakeCro:
    """See the module. `attached` and `detached` take (node, UUID) and change the node's Devices."""

    server: ApiServer
    clock: Callable[[], float]
    pool: dict[str, int]
    """Free devices by model. The operator ignores requests for other models."""
    attach_s: float = 2.0
    detach_s: float = 1.0
    look_s: float = 30.0
    period_s: float = 0.1
    attached: Callable[[str, str], None] = lambda node, uuid: None
    detached: Callable[[str, str], None] = lambda node, uuid: None
    # busy: whether a process uses a device, which then is not detached
    busy: Callable[[str, str], bool] = lambda node, uuid: False
    # visible: whether the node's device plugin reports a device
    visible: Callable[[str, str], bool] = lambda node, uuid: True
    never: Container[str] = ()
    """Models of which it attaches nothing, without reporting an error."""
    late: bool = False
    """An attachment that has begun completes even if it was cancelled meanwhile."""
    due_s: dict[str, float] = field(default_factory=dict)
    """When the next step of each resource is due, or its next poll."""
    gave: dict[str, str] = field(default_factory=dict)
    """UUID of each resource's device, from the attachment until the device is free again."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self.step()
            except AnswerError as error:
                if error.reason not in {"Conflict", "NotFound", "AlreadyExists"}:
                    raise
            await asyncio.sleep(self.period_s)

    async def step(self) -> None:
        """Polls all objects once."""
        resources = await self.server.items(RESOURCES)
        for one in resources:
            if one["spec"]["model"] in self.pool:
                await self._resource(one)
        requests = [one for one in await self.server.items(REQUESTS) if one["spec"]["resource"]["model"] in self.pool]
        wanted = [tuple(one["spec"]["resource"].get(key) for key in ("model", "target_node")) for one in requests]
        assert len(set(wanted)) == len(wanted), "its webhook refuses a second request for a model and a node"
        resources = await self.server.items(RESOURCES)
        for one in requests:
            await self._request(one, resources)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _request(self, one: Object, resources: list[Object]) -> None:
        metadata, path = one["metadata"], f"{REQUESTS}/{one['metadata']['name']}"
        state = (one.get("status") or {}).get("state", "")
        mine = [
            each for each in resources if (each["metadata"].get("labels") or {}).get(MANAGED_BY) == metadata["name"]
        ]
        if "deletionTimestamp" in metadata:
            for each in mine:
                await self.server.delete(f"{RESOURCES}/{each['metadata']['name']}")
            if mine:
                await self._state(path, "Cleaning", {})
            else:
                await self.server.patch(path, {"metadata": {"finalizers": None}})
            return
        if FINALIZER not in (metadata.get("finalizers") or ()):
            await self.server.patch(path, {"metadata": {"finalizers": [FINALIZER]}})
        if not state:
            await self._state(path, "NodeAllocating", {})
            return
        alive = [each for each in mine if "deletionTimestamp" not in each["metadata"]]
        size = one["spec"]["resource"]["size"]
        for _ in range(size - len(alive)):
            await self._make(one)
        for each in sorted(alive, key=_rank)[: max(0, len(alive) - size)]:
            await self.server.delete(f"{RESOURCES}/{each['metadata']['name']}")
        done = len(mine) == size and all(each.get("status", {}).get("state") == ONLINE for each in mine)
        resource_states: Object = dict.fromkeys((one.get("status") or {}).get("resources") or {})
        resource_states |= {each["metadata"]["name"]: _told(each) for each in mine}
        await self._state(path, "Running" if done else "Updating", {"resources": resource_states})

    async def _state(self, path: str, state: str, more: Object) -> None:
        await self.server.patch(f"{path}/status", {"status": {"state": state, **more}})

    async def _make(self, request: Object) -> None:
        asked = request["spec"]["resource"]
        spec = {"type": "gpu", "model": asked["model"], "target_node": asked["target_node"], "force_detach": False}
        await self.server.create(RESOURCES, {
            "apiVersion": API, "kind": "ComposableResource",
            "metadata": {
                "name": f"gpu-{next(self.numbers):08x}", "finalizers": [FINALIZER],
                "labels": {MANAGED_BY: request["metadata"]["name"]},
            },
            "spec": spec,
        })  # fmt: skip

    # --- resources ----------------------------------------------------------------------------------------------------

    async def _resource(self, one: Object) -> None:
        name, path = one["metadata"]["name"], f"{RESOURCES}/{one['metadata']['name']}"
        status, node = one.get("status") or {}, one["spec"]["target_node"]
        state, device = status.get("state", ""), status.get("device_id", "")
        goes, now_s = "deletionTimestamp" in one["metadata"], self.clock()
        if goes and (not state or (state == "Attaching" and not self.late)) and not device:
            self.free(name, one["spec"]["model"])
            await self.server.patch(path, {"metadata": {"finalizers": None}})
        elif not state:
            self.due_s[name] = now_s + self.attach_s
            await self._state(path, "Attaching", {})
        elif now_s < self.due_s.get(name, 0.0) or (one["spec"]["model"] in self.never and not device):
            return
        elif state == "Attaching" and not device:
            await self._attach(path, name, one["spec"]["model"], node)
        elif state == "Attaching":
            online = self.visible(node, device)
            self.due_s[name] = now_s + (0.0 if online else self.look_s)
            if online:
                await self._state(path, ONLINE, {"error": ""})
        elif goes and state == ONLINE:
            self.due_s[name] = now_s + self.detach_s
            await self._state(path, "Detaching", {})
        elif state == "Detaching" and self.busy(node, device) and not one["spec"].get("force_detach"):
            self.due_s[name] = now_s + self.look_s
            await self._state(path, "Detaching", {"error": f"there are processes on {device}"})
        elif state == "Detaching":
            self.free(name, one["spec"]["model"])
            self.detached(node, device)
            await self.server.patch(path, {"metadata": {"finalizers": None}})

    async def _attach(self, path: str, name: str, model: str, node: str) -> None:
        if not self.pool.get(model, 0):
            self.due_s[name] = self.clock() + self.look_s
            await self._state(path, "Attaching", {"error": NONE_FREE})
            return
        self.pool[model] -= 1
        self.gave[name] = uuid = f"GPU-{name.removeprefix('gpu-')}"
        self.attached(node, uuid)
        await self._state(path, "Attaching", {"device_id": uuid, "cdi_device_id": f"cdi-{uuid}", "error": ""})

    def free(self, name: str, model: str) -> None:
        """Returns the resource's device, if it has one, to the pool."""
        if self.gave.pop(name, None) is not None:
            self.pool[model] += 1


def _told(resource: Object) -> Object:
    status = resource.get("status") or {}
    fields = {key: status[key] for key in ("device_id", "cdi_device_id", "error") if status.get(key)}
    return {"state": status.get("state", ""), "node_name": resource["spec"]["target_node"], **fields}


def _rank(resource: Object) -> tuple[int, str, str]:
    """Order in which resources are removed when a request shrinks."""
    status, notes = resource.get("status") or {}, resource["metadata"].get("annotations") or {}
    state = status.get("state", "")
    never, marked = not status.get("device_id"), notes.get(VICTIM) == "true"
    order = 0 if never else 1 if state == ONLINE and marked else 2 if state == "Attaching" else 3
    return order, notes.get(LAST_USED, ""), resource["metadata"]["name"]
