"""The health port reports liveness, readiness and metrics; it is no operations port."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from autoscaler.contract import GatewayId
from autoscaler.explain.decision_log import Log
from autoscaler.server.ops import OperationsServer
from gateway.gateway import Gateway
from gateway.ops import build_ops_application
from pilotlight.net import http_server
from pilotlight.net.listen import Address
from tests.support.builders.worlds import world
from tests.support.harness.manual_loop import SteppedLoop
from tests.support.net.ports import free_port

pytestmark = pytest.mark.standard


def of_autoscaler() -> web.Application:
    return OperationsServer(SteppedLoop(world([], [])).loop, Log(), lambda: b"# metrics\n", list).health()


def of_gateway() -> web.Application:
    return build_ops_application(Gateway(GatewayId("g"), "boot", lambda: 0.0))


@pytest.mark.parametrize("app", [of_autoscaler, of_gateway])
async def test_health_port_returns_404_except_for_health_readiness_and_metrics(app: object) -> None:
    assert callable(app)
    address = Address("127.0.0.1", free_port())
    runner = await http_server.open_port(address, app())
    try:
        async with aiohttp.ClientSession(address.url) as session:
            for path, wanted in (("/healthz", {200}), ("/readyz", {200, 503}), ("/metrics", {200})):
                async with session.get(path, headers={"Host": "10.1.2.3:8082"}) as answer:
                    assert answer.status in wanted, path
            for method, path in (("GET", "/"), ("GET", "/api/v1/status"), ("POST", "/api/v1/models/a/wake")):
                async with session.request(method, path) as answer:
                    assert answer.status == 404, path
    finally:
        await runner.cleanup()


async def test_health_port_is_not_opened_if_no_address_is_configured() -> None:
    runner = await http_server.open_port(None, of_gateway())
    assert runner.addresses == []
    await runner.cleanup()
