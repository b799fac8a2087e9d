"""Several autoscalers and gateways as processes, and what a test sees of them: who leads, which pods were ever made."""

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
from tests.cluster import house
from tests.cluster.calls import Answered, chat, lists_models
from tests.cluster.definitions import API_VERSION
from tests.cluster.plane import free_ports
from tests.kit.freezing import deliver

WAIT_S_MAX = 120.0
LEASE_S = 5
"""A request about it has a fifth of that: shorter, and leaders change whenever the machine is busy."""
SETTINGS: dict[str, object] = {
    "apiVersion": API_VERSION, "kind": "Settings", "leaseSeconds": LEASE_S, "auth": "none",
}  # fmt: skip


def model(name: str, **spec: object) -> dict[str, object]:
    """A Model whose engine is the fake one; it stays once it runs."""
    return house.model(name, **{"idleSeconds": 600, **spec})


class Estate:
    """Autoscalers a1, a2 ... and gateways g1, g2 ... of one namespace. Each process is ended by its `stop`."""

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
        """What their processes run."""
        self.skews_s: dict[str, float] = {}
        """How far the clocks of some processes are off."""
        self.trees: dict[str, Path] = {}
        """Where other versions of some processes are."""
        self.pods_made = set[str]()
        """Names of all pods of ours that ever were."""

    @asynccontextmanager
    async def open(
        self, *documents: dict[str, object], autoscalers: int = 2, gateways: int = 1
    ) -> AsyncIterator[Estate]:
        """All of them, until the gateways answer; nothing of it is left at the end."""
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
        house.check_logs(self._folder / f"{name}.log" for name in self._autoscalers)

    def write(self, *documents: dict[str, object], **more: object) -> None:
        """The documents, and `more` of the Settings; who runs reads them again at a SIGHUP."""
        (self._folder / "documents.yaml").write_text(yaml.safe_dump_all([{**self.settings, **more}, *documents]))

    async def start(self, name: str) -> None:
        """One process (again)."""
        words = self._autoscaler(name) if name in self._autoscalers else self._gateway(name)
        module = ("tests.cluster.skewed", str(self.skews_s[name])) if name in self.skews_s else (self.module,)
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
        """To one process; SIGSTOP has taken effect then."""
        deliver(self.processes[name].pid, number)

    async def stop(self, name: str, number: int = SIGTERM) -> None:
        """Ends one process and waits for that."""
        process = self.processes.pop(name)
        if process.returncode is None:
            process.send_signal(SIGCONT)
            process.send_signal(number)
        await asyncio.wait_for(process.wait(), WAIT_S_MAX)

    async def _end(self) -> None:
        for name in list(self.processes):
            await self.stop(name)

    # --- what is seen -------------------------------------------------------------------------------------------------

    async def lease(self) -> Object:
        """What the Lease says; empty: there is none."""
        try:
            lease = await self.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/pilotlight")
        except ApiError:
            return {}
        spec: Object = lease["spec"]
        return spec

    async def holder(self) -> str:
        """Who holds the Lease; empty: nobody."""
        return str((await self.lease()).get("holderIdentity", "")).partition("_")[0]

    async def leader(self, *others: str) -> str:
        """Waits until somebody beside `others` holds the Lease, and says who."""
        async with asyncio.timeout(WAIT_S_MAX):
            while (found := await self.holder()) in ("", *others):
                await asyncio.sleep(0.02)
            return found

    async def somebody_leads(self) -> bool:
        """Whether one says so itself, whatever an old Lease says."""
        return any([await self.leads(name) for name in self._autoscalers])

    async def leads(self, name: str) -> bool:
        """Whether the process itself says that it leads."""
        url = f"http://127.0.0.1:{self._ports[name][1]}/metrics"
        async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=60)) as answer:
            return "pilotlight_leader 1.0" in await answer.text()

    async def listed(self, name: str) -> bool:
        """Whether an autoscaler knows all that exists: from then on it stands for election."""
        try:
            async with self.session.get(f"http://127.0.0.1:{self._ports[name][1]}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def answers(self, name: str) -> bool:
        """Whether a gateway knows what there is."""
        return await lists_models(self.session, self.url(name))

    def socket(self, autoscaler: str) -> Path:
        """Where it takes reports."""
        return self._folder / f"{autoscaler}.sock"

    def url(self, gateway: str) -> str:
        """Its inference port."""
        return f"http://127.0.0.1:{self._ports[gateway][0]}"

    async def said(self, name: str, path: str) -> str:
        """What its operations port answers."""
        async with self.session.get(f"http://127.0.0.1:{self._ports[name][1]}{path}") as answer:
            assert answer.status == 200
            return await answer.text()

    async def counts(self, name: str, autoscaler: str = "a1") -> tuple[dict[str, int], dict[str, int]]:
        """Of a Model: Replicas by state, and Calls waiting and running."""
        row = json.loads(await self.said(autoscaler, f"/api/v1/models/{name}"))
        return row["replicas"], row["demand"]

    async def counted(self, name: str, metric: str, *labels: str) -> float:
        """The sum of a metric's series that have all these labels (`reason="connect"`)."""
        rows = re.findall(rf"^{metric}(?:\{{(.*)\}})? (\S+)$", await self.said(name, "/metrics"), re.MULTILINE)
        return sum(float(value) for found, value in rows if all(label in found for label in labels))

    async def until(self, what: Callable[[], Awaitable[bool]]) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not await what():
                self._all_live()
                await asyncio.sleep(0.02)

    def _all_live(self) -> None:
        for name, process in self.processes.items():
            said = (self._folder / f"{name}.log").read_text()[-2000:]
            assert process.returncode is None, f"{name} ended with {process.returncode}: {said}"

    async def call(self, name: str, gateway: str = "g1", **headers: str) -> Answered:
        """One chat completion; status 0: nobody took it."""
        try:
            return await chat(self.session, self.url(gateway), name, headers)
        except aiohttp.ClientError as error:
            return Answered(0, type(error).__name__)

    @asynccontextmanager
    async def calling(self, name: str, *gateways: str) -> AsyncIterator[list[Answered]]:
        """Meanwhile Calls go on, one after another through each gateway; all that they heard so far."""
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
        """Pods of a Model that were ever made."""
        return sum(pod.startswith(f"{name}-") for pod in self.pods_made)

    async def _watch_pods(self) -> None:
        def note(changes: list[Change[ObjectKey]]) -> None:
            self.pods_made.update(change.key.name for change in changes if change.new is not None)

        path = f"/api/v1/namespaces/{self.namespace}/pods"
        await Watched(
            self.api, path, lambda pod: ObjectKey("", pod["metadata"]["name"]), note,
            labelSelector="app.kubernetes.io/managed-by=pilotlight",
        ).run()  # fmt: skip
