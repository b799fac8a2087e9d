"""A Pilotlight on the bed: autoscalers with the Kubernetes driver, and one gateway, as processes of this machine.

Owns the processes. Each autoscaler has a contract socket of its own, and the gateway follows all of them.
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
    """One autoscaler process. It may be ended and started again."""

    def __init__(self, name: str, words: Sequence[str], log: Path) -> None:
        self.name = name
        self.words = words
        self.log = log
        self.process: subprocess.Popen[bytes]
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Starts it."""
        self.process = self._stack.enter_context(kit.running(self.words, self.log))

    def stop(self) -> None:
        """SIGTERM if it runs, and gone."""
        self._stack.close()


class House:
    """What runs."""

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
    """Running, and the gateway answers. Documents are files: objects of the API server come on top. The last of two
    equal options counts: `words` change those of the autoscaler.
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
    """Until each autoscaler that runs answers."""
    for url, one in zip(house.operations, house.scalers, strict=True):
        await kit.answers(f"{url}/readyz", one.process, one.log)
