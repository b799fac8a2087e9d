"""Several installations on one API server, in virtual time.

Each has two autoscaler processes, composed as in the product (`pilotlight.processes.cluster.Cluster`). Simulated are
the API server (`tests.simulation.environment.api_server`), one node with its kubelet, and one gateway per installation,
which reports requests of every Model to all of its installation's processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from autoscaler.contract import GatewayId, Level, ModelName, Report, TenantName
from autoscaler.controller.loop import Loop
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.kubernetes.resources.model_conditions import ELSEWHERE
from autoscaler.spec.installation_ownership import INSTALLATION
from autoscaler.spec.pod import API_VERSION, OURS
from autoscaler.spec.settings import Settings
from autoscaler.state.events import DocumentsSeen, GatewaySeen, Reported
from pilotlight.processes.cluster import Cluster, ClusterOptions
from tests.simulation.environment.api_server import NODES, Server, SimApi
from tests.simulation.environment.process import Process

NODE = "node"
BIND_S, END_S = 0.5, 1.0
"""Delay from a pod to its running container, and from its deletion to its end."""
REPORT_S = 1.0
DEFAULT_SETTINGS = Settings()
MODELS = f"/apis/{API_VERSION}/namespaces/{{}}/models"


class Breach(NamedTuple):
    """A violated invariant."""

    at_s: float
    what: str


class SharedCluster:
    """One API server and one node. `breaches`: pods deleted by another installation, Models served twice."""

    def __init__(self, models: Mapping[str, str]) -> None:
        """`models`: namespace by name."""
        self.server = Server()
        self.server.on_pod = self._hears
        self.models = models
        self.breaches: list[Breach] = []
        self.made: dict[str, set[str]] = {}
        """The installations that created pods, by Model."""
        self._addresses = itertools.count(2)
        self.server.put(NODES, {
            "metadata": {"name": NODE, "uid": "node-uid"}, "spec": {},
            "status": {
                "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "200"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }, "ADDED")  # fmt: skip
        for name, namespace in models.items():
            self.server.put(MODELS.format(namespace), model(name, namespace), "ADDED")

    def pods(self) -> list[Object]:
        """Pods of all namespaces."""
        return [
            pod for collection, found in self.server.objects.items() if collection.endswith("/pods")
            for pod in found.values()
        ]  # fmt: skip

    def _hears(self, pod: Object, event: str) -> None:
        loop, labels = asyncio.get_running_loop(), pod["metadata"]["labels"]
        if event != "ADDED":
            who = self.server.asked[-1].who.partition(".")[0]
            if who != labels[INSTALLATION]:
                self._breach(f"{who} deletes a pod of {labels[INSTALLATION]}")
            loop.call_later(END_S, self._set, pod, "DELETED", {})
            return
        self.made.setdefault(labels[OURS + "model"], set()).add(labels[INSTALLATION])
        owners = {
            one["metadata"]["labels"][INSTALLATION] for one in self.pods()
            if one["metadata"]["labels"].get(OURS + "model") == labels[OURS + "model"]
        }  # fmt: skip
        if len(owners) > 1:
            self._breach(f"{labels[OURS + 'model']} is served by {sorted(owners)}")
        loop.call_later(BIND_S, self._starts, pod)

    def _starts(self, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        pod["spec"]["nodeName"] = NODE
        started = datetime.fromtimestamp(Server.unix_s(), UTC).isoformat()
        state = {"name": "engine", "state": {"running": {"startedAt": started}}, "ready": True}
        address = f"10.244.0.{next(self._addresses) % 250 + 2}"
        self._set(pod, "MODIFIED", {"phase": "Running", "podIP": address, "containerStatuses": [state]})

    def _set(self, pod: Object, event: str, status: Object) -> None:
        collection = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"
        found = self.server.objects[collection].get(pod["metadata"]["name"])
        if found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"]:
            self.server.put(collection, {**found, "status": {**found.get("status", {}), **status}}, event)

    def _breach(self, what: str) -> None:
        self.breaches.append(Breach(asyncio.get_running_loop().time(), what))

    def unlabelled(self) -> set[str]:
        """Collections in which an installation created an object without its label."""
        made = [one for one in self.server.asked if one.method == "POST" and not one.body["kind"].endswith("Review")]
        return {
            one.path for one in made
            if one.body["metadata"].get("labels", {}).get(INSTALLATION) != one.who.partition(".")[0]
        }  # fmt: skip

    def elsewhere(self) -> dict[str, list[str]]:
        """By Model, the messages of its conditions about the installations that do not serve it."""
        found = {name: self.server.objects[MODELS.format(at)][name]["status"] for name, at in self.models.items()}
        return {
            name: [one["message"] for one in status.get("conditions", ()) if one["type"] == ELSEWHERE]
            for name, status in found.items()
        }

    def status_writes(self, since_s: float) -> Counter[str]:
        """Requests that wrote the status of a Model, by its name."""
        written = (one.path.split("/") for one in self.server.asked if one.at_s >= since_s and one.method == "PATCH")
        return Counter(path[-2] for path in written if path[-1] == "status")


def model(name: str, namespace: str) -> Object:
    """A Model's custom resource: an engine that needs no GPU."""
    spec: Object = {
        "engine": "vllm", "artifact": "hf://org/name", "image": "vllm:1", "gpu": {"count": 0}, "idleSeconds": 60,
    }  # fmt: skip
    metadata = {
        "name": name, "namespace": namespace, "uid": f"model-{name}", "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": spec, "status": {}}


class Running:
    """One autoscaler process of an installation."""

    def __init__(self, cluster: SharedCluster, options: ClusterOptions, name: str, files: DocumentsSeen) -> None:
        self.process = Process()
        self.loop: Loop
        self.cluster = cluster
        self._options, self._name, self._files = options, name, files
        self.task = self.process.run(lambda: asyncio.create_task(self._live()))

    async def _live(self) -> None:
        clock, who = asyncio.get_running_loop().time, f"{self._options.installation}.{self._name}"
        server = self.cluster.server
        elector = Elector(SimApi(server, who), self._options.own_namespace, self._options.lease, who, clock)
        apis = SimApi(server, who, elector.writes_s), SimApi(server, who)
        part = Cluster(self._options, apis, elector, self._name, clock)
        self.loop = part.loop()
        part.put_files(self._files)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.loop.run())
            tasks.create_task(part.run())


class Installed:
    """One installation: processes that start and end, and the reports of its gateway."""

    def __init__(
        self, cluster: SharedCluster, options: ClusterOptions, processes: int = 2, settings: Settings = DEFAULT_SETTINGS
    ) -> None:
        self.options, self._files = options, DocumentsSeen(settings=settings)
        self.called: set[str] = set()
        """Models that have requests now."""
        self._cluster = cluster
        self._numbers, self._sequences = itertools.count(1), itertools.count(1)
        self.processes: list[Running] = []
        self._gone: list[Running] = []
        for _ in range(processes):
            self.start()
        self._reports = asyncio.create_task(self._report())

    def start(self) -> None:
        """Start one more process."""
        self.processes.append(Running(self._cluster, self.options, f"process-{next(self._numbers)}", self._files))

    def kill(self, number: int) -> None:
        """SIGKILL."""
        one = self.processes.pop(number)
        one.process.stop()
        self._gone.append(one)

    async def close(self) -> None:
        """End all tasks."""
        self._reports.cancel()
        for one in (*self.processes, *self._gone):
            await one.process.buried()

    async def _report(self) -> None:
        gateway = GatewayId("gateway-1")
        while True:
            levels = tuple(
                Level(model=ModelName(name), tenant=TenantName("default"), waiting=1, oldest_wait_s=1.0)
                for name in sorted(self.called)
            )
            report = Report(gateway=gateway, boot="boot", sequence=next(self._sequences), levels=levels)
            for one in self.processes:
                if one.process.runs and hasattr(one, "loop"):
                    now_s = asyncio.get_running_loop().time()
                    one.loop.observe([GatewaySeen(gateway=gateway), Reported(report=report, came_s=now_s)])
            await asyncio.sleep(REPORT_S)


def probe_of(cluster: SharedCluster) -> Callable[..., object]:
    """Replacement for `probes.probe_engine`: an engine answers while its pod runs."""

    async def probe(host: str, port: int, path: str, *, tls_name: str | None = None) -> bool | None:
        del port, path, tls_name
        await asyncio.sleep(0.001)
        return True if any(pod.get("status", {}).get("podIP") == host for pod in cluster.pods()) else None

    return probe
