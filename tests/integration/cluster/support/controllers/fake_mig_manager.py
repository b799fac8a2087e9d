"""Nodes with a MIG GPU, and a fake of NVIDIA's mig-manager that applies the configuration in a node's label.

Records each requested configuration, and the pods that had a MIG device of its node during a repartitioning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from autoscaler.drivers.kubernetes.inventory.mig_manager import ANNOTATION, FILE
from autoscaler.drivers.kubernetes.objects.other_pods import read_other_pod
from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.constants import NODES
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.slicing.mig import CONFIG, GPU, MIXED, PRODUCT, STATE, STRATEGY
from autoscaler.state.mig import FAILED, SUCCESS
from tests.integration.cluster.support.kubelet.node import Node, next_number

H100 = "NVIDIA-H100-80GB-HBM3"
CONFIG_MAP = "mig"
POOL = "pool"
"""The label of all nodes of one test."""
REBOOTING = "rebooting"


class NodeState(NamedTuple):
    """The requested configuration and our annotation on a node."""

    config: str
    note: str
    """Our annotation on the node."""


class Manager:
    """The fake mig-manager of one node, whose GPU is in seven small MIG devices."""

    def __init__(self, api: Api, node: Node, namespace: str) -> None:
        self.api, self.node = api, node
        self._config_map = f"/api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}"
        self._amounts = {f"{MIXED}1g.10gb": "7"}
        self._work = asyncio.Event()
        self.states: list[NodeState] = []
        """Every change of the node's labels and annotation."""
        self.may_end = asyncio.Event()
        """While not set, a repartitioning that has begun does not finish."""
        self.may_end.set()
        self.fate: Callable[[], str] = lambda: SUCCESS
        """Result of an order: success, failed, or rebooting, which ends when the order is cancelled."""
        self.harmed: list[str] = []
        """Pods that had a device of the node while it was repartitioned."""

    @property
    def orders(self) -> list[str]:
        """Our configurations that were requested on the node."""
        return [one.config for one in self.states if one.config.startswith("pilotlight-")]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Manager]:
        """Runs the node and the fake until the end of the test."""
        watched = Watched(self.api, NODES, _node_state, self._changed, fieldSelector=f"metadata.name={self.node.name}")
        async with self.node.running():
            works = [asyncio.create_task(watched.run()), asyncio.create_task(self._go())]
            try:
                yield self
            finally:
                for work in works:
                    work.cancel()
                for work in works:
                    with suppress(asyncio.CancelledError):
                        await work

    async def labels(self) -> dict[str, str]:
        """The current labels of the node."""
        found: dict[str, str] = (await self.api.get(f"{NODES}/{self.node.name}"))["metadata"]["labels"]
        return found

    async def say(self, **labels: str) -> None:
        """Writes labels, as mig-manager or a user does."""
        node_labels = {CONFIG if name == "config" else STATE: value for name, value in labels.items()}
        await self.api.patch(f"{NODES}/{self.node.name}", {"metadata": {"labels": node_labels}})

    def _changed(self, changes: list[Change[NodeState]]) -> None:
        """Ignores state that exists at the start: an earlier fake has handled it."""
        for _, old, new in changes:
            if old is not None and new is not None and new != old:
                self.states.append(new)
                self._work.set()

    async def _go(self) -> None:
        while await self._work.wait():
            self._work.clear()
            await self._cut(self.states[-1].config)

    async def _cut(self, config: str) -> None:
        """Repartitions as mig-manager does: the device plugin is stopped meanwhile and reports new resources last."""
        await self.say(state="pending")
        await self._look()
        await self._show(dict.fromkeys(self._amounts, "0"))
        await self.may_end.wait()
        state = self.fate()
        if state == REBOOTING:
            await self.say(state=state)
            await self.node.restarts(over=False)
            while (state := self.fate()) == REBOOTING:
                await asyncio.sleep(0.02)
            await self.node.restarts(over=True)
        removed = dict.fromkeys(self._amounts, "0")
        if state == SUCCESS:
            wanted = await self._wanted(config)
            state, self._amounts = (FAILED, self._amounts) if wanted is None else (SUCCESS, wanted)
        await self._look()
        await self.say(state=state)
        await self._show({**removed, **self._amounts})

    async def _wanted(self, config: str) -> dict[str, str] | None:
        """Returns the node's resources with this configuration; None: there is no such configuration."""
        try:
            text = (await self.api.get(self._config_map))["data"][FILE]
        except ApiError:
            return None
        found = yaml.safe_load(text)["mig-configs"].get(config)
        if found is None:
            return None
        (gpu,) = found
        cuts = {MIXED + name.replace("+", "."): str(many) for name, many in gpu.get("mig-devices", {}).items()}
        return cuts if gpu["mig-enabled"] else {GPU: "1"}

    async def _show(self, amounts: dict[str, str]) -> None:
        await self.node.has(amounts)

    async def _look(self) -> None:
        """Records pods that have a device of the node."""
        query = f"spec.nodeName={self.node.name},status.phase!=Succeeded,status.phase!=Failed"
        pods = (await self.api.get("/api/v1/pods", fieldSelector=query))["items"]
        self.harmed += [pod["metadata"]["name"] for pod in pods if (has := read_other_pod(pod)) and has.has_devices]


def _node_state(node: Object) -> NodeState:
    metadata = node["metadata"]
    return NodeState(metadata["labels"].get(CONFIG, ""), (metadata.get("annotations") or {}).get(ANNOTATION, ""))


def settings(namespace: str) -> dict[str, object]:
    """Settings that allow repartitioning of a test's nodes."""
    kind = {
        "selector": {POOL: namespace}, "device": {"model": H100, "memory": "80Gi"},
        "slicing": {"kind": "mig", "cut": True},
    }  # fmt: skip
    return {"nodes": [kind], "cutting": {"namespace": namespace, "configMap": CONFIG_MAP}}


@asynccontextmanager
async def managed(api: Api, namespace: str, logs: Path, many: int) -> AsyncIterator[list[Manager]]:
    """Yields that many idle nodes, in the order of their names."""
    async with AsyncExitStack() as stack:
        managers = list[Manager]()
        for at in range(many):
            name = f"{namespace}-{at}"
            labels = {
                POOL: namespace, "test": name, PRODUCT: H100, CONFIG: "as-it-was", STATE: SUCCESS, STRATEGY: "mixed"
            }  # fmt: skip
            node = Node(api, name, next_number(), {f"{MIXED}1g.10gb": "7"}, labels, logs, probe_period_s=0.05)
            managers.append(await stack.enter_async_context(Manager(api, node, namespace).running()))
        yield managers
