"""The server side of the contract: receives reports, sends streams, and detects dead gateway processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from pytest_aiohttp import AiohttpClient

from autoscaler.contract import CatalogueDelta, GatewayId, ModelName, Report, ReportAnswer, RoutesDelta
from autoscaler.controller.loop import TICK_S_MAX, Loop
from autoscaler.fold.gateway_reports import GONE_KEPT_S, UNWATCHED_SILENT_S
from autoscaler.server import gateways
from autoscaler.server.gateways import GATEWAYS_MAX, ContractServer, Feed, accept_report
from autoscaler.spec.model import Model
from autoscaler.state.events import DocumentsSeen, GatewayGone
from autoscaler.state.world import World
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.worlds import device, gateway, level, model, replica, world
from tests.support.harness.async_tests import run_with
from tests.support.harness.manual_loop import IdleDriver, SteppedLoop
from tests.support.waiting import until

pytestmark = pytest.mark.standard

WHICH = "invalid `gateway`: expected ?gateway=ID with at most 253 letters, digits or ._-"
Client = TestClient[web.Request, web.Application]
A = model("a")

PEER = """
import http.client, socket, sys, time
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall(b"GET /v1/routes?gateway=g9&boot=b9 HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
link.recv(10)
print("connected", flush=True)
time.sleep(60)
"""


def stepped() -> SteppedLoop:
    """A loop with gateway g1 and one ready replica, in which nothing is to be done."""
    loop = SteppedLoop(world([A], [device()], [replica(A, "r1", address="127.0.0.1:9")], gateways=[gateway("g1")]))
    loop.step()
    return loop


def documents(*models: Model) -> DocumentsSeen:
    return DocumentsSeen(models=models)


def report(boot: str = "b", sequence: int = 2, waiting: int = 0) -> Report:
    levels = (level("a", waiting),) if waiting else ()
    return Report(gateway=GatewayId("g1"), boot=boot, sequence=sequence, epoch=1, version=1, levels=levels)


async def post(client: Client, body: bytes) -> tuple[int, bytes]:
    response = await client.post("/v1/report", data=body)
    return response.status, await response.read()


async def test_report_is_queued_for_the_next_step_and_answered_with_epoch(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    status, answer = await post(client, msgspec.json.encode(report(waiting=2)))
    assert (status, msgspec.json.decode(answer, type=ReportAnswer)) == (200, ReportAnswer(epoch=1))
    assert not loop.loop.world.loads, "nothing is folded outside of a step"
    assert loop.step().loads[ModelName("a")].waiting == 2


@run_with(run)
async def test_report_without_a_change_triggers_no_decision_before_the_next_tick() -> None:
    """A gateway with queued requests reports twenty times a second; a decision over many Models takes longer."""
    clock = asyncio.get_running_loop().time
    loop = Loop(world([A], [device()], gateways=[gateway("g1")], leads=False), IdleDriver(), clock)
    decided_s: list[float] = []
    loop.listeners.append(lambda step: decided_s.append(step.started_s))
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    gateways.accept_report(loop, report(waiting=2))
    await asyncio.sleep(0.1)
    decided_s.clear()
    for sequence in range(3, 12):
        gateways.accept_report(loop, report(sequence=sequence, waiting=2))
        await asyncio.sleep(0.05)
    assert not decided_s
    last_s = clock() - 0.05
    gateways.accept_report(loop, report(sequence=12, waiting=3))
    await asyncio.sleep(0.05)
    assert len(decided_s) == 1
    gateways.accept_report(loop, report(sequence=13, waiting=3))
    said_s = clock()
    await asyncio.sleep(TICK_S_MAX)
    assert last_s < loop.world.gateways[GatewayId("g1")].seen_s == said_s, "it is as old as when it came"
    task.cancel()


async def test_report_of_an_unknown_boot_is_answered_with_a_resend_request(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    resend = []
    for _ in range(2):
        _, answer = await post(client, msgspec.json.encode(report(boot="fresh", sequence=1)))
        resend.append(msgspec.json.decode(answer, type=ReportAnswer).resend)
        loop.step()
    assert resend == [True, False]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"gateway": 3}',
        b"\xff",
        b'{"gateway": "g", "boot": "b"}',
        b'{"gateway":"\xff"}',
        b'{"a":' + b"[" * 5000,
    ],
)
async def test_invalid_report_is_rejected_with_400_and_changes_nothing(
    aiohttp_client: AiohttpClient, body: bytes
) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    status, answer = await post(client, body)
    assert status == 400
    assert answer.startswith(b'{"error": "invalid report: ')
    before = loop.loop.world
    assert loop.step() is before


async def test_unknown_report_fields_of_a_newer_gateway_are_ignored(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(ContractServer(stepped().loop).application())
    status, _ = await post(client, msgspec.json.encode(report())[:-1] + b',"newer":{"x":1}}')
    assert status == 200


async def lines(
    response: aiohttp.ClientResponse, kind: type[RoutesDelta] | type[CatalogueDelta]
) -> AsyncIterator[RoutesDelta | CatalogueDelta]:
    async for line in response.content:
        yield msgspec.json.decode(line, type=kind)


async def test_route_stream_starts_full_and_continues_with_deltas(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    response = await client.get("/v1/routes?gateway=g1&boot=b")
    async with asyncio.timeout(60):
        stream = lines(response, RoutesDelta)
        first = await anext(stream)
        assert isinstance(first, RoutesDelta)
        assert (first.full, [route.replica for route in first.replicas]) == (True, ["r1"])
        loop.step(documents(A, model("b")))
        second = await anext(stream)
        assert isinstance(second, RoutesDelta)
        assert (second.full, [one.model for one in second.models]) == (False, ["b"])
        assert second.version > first.version
    response.close()


async def test_idle_route_and_catalogue_streams_send_heartbeats(
    aiohttp_client: AiohttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "HEARTBEAT_S", 0.02)
    client = await aiohttp_client(ContractServer(stepped().loop).application())
    for path, kind in (("/v1/routes?gateway=g1&boot=b", RoutesDelta), ("/v1/catalogue", CatalogueDelta)):
        response = await client.get(path)
        async with asyncio.timeout(60):
            stream = lines(response, kind)
            assert (await anext(stream)).full
            for _ in range(2):
                beat = await anext(stream)
                assert not beat.full
                assert not beat.models
        response.close()


async def test_catalogue_is_withheld_until_the_documents_are_known() -> None:
    """A gateway with an empty catalogue would reject every Model as unknown."""
    loop = SteppedLoop(World(epoch=1))
    async with contextlib.aclosing(Feed(loop.loop).catalogue()) as messages:
        assert await anext(messages) == gateways.BLANK
        loop.loop.observe([documents()])
        loop.step()
        whole = msgspec.json.decode(await anext(messages), type=CatalogueDelta)
        assert (whole.full, whole.models) == (True, ()), "none is also something to know"


async def test_catalogue_stream_starts_full_and_continues_with_deltas(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    response = await client.get("/v1/catalogue")
    async with asyncio.timeout(60):
        stream = lines(response, CatalogueDelta)
        first = await anext(stream)
        loop.step(documents(model("b")))
        second = await anext(stream)
    assert isinstance(first, CatalogueDelta)
    assert isinstance(second, CatalogueDelta)
    assert [entry.name for entry in first.models] == ["a"]
    assert ([entry.name for entry in second.models], second.models_gone) == (["b"], ("a",))
    response.close()


async def test_slow_reader_of_a_catalogue_stream_gets_one_combined_delta() -> None:
    loop = stepped()
    async with contextlib.aclosing(Feed(loop.loop).catalogue()) as messages:
        await anext(messages)
        for name in ("b", "c", "d"):
            loop.step(documents(A, *(model(known) for known in ("b", "c", "d") if known <= name)))
        async with asyncio.timeout(60):
            delta = msgspec.json.decode(await anext(messages), type=CatalogueDelta)
    assert [entry.name for entry in delta.models] == ["b", "c", "d"]
    assert delta.version == loop.loop.world.version


ODD: list[object] = [None, -1, 2**63, 10**30, 1e308, "", 100_000 * "x", "\0", "a/b/../c", [], {}, True]
WHOLE: dict[str, Any] = {
    "gateway": "g7", "boot": "b7", "sequence": 1, "epoch": 1, "version": 1,
    "levels": [{"model": "a", "tenant": "t", "priority": 0, "waiting": 1, "running": 1, "oldest_wait_s": 1.0}],
    "totals": [{"model": "a", "tenant": "t", "admitted": 1, "busy_slot_us": 1, "idle_s": 1.0}],
    "replicas": [{"replica": "r1", "hold": 1, "in_use": 1, "last_byte_age_s": 1.0}],
}  # fmt: skip
"""A valid report with a value for each field."""
MAY_BE = {
    "gateway": (), "boot": (), "sequence": (), "epoch": (), "version": (), "waiting": (), "running": (), "hold": (),
    "in_use": (), "admitted": (), "busy_slot_us": (), "levels": ([],), "totals": ([],), "replicas": ([],),
    "model": ("a/b/../c",), "tenant": ("a/b/../c",), "replica": ("a/b/../c",), "priority": (-1,),
    "oldest_wait_s": (-1,), "idle_s": (-1,), "last_byte_age_s": (-1, None),
}  # fmt: skip
"""The values of ODD that are valid for a field; names may contain slashes."""


def odd_reports() -> Iterator[tuple[str, dict[str, Any]]]:
    """(path of the field, a report with an invalid value there)."""
    for field, rows in WHOLE.items():
        for odd in ODD:
            if not any(odd == one and type(odd) is type(one) for one in MAY_BE[field]):
                yield f"$.{field}", {**WHOLE, field: odd}
            for key in rows[0] if isinstance(rows, list) else ():
                if not any(odd == one and type(odd) is type(one) for one in MAY_BE[key]):
                    yield f"$.{field}[0].{key}", {**WHOLE, field: [{**rows[0], key: odd}]}


async def test_report_out_of_bounds_is_rejected_with_400_and_the_field(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    tried = 0
    for path, odd in odd_reports():
        status, answer = await post(client, json.dumps(odd).encode())
        assert status == 400, odd
        assert f"`{path}`" in json.loads(answer)["error"], answer
        assert len(answer) < 300, "without the value"
        tried += 1
    assert tried > 200
    assert GatewayId("g7") not in loop.step().gateways
    status, _ = await post(client, json.dumps(WHOLE).encode())
    assert (status, GatewayId("g7") in loop.step().gateways) == (200, True)


async def test_report_with_a_future_route_version_is_rejected(aiohttp_client: AiohttpClient) -> None:
    """Otherwise another boot would count as the living one, and the reports of the gateway itself would be ignored."""
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    version = loop.loop.world.version
    for odd in (version + 1, 2**53 - 1):
        status, answer = await post(client, json.dumps({**WHOLE, "gateway": "g1", "version": odd}).encode())
        assert (status, b"`$.version`" in answer) == (400, True)
    assert loop.step().gateways[GatewayId("g1")].boot == "b"
    assert (await post(client, json.dumps({**WHOLE, "gateway": "g1", "version": version}).encode()))[0] == 200


async def test_gateway_above_the_limit_is_rejected_until_silent_gateways_expire(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    for n in range(GATEWAYS_MAX - 1):
        accept_report(loop.loop, Report(gateway=GatewayId(f"x{n}"), boot="b", sequence=1))
    loop.step()
    assert (await post(client, json.dumps(WHOLE).encode()))[0] == 503
    assert (await client.get("/v1/routes?gateway=g7")).status == 503
    loop.now_s += UNWATCHED_SILENT_S
    assert {one.id for one in loop.step().gateways.values() if not one.gone} == {"g1"}, "its process is watched"
    loop.now_s += GONE_KEPT_S
    assert set(loop.step().gateways) == {"g1"}
    assert (await post(client, json.dumps(WHOLE).encode()))[0] == 200


async def test_route_stream_without_a_valid_gateway_name_is_rejected_with_400(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(ContractServer(stepped().loop).application())
    response = await client.get("/v1/routes")
    assert (response.status, await response.json()) == (400, {"error": WHICH})
    for query in ("gateway=a/b", "gateway=" + 300 * "x", "gateway=%00"):
        response = await client.get(f"/v1/routes?{query}")
        assert (response.status, await response.json()) == (400, {"error": WHICH})
    assert (await client.get("/v1/routes?gateway=g1&boot=" + 300 * "x")).status == 400


async def test_gateway_that_opens_a_route_stream_is_known_before_it_reports(aiohttp_client: AiohttpClient) -> None:
    loop = stepped()
    client = await aiohttp_client(ContractServer(loop.loop).application())
    response = await client.get("/v1/routes?gateway=g2&boot=b2")
    world_now = loop.step()
    assert world_now.gateways[GatewayId("g2")].report is None
    response.close()


async def test_gateway_whose_process_was_killed_is_observed_as_gone(tmp_path: Path) -> None:
    loop = stepped()

    def gone() -> list[object]:
        return [one for one in loop.loop.observed if isinstance(one, GatewayGone)]

    runner = web.AppRunner(ContractServer(loop.loop).application(), shutdown_timeout=0.1)
    await runner.setup()
    path = tmp_path / "autoscaler.sock"
    await web.UnixSite(runner, str(path)).start()
    peer = subprocess.Popen([sys.executable, "-S", "-E", "-c", PEER, str(path)], stdout=subprocess.PIPE)
    try:
        assert peer.stdout is not None
        assert (await asyncio.to_thread(peer.stdout.readline)).strip() == b"connected"
        assert not gone()
        peer.kill()
        await until("its end is observed", gone, 5)
    finally:
        peer.kill()
        peer.communicate()
        await runner.cleanup()
    assert gone() == [GatewayGone(gateway=GatewayId("g9"), boot="b9")]
    assert loop.step().gateways[GatewayId("g9")].gone


async def test_gateway_with_a_broken_connection_is_not_recorded_as_gone(tmp_path: Path) -> None:
    loop = stepped()
    runner = web.AppRunner(ContractServer(loop.loop).application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as session:
        response = await session.get("http://x/v1/routes?gateway=g9&boot=b9")
        response.close()
    await runner.cleanup()
    assert not loop.step().gateways[GatewayId("g9")].gone
