"""Gateway faults in a cluster, named after cases of the fault list: a drain, an update, a crash, a bait.

Gateways are processes, in cases 14 and 15 pods of a Deployment that clients reach by its EndpointSlice; autoscaler,
engines and API server are real, too. Durations of the list are replaced by conditions, with slack for a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api
from gateway.request.forbidden_fields import PLACES
from loadtest.client import Client
from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run
from tests.integration.cluster.support.installations.gateway_deployment import Front, deployment
from tests.integration.cluster.support.installations.gpu_node import Stage, runs, staged
from tests.integration.cluster.support.installations.multi_instance import SETTINGS, Estate
from tests.integration.cluster.support.kubelet.node import next_number
from tests.integration.cluster.support.network.dns_server import names
from tests.support.harness.serve.serve import shot
from tests.support.net.canary import canary_server
from tests.support.waiting import until

WITHIN_S, LIMIT_S = 90.0, 240.0
LONG_PER_S = 3.0
"""Tokens per second of streams of 200 tokens. They last 67 s: longer than gateways need to be replaced on a busy
machine, also if a process stops for 20 s meanwhile."""


@pytest.fixture
async def stage(api: Api, namespace: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(api, namespace, tmp_path) as one:
        yield one


@pytest.mark.case("10")
@pytest.mark.standard
async def test_draining_replica_stops_only_after_every_gateway_acknowledges(stage: Stage, estate: Estate) -> None:
    """Of three gateways, one receives no update while the three replicas drain.
    None of them is stopped until it has acknowledged. Requests arrive all the time, and none that arrives after its
    gateway has acknowledged is sent to a draining replica.
    """
    ada = stage.ada(10, 20, replicas={"min": 4, "max": 4})  # all are ready when the first stream begins
    estate.settings = {**SETTINGS, "leaseSeconds": 60}  # a pause of the autoscaler must not begin another leadership
    async with estate.open(ada, autoscalers=1, gateways=3) as one, asyncio.timeout(LIMIT_S):
        await send(one.url("g3"), tokens=1)  # g3 knows the model, and has no request from now on
        await runs(one, 4, 0)
        streams = [asyncio.create_task(send(one.url(f"g{1 + n % 2}"), tokens=150)) for n in range(80)]
        await one.until(lambda: all_begun(one, streams))
        one.signal("g3", signal.SIGSTOP)
        one.write(stage.ada(10, 20, replicas={"max": 1}))
        one.signal("a1", signal.SIGHUP)
        await one.until(lambda: acknowledged_by_all_but(one, "g3"))
        later = [asyncio.create_task(send(one.url(f"g{1 + n % 2}"), tokens=1)) for n in range(20)]
        results = await asyncio.gather(*streams, *later)
        assert judge_run(100, results).completed == 100
        assert list((await stage.engines()).values()) == [False] * 4, "g3 has not acknowledged"
        await one.until(lambda: is_counted(one, ready=1, draining=3))  # the ready one may miss its probes for a while
        one.signal("g3", signal.SIGCONT)
        while len(left := await stage.engines()) > 1:
            await asyncio.sleep(0.05)
        (survivor,) = left
        ids = {result.headers["x-request-id"] for result in results[80:]}
        assert {call.pid for call in stage.calls() if call.id in ids} == {stage.pid(survivor)}
        assert not any(call.aborted for call in stage.calls())


async def all_begun(one: Estate, streams: list[asyncio.Task[Result]]) -> bool:
    """Whether all four replicas are ready and each stream runs or has already ended."""
    states, demand = await one.counts("ada")
    ended = sum(stream.done() for stream in streams)
    return states.get("ready") == 4 and demand["running"] + ended >= len(streams)


async def is_counted(one: Estate, **states: int) -> bool:
    """Whether ada has exactly these replicas by state."""
    return (await one.counts("ada"))[0] == states


async def acknowledged_by_all_but(one: Estate, gateway: str) -> bool:
    """Whether `explain` shows only this gateway as missing, for all three draining replicas."""
    message = await one.read_ops("a1", "/api/v1/explain/model/ada")
    return message.count(f"{gateway} has not acknowledged") == 3 and message.count("not acknowledged") == 3


async def send(url: str, tokens: int) -> Result:
    """Sends one streaming request."""
    (result,) = await Client(url).run([shot("ada", tokens=tokens, timeout_s=120)])
    return result


# --- gateways as pods -------------------------------------------------------------------------------------------------


def through(results: list[Result], gateways: set[str]) -> list[Result]:
    """The results that were sent through one of these gateways, by their request ids."""
    return [one for one in results if one.headers.get("x-request-id", "").rsplit("-", 3)[0] in gateways]


@pytest.mark.case("14")
async def test_rolling_update_of_gateways_interrupts_no_stream(
    stage: Stage, estate: Estate, api: Api, namespace: str
) -> None:
    """40 streams on each of two gateways (200 in the list), since engine, gateways and clients share two cores here.
    Streams outlast their gateway's SIGTERM, and new clients connect all the time.
    """
    ada = stage.ada(LONG_PER_S, 200)
    front = Front(api, namespace)
    async with estate.open(ada, autoscalers=1, gateways=0) as one, asyncio.timeout(LIMIT_S):
        wanted = deployment(2, [one.socket("a1")], stage.node.name, grace_s=100)
        async with front.running(wanted):
            before = await front.pods()
            assert (await front.send(shot("ada", tokens=1)))[0].ending is Ending.COMPLETED
            long = [shot("ada", tokens=200, timeout_s=120) for _ in range(40)]
            streams = [asyncio.create_task(front.send(*long, to=address)) for address in before.values()]
            await runs(one, 1, 80)
            over, short = asyncio.Event(), list[Result]()
            long_before = dict(zip(before, streams, strict=True))

            async def client() -> None:
                while not over.is_set():
                    short.extend(await front.send(shot("ada", tokens=2, timeout_s=120)))

            async with asyncio.TaskGroup() as tasks:
                clients = [tasks.create_task(client()) for _ in range(6)]
                while not all(through(short, {name}) for name in before):
                    await asyncio.sleep(0.05)
                await front.update()
                while not (ending := set(before) - set(await front.pods())):
                    await asyncio.sleep(0.05)
                assert not any(long_before[name].done() for name in ending), "its streams go on"
                await front.updated(set(before), 2)
                while not all(through(short, {name}) for name in await front.pods()):
                    await asyncio.sleep(0.05)
                over.set()
                await asyncio.gather(*clients)
            results = [result for each in streams for result in await each]
            after = set(await front.pods())
        assert judge_run(80, results).completed == 80
        assert len(through(results, set(before))) == 80
        assert judge_run(len(short), short).completed == len(short), "no request was rejected"
        assert {bool(through(short, {name})) for name in (*before, *after)} == {True}, "they came to each"
        assert not any(call.aborted for call in stage.calls())


@pytest.mark.case("15")
@pytest.mark.parametrize("leader_too", [False, True])
async def test_killed_gateway_loses_only_its_own_requests(
    stage: Stage, estate: Estate, api: Api, namespace: str, leader_too: bool
) -> None:
    """Only its own requests are lost: no stream of another gateway, no new request, no slot, and no work of an engine.
    The same holds if the leader crashes at the same moment, and the next one has to learn the allocations.
    """
    slots = 24
    ada = stage.ada(LONG_PER_S, slots)
    front = Front(api, namespace)
    async with estate.open(ada, autoscalers=2, gateways=0) as one, asyncio.timeout(LIMIT_S):
        async with front.running(deployment(3, [one.socket("a1"), one.socket("a2")], stage.node.name)):
            assert (await front.send(shot("ada", tokens=1)))[0].ending is Ending.COMPLETED
            leader = await one.leader()
            pods = await front.pods()
            long = [shot("ada", tokens=200, timeout_s=120) for _ in range(slots // 3)]
            streams = {name: asyncio.create_task(front.send(*long, to=pods[name])) for name in pods}
            await runs(one, 1, slots, leader)
            victim, *others = pods
            os.killpg(stage.pid(victim), signal.SIGKILL)
            if leader_too:
                await one.stop(leader, signal.SIGKILL)
                (leader,) = {"a1", "a2"} - {leader}
            lost = await streams[victim]
            assert {result.ending for result in lost} == {Ending.LOST}
            await until("no engine works for it", lambda: aborted(stage) == len(lost), WITHIN_S)
            more = [shot("ada", tokens=4, timeout_s=120) for _ in range(slots)]
            newcomers = await asyncio.gather(*(front.send(*more, to=pods[name]) for name in others))
            assert not any(streams[name].done() for name in others), "its Slots are the others' before any stream ends"
            if leader_too:  # otherwise a pause of the leader may make the other one lead
                await one.until(lambda: one.leads(leader))
            for name, came in zip(others, newcomers, strict=True):
                assert judge_run(slots, came).completed == slots
                assert judge_run(len(long), await streams[name]).completed == len(long)
        assert aborted(stage) == len(lost)
        ids = {result.headers["x-request-id"] for came in newcomers for result in came}
        assert max(call.at_once for call in stage.calls() if call.id in ids) == slots, "all of its Slots"
        assert max(call.at_once for call in stage.calls()) <= slots
        assert one.made("ada") == 1


def aborted(stage: Stage) -> int:
    """The number of requests that an engine aborted."""
    return sum(call.aborted for call in stage.calls())


# --- baits ------------------------------------------------------------------------------------------------------------


@pytest.mark.case("43")
async def test_no_address_named_in_a_request_is_contacted_or_resolved(
    stage: Stage, estate: Estate, api: Api, namespace: str
) -> None:
    """Each bait points to a canary at a pod address, directly or by a name of the cluster.
    Engines may only use DNS; tests/chart/test_network.py checks that policy, since none is enforced here.
    """
    ip = f"10.244.{next_number()}.250"
    async with (
        canary_server(ip) as canary, names(api) as asked, estate.open(stage.ada(0, 20), autoscalers=1) as one,
        asyncio.timeout(LIMIT_S),
    ):  # fmt: skip
        at = f"{ip}:{canary.port}"
        await canary_service(api, namespace, ip, canary.port)
        baits = [
            f"http://{at}/a.png", f"http://canary.{namespace}.svc:{canary.port}/", f"https://{at}/", at, f"//{at}/x",
            f"s3://{at}/b", f"file://{at}/etc/passwd", "http://169.254.169.254/latest/meta-data/",
        ]  # fmt: skip
        own = f"canary.{namespace}.svc.cluster.local"  # no bait: a late server gets a query twice, the second one later
        assert (await resolved(own, canary.port), own in asked) == (ip, True), "who looks it up finds it, and is noted"
        before = len(asked)
        for bait in baits:
            parts = [{"type": "image_url", "image_url": {"url": bait}}, {"type": "file", "file": {"file_id": bait}}]
            text = {"messages": [{"role": "user", "content": parts}], "file": bait, "proxy": bait}
            assert await post(one, {"model": "ada", **text}) == (200, "")
            assert await post(one, {"model": bait, **text}) == (404, "model_not_found")
            for place in PLACES:
                assert await post(one, {"model": "ada", **text, place: bait}) == (400, "invalid_request")
        assert canary.connections == 0
        assert [name for name in asked[before:] if not name.startswith(own)] == [], "no name was looked up"


async def resolved(name: str, port: int) -> str:
    """Resolves a name. Repeats that if the server responds too late: the C library waits for 10 s."""
    while True:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, port)
        except socket.gaierror:
            await asyncio.sleep(0.1)
        else:
            return str(found[0][4][0])


async def canary_service(api: Api, namespace: str, ip: str, port: int) -> None:
    """Creates a Service and its endpoint for the canary."""
    base = f"namespaces/{namespace}"
    ports = [{"name": "http", "port": port}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "canary"}, "spec": {"ports": ports}}
    await api.create(f"/api/v1/{base}/services", service)
    await api.create(f"/apis/discovery.k8s.io/v1/{base}/endpointslices", {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "ports": ports,
        "metadata": {"name": "canary", "labels": {"kubernetes.io/service-name": "canary"}},
        "endpoints": [{"addresses": [ip]}],
    })  # fmt: skip


async def post(one: Estate, body: dict[str, object]) -> tuple[int, str]:
    """Sends a request and returns (status, error code)."""
    async with one.session.post(f"{one.url('g1')}/v1/chat/completions", json=body) as answer:
        response = json.loads(await answer.read())
    return answer.status, response.get("error", {}).get("code", "")
