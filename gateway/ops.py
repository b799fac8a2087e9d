"""A gateway's operations port (interfaces, section 4): liveness, readiness and metrics. Read-only."""

from __future__ import annotations

from aiohttp import web

from gateway.gateway import Gateway

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_ops_application(gateway: Gateway) -> web.Application:
    """Build GET /healthz, /readyz and /metrics, for a TCP port or a Unix socket."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not gateway.ready:
            return web.Response(status=503, text="no routes yet, or stopping\n")
        return web.Response(text="ok\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=gateway.metrics(), headers={"content-type": METRICS_TYPE})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
