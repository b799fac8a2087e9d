"""One autoscaler and several gateways, each with its own port: for benchmarks that must reach a certain gateway.

The gateways share a state directory and start in order. With `serve` all gateways share one port, and the kernel
selects a gateway for each connection.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench import kit
from bench.documents import Document, text


@contextlib.asynccontextmanager
async def fleet(
    place: Path,
    documents: Sequence[Document],
    gateways: int,
    *,
    core: int | None = None,
    runs: Sequence[str] = ("pilotlight",),
) -> AsyncIterator[kit.Serving]:
    """Run a fleet and wait until it is ready; `urls` of the result has the URL of each gateway.

    `runs`: the module of a gateway, and the words before its arguments. `core`: all processes run on this core.
    """
    place.mkdir(parents=True)
    (place / "documents.yaml").write_text(text(documents))
    contract, operations = place / "contract.sock", kit.free_port()
    python = [*kit.on_core(core), sys.executable, "-Pm"]
    scaler = [*python, "pilotlight", "autoscaler", "--driver", "local", "--documents", str(place / "documents.yaml")]
    scaler += ["--contract-socket", str(contract), "--ops", f"{kit.HOST}:{operations}", "--state", str(place / "state")]
    async with contextlib.AsyncExitStack() as stack:
        process = stack.enter_context(kit.running(scaler, place / "autoscaler.log"))
        await kit.answers(f"http://{kit.HOST}:{operations}/readyz", process, place / "autoscaler.log")
        urls = []
        for number in range(1, gateways + 1):
            listen, ops = kit.free_port(), kit.free_port()
            words = [*python, *runs, "gateway", "--autoscaler", f"unix:{contract}", "--id", f"gateway-{number}"]
            words += ["--listen", f"{kit.HOST}:{listen}", "--ops", f"{kit.HOST}:{ops}", "--grace", "1"]
            words += ["--events", str(place / f"gateway-{number}.calls.log")]
            stack.enter_context(kit.running(words, place / f"gateway-{number}.log"))
            urls.append(f"http://{kit.HOST}:{listen}")
        one = kit.Serving(urls, f"http://{kit.HOST}:{operations}", process, place / "autoscaler.log")
        stack.push_async_callback(one.close)
        await one.ready()
        yield one
