"""Several autoscalers and gateways as processes, and what tests observe: the leader, and all pods ever created."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from signal import SIGCONT, SIGTERM

import aiohttp
import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from tests.integration.cluster.support.clients.gateway_requests import Answered, chat, lists_models
from tests.integration.cluster.support.control_plane.components import free_ports
from tests.integration.cluster.support.control_plane.custom_resources import API_VERSION
from tests.integration.cluster.support.installations import single_instance
from tests.support.harness.faults.sigstop import deliver

WAIT_S_MAX = 120.0
LEASE_S = 5
"""Requests about the Lease time out after a fifth of it. If shorter, leaders change whenever the machine is busy."""
SETTINGS: dict[str, object] = {
    "apiVersion": API_VERSION, "kind": "Settings", "leaseSeconds": LEASE_S, "auth": "none",
}  # fmt: skip


def model(name: str, **spec: object) -> dict[str, object]:
    """Builds a Model that uses the fake engine and does not scale to zero."""
    return single_instance.model(name, **{"idleSeconds": 600, **spec})


class Estate:
    """Autoscalers a1, a2 ... and gateways g1, g2 ... of one namespace. `stop` terminates one process."""

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, api: Api) -> None:
        self.namespace = namespace
        self.api = api
        self._folder = folder
        self._kubeconfig = kubeconfig
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._ports: dict[str, tuple[int, int]] = {}
        self._autoscalers: list[str] = []
        self.session: aiohttp.ClientSession
        self.settings = SETTINGS
        self.module = "pilotlight"
        """The module that the processes run."""
        self.skews_s: dict[str, float] = {}
        """Process -> the offset of its clock in seconds."""
        self.trees: dict[str, Path] = {}
        """Process -> the source tree of another version."""
        self.pods_made = set[str]()
        """Names of all pods that we ever created."""
        self._pods: Watched[ObjectKey]

    @asynccontextmanager
    async def open(
        self, *documents: dict[str, object], autoscalers: int = 2, gateways: int = 1
    ) -> AsyncIterator[Estate]:
        """Starts all processes, yields when the gateways answer, and deletes everything at the end."""
        self.write(*documents)
        self._autoscalers = [f"a{n + 1}" for n in range(autoscalers)]
        names = [*self._autoscalers, *(f"g{n + 1}" for n in range(gateways))]
        numbers = free_ports(2 * len(names))
        self._ports = {name: (numbers[2 * n], numbers[2 * n + 1]) for n, name in enumerate(names)}
        async with AsyncExitStack() as stack:
            self.session = await stack.enter_async_context(aiohttp.ClientSession())
            stack.push_async_callback(self._end)
            watching = asyncio.create_task(self._watch_pods())
            stack.callback(watching.cancel)
            for name in names:
                await self.start(name)
            for name in names[autoscalers:]:
                await self.until(lambda name=name: self.answers(name))  # type: ignore[misc]  # bound now
            yield self
        single_instance.check_logs(self._folder / f"{name}.log" for name in self._autoscalers)

    def write(self, *documents: dict[str, object], **more: object) -> None:
        """Writes the documents; `more` goes into the Settings. Processes reload them on SIGHUP."""
        (self._folder / "documents.yaml").write_text(yaml.safe_dump_all([{**self.settings, **more}, *documents]))

    async def start(self, name: str) -> None:
        """Starts or restarts one process."""
        words = self._autoscaler(name) if name in self._autoscalers else self._gateway(name)
        module = (
            ("tests.integration.cluster.support.entry_points.clock_skew", str(self.skews_s[name]))
            if name in self.skews_s
            else (self.module,)
        )
        with (self._folder / f"{name}.log").open("ab") as output:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *module, *words, stdout=output, stderr=output, env=dict(os.environ),
                cwd=self.trees.get(name),
            )  # fmt: skip

    def _autoscaler(self, name: str) -> list[str]:
        return [
            "autoscaler", "--driver", "kubernetes", "--kubeconfig", str(self._kubeconfig),
            "--namespace", self.namespace, "--documents", str(self._folder / "documents.yaml"),
            "--identity", name, "--contract-socket", str(self._folder / f"{name}.sock"),
            "--ops", f"127.0.0.1:{self._ports[name][1]}", "--state", str(self._folder / f"{name}.state"),
        ]  # fmt: skip

    def _gateway(self, name: str) -> list[str]:
        listen, ops = self._ports[name]
        followed = [word for one in self._autoscalers for word in ("--autoscaler", f"unix:{self._folder}/{one}.sock")]
        return [
            "gateway", "--id", name, *followed, "--listen", f"127.0.0.1:{listen}", "--ops", f"127.0.0.1:{ops}",
            "--state", str(self._folder),
        ]  # fmt: skip

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to one process; returns when a SIGSTOP has taken effect."""
        deliver(self.processes[name].pid, number)

    async def stop(self, name: str, number: int = SIGTERM) -> None:
        """Terminates one process and waits until it has exited."""
        process = self.processes.pop(name)
        if process.returncode is None:
            process.send_signal(SIGCONT)
            process.send_signal(number)
        await asyncio.wait_for(process.wait(), WAIT_S_MAX)

    async def _end(self) -> None:
        for name in list(self.processes):
            await self.stop(name)

    # --- observed state -----------------------------------------------------------------------------------------------

    async def lease(self) -> Object:
        """The spec of the Lease; empty if there is none."""
        try:
            lease = await self.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/pilotlight")
        except ApiError:
            return {}
        spec: Object = lease["spec"]
        return spec

    async def holder(self) -> str:
        """The holder of the Lease; empty if there is none."""
        return str((await self.lease()).get("holderIdentity", "")).partition("_")[0]

    async def leader(self, *others: str) -> str:
        """Waits until a process not in `others` holds the Lease, and returns its name."""
        async with asyncio.timeout(WAIT_S_MAX):
            while (found := await self.holder()) in ("", *others):
                await asyncio.sleep(0.02)
            return found

    async def leading(self) -> str:
        """Waits until the holder of the Lease reports itself as leader, and returns its name."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not await self.leads(found := await self.leader()):
                await asyncio.sleep(0.02)
            return found

    async def somebody_leads(self) -> bool:
        """Whether an autoscaler reports itself as leader, whatever an old Lease contains."""
        return any([await self.leads(name) for name in self._autoscalers])

    async def leads(self, name: str) -> bool:
        """Whether the process reports itself as leader. One that does not accept connections yet does not."""
        url = f"http://127.0.0.1:{self._ports[name][1]}/metrics"
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=60)) as answer:
                return "pilotlight_leader 1.0" in await answer.text()
        except aiohttp.ClientError:
            return False

    async def listed(self, name: str) -> bool:
        """Whether an autoscaler has listed all objects; only then does it take part in leader election."""
        try:
            async with self.session.get(f"http://127.0.0.1:{self._ports[name][1]}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def answers(self, name: str) -> bool:
        """Whether a gateway has received the list of models."""
        return await lists_models(self.session, self.url(name))

    def socket(self, autoscaler: str) -> Path:
        """The Unix socket on which the autoscaler accepts reports."""
        return self._folder / f"{autoscaler}.sock"

    def url(self, gateway: str) -> str:
        """The URL of the gateway's inference port."""
        return f"http://127.0.0.1:{self._ports[gateway][0]}"

    async def read_ops(self, name: str, path: str) -> str:
        """Returns the response of a process's operations port to a GET."""
        async with self.session.get(f"http://127.0.0.1:{self._ports[name][1]}{path}") as answer:
            assert answer.status == 200
            return await answer.text()

    async def counts(self, name: str, autoscaler: str = "a1") -> tuple[dict[str, int], dict[str, int]]:
        """Returns a model's replicas by state and its requests (waiting and running)."""
        row = json.loads(await self.read_ops(autoscaler, f"/api/v1/models/{name}"))
        return row["replicas"], row["demand"]

    async def counted(self, name: str, metric: str, *labels: str) -> float:
        """The sum of a metric's series that have all these labels (`reason="connect"`)."""
        rows = re.findall(rf"^{metric}(?:\{{(.*)\}})? (\S+)$", await self.read_ops(name, "/metrics"), re.MULTILINE)
        return sum(float(value) for found, value in rows if all(label in found for label in labels))

    async def until(self, what: Callable[[], Awaitable[bool]]) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not await what():
                self._all_live()
                await asyncio.sleep(0.02)

    def _all_live(self) -> None:
        for name, process in self.processes.items():
            output = (self._folder / f"{name}.log").read_text()[-2000:]
            assert process.returncode is None, f"{name} ended with {process.returncode}: {output}"

    async def call(self, name: str, gateway: str = "g1", **headers: str) -> Answered:
        """Sends one chat completion; status 0: the connection failed."""
        try:
            return await chat(self.session, self.url(gateway), name, headers)
        except aiohttp.ClientError as error:
            return Answered(0, type(error).__name__)

    @asynccontextmanager
    async def calling(self, name: str, *gateways: str) -> AsyncIterator[list[Answered]]:
        """Meanwhile sends requests one after another through each gateway; yields the list of responses so far."""
        answers, over = list[Answered](), asyncio.Event()

        async def call_on(gateway: str) -> None:
            while not over.is_set():
                answers.append(await self.call(name, gateway))
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for gateway in gateways:
                tasks.create_task(call_on(gateway))
            try:
                yield answers
            finally:
                over.set()

    def made(self, name: str) -> int:
        """The number of pods ever created for a model."""
        return sum(pod.startswith(f"{name}-") for pod in self.pods_made)

    async def refresh_pods(self) -> None:
        """Returns when all existing pods are in `pods_made`: after an outage the watch reconnects with a delay."""
        await self._pods.refresh()

    async def _watch_pods(self) -> None:
        def note(changes: list[Change[ObjectKey]]) -> None:
            self.pods_made.update(change.key.name for change in changes if change.new is not None)

        path = f"/api/v1/namespaces/{self.namespace}/pods"
        self._pods = Watched(
            self.api, path, lambda pod: ObjectKey("", pod["metadata"]["name"]), note,
            labelSelector="app.kubernetes.io/managed-by=pilotlight",
        )  # fmt: skip
        await self._pods.run()
