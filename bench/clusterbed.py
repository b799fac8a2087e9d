"""The environment of the cluster benchmarks: a real control plane, its audit log, and a node with processes as pods.

Events at the API server, with their time and client, are read from the server's own audit log (one line per request,
microseconds), which does not depend on the measured programs. The node is a separate process, so that the load and the
kubelet do not wait for each other. Pods need addresses, so run it in a network namespace
(`python -m tests.integration.network_namespace`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.kubernetes.kubeconfig import load_api_access
from bench import kit
from bench.kit import BenchError
from tests.integration import network_namespace
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane.components import Plane, PlaneError
from tests.integration.cluster.support.programs.build import TESTPLANE
from tests.support.go_programs import BuildError, build

AGENT = "pilotlight"
"""The prefix of the User-Agent of Pilotlight's requests."""
_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {level: None, users: ["system:kube-scheduler", "system:kube-controller-manager"]}
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: Metadata}
"""


class Asked(NamedTuple):
    """One request, as the API server logged it."""

    agent: str
    verb: str
    what: str
    """The resource with its subresource: `pods`, `deployments/scale`, `leases`."""
    name: str
    code: int
    received_unix_s: float
    done_unix_s: float


class Bed:
    """A running environment. `node` is the name of its node, and the value of the label `test` of that node."""

    def __init__(self, api: Api, plane: Plane, namespace: str, node: str) -> None:
        self.api = api
        self.plane = plane
        self.namespace = namespace
        self.node = node
        self._audit = plane.folder / "audit.log"

    def asked(self, since_unix_s: float = 0.0) -> Iterator[Asked]:
        """Yield all requests received since `since_unix_s`, in the order in which they ended."""
        for line in self._audit.read_text().splitlines():
            entry = json.loads(line)
            received_unix_s = _unix_s(entry["requestReceivedTimestamp"])
            if received_unix_s < since_unix_s or "objectRef" not in entry:
                continue
            what = entry["objectRef"]
            yield Asked(
                entry.get("userAgent", ""), entry["verb"], "/".join(filter(None, (what.get("resource"),
                what.get("subresource")))), what.get("name", ""), entry.get("responseStatus", {}).get("code", 0),
                received_unix_s, _unix_s(entry["stageTimestamp"]),
            )  # fmt: skip

    def ours(self, since_unix_s: float) -> list[Asked]:
        """Return the product's requests received since `since_unix_s`, except for leader election and long watches."""
        return [
            one
            for one in self.asked(since_unix_s)
            if one.agent.startswith(AGENT) and one.verb != "watch" and one.what != "leases"
        ]

    async def pods(self) -> list[dict[str, object]]:
        """Return the pods of the namespace."""
        return list((await self.api.get(f"/api/v1/namespaces/{self.namespace}/pods"))["items"])


@asynccontextmanager
async def bed(place: Path, *, gpus: int = 64) -> AsyncIterator[Bed]:
    """Run an environment; BenchError if the machine does not support it. GPUs stay in use for 30 s after a pod ends."""
    if not network_namespace.entered():
        raise BenchError("pods need a network of their own: run it as `make bench-cluster` does")
    policy = place / "policy.yaml"
    policy.write_text(_POLICY)
    try:
        plane = Plane(
            place / "plane", build(TESTPLANE),
            {"kube-apiserver": [f"--audit-policy-file={policy}", f"--audit-log-path={place}/plane/audit.log"]},
        )  # fmt: skip
        (place / "plane").mkdir()
        plane.start()
    except (BuildError, PlaneError) as error:
        raise BenchError(f"no control plane: {error}") from None
    try:
        async with Api(await load_api_access(plane.kubeconfig), agent="bench") as api:
            namespace, node = "bench", f"node-{uuid.uuid4().hex[:6]}"
            await make_namespace(api, namespace)
            with _node(place, plane, node, gpus):
                await schedulable(api, node)
                yield Bed(api, plane, namespace, node)
    finally:
        plane.stop()


@contextmanager
def _node(place: Path, plane: Plane, name: str, gpus: int) -> Iterator[None]:
    """Run the kubelet as a process."""
    logs = place / "pods"
    logs.mkdir()
    command = [sys.executable, "-Pm", "bench.clusternode", str(plane.kubeconfig), name, str(gpus), str(logs)]
    with kit.running(command, place / "node.log", dict(os.environ)):
        yield


async def schedulable(api: Api, name: str) -> None:
    """Wait until the controllers allow pods on the node."""
    deadline_s = time.monotonic() + kit.START_S_MAX
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ApiError):
            node = await api.get(f"/api/v1/nodes/{name}")
            if node.get("status", {}).get("allocatable") and not node["spec"].get("taints"):
                return
        await asyncio.sleep(0.05)
    raise BenchError(f"node {name} still accepts no pods after {kit.START_S_MAX:.0f} s")


def _unix_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
