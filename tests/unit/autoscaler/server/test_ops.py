"""The operations port: each path, its responses to unknown names, and its description."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from pytest_aiohttp import AiohttpClient

from autoscaler.contract import ReplicaId, TenantName
from autoscaler.explain.decision_log import Log
from autoscaler.server import openapi, ops
from autoscaler.server.ops import OperationsServer
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from autoscaler.state.actions import DrainReplica, Plan
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import World
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, use, world
from tests.support.harness.faults.fault_injection import concerns, inject
from tests.support.harness.manual_loop import SteppedLoop

pytestmark = pytest.mark.standard

Client = TestClient[web.Request, web.Application]
A, B = model("a", 20), model("org/b", 20)
GAUGE = b"# HELP pilotlight_leader x\n# TYPE pilotlight_leader gauge\npilotlight_leader 1.0\n"


def lived() -> tuple[World, Log]:
    """`a` runs on the only device, `org/b` waits for it; there is one Tenant with a key."""
    runs = replica(A, "r1")
    calls = [gateway(levels=[level("a", 0, 2), level("org/b", 3)], uses=[use("r1", 2)])]
    acme = Tenant(name=TenantName("acme"), spec=TenantSpec(keys=(Key(sha256="5" * 64),), weight=2.0))
    made = world([A, B], [device(product="H100")], [runs], calls, tenants={acme.name: acme})
    log = Log()
    log.extend([Transition(at_s=T0, replica=runs.id, model=A.name, slices=runs.resources.slices, before=S.STARTING,
                           after=S.READY, verb="seen", reason="seen ready")])  # fmt: skip
    return made, log


async def connect(aiohttp_client: AiohttpClient, made: World, log: Log | None = None, *sockets: Path) -> Client:
    loop = SteppedLoop(made).loop
    port = OperationsServer(loop, log or Log(), lambda: GAUGE, lambda: sockets, "1.2.3")
    return await aiohttp_client(port.application())


async def test_response_of_each_read_only_path_matches_its_openapi_schema(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, *lived())
    described = await (await client.get(openapi.PATH)).json()
    validate(described)
    assert described["info"]["version"] == "1.2.3"
    for path, item in described["paths"].items():
        for name in ("a", "org/b", "nobody") if "get" in item else ():
            response = await client.get(path.replace("{name}", name))
            status = "404" if "{name}" in path and name == "nobody" else "200"
            assert response.status == int(status), path
            assert response.content_type == "application/json"
            schema = item["get"]["responses"][status]["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": described["components"]}).validate(await response.json())


async def test_api_returns_models_tenants_devices_plan_and_explanations(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, *lived())

    async def get(path: str) -> object:
        return await (await client.get(f"/api/v1/{path}")).json()

    rows = await get("status")
    assert isinstance(rows, list)
    assert [(row["model"], row["state"], row["waiting"], row["running"], row["devices"]) for row in rows] == [
        ("a", "ready", 0, 2, ["gpu0"]),
        ("org/b", "waiting", 3, 0, []),
    ]
    one = await get("models/a")
    assert isinstance(one, dict)
    assert (one["replicas"], one["demand"], one["slots"]) == ({"ready": 1}, {"waiting": 0, "running": 2}, 4)
    models = await get("models")
    assert isinstance(models, list)
    assert [row["name"] for row in models] == ["a", "org/b"]
    assert await get("tenants") == [{"name": "acme", "weight": 2.0, "keys": 1}]
    held = {"id": "r1", "model": "a", "state": "ready", "memory_bytes": 20 << 30, "devices": []}
    expected = {"id": "gpu0", "product": "H100", "isolation": "none", "replicas": [held]}
    devices = await get("devices")
    assert isinstance(devices, list)
    assert [{key: row[key] for key in expected} for row in devices] == [expected]
    assert await get("plan") == {"actions": [], "unmet": [], "next_s": None, "tries": []}
    explanation = await get("explain/last")
    assert isinstance(explanation, dict)
    assert [sentence.partition(",")[0] for sentence in explanation["sentences"]] == ["a: r1 starting -> ready"]
    why = await get("explain/model/org/b")
    assert isinstance(why, dict)
    assert why["sentences"][0].startswith("1 replica is needed: 3 waiting")


def test_action_of_a_plan_is_encoded_with_its_kind() -> None:
    made = Plan(actions=(DrainReplica(replica=ReplicaId("r1"), reason="idle"),))
    (shown,) = json.loads(msgspec.json.encode(made))["actions"]
    assert shown == {
        "kind": "drain", "replica": "r1", "reason": "idle", "victim_of": None, "stranded": False, "crowded": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "point", "what"),
    [
        ("explain/fit/a", "autoscaler.explain.fit:build_placement_request", "explain"),
        ("devices", "autoscaler.server.read_responses:devices_of", "status"),
    ],
)
async def test_error_for_a_model_is_reported_once_and_the_request_succeeds(
    path: str, point: str, what: str, aiohttp_client: AiohttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = inject(monkeypatch, point, concerns("a"))
    client = await connect(aiohttp_client, *lived())
    for _ in range(2):
        response = await client.get(f"/api/v1/{path}")
        assert response.status == 200
        assert faults.reported == [("a", what)]
    found = await response.json()
    if path == "devices":
        assert [(one["id"], one["devices"]) for one in found[0]["replicas"]] == [("r1", [])]
    else:
        assert found["sentences"][0].startswith("Quarantined because of an internal error (InjectedError in ")
    assert (await client.get("/api/v1/nodes")).status == 200


async def test_model_is_found_by_its_aliases(aiohttp_client: AiohttpClient) -> None:
    made = world([A, model("org/b", 20, aliases=("small", "gpt-4o-mini"))], [device()])
    client = await connect(aiohttp_client, made)
    view = await (await client.get("/api/v1/models/gpt-4o-mini")).json()
    assert (view["name"], view["aliases"]) == ("org/b", ["small", "gpt-4o-mini"])
    explanation = await (await client.get("/api/v1/explain/model/small")).json()
    assert explanation["model"] == "org/b"


async def test_unknown_model_or_path_is_answered_with_the_available_ones(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, *lived())
    for path in ("models/x", "explain/model/x"):
        response = await client.get(f"/api/v1/{path}")
        assert (response.status, await response.json()) == (404, {"error": "no such model; existing: a, org/b"})
    response = await client.get("/api/v2/status")
    assert response.status == 404
    assert openapi.PATH in (await response.json())["error"]
    response = await client.post("/api/v1/status", json={})
    fields = {"error": "this path does not support the method; /api/v1/openapi.json lists all paths"}
    assert (response.status, await response.json()) == (405, fields)


async def test_server_is_healthy_but_not_ready_before_replicas_are_listed(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, World(epoch=1))
    assert (await client.get("/healthz")).status == 200
    response = await client.get("/readyz")
    assert (response.status, await response.text()) == (503, "the running replicas are still being listed\n")
    assert await (await client.get("/api/v1/devices")).json() == []


async def test_server_is_ready_once_all_running_replicas_are_listed(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, world([A]))
    assert (await client.get("/readyz")).status == 200


async def test_metrics_include_the_metrics_of_gateways_that_respond(
    aiohttp_client: AiohttpClient, tmp_path: Path
) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=b"# TYPE x counter\nx_total 4.0\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "g1.sock")).start()
    try:
        client = await connect(aiohttp_client, world(), None, tmp_path / "g1.sock", tmp_path / "gone.sock")
        response = await client.get("/metrics")
        text = await response.text()
        asked = {"accept": "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5"}
        other = await client.get("/metrics", headers=asked)
        assert other.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert (await other.text()).endswith("# EOF\n")
    finally:
        await runner.cleanup()
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "x_total 4.0" in text
    assert "pilotlight_leader 1.0" in text


class Outline(HTMLParser):
    """Records the tags of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


async def test_operator_page_loads_no_resources_and_runs_only_its_own_script(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, *lived())
    response = await client.get("/")
    text = await response.text()
    assert (response.status, response.content_type) == (200, "text/html")
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for tag in ("script", "style"):
        inside = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    outline = Outline()
    outline.feed(text)
    for tag, attributes in outline.tags:
        assert not {"src", "srcset", "style"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert (attributes.get("href") or "/").startswith("/"), tag
    assert "innerHTML" not in text
    assert {"lang": "en"} in [attributes for tag, attributes in outline.tags if tag == "html"]


async def test_operator_page_reads_only_existing_paths_and_fields(aiohttp_client: AiohttpClient) -> None:
    client = await connect(aiohttp_client, *lived())
    text = ops.load_operator_page().body.decode()
    for path, fields in (
        ("status", ("model", "state", "replicas", "waiting", "running", "devices", "since_s", "why")),
        ("devices", ("id", "product", "healthy", "closed", "memory_bytes", "replicas")),
        ("explain/last", ("sentences",)),
    ):
        assert f'read("{path}")' in text
        answered = await (await client.get(f"/api/v1/{path}")).json()
        row = answered[0] if isinstance(answered, list) else answered
        for field in fields:
            assert field in row, (path, field)
            assert f".{field}" in text, (path, field)


async def test_hanging_gateway_delays_the_scrape_only_by_its_timeout(
    aiohttp_client: AiohttpClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoscaler.server.ops.SCRAPE_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(str(tmp_path / "g.sock"))
        hangs.listen(1)  # the kernel accepts the connection; no response follows
        client = await connect(aiohttp_client, world(), None, tmp_path / "g.sock")
        async with asyncio.timeout(30):
            assert "pilotlight_leader" in await (await client.get("/metrics")).text()
