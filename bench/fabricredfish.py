"""A request that lacks a GPU, and a fabric that Redfish composes: the overhead in addition to the attach itself.

The part `attached` of `bench.fabric`. The service is the project's own emulator, with TLS, ETags and tasks. An attach
takes ATTACH_S, from the PATCH of the system's links until the block belongs to the system. The node then counts one GPU
more at once: the time of a device plug-in and a kubelet is not simulated. One round is one request for another Model,
which gets its GPU and is answered from it.

The overhead is exact: the time from the request until the API server has the pod that the plan placed on the GPU, less
the emulator's time from that PATCH to the attach. It contains these steps. The request is queued, the plan orders, a
free block is found and marked, and the links are written. Then the end of the task is detected, node and service report
the new GPU, and the plan places the replica on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.clusterbed import Bed, bed
from bench.clusterhouse import house, ready
from bench.clusterwake import called, engine
from bench.documents import Document, model, settings
from bench.kit import BenchError, Figures, quantile, say, spread, title
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.fakes.redfish import A100, BLOCKS, SYSTEMS, FakeFabric
from tests.support.net import certificates

GPU = "nvidia.com/gpu"
KEYS = (
    "patch_ms_p50", "patch_ms_p99", "link_ms_p99", "redfish_overhead_s", "redfish_overhead_s_p50",
    "redfish_overhead_s_max", "attaches",
)  # fmt: skip
NODES = 4
"""The number of nodes. Rounds use them in turn."""
ROUNDS, QUICK_ROUNDS = 40, 8
ATTACH_S = 1.0
SETTLE_S = 3.0
"""The time until the provider's offers are known."""


class Round(NamedTuple):
    """One request. Times are of the system clock."""

    sent_s: float
    marked_s: float
    """When the service had the first PATCH, which marks the block."""
    linked_s: float
    """When it had the PATCH of the system's links."""
    attached_s: float
    placed_s: float
    """When the API server had the pod."""

    @property
    def overhead_s(self) -> float:
        """Return the overhead as defined in the module's docstring."""
        return self.placed_s - self.sent_s - (self.attached_s - self.linked_s)


class Rack:
    """The emulator, and nodes that count the GPUs attached to their systems."""

    def __init__(self, one: Bed, place: Path, rounds: int) -> None:
        self.fabric = FakeFabric(
            systems=tuple(str(at) for at in range(NODES)), gpus=(A100,) * rounds, takes_s=ATTACH_S, login="none"
        )
        self.nodes = [
            Node(one.api, f"rack-{at}", at + 10, {GPU: "0"}, {"fabric": "bench"}, place) for at in range(NODES)
        ]
        self.attached_s: list[float] = []
        self._counts = [0] * NODES
        self._tasks: asyncio.TaskGroup
        self.fabric.changed = self._changed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rack]:
        """Run until the emulator responds and the nodes are ready."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.fabric.serving(certificates.sides().server))
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for node in self.nodes:
                await stack.enter_async_context(node.running())
            yield self

    def _changed(self) -> None:
        """Update the nodes after an operation."""
        self.attached_s.append(time.time())
        for at, node in enumerate(self.nodes):
            count = len(self.fabric.attached(str(at)))
            if count != self._counts[at]:
                self._counts[at] = count
                self._tasks.create_task(node.has({GPU: str(count)}))

    def settings(self, place: Path, rounds: int) -> Document:
        """Return Settings with the fabric."""
        authority = place / "ca.crt"
        authority.write_text(certificates.pem(certificates.OURS))
        kind = {"selector": {"fabric": "bench"}, "device": {"model": A100[0], "memory": "40Gi"}, "devicesMax": rounds}
        systems = {node.name: self.fabric.path(str(at)) for at, node in enumerate(self.nodes)}
        service = {"url": self.fabric.url, "systems": systems, "caFile": str(authority)}
        provider = {"name": "rack", "redfish": service, "expectedSeconds": ATTACH_S}
        return settings(devices=[], auth="none", nodes=[kind], capacity=[provider])


async def attached(place: Path, *, quick: bool) -> Figures:
    """Measure from the request to the first PATCH, and to the pod."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    title(f"a request that lacks a GPU -> Redfish, an attach takes {ATTACH_S:.0f} s, {rounds} rounds")
    async with bed(place, gpus=0) as one, Rack(one, place, rounds).running() as rack:
        names = [f"m{number:02}" for number in range(rounds)]
        documents = [rack.settings(place, rounds), *(lacking(name, place) for name in names)]
        async with house(one, place / "house", documents) as running:
            await ready(running)
            await asyncio.sleep(SETTLE_S)
            offset_s = time.time() - asyncio.get_running_loop().time()
            sent = [(await called(running.url, name)).sent_unix_s for name in names]
        placed = [
            each.done_unix_s for each in one.ours(0.0)
            if (each.what, each.verb) == ("pods", "create") and each.code < 300
        ]  # fmt: skip
    found = match_rounds(sent, rack, offset_s, placed)
    return figures(found)


def match_rounds(sent: list[float], rack: Rack, offset_s: float, placed: list[float]) -> list[Round]:
    """Return the rounds: for each request the first event of each kind after it."""
    marked, linked = (
        [one.at_s + offset_s for one in rack.fabric.patches(below)] for below in (BLOCKS, SYSTEMS)
    )  # fmt: skip
    seen = {"marked": marked, "linked": linked, "attached": rack.attached_s, "placed": placed}
    if any(len(one) < len(sent) for one in seen.values()):
        raise BenchError(f"{len(sent)} requests, and {', '.join(f'{len(one)} {what}' for what, one in seen.items())}")
    return [Round(at_s, *(min(one for one in of if one >= at_s) for of in seen.values())) for at_s in sent]


def figures(found: list[Round]) -> Figures:
    """Print the table and return the figures."""
    patch_ms = [(one.marked_s - one.sent_s) * 1e3 for one in found]
    link_ms = [(one.linked_s - one.sent_s) * 1e3 for one in found]
    over_s = [one.overhead_s for one in found]
    seen_ms = [(one.placed_s - one.attached_s) * 1e3 for one in found]
    say(f"  request -> first PATCH {spread(patch_ms)} ms, p99 {quantile(patch_ms, 0.99):.1f}   (at most 100)")
    say(f"  request -> PATCH of links {spread(link_ms)} ms, p99 {quantile(link_ms, 0.99):.1f}")
    say(f"  attached -> pod at the API server {spread(seen_ms)} ms, p99 {quantile(seen_ms, 0.99):.1f}")
    say(f"  overhead {spread(over_s, 3)} s, p99 {quantile(over_s, 0.99):.3f}   (at most 0.5)")
    return {
        "patch_ms_p50": quantile(patch_ms, 0.5), "patch_ms_p99": quantile(patch_ms, 0.99),
        "link_ms_p99": quantile(link_ms, 0.99), "redfish_overhead_s": quantile(over_s, 0.99),
        "redfish_overhead_s_p50": quantile(over_s, 0.5), "redfish_overhead_s_max": max(over_s), "attaches": len(found),
    }  # fmt: skip


def lacking(name: str, place: Path) -> Document:
    """Return a Model that fits on no existing device, and whose replica is not stopped during the benchmark."""
    words = engine("{host}", "{port}", place / name)
    return model(
        name, engine="command", command=words, image="engine", gpu={}, idleSeconds=3600, residencySeconds=3600,
        replicas={"max": 1},
    )  # fmt: skip
