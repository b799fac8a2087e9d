"""Gateways as pods of a Deployment behind a Service, and clients that use the ready addresses of its EndpointSlice.

The Deployment controller, the EndpointSlices and the rolling update are real; each pod is a gateway process. There is
no kube-proxy: a client selects one of the ready addresses when it connects, as kube-proxy does.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from autoscaler.kubernetes.api import STRATEGIC, Api, Object
from autoscaler.kubernetes.watch import Change, Watched
from loadtest.client import Client
from loadtest.result import Result, Shot

NAME = "gateway"
LABELS = {"app.kubernetes.io/component": "gateway"}
PORT, HEALTH = 8080, 8082
WAIT_S_MAX = 120.0
PRE_STOP_S = 25
"""Delay before SIGTERM. If the controllers stop for up to 20 s, clients still learn in time that the pod is leaving."""


def deployment(replicas: int, sockets: Sequence[Path], node: str, grace_s: int = 30) -> Object:
    """Builds the chart's Deployment with the Unix sockets of its autoscalers and a longer delay before SIGTERM."""
    followed = [word for socket in sockets for word in ("--autoscaler", f"unix:{socket}")]
    words = [
        sys.executable, "-m", "pilotlight", "gateway", "--id", "$(POD_NAME)", *followed,
        "--listen", f"$(POD_IP):{PORT}", "--health", f"$(POD_IP):{HEALTH}", "--ops", "127.0.0.1:0",
        "--grace", str(grace_s),
    ]  # fmt: skip
    env = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
    ]
    container = {
        "name": "gateway", "image": "pilotlight", "command": words, "env": env,
        "ports": [{"name": "http", "containerPort": PORT}, {"name": "health", "containerPort": HEALTH}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 1},
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
    }  # fmt: skip
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": LABELS},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": LABELS}, "spec": {
                "containers": [container], "nodeSelector": {"kubernetes.io/hostname": node},
                "terminationGracePeriodSeconds": PRE_STOP_S + grace_s + 10,
            }},
        },
    }  # fmt: skip


class Front:
    """The gateways of one namespace, as seen by clients and operators."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._base = f"namespaces/{namespace}"
        self._ends: dict[str, list[str]] = {}
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def running(self, wanted: Object) -> AsyncIterator[Front]:
        """Creates a Deployment and its Service and waits until all of its pods are ready."""
        await self._api.create(f"/apis/apps/v1/{self._base}/deployments", wanted)
        await self._api.create(f"/api/v1/{self._base}/services", {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME},
            "spec": {"selector": LABELS, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
        })  # fmt: skip
        slices = Watched(
            self._api, f"/apis/discovery.k8s.io/v1/{self._base}/endpointslices", lambda found: found, self._heard,
            labelSelector=f"kubernetes.io/service-name={NAME}",
        )  # fmt: skip
        following = asyncio.create_task(slices.run())
        try:
            await self.until_ready(wanted["spec"]["replicas"])
            yield self
        finally:
            following.cancel()

    def _heard(self, changes: Sequence[Change[Object]]) -> None:
        for key, _, new in changes:
            ends = (new or {}).get("endpoints") or []
            self._ends[key.name] = [end["addresses"][0] for end in ends if end["conditions"].get("ready")]
        self._changed.set()

    @property
    def ready(self) -> list[str]:
        """Addresses to which a Service would route now."""
        return sorted(address for ends in self._ends.values() for address in ends)

    async def until_ready(self, number: int) -> None:
        """Waits until that many addresses are ready."""
        async with asyncio.timeout(WAIT_S_MAX):
            while len(self.ready) != number:
                self._changed.clear()
                await self._changed.wait()

    async def pods(self) -> dict[str, str]:
        """Name -> address of the pods that are not being deleted."""
        found = await self._api.get(f"/api/v1/{self._base}/pods", labelSelector="app.kubernetes.io/component=gateway")
        return {
            one["metadata"]["name"]: one["status"].get("podIP", "")
            for one in found["items"] if "deletionTimestamp" not in one["metadata"]
        }  # fmt: skip

    async def update(self) -> None:
        """Starts a rolling update of all pods."""
        changed = {"spec": {"template": {"metadata": {"annotations": {"changed": "yes"}}}}}
        await self._api.patch(f"/apis/apps/v1/{self._base}/deployments/{NAME}", changed, STRATEGIC)

    async def updated(self, before: set[str], number: int) -> None:
        """Waits until all pods in `before` are gone, terminating ones included, and `number` new ones are ready."""
        path = f"/api/v1/{self._base}/pods"
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                found = await self._api.get(path, labelSelector="app.kubernetes.io/component=gateway")
                names = {one["metadata"]["name"] for one in found["items"]}
                if not names & before and len(self.ready) == number:
                    return
                await asyncio.sleep(0.05)

    async def send(self, *shots: Shot, to: str = "") -> list[Result]:
        """Sends requests through ready gateways, or through the one at the address `to`."""
        return await Client(f"http://{to or random.choice(self.ready)}:{PORT}").run(shots)
