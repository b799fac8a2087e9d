"""The operations port of the autoscaler (interfaces, section 4): health, metrics, the read API and operator orders.

Owns the HTTP side only: data come from the loop's `World`, its Plan and its log, on which decisions are based.
`autoscaler.server.order_handlers` handles orders. Metrics of gateways on Unix sockets are scraped and merged into the
autoscaler's own.

Also serves the operator page at `/`: the single file `pages/operator.html` without external resources. Its
Content-Security-Policy allows only the one script and the one style, by their hashes (CSP level 3, section 2.3.1), and
requests to the page's own port.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from autoscaler.controller.loop import Loop
from autoscaler.explain import decision_log, model, status_rows
from autoscaler.explain.decision_log import Log
from autoscaler.explain.fit import Needs, explain_fit
from autoscaler.queries.response_types import DocumentsView, OffView, Problem, Sentences
from autoscaler.server import openapi, read_responses
from autoscaler.server.metrics import merge_metrics
from autoscaler.server.order_handlers import Commands
from autoscaler.server.what_if import WhatIfApi
from autoscaler.spec.model import Model
from autoscaler.state.world import World


class Page(NamedTuple):
    """A page, and the headers to send with it."""

    body: bytes
    headers: dict[str, str]


@cache
def load_operator_page() -> Page:
    """Load the operator page."""
    text = resources.files("autoscaler").joinpath("pages/operator.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(text.encode(), headers)


def _hash(text: str, tag: str) -> str:
    """Return `'sha256-...'` of the content of the only such tag. Raises ValueError if there is not exactly one."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


SCRAPE_TIMEOUT_S = 1.0
SCRAPE_BYTES_MAX = 32 << 20
"""Limit of a gateway's /metrics."""
NAMES_MAX = 100
"""The maximum number of names in an error message."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The type for scrapers that accept it (https://prometheus.io/docs/specs/om/open_metrics_spec/)."""


class OperationsServer:
    """The operations port as an aiohttp application.

    `gateway_sockets` returns the current ports of the gateways; `off` lists functions that this mode does not support.
    `documents` and `needs` read files in a thread: the result of the last reload, and the needs of a Model's artifact.
    """

    def __init__(
        self,
        loop: Loop,
        log: Log,
        metrics: Callable[[], bytes],
        gateway_sockets: Callable[[], Sequence[Path]],
        version: str = "0",
        *,
        commands: Commands | None = None,
        off: Sequence[str] = (),
        documents: Callable[[], DocumentsView] = DocumentsView,
        needs: Callable[[Model], Needs] = lambda _: Needs(problem="this process does not read artifacts"),
    ) -> None:
        self._loop = loop
        self._log = log
        self._metrics = metrics
        self._gateway_sockets = gateway_sockets
        self._openapi = openapi.render_openapi(version)
        self._commands = commands
        self._needs = needs
        self._documents = documents
        self._off = tuple(off)

    def application(self) -> web.Application:
        """Return the application with all paths of section 4. Other paths get an error that names the description."""
        app = web.Application()
        get = app.router.add_get
        get("/", self._page)
        get("/healthz", self._healthz)
        get("/readyz", self._readyz)
        get("/metrics", self._metrics_text)
        get(openapi.PATH, self._description)
        get("/api/v1/status", self._status)
        get("/api/v1/off", self._what_is_off)
        get("/api/v1/documents", self._documents_in_force)
        get("/api/v1/models", self._models)
        get("/api/v1/models/{name:.+}", self._model)
        get("/api/v1/tenants", self._tenants)
        get("/api/v1/devices", self._devices)
        get("/api/v1/nodes", self._nodes)
        get("/api/v1/plan", self._plan)
        get("/api/v1/explain/model/{name:.+}", self._explain)
        get("/api/v1/explain/fit/{name:.+}", self._fit)
        get("/api/v1/explain/last", self._last)
        WhatIfApi(self._loop).add_to(app)
        if self._commands is not None:
            self._commands.add_to(app)
        app.router.add_route("*", "/{path:.*}", handle_unknown_path)
        return app

    def health(self) -> web.Application:
        """Return the application with only the paths for kubelets and Prometheus."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    @property
    def _world(self) -> World:
        return self._loop.world

    async def _page(self, _: web.Request) -> web.Response:
        shown = load_operator_page()
        return web.Response(body=shown.body, headers=shown.headers)

    async def _description(self, _: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if not self._world.leadership.synced:
            return web.Response(status=503, text="the running replicas are still being listed\n")
        return web.Response(text="ok\n")

    async def _metrics_text(self, request: web.Request) -> web.Response:
        openmetrics = OPENMETRICS_TYPE.partition(";")[0] in request.headers.get("accept", "")
        texts = await asyncio.gather(*(scrape_gateway(path) for path in self._gateway_sockets()))
        body = merge_metrics([self._metrics(), *(text for text in texts if text is not None)], openmetrics=openmetrics)
        return web.Response(body=body, headers={"content-type": OPENMETRICS_TYPE if openmetrics else METRICS_TYPE})

    async def _status(self, _: web.Request) -> web.Response:
        now_s, plan = self._now_s(), self._loop.plan
        return json_response(
            self._loop.contained("status", lambda world: status_rows.list_status_rows(world, plan, now_s))
        )

    async def _what_is_off(self, _: web.Request) -> web.Response:
        return json_response(OffView(sentences=self._off, degraded=self._world.degraded))

    async def _documents_in_force(self, _: web.Request) -> web.Response:
        return json_response(await asyncio.to_thread(self._documents))

    async def _models(self, _: web.Request) -> web.Response:
        return json_response(self._loop.contained("status", read_responses.list_models))

    async def _model(self, request: web.Request) -> web.Response:
        known = read_responses.find_model(self._world, request.match_info["name"])
        if known is None:
            return self._no_model()
        return json_response(self._loop.contained("status", lambda world: read_responses.model_view(world, known)))

    async def _tenants(self, _: web.Request) -> web.Response:
        return json_response(read_responses.list_tenants(self._world))

    async def _devices(self, _: web.Request) -> web.Response:
        now_s = self._now_s()
        return json_response(self._loop.contained("status", lambda world: read_responses.list_devices(world, now_s)))

    async def _nodes(self, _: web.Request) -> web.Response:
        now_s = self._now_s()
        return json_response(self._loop.contained("status", lambda world: read_responses.list_nodes(world, now_s)))

    async def _plan(self, _: web.Request) -> web.Response:
        return json_response(self._loop.plan)

    async def _explain(self, request: web.Request) -> web.Response:
        known = read_responses.find_model(self._world, request.match_info["name"])
        if known is None:
            return self._no_model()
        now_s, plan, log = self._now_s(), self._loop.plan, self._log
        return json_response(
            self._loop.contained("explain", lambda world: model.explain_model(world, plan, log, known.name, now_s))
        )

    async def _fit(self, request: web.Request) -> web.Response:
        known = read_responses.find_model(self._world, request.match_info["name"])
        if known is None:
            return self._no_model()
        needs = await asyncio.to_thread(self._needs, known)
        now_s = self._now_s()
        return json_response(self._loop.contained("explain", lambda world: explain_fit(world, known, needs, now_s)))

    async def _last(self, _: web.Request) -> web.Response:
        return json_response(Sentences(sentences=decision_log.list_recent_decisions(self._log, self._now_s())))

    def _no_model(self) -> web.Response:
        """Return a 404 that lists the names of Models."""
        names = sorted(self._world.models)[:NAMES_MAX]
        return error_response(404, f"no such model; existing: {', '.join(names) or 'none'}")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def handle_unknown_path(request: web.Request) -> web.Response:
    """Answer any other path or method."""
    if request.method not in {"GET", "HEAD"}:
        return error_response(405, f"this path does not support the method; {openapi.PATH} lists all paths")
    return error_response(404, f"no such path; {openapi.PATH} lists all paths, and / is the operator page")


async def scrape_gateway(path: Path) -> bytes | None:
    """Return a gateway's /metrics. None: it does not respond in time (it may be restarting), or its response has
    SCRAPE_BYTES_MAX or more.
    """
    timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session,
            session.get("http://gateway/metrics") as response,
        ):
            await response.content.readexactly(SCRAPE_BYTES_MAX)
            return None
    except asyncio.IncompleteReadError as whole:  # the body ended earlier
        return whole.partial
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def json_response(value: object) -> web.Response:
    """Return `value` as a JSON response."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def error_response(status: int, text: str) -> web.Response:
    """Return an error response."""
    return web.Response(status=status, body=msgspec.json.encode(Problem(error=text)), content_type="application/json")
