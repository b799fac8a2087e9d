"""llama-swap as a peer: the binary on the PATH or in LLAMA_SWAP, on loopback, with its defaults.

If it is not installed, its figure is null.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from bench import kit
from bench.documents import Document

MISSING = "llama-swap is not measured: it is not on the PATH, and LLAMA_SWAP names no binary"


class Swap:
    """A running llama-swap."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def unload(self) -> None:
        """Stop all engines of llama-swap and wait until it reports none."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            async with session.get(f"{self.url}/unload") as answer:
                answer.raise_for_status()
            while True:
                async with session.get(f"{self.url}/running") as answer:
                    if not json.loads(await answer.text()).get("running"):
                        return
                await asyncio.sleep(0.02)


def binary() -> str | None:
    """Return the program, if installed."""
    return os.environ.get("LLAMA_SWAP") or shutil.which("llama-swap")


@contextlib.asynccontextmanager
async def serving(place: Path, program: str, documents: Sequence[Document]) -> AsyncIterator[Swap]:
    """Run llama-swap with the same Models, started exactly as Pilotlight starts them."""
    place.mkdir(parents=True)
    models = {}
    for document in documents:
        model, port = kit.model_of(document), kit.free_port()
        command = shlex.join(kit.launch_of(model, port).argv)
        models[model.name] = {"cmd": command, "proxy": f"http://{kit.HOST}:{port}", "checkEndpoint": "/health"}
    config = place / "config.yaml"
    config.write_text(json.dumps({"logLevel": "warn", "models": models}))
    url = f"http://{kit.HOST}:{kit.free_port()}"
    with kit.running(
        [program, "--config", str(config), "--listen", url.removeprefix("http://")], place / "log"
    ) as process:
        await kit.answers(f"{url}/v1/models", process, place / "log")
        yield Swap(url)
