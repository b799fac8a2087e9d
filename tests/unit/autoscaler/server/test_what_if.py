"""The what-if endpoint of the operations port: valid queries, rate limits, and no side effects."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from pytest_aiohttp import AiohttpClient

from autoscaler.contract import ModelName, TenantName
from autoscaler.explain.decision_log import Log
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.planner.what_if import PATH, Answer, AssumedDemand, simulate_world
from autoscaler.server import openapi, what_if
from autoscaler.server.ops import OperationsServer
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from autoscaler.state.world import World
from tests.support.builders.worlds import device, model, replica, world
from tests.support.harness.faults.fault_injection import concerns, inject
from tests.support.harness.manual_loop import SteppedLoop

pytestmark = pytest.mark.standard

Client = TestClient[web.Request, web.Application]
A, B = model("a", 20, aliases=("small",), idle_seconds=3600.0), model("org/b", 20)


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def tenants() -> dict[TenantName, Tenant]:
    keys = (Key(sha256=hashed("pl-ops"), name="ops", role="operator"), Key(sha256=hashed("pl-app"), name="app"))
    acme = Tenant(name=TenantName("acme"), spec=TenantSpec(keys=keys))
    return {acme.name: acme}


def lived() -> World:
    """`a` is idle on the only device."""
    return world([A, B], [device()], [replica(A, "r1")])


async def connect(aiohttp_client: AiohttpClient, made: World) -> tuple[Client, SteppedLoop]:
    stepped = SteppedLoop(made)
    port = OperationsServer(stepped.loop, Log(), lambda: b"", tuple, "1.2.3")
    return await aiohttp_client(port.application()), stepped


async def test_what_if_query_returns_starts_and_stops_without_executing_them(aiohttp_client: AiohttpClient) -> None:
    made = lived()
    client, stepped = await connect(aiohttp_client, made)
    response = await client.post(PATH, json={"demand": {"org/b": {"waiting": 3}, "small": {}}})
    found = await response.json()
    assert response.status == 200
    assert [start["model"] for start in found["starts"]] == ["org/b"]
    assert [stop["replica"] for stop in found["stops"]] == ["r1"]
    assert stepped.loop.world is made
    assert (stepped.driver.started, stepped.driver.stopped) == ([], [])
    described = await (await client.get(openapi.PATH)).json()
    schema = described["paths"][PATH]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": described["components"]}).validate(found)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"demand": {"c": {"waiting": 1}}}', 404, "c: no such model; existing: a, org/b"),
        (b'{"demand": {"a": {}, "small": {}}}', 400, "small: Model a occurs twice"),
        (b'{"demand": {"a": {"waiting": -1}}}', 400, "expected {"),
        (b'{"demand": {"a": {"waiting": 1000001}}}', 400, "expected {"),
        (b'{"demand": {"a": {"wating": 1}}}', 400, "expected {"),
        (b'{"demand": {}}', 400, "expected {"),
        (b"", 400, "expected {"),
        (b"[" * 5000, 400, "expected {"),
        (b" " * 70_000, 413, "at most 65536 bytes"),
    ],
)
async def test_invalid_what_if_query_is_rejected_with_the_reason(
    aiohttp_client: AiohttpClient, body: bytes, status: int, message: str
) -> None:
    client, _ = await connect(aiohttp_client, lived())
    response = await client.post(PATH, data=body, headers={"content-type": "application/json"})
    assert response.status == status
    assert message in (await response.json())["error"]


async def test_cross_origin_query_or_query_to_a_follower_is_rejected(aiohttp_client: AiohttpClient) -> None:
    client, _ = await connect(aiohttp_client, world([A], [device()], leads=False))
    question = {"demand": {"a": {"waiting": 1}}}
    assert (await client.post(PATH, json=question)).status == 503
    assert (await client.post(PATH, json=question, headers={"origin": "https://evil"})).status == 403
    assert (await client.post(PATH, data="{}", headers={"content-type": "text/plain"})).status == 415


async def test_query_requires_an_operator_key_if_tenants_exist(aiohttp_client: AiohttpClient) -> None:
    client, _ = await connect(aiohttp_client, replace(lived(), tenants=tenants()))
    question = {"demand": {"a": {"waiting": 1}}}
    found: list[tuple[int, str]] = []
    for headers in ({}, {"authorization": "Bearer pl-app"}, {"authorization": "Bearer pl-ops"}):
        response = await client.post(PATH, json=question, headers=headers)
        found.append((response.status, (await response.json()).get("error", "")))
    assert found == [
        (
            401,
            "a what-if requires an API key with the role operator: `pilotlight key new --tenant NAME --role operator`",
        ),
        (403, "this API key has the role tenant: a what-if requires a key with the role operator"),
        (200, ""),
    ]


async def test_simulation_reports_the_obstacle_of_a_model_that_cannot_start(aiohttp_client: AiohttpClient) -> None:
    """No replica is evicted for it, and the query leaves no state behind."""
    client, stepped = await connect(aiohttp_client, lived())
    stepped.driver.obstacles["org/b"] = "vllm: no such program"
    found = await (await client.post(PATH, json={"demand": {"org/b": {"waiting": 1}}})).json()
    assert (found["starts"], found["stops"]) == ([], [])
    assert "vllm: no such program" in str((found["unmet"], found["orders"]))
    assert stepped.loop.world.learned.obstacles == {}


async def test_simulation_answer_contains_no_address_and_no_key(aiohttp_client: AiohttpClient) -> None:
    ran = replica(A, "r1", address="http://10.9.8.7:8000")
    client, _ = await connect(aiohttp_client, world([A, B], [device()], [ran], tenants=tenants()))
    demands: list[dict[str, dict[str, int]]] = [{"org/b": {"waiting": 3}}, {"a": {"waiting": 9}}, {"c": {}}]
    for demand in demands:
        headers = {"authorization": "Bearer pl-ops"}
        response = await (await client.post(PATH, json={"demand": demand}, headers=headers)).text()
        assert not [one for one in ("10.9.8.7", "8000", "pl-ops", hashed("pl-ops")) if one in response]


async def test_second_simulation_is_rejected_with_429_while_the_first_runs(
    aiohttp_client: AiohttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(made: World, asked: Mapping[ModelName, AssumedDemand], now_s: float) -> Answer:
        begun.set()
        assert go_on.wait(60)
        return simulate_world(made, asked, now_s)

    monkeypatch.setattr(what_if, "simulate_world", slow)
    client, _ = await connect(aiohttp_client, lived())
    question = {"demand": {"a": {"waiting": 1}}}
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post(PATH, json=question))
        assert await asyncio.to_thread(begun.wait, 60)
        assert (await client.post(PATH, json=question)).status == 429
        assert (await client.get("/healthz")).status == 200, "the loop goes on"
        go_on.set()
    assert first.result().status == 200
    assert (await client.post(PATH, json=question)).status == 200


async def test_model_that_raises_is_quarantined_and_the_others_are_simulated(
    aiohttp_client: AiohttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("a"))
    client, stepped = await connect(aiohttp_client, world([A, B], [device(), device("free")], [replica(A, "r1")]))
    response = await client.post(PATH, json={"demand": {"a": {"waiting": 1}, "org/b": {"waiting": 1}}})
    assert response.status == 200
    assert [start["model"] for start in (await response.json())["starts"]] == ["org/b"]
    assert faults.reported == [("a", "what-if")]
    assert list_quarantined_models(stepped.loop.world) == {"a"}
