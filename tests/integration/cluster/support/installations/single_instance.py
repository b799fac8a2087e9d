"""One autoscaler and one gateway as processes (`multi_instance` runs several), and Models that use the fake engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import yaml

from autoscaler.kubernetes.resources.document_merge import UNKNOWN
from tests.integration.cluster.support.clients.gateway_requests import chat, lists_models
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.components import free_ports
from tests.integration.cluster.support.control_plane.custom_resources import API_VERSION
from tests.support.fakes.engines.fake_engine_process import command

WAIT_S_MAX = 180.0


@asynccontextmanager
async def process(log: Path, *words: str, module: str = "pilotlight") -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `pilotlight WORDS` and terminates it at the end of the context."""
    with log.open("wb") as output:
        one = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *words, stdout=output, stderr=output, env=dict(os.environ)
        )
    try:
        yield one
    finally:
        if one.returncode is None:
            one.terminate()
        await asyncio.wait_for(one.wait(), WAIT_S_MAX)


def check_logs(logs: Iterable[Path]) -> None:
    """Fails if an autoscaler logged a contained exception: no test injects one into a process.

    A Model of a namespace whose Lease cannot be read is also quarantined, but not by an exception.
    """
    unknown_holder = UNKNOWN.partition("{}")[0]
    for log in logs:
        faults = [
            line
            for line in log.read_text().splitlines()
            if re.search("event=(model_faulty|degraded)", line) and unknown_holder not in line
        ]
        assert not faults, f"a contained exception that no test injected: {faults[0]}"


class House:
    """One autoscaler and one gateway as processes, and their documents."""

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, *words: str) -> None:
        self._folder, self.kubeconfig = folder, kubeconfig
        self._words = ("--driver", "kubernetes", "--kubeconfig", str(kubeconfig), "--namespace", namespace, *words)
        self.listen, self.ops, self._gateway_ops = free_ports(3)
        self.url = f"http://127.0.0.1:{self.listen}"
        self.module = "pilotlight"
        """The module that runs the autoscaler."""
        self._stack: AsyncExitStack

    def tell(self, *documents: dict[str, object], **more: object) -> None:
        """Replaces the documents and makes the running processes reload them."""
        self.write(*documents, **more)
        self.autoscaler.send_signal(signal.SIGHUP)

    def write(self, *documents: dict[str, object], **more: object) -> None:
        """Writes the documents; `more` goes into the Settings."""
        settings = {"apiVersion": API_VERSION, "kind": "Settings", "auth": "none", **more}
        (self._folder / "documents.yaml").write_text(yaml.safe_dump_all([settings, *documents]))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[House]:
        """Starts both processes and yields when the gateway answers."""
        folder, socket = self._folder, str(self._folder / "contract.sock")
        async with AsyncExitStack() as stack:
            self._stack = stack
            await self._start(folder / "autoscaler.log")
            await stack.enter_async_context(
                process(
                    folder / "gateway.log", "gateway", "--id", "g1", "--autoscaler", f"unix:{socket}",
                    "--listen", f"127.0.0.1:{self.listen}", "--ops", f"127.0.0.1:{self._gateway_ops}",
                )
            )  # fmt: skip
            async with aiohttp.ClientSession() as self.session, asyncio.timeout(WAIT_S_MAX):
                while not await lists_models(self.session, self.url):
                    await asyncio.sleep(0.05)
            async with aiohttp.ClientSession() as self.session:
                yield self
        check_logs(folder.glob("autoscaler*.log"))

    async def _start(self, log: Path) -> None:
        folder = self._folder
        scaler = ("autoscaler", *self._words, "--documents", str(folder / "documents.yaml"))
        self.autoscaler = await self._stack.enter_async_context(
            process(
                log, *scaler, "--contract-socket", str(folder / "contract.sock"),
                "--ops", f"127.0.0.1:{self.ops}", "--state", str(folder / "state"), module=self.module,
            )
        )  # fmt: skip

    async def autoscaler_anew(self, meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
        """Kills the autoscaler and starts another after `meanwhile`."""
        self.autoscaler.kill()
        await self.autoscaler.wait()
        if meanwhile is not None:
            await meanwhile()
        await self._start(self._folder / "autoscaler-anew.log")

    async def until_up(self) -> None:
        """Waits until the operations port of a restarted autoscaler responds: from then on it handles SIGHUP."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                try:
                    async with self.session.get(f"http://127.0.0.1:{self.ops}/api/v1/status"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)

    async def read_ops(self, path: str) -> str:
        """Returns the response of the autoscaler's operations port to a GET."""
        async with self.session.get(f"http://127.0.0.1:{self.ops}/api/v1/{path}") as answer:
            assert answer.status == 200
            return await answer.text()

    async def call(self, model: str) -> tuple[int, str]:
        """Sends one chat completion and returns (status, response text)."""
        answer = await chat(self.session, self.url, model)
        return answer.status, answer.text


def model(name: str, **spec: object) -> dict[str, object]:
    """Builds a Model that uses the fake engine."""
    words = command("--host", "{host}", "--port", "{port}", "--name", name)
    return custom_resources.model(name, **{"image": "fake-engine", "command": words, "gpu": {"memory": "1Gi"}, **spec})
