"""The documents of one autoscaler as custom resources on a simulated API server, with everything that reads and writes
them: watches, merge, sizes, statuses and Events, composed as in `pilotlight.processes.cluster`.
"""

from __future__ import annotations

import asyncio

from autoscaler.contract import ModelName
from autoscaler.controller.loop import Loop
from autoscaler.documents.render import to_plain_value
from autoscaler.drivers import probes
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.resources.kubeai_watcher import API_VERSION as KUBEAI
from autoscaler.spec.model import ModelSpec
from autoscaler.spec.pod import API_VERSION
from autoscaler.state.events import DocumentsSeen
from autoscaler.state.world import World
from pilotlight.processes.cluster import ClusterOptions
from pilotlight.processes.cluster_documents import Resources
from tests.simulation.environment.api_server import Server, SimApi

NAMESPACE = "town"
MODELS, KUBEAI_MODELS = (f"/apis/{version}/namespaces/{NAMESPACE}/models" for version in (API_VERSION, KUBEAI))
NO_FILES = DocumentsSeen()
OPTIONS = ClusterOptions(namespace=NAMESPACE, adopt_in=(), watch_kubeai=True)


class ModelObjects:
    """The Model objects of a namespace."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def put(self, name: str, spec: ModelSpec | Object, collection: str = MODELS) -> None:
        """Create an object, or change its spec."""
        before = self.server.objects.get(collection, {}).get(name)
        old: Object = {"uid": f"uid-{name}", "generation": 0} if before is None else before["metadata"]
        found = {
            "apiVersion": API_VERSION if collection == MODELS else KUBEAI, "kind": "Model",
            "metadata": {
                **old, "name": name, "namespace": NAMESPACE, "generation": old["generation"] + 1,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": to_plain_value(spec), "status": {} if before is None else before["status"],
        }  # fmt: skip
        self.server.put(collection, found, "ADDED" if before is None else "MODIFIED")

    def spec(self, name: str) -> Object:
        """The spec of an object."""
        found: Object = self.server.objects[MODELS][name]["spec"]
        return found

    def delete(self, name: str) -> None:
        """Delete an object."""
        self.server.put(MODELS, self.server.objects[MODELS][name], "DELETED")

    def conditions(self, name: str) -> dict[str, str]:
        """The status of each condition of an object, by type."""
        status = self.server.objects[MODELS][name]["status"]
        return {one["type"]: one["status"] for one in status.get("conditions", ())}

    def observed_generation(self, name: str) -> tuple[int, int]:
        """The generation in the status of an object, and its generation."""
        found = self.server.objects[MODELS][name]
        return found["status"].get("observedGeneration", 0), found["metadata"]["generation"]


class DocumentTasks:
    """The tasks of one autoscaler that read the objects and write their statuses. Create it before the loop runs."""

    def __init__(self, server: Server, loop: Loop, who: str, files: DocumentsSeen = NO_FILES) -> None:
        """`files`: the documents of files, which contain the Tenants."""
        clock = asyncio.get_running_loop().time
        self._apis = SimApi(server, who), SimApi(server, who)
        self._resources = Resources(OPTIONS, *self._apis, reporter=who, clock=clock, pace=probes.Pace(clock))
        self._resources.join(loop)
        self._resources.put_files(files)
        self.observed = self._resources.observed
        """Set once all documents have been observed."""

    def unreadable(self) -> list[str]:
        """The objects that cannot be read."""
        return [f"{one.kind} {one.name} is unreadable: {one.reason}" for api in self._apis for one in api.unreadable]

    async def run(self) -> None:
        """Read and write until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._resources.run())
            tasks.create_task(self._resources.adopted.run(lambda _: None))


def faults(world: World) -> dict[ModelName, int]:
    """Model -> number of its quarantines in a row, of those quarantined now."""
    return {name: one.times for name, one in world.learned.faults.items() if one.until_s}
