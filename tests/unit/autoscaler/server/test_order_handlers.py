"""Operator orders over HTTP: authorization, responses, audit log and persistence."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from openapi_spec_validator import validate
from pytest_aiohttp import AiohttpClient

from autoscaler.contract import ModelName, TenantName
from autoscaler.drivers.driver import CordonError
from autoscaler.drivers.local.cordon_file import CordonFile
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.explain.decision_log import Log
from autoscaler.fold.quarantine_mask import assume_quarantined
from autoscaler.planner import what_if
from autoscaler.server import openapi
from autoscaler.server.operator_request_checks import is_same_origin
from autoscaler.server.ops import OperationsServer
from autoscaler.server.order_handlers import Commands
from autoscaler.spec.model import Adopted
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from autoscaler.state.events import CordonsSeen, ModelStopped, ModelWoken
from autoscaler.state.world import Cordon, CordonTarget, World
from tests.support.builders.worlds import T0, device, gateway, level, model, replace_fields, replica, use, world
from tests.support.harness.manual_loop import SteppedLoop

pytestmark = pytest.mark.standard

Client = TestClient[web.Request, web.Application]
A, B = model("a", 20, idle_seconds=60.0), model("org/b", 20)
OPERATOR, CALLER = "pl-operator", "pl-caller"


class Kept:
    """Orders in memory."""

    def __init__(self) -> None:
        self.cordons: dict[CordonTarget, Cordon] = {}
        self.fails = ""

    async def put(self, cordon: Cordon) -> None:
        if self.fails:
            raise CordonError(self.fails)
        self.cordons[cordon.place] = cordon

    async def lift(self, place: CordonTarget) -> None:
        self.cordons.pop(place, None)


class Port:
    """An operations port over an unchanging `World`."""

    def __init__(self, made: World) -> None:
        self.loop = SteppedLoop(made).loop
        self.kept = Kept()

    async def client(self, aiohttp_client: AiohttpClient) -> Client:
        commands = Commands(self.loop, self.kept, lambda: 1_800_000_000.0)
        server = OperationsServer(self.loop, Log(), lambda: b"", tuple, commands=commands)
        return await aiohttp_client(server.application())


def lived(**fields: Any) -> World:
    calls = [gateway(levels=[level("a", 0, 2)], uses=[use("r1", 2)])]
    return world([A, B], [device(), device("n0/gpu1")], [replica(A, "r1")], calls, **fields)


def tenants() -> dict[TenantName, Tenant]:
    def hashed(secret: str) -> str:
        return hashlib.sha256(secret.encode()).hexdigest()

    keys = (
        Key(sha256=hashed(OPERATOR), name="ops", role="operator"),
        Key(sha256=hashed(CALLER), name="app"),
        Key(sha256=hashed("old"), role="operator", expires_at="2020-01-01T00:00:00Z"),
    )
    acme = Tenant(name=TenantName("acme"), spec=TenantSpec(keys=keys))
    return {acme.name: acme}


async def test_response_to_each_operator_order_matches_its_openapi_schema(aiohttp_client: AiohttpClient) -> None:
    client = await Port(lived()).client(aiohttp_client)
    described = await (await client.get(openapi.PATH)).json()
    validate(described)
    posts = {path: item["post"] for path, item in described["paths"].items() if "post" in item}
    orders = [(path, post) for path, post in posts.items() if path != what_if.PATH]
    assert len(orders) == 8
    for path, operation in orders:
        names = {"models": "org/b", "devices": "n0/gpu1", "nodes": "n0"}
        for name, status in ((names[path.split("/")[3]], "200"), ("nobody", "404")):
            response = await client.post(path.replace("{name}", name), json={})
            assert response.status == int(status), path
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": described["components"]}).validate(await response.json())


async def effect_of(client: Client, path: str, **body: bool) -> str:
    response = await client.post(f"/api/v1/{path}", json=body)
    assert response.status == 200, await response.text()
    return str((await response.json())["says"])


async def test_operator_order_is_queued_and_answered_with_its_effect(aiohttp_client: AiohttpClient) -> None:
    port = Port(lived())
    client = await port.client(aiohttp_client)
    assert await effect_of(client, "models/a/wake") == "a is ready and stays for its idle timeout (60 s)"
    assert (await effect_of(client, "models/org/b/wake")).startswith("org/b starts as soon as there is room")
    assert await effect_of(client, "models/a/stop", force=True) == (
        "1 replica of a drains; 2 running requests may take 10 s at most; "
        "a waiting or new request starts it again, unless spec.paused is set"
    )
    assert await effect_of(client, "models/org/b/stop") == (
        "no replica of org/b runs; a waiting or new request starts it again, unless spec.paused is set"
    )
    assert port.loop.observed == [
        ModelWoken(model=A.name), ModelWoken(model=B.name),
        ModelStopped(model=A.name, force=True), ModelStopped(model=B.name),
    ]  # fmt: skip


async def test_stop_of_a_manually_scaled_model_mentions_the_manual_scale(aiohttp_client: AiohttpClient) -> None:
    message = "scaled to 2 by kubectl; holds until then"
    by_hand = Adopted(kind="Deployment", namespace="default", name="a", held=True, message=message)
    made = replace(model("a", 20, low=2, high=2), adopted=by_hand)
    port = Port(world([made], [device()], [replica(made, "r1")]))
    text = await effect_of(await port.client(aiohttp_client), "models/a/stop")
    assert text.endswith(f"; {message}, so it starts again")


async def test_cordon_drain_and_uncordon_are_stored_and_report_their_effect(aiohttp_client: AiohttpClient) -> None:
    port = Port(lived())
    client = await port.client(aiohttp_client)
    message = await effect_of(client, "devices/gpu0/cordon")
    assert message.startswith("no new replica is placed on device gpu0; a stays there until it is idle or drained")
    assert await effect_of(client, "devices/n0/gpu1/cordon") == "no new replica is placed on device n0/gpu1"
    message = await effect_of(client, "nodes/n0/drain")
    assert message == "no new replica is placed on node n0; a drains, and starts on another device if there is room"
    assert {(c.place.kind, c.place.name, c.node, c.drain) for c in port.kept.cordons.values()} == {
        ("device", "gpu0", "n0", False), ("device", "n0/gpu1", "n0", False), ("node", "n0", "n0", True),
    }  # fmt: skip
    assert await effect_of(client, "devices/gpu0/uncordon") == "device gpu0 was not cordoned", "as far as is observed"
    assert CordonTarget("device", "gpu0") not in port.kept.cordons


async def test_cordon_does_not_cancel_an_existing_drain(aiohttp_client: AiohttpClient) -> None:
    place = CordonTarget("device", "gpu0")
    known = Cordon(place=place, node="n0", since_s=T0 - 50, drain=True, force=True)
    port = Port(lived(cordons={place: known}))
    client = await port.client(aiohttp_client)
    await effect_of(client, "devices/gpu0/cordon")
    assert port.kept.cordons[place] is known


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"models": {A.name: model("a", 20, paused=True)}}, "a is paused: set spec.paused to false first"),
        ({"obstacles": {ModelName("a"): "there is no program x"}}, "a cannot start: there is no program x"),
        ({"models": {A.name: model("a", 200)}}, "a fits on no device: needs 200Gi on one device; the largest has 24Gi"),
    ],
)
async def test_wake_that_cannot_succeed_is_rejected_with_409_and_the_reason(
    aiohttp_client: AiohttpClient, fields: dict[str, object], why: str
) -> None:
    client = await Port(replace_fields(world([A], [device()]), **fields)).client(aiohttp_client)
    response = await client.post("/api/v1/models/a/wake", json={})
    assert (response.status, await response.json()) == (409, {"error": why})


@pytest.mark.parametrize("paused", [False, True])
async def test_wake_of_a_quarantined_model_retries_it(aiohttp_client: AiohttpClient, paused: bool) -> None:
    of = model("a", 20, paused=paused)
    port = Port(assume_quarantined(world([of], [device()]), [of.name]))
    assert await effect_of(await port.client(aiohttp_client), "models/a/wake") == "retrying a now"
    assert port.loop.observed == [ModelWoken(model=of.name)]


# --- authorization --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "status", "word"),
    [
        (None, 401, "role operator"),
        ("wrong", 401, "role operator"),
        ("old", 401, "role operator"),
        (CALLER, 403, "role tenant"),
        (OPERATOR, 200, ""),
    ],
)
async def test_order_requires_an_operator_key_if_tenants_exist(
    aiohttp_client: AiohttpClient, key: str | None, status: int, word: str
) -> None:
    port = Port(lived(tenants=tenants()))
    client = await port.client(aiohttp_client)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await client.post("/api/v1/models/a/wake", json={}, headers=headers)
    assert response.status == status
    assert word in await response.text()
    assert bool(port.loop.observed) == (status == 200)


async def test_order_needs_no_key_with_auth_none(aiohttp_client: AiohttpClient) -> None:
    client = await Port(lived(tenants=tenants(), settings=Settings(auth="none"))).client(aiohttp_client)
    assert (await client.post("/api/v1/models/a/wake", json={})).status == 200


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"origin": "http://evil.example"}, "{}", 403),
        ({"origin": "null"}, "{}", 403),
        ({"sec-fetch-site": "cross-site"}, "{}", 403),
        ({"content-type": "text/plain"}, "{}", 415),
        ({"content-type": "application/x-www-form-urlencoded"}, "force=true", 415),
        ({}, "{", 400),
        ({}, '{"forced": true}', 400),
        ({}, '{"force": 1}', 400),
        ({}, "[" * 600, 400),
        ({}, '{"force": true}' + " " * 1024, 413),
    ],
)
async def test_invalid_or_cross_origin_order_is_rejected_and_changes_nothing(
    aiohttp_client: AiohttpClient, headers: dict[str, str], body: str, status: int
) -> None:
    port = Port(lived())
    client = await port.client(aiohttp_client)
    sent = {"content-type": "application/json", **headers}
    response = await client.post("/api/v1/models/a/stop", data=body, headers=sent)
    assert response.status == status
    assert (await response.json())["error"]
    assert not port.loop.observed


@pytest.mark.parametrize(
    ("origin", "site", "host", "own"),
    [
        (None, None, "127.0.0.1:8081", True),
        ("http://127.0.0.1:8081", "same-origin", "127.0.0.1:8081", True),
        ("http://127.0.0.1:8080", "same-site", "127.0.0.1:8081", False),
        ("http://127.0.0.1:8080", None, "127.0.0.1:8081", False),
        ("http://h", None, None, False),
    ],
)
def test_only_requests_without_a_foreign_origin_are_accepted(
    origin: str | None, site: str | None, host: str | None, own: bool
) -> None:
    assert is_same_origin(origin, site, host) is own


async def test_order_is_rejected_with_503_unless_leading_and_synced(aiohttp_client: AiohttpClient) -> None:
    port = Port(lived(leads=False))
    client = await port.client(aiohttp_client)
    response = await client.post("/api/v1/models/a/stop", json={})
    assert (response.status, "does not lead" in await response.text()) == (503, True)
    assert not port.loop.observed
    begun = await Port(World(epoch=1)).client(aiohttp_client)
    assert (await begun.post("/api/v1/nodes/n0/cordon", json={})).status == 503


async def test_accepted_order_is_logged_in_one_line_without_the_key(
    aiohttp_client: AiohttpClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await Port(lived(tenants=tenants())).client(aiohttp_client)
    with caplog.at_level(logging.INFO, "pilotlight.autoscaler.operators"):
        for key in (OPERATOR, CALLER):
            headers = {"authorization": f"Bearer {key}"}
            await client.post("/api/v1/devices/gpu0/drain", json={"force": True}, headers=headers)
    lines = [record.getMessage() for record in caplog.records if "event=operator" in record.getMessage()]
    assert lines == ["event=operator who='acme/ops' verb=drain device=gpu0 force=true"]


async def test_operator_order_to_a_read_only_server_is_rejected_with_405(aiohttp_client: AiohttpClient) -> None:
    server = OperationsServer(SteppedLoop(lived()).loop, Log(), lambda: b"", tuple)
    client = await aiohttp_client(server.application())
    assert (await client.post("/api/v1/models/a/wake", json={})).status == 405


# --- persistence ----------------------------------------------------------------------------------------------------


def file(folder: Path, seen: list[CordonsSeen], clock: Callable[[], float], wall: Callable[[], float]) -> CordonFile:
    state = StateDirectory.open(folder)
    state.close()
    return CordonFile(state, seen.extend, clock, wall)


async def test_cordons_survive_a_restart_with_their_age(tmp_path: Path) -> None:
    seen: list[CordonsSeen] = []
    first = file(tmp_path, seen, lambda: 100.0, lambda: 5000.0)
    assert first.load() == ""
    one = Cordon(place=CordonTarget("device", "gpu0"), node="n0", since_s=90.0, drain=True, force=True)
    two = Cordon(place=CordonTarget("node", "n0"), node="n0", since_s=95.0)
    await first.put(one)
    await first.put(two)
    await first.lift(two.place)
    assert [len(batch.cordons) for batch in seen] == [1, 2, 1]
    seen.clear()
    second = file(tmp_path, seen, lambda: 7.0, lambda: 5060.0)
    assert second.load() == ""
    (known,) = seen[0].cordons
    assert (known.place, known.drain, known.force, known.since_s) == (one.place, True, True, 7.0 - 70.0)


async def test_order_that_cannot_be_stored_does_not_take_effect(
    aiohttp_client: AiohttpClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CordonsSeen] = []
    kept = file(tmp_path, seen, lambda: 0.0, lambda: 0.0)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("autoscaler.drivers.local.cordon_file.replace_file", full)
    with pytest.raises(CordonError, match=r"cordons.json cannot be written \(No space left on device\)"):
        await kept.put(Cordon(place=CordonTarget("device", "gpu0"), node="n0", since_s=0.0))
    assert not seen
    port = Port(lived())
    port.kept.fails = "the disk is full"
    client = await port.client(aiohttp_client)
    response = await client.post("/api/v1/devices/gpu0/cordon", json={})
    assert (response.status, await response.json()) == (500, {"error": "the order has no effect: the disk is full"})


def test_corrupt_cordon_file_is_renamed_and_reported(tmp_path: Path) -> None:
    (tmp_path / "cordons.json").write_text("{")
    seen: list[CordonsSeen] = []
    reported = file(tmp_path, seen, lambda: 0.0, lambda: 0.0).load()
    assert "cannot be read" in reported
    assert (tmp_path / "cordons.broken").exists()
    assert not seen
