"""`make bench-fabric`: how soon a fabric is asked for a GPU that a Call lacks, and what that costs beside the attach.

On a real API server, with one gateway and one autoscaler as processes. Both parts begin at the moment at which a Call
that lacks a GPU is sent to the gateway, where it parks at once: the queue signal.

`requested`, by a fabric's operator (CRO): each round is a Call for another Model without a Replica, where nodes have no
GPUs and each may have one attached. It ends when the API server has the ComposabilityRequest, by its audit log. What
was asked for before stays on its way, one more each round: the played operator makes its resources between rounds, and
never attaches.

`attached` (`bench.fabricredfish`), by Redfish: until the service has its first PATCH, and until the plan has placed a
Replica on the GPU, less what the attach took.

Prints as its last line one JSON object (interfaces, section 10). `QUICK=1`: fewer rounds.
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
from pilotlight.kube import Objects
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
"""So many on their way at once are few."""
ROUNDS, QUICK_ROUNDS = 60, 15
PAUSE_S = 1.0
"""From one Call to when the operator is let at what was made of it."""
BEAT_S = 2.0
"""From one heartbeat of a node to its next: the bed's controllers give up a node after 5 s."""
SETTLE_S = 3.0
"""Until what the provider offers has been heard."""
HOPELESS_S = 20.0
LASTS_S = 600.0
"""Longer than all rounds: a Call waits on, and nothing is attached."""


async def requested(place: Path, *, quick: bool) -> Figures:
    """From the Call to the request."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    title(f"a Call that lacks a GPU -> ComposabilityRequest at the API server, {rounds} rounds")
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
    say(f"  up to {len(few)} on their way at once: {spread(few)} ms, p99 {quantile(few, 0.99):.1f}   (at most 100)")
    say(f"  up to {rounds}: {spread(many)} ms, p99 {quantile(many, 0.99):.1f}")
    say(f"  one by one: {' '.join(f'{each:.0f}' for each in took_ms)}")
    return {
        "request_ms_p50": quantile(few, 0.5), "request_ms_p99": quantile(few, 0.99),
        "request_ms_p50_of_many": quantile(many, 0.5), "request_ms_p99_of_many": quantile(many, 0.99),
        "requests": rounds,
    }  # fmt: skip


async def called(url: str, number: int, calls: set[asyncio.Task[Result]], operator: FakeCro) -> float:
    """When the Call of one round was sent. It waits on, so that what was asked for it is not the next one's."""
    client = Client(url)
    await client.open(1)
    sent_unix_s = time.time()
    call = asyncio.create_task(client.send(shot(number)))
    calls.add(call)
    await asyncio.wait([call], timeout=PAUSE_S)
    if call.done():
        said = call.result()
        raise BenchError(f"round {number}: the Call was answered: {said.status} {said.code}")
    await operator.step()
    return sent_unix_s


def took(sent_unix_s: list[float], had: list[Asked]) -> list[float]:
    """Milliseconds from each Call to the request that the API server had next. Raises BenchError where it had none."""
    ends = [*sent_unix_s[1:], sent_unix_s[-1] + HOPELESS_S]
    found = [
        [each.done_unix_s for each in had if sent_s <= each.done_unix_s < end_s]
        for sent_s, end_s in zip(sent_unix_s, ends, strict=True)
    ]
    if not all(found):
        late = [number for number, each in enumerate(found) if not each]
        raise BenchError(f"nothing was asked of the operator before the next Call in rounds {late}")
    if len(had) != len(sent_unix_s):
        raise BenchError(f"{len(had)} requests were made in {len(sent_unix_s)} rounds")
    return [(min(each) - sent_s) * 1e3 for each, sent_s in zip(found, sent_unix_s, strict=True)]


def requests(one: Bed) -> list[Asked]:
    """Those of ours that the API server took."""
    return [each for each in one.ours(0.0) if (each.what, each.verb) == (KIND, "create") and each.code < 300]


def shot(number: int) -> Shot:
    """The Call of a round."""
    name = f"m{number:02}"
    return Shot(model=name, body=body(name), timeout_s=LASTS_S)


def rack() -> Document:
    """Settings with the fabric."""
    kind = {"selector": {"fabric": "bench"}, "device": {"model": PRODUCT, "memory": "40Gi"}, "devicesMax": 1}
    provider = {"name": "rack", "cro": {"model": PRODUCT}, "expectedSeconds": 120}
    return settings(devices=[], auth="none", nodes=[kind], capacity=[provider])


def lacking(number: int) -> Document:
    """A Model that nobody has room for."""
    return model(
        f"m{number:02}", engine="command", command=["serve", "{host}", "{port}"], image="engine", gpu={},
        replicas={"max": 1},
    )  # fmt: skip


async def beats(one: Bed, many: int) -> None:
    """The hearts of nodes that have no kubelet."""
    while True:
        for number in range(many):
            await one.api.patch(f"{LEASES}/{node(number)['metadata']['name']}", {"spec": lease()["spec"]}, MERGE)
            await asyncio.sleep(BEAT_S / many)  # not all at once


def lease() -> Object:
    """Of a node that lives now."""
    spec = {"holderIdentity": "bench", "leaseDurationSeconds": 40, "renewTime": now(micro=True)}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}


def node(number: int) -> Object:
    """Without GPUs."""
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
