"""A Pilotlight on the cluster environment: autoscalers with the Kubernetes driver and one gateway, as local processes.

Each autoscaler has its own contract socket, and the gateway follows all of them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench import kit
from bench.clusterbed import Bed
from bench.documents import Document, text
from bench.kit import HOST

LEASE = "bench"


class Scaler:
    """One autoscaler process. It can be stopped and started again."""

    def __init__(self, name: str, words: Sequence[str], log: Path) -> None:
        self.name = name
        self.words = words
        self.log = log
        self.process: subprocess.Popen[bytes]
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Start the process."""
        self.process = self._stack.enter_context(kit.running(self.words, self.log))

    def stop(self) -> None:
        """Send SIGTERM if the process runs, and wait for its exit."""
        self._stack.close()


class House:
    """The running processes."""

    def __init__(
        self, url: str, operations: Sequence[str], scalers: Sequence[Scaler], gateway: subprocess.Popen[bytes]
    ) -> None:
        self.url = url
        self.gateway = gateway
        self.operations = operations
        self.scalers = scalers


@asynccontextmanager
async def house(
    bed: Bed, place: Path, documents: Sequence[Document], *, scalers: int = 1, words: Sequence[str] = ()
) -> AsyncIterator[House]:
    """Start an installation of Pilotlight and wait until its gateway responds.

    Documents are files, in addition to objects of the API server. `words` override options of the autoscaler, because
    the last of two equal options is used.
    """
    more = words
    place.mkdir(parents=True)
    (place / "documents.yaml").write_text(text(documents))
    made, sockets, operations = list[Scaler](), list[Path](), list[str]()
    for number in range(scalers):
        name, ops = f"autoscaler-{number}", kit.free_port()
        sockets.append(place / f"{name}.sock")
        operations.append(f"http://{HOST}:{ops}")
        words = [sys.executable, "-Pm", "pilotlight", "autoscaler", "--driver", "kubernetes"]
        words += ["--kubeconfig", str(bed.plane.kubeconfig), "--namespace", bed.namespace]
        words += ["--lease", LEASE, "--identity", name, "--documents", str(place / "documents.yaml")]
        words += ["--contract-socket", str(sockets[-1]), "--ops", f"{HOST}:{ops}", "--state", str(place / name), *more]
        made.append(Scaler(name, words, place / f"{name}.log"))
    listen = kit.free_port()
    words = [sys.executable, "-Pm", "pilotlight", "gateway", "--id", "gateway-1", "--listen", f"{HOST}:{listen}"]
    words += ["--ops", f"{HOST}:{kit.free_port()}", "--grace", "1"]
    words += [word for path in sockets for word in ("--autoscaler", f"unix:{path}")]
    try:
        for one in made:
            one.start()
        with kit.running(words, place / "gateway.log") as gateway:
            url = f"http://{HOST}:{listen}"
            await kit.answers(f"{url}/v1/models", gateway, place / "gateway.log")
            yield House(url, operations, made, gateway)
    finally:
        for one in made:
            one.stop()


async def ready(house: House) -> None:
    """Wait until each running autoscaler responds."""
    for url, one in zip(house.operations, house.scalers, strict=True):
        await kit.answers(f"{url}/readyz", one.process, one.log)
