"""Fuzz target for reports of gateways and agents: after any report, the autoscaler still plans and publishes, requests
weights from agents and checks which of them have arrived.

An input is one byte that selects the kind, and the report. It reaches a loop as `autoscaler.server.gateways` passes it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any, Final

import msgspec

from autoscaler.agent_contract import Laid, NodeReport
from autoscaler.contract import GatewayId, Report, make_decoder
from autoscaler.controller.loop import Loop
from autoscaler.controller.weights_wait import AgentNodeSupply, NotBroughtError
from autoscaler.routing import catalogue, routes
from autoscaler.server import gateways
from autoscaler.server.agents import NodeWantsServer
from autoscaler.spec.model import Model
from autoscaler.state.events import NodeReported
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import ClusterFacts, NodeId, Replica
from pilotlight.models import header_report
from tests.fuzz.inputs.json_mutations import mutated, written
from tests.support.builders.worlds import T0, device, gateway, model, replica, world
from tests.support.harness.manual_loop import SteppedLoop

_HEADER: Final = json.dumps({
    "words": "Its GGUF header (llama)",
    "shape": {"weights_bytes": 1, "layers": [], "context_tokens": 1, "vocabulary": 1, "width": 1, "inner": 1},
})  # fmt: skip
REPORT: Final[dict[str, object]] = {
    "gateway": "g1", "boot": "b", "sequence": 2, "epoch": 1, "version": 1,
    "levels": [{"model": "a", "tenant": "t", "priority": 0, "waiting": 1, "running": 1, "oldest_wait_s": 1.5,
    "soonest_deadline_s": 2.5}],
    "totals": [{"model": "a", "tenant": "t", "admitted": 1, "refused_cold": 1, "finished": 1, "busy_slot_us": 1,
    "waiting_call_us": 1,
                "tokens_in": 1, "tokens_out": 1, "idle_s": 1.5, "retry_after_s": 1.5}],
    "replicas": [{"replica": "r1", "hold": 1, "in_use": 1, "connect_failures": 1, "last_byte_age_s": 0.5}],
}  # fmt: skip
NODE: Final[dict[str, object]] = {
    "node": "n1", "boot": "b", "sequence": 1, "brings": True, "epoch": 1, "peer": "https://n1:1",
    "copies": ["oci://r.example/a:1"],
    "weights": [{"artifact": "oci://r.example/a:1", "replicas": ["r1"], "folder": "copies/a",
    "digest": "sha256:" + "a" * 64, "ggufs": ["a.gguf"],
                 "adapters": [""], "bytes": 1, "total_bytes": 2, "bytes_per_s": 1.5, "failed": "", "look": True,
                 "image": "", "no_image": "",
                 "header": _HEADER, "no_header": ""},
                {"artifact": "oci://r.example/a:1", "bytes": 1, "total_bytes": 2, "bytes_per_s": 1.5}],
    "images": ["x"], "devices": [{"id": "GPU-1", "product": "x", "memory_bytes": 1, "used_bytes": 1, "healthy": True}],
    "pods": [{"devices": ["GPU-1"], "pod_uid": "u", "namespace": "n", "name": "p"}],
    "uses": [{"pod_uid": "u", "device": "GPU-1", "used_bytes": 1}], "age_s": 0.5, "attaches": True,
    "fabric": [{"device": "GPU-1", "leave": False, "done": True, "failed": False, "says": "x"}],
}  # fmt: skip
_KNOWN: Final = (REPORT, NODE)
_decode: Final[tuple[Callable[[bytes], Any], ...]] = (make_decoder(Report), make_decoder(NodeReport))  # one type each
SEEDS: Final = tuple(bytes((number,)) + written(known) for number, known in enumerate(_KNOWN))
WORDS: Final = (
    b'"waiting":9223372036854775807', b'"sequence":-1', b'"epoch":9223372036854775807', b"1e308", b"-1", b"null",
    b"[]", b"{}", b'""',
    b'"total_bytes":9223372036854775807', b'"bytes_per_s":1e308',
    b'"r1"', b'"g1"', b'"a"', b'"n1"', b"99999999999999999999", b'"header":"{\\"shape\\":[[[["',
)  # fmt: skip


def case(random: Random) -> bytes:
    """A report that is changed in a few places."""
    number = random.randrange(2)
    return bytes((number,)) + mutated(_KNOWN[number], random)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of the waiting start and of the stream to the agent."""
    made = asyncio.new_event_loop()
    atexit.register(made.close)
    return made


@contextmanager
def waiting(loop: Loop, one: Replica, model: Model) -> Iterator[None]:
    """A start waits for its weights, and the agent of its node is connected."""
    supply = AgentNodeSupply(lambda: loop.world, loop.now_s, loop.fault)
    loop.listeners.append(supply.on_step)
    lines = NodeWantsServer(loop).messages(NodeId("n1"))

    async def start() -> asyncio.Future[Laid]:
        coming = supply(one, model, lambda progress: None)
        assert coming is not None
        task = asyncio.ensure_future(coming)
        await anext(lines)
        return task

    async def stop() -> None:
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        await lines.aclose()
        if isinstance(result, Exception) and not isinstance(result, NotBroughtError):
            raise result

    task = event_loop().run_until_complete(start())
    try:
        yield
    finally:
        event_loop().run_until_complete(stop())


def reports(data: bytes) -> None:
    """Send one report three times to a loop with a Model, a device and a Replica."""
    if not data:
        return
    number = data[0] % 2
    try:
        report = _decode[number](data[1:])
    except msgspec.DecodeError:
        return
    one = model("a", artifact="oci://r.example/a:1")
    replicas = [replica(one, "r1", address="127.0.0.1:9"), starts := replica(one, "r2", state=S.STARTING)]
    facts = ClusterFacts(volumes=True)
    loop = SteppedLoop(world([one], [device(node="n1")], replicas, gateways=[gateway("g1")], mounting=facts))
    with waiting(loop.loop, starts, one):
        for now_s in (T0, T0 + 1.0, T0 + 100.0):
            loop.now_s = now_s
            if isinstance(report, Report):
                msgspec.json.encode(gateways.accept_report(loop.loop, report))
            else:
                loop.loop.observe((NodeReported(report=report),))
            after = loop.step()
            assert (after.degraded, after.learned.faults) == ("", {})
            header_report.find_artifact_facts(one, after.learned.looked)
            msgspec.json.encode(catalogue.catalogue_full(after))
            msgspec.json.encode(routes.routes_full(after, GatewayId("g1"), now_s, {}, boot="b"))
