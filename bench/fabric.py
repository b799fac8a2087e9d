"""`make bench-fabric`: the time until a fabric gets the order for a missing GPU, and the overhead of an attach.

Runs on a real API server, with one gateway and one autoscaler as processes. Both parts begin when a request that lacks
a GPU is sent to the gateway, which queues it at once.

`requested`, with a fabric's operator (CRO): each round is a request for another Model without a replica. Nodes have no
GPUs, and each may get one. The round ends when the API server has the ComposabilityRequest, by its audit log. Earlier
orders stay in progress, one more each round: the simulated operator creates its resources between rounds, and never
attaches.

`attached` (`bench.fabricredfish`), with Redfish: until the service has its first PATCH, and until the plan has placed a
replica on the GPU, less the duration of the attach.

The last line is one JSON object (interfaces, section 10). `QUICK=1`: fewer rounds.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from autoscaler.kubernetes.api import MERGE, Object
from bench import fabricredfish
from bench.clusterbed import Asked, Bed, bed, schedulable
from bench.clusterhouse import house, ready
from bench.documents import Document, body, model, settings
from bench.kit import BenchError, Figures, quantile, say, spread, title
from bench.parts import Part, main
from loadtest.client import Client
from loadtest.result import Result, Shot
from pilotlight.provider_kubernetes_client import Objects
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.kubelet.container import now
from tests.integration.cluster.support.kubelet.node import LEASES
from tests.support.fakes.kubernetes.cro import FakeCro

PRODUCT = "NVIDIA-A100-PCIE-40GB"
KIND = "composabilityrequests"
KEYS = (
    "request_ms_p50", "request_ms_p99", "request_ms_p50_of_many", "request_ms_p99_of_many", "requests",
    *fabricredfish.KEYS,
)  # fmt: skip
FEW = 10
"""Rounds with at most this number of orders in progress are reported separately."""
ROUNDS, QUICK_ROUNDS = 60, 15
PAUSE_S = 1.0
"""The time from a request until the operator may process the order."""
BEAT_S = 2.0
"""The interval of a node's heartbeats: the controllers give up a node after 5 s."""
SETTLE_S = 3.0
"""The time until the provider's offers are known."""
HOPELESS_S = 20.0
LASTS_S = 600.0
"""Longer than all rounds: requests keep waiting, because nothing is attached."""


async def requested(place: Path, *, quick: bool) -> Figures:
    """Measure from the request to the order."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    title(f"a request that lacks a GPU -> ComposabilityRequest at the API server, {rounds} rounds")
    async with bed(place, gpus=0) as one:
        await custom_resources.install_foreign(one.api, "cro")
        documents = [rack(), *(lacking(number) for number in range(rounds))]
        for number in range(rounds):
            await one.api.create("/api/v1/nodes", node(number))
            await one.api.create(LEASES, {**lease(), "metadata": {"name": node(number)["metadata"]["name"]}})
        for number in range(rounds):
            await schedulable(one.api, node(number)["metadata"]["name"])
        clock, beating = asyncio.get_running_loop().time, asyncio.create_task(beats(one, rounds))
        operator = FakeCro(Objects(one.api, one.api), clock, {PRODUCT: rounds}, attach_s=LASTS_S)
        async with house(one, place / "house", documents) as running:
            await ready(running)
            await asyncio.sleep(SETTLE_S)
            calls = set[asyncio.Task[Result]]()
            try:
                sent_unix_s = [await called(running.url, number, calls, operator) for number in range(rounds)]
            finally:
                for task in (beating, *calls):
                    task.cancel()
        took_ms = took(sent_unix_s, requests(one))
    few, many = took_ms[:FEW], took_ms[FEW:]
    say(f"  up to {len(few)} in progress at once: {spread(few)} ms, p99 {quantile(few, 0.99):.1f}   (at most 100)")
    say(f"  up to {rounds}: {spread(many)} ms, p99 {quantile(many, 0.99):.1f}")
    say(f"  one by one: {' '.join(f'{each:.0f}' for each in took_ms)}")
    return {
        "request_ms_p50": quantile(few, 0.5), "request_ms_p99": quantile(few, 0.99),
        "request_ms_p50_of_many": quantile(many, 0.5), "request_ms_p99_of_many": quantile(many, 0.99),
        "requests": rounds,
    }  # fmt: skip


async def called(url: str, number: int, calls: set[asyncio.Task[Result]], operator: FakeCro) -> float:
    """Send the request of one round; return the time. It keeps waiting, so the next round cannot use its order."""
    client = Client(url)
    await client.open(1)
    sent_unix_s = time.time()
    call = asyncio.create_task(client.send(shot(number)))
    calls.add(call)
    await asyncio.wait([call], timeout=PAUSE_S)
    if call.done():
        response = call.result()
        raise BenchError(f"round {number}: the request got a response: {response.status} {response.code}")
    await operator.step()
    return sent_unix_s


def took(sent_unix_s: list[float], had: list[Asked]) -> list[float]:
    """Return the milliseconds from each request to the next order at the API server; BenchError if there is none."""
    ends = [*sent_unix_s[1:], sent_unix_s[-1] + HOPELESS_S]
    found = [
        [each.done_unix_s for each in had if sent_s <= each.done_unix_s < end_s]
        for sent_s, end_s in zip(sent_unix_s, ends, strict=True)
    ]
    if not all(found):
        late = [number for number, each in enumerate(found) if not each]
        raise BenchError(f"Pilotlight created no ComposabilityRequest before the next request in rounds {late}")
    if len(had) != len(sent_unix_s):
        raise BenchError(f"{len(had)} orders were created in {len(sent_unix_s)} rounds")
    return [(min(each) - sent_s) * 1e3 for each, sent_s in zip(found, sent_unix_s, strict=True)]


def requests(one: Bed) -> list[Asked]:
    """Return Pilotlight's orders that the API server accepted."""
    return [each for each in one.ours(0.0) if (each.what, each.verb) == (KIND, "create") and each.code < 300]


def shot(number: int) -> Shot:
    """Return the request of a round."""
    name = f"m{number:02}"
    return Shot(model=name, body=body(name), timeout_s=LASTS_S)


def rack() -> Document:
    """Return Settings with the fabric."""
    kind = {"selector": {"fabric": "bench"}, "device": {"model": PRODUCT, "memory": "40Gi"}, "devicesMax": 1}
    provider = {"name": "rack", "cro": {"model": PRODUCT}, "expectedSeconds": 120}
    return settings(devices=[], auth="none", nodes=[kind], capacity=[provider])


def lacking(number: int) -> Document:
    """Return a Model that fits on no existing device."""
    return model(
        f"m{number:02}", engine="command", command=["serve", "{host}", "{port}"], image="engine", gpu={},
        replicas={"max": 1},
    )  # fmt: skip


async def beats(one: Bed, many: int) -> None:
    """Send heartbeats of nodes that have no kubelet."""
    while True:
        for number in range(many):
            await one.api.patch(f"{LEASES}/{node(number)['metadata']['name']}", {"spec": lease()["spec"]}, MERGE)
            await asyncio.sleep(BEAT_S / many)  # spread over the interval


def lease() -> Object:
    """Return the Lease of a node that is alive."""
    spec = {"holderIdentity": "bench", "leaseDurationSeconds": 40, "renewTime": now(micro=True)}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}


def node(number: int) -> Object:
    """Return a node without GPUs."""
    amounts = {"cpu": "64", "memory": "1Ti", "pods": "110"}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    good = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "lastHeartbeatTime": at,
        "lastTransitionTime": at,
    }
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": f"fabric-{number:02}", "labels": {"fabric": "bench"}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [good]},
    }  # fmt: skip


PARTS: dict[str, Part] = {"requested": requested, "attached": fabricredfish.attached}

if __name__ == "__main__":
    main("fabric", __doc__, KEYS, PARTS)
